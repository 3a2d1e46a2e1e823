"""What the ranks agree on about a model that was just built."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.model_setup import _report_size
from tests.distributed import ranks

WEIGHTS = "embedding.word_embeddings.weight", "output_layer.weight"


def report(tied: bool, frozen: tuple[str, ...]) -> str:
    """Of a stage of two whose user froze these parameters: the error, or nothing."""
    parallel_state.destroy_model_parallel()  # another test's, in a process that stays
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), 16, 4, pre_process=rank == 0, post_process=rank == 1, share_embeddings_and_output_weights=tied
    )
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    try:
        _report_size([model], 2, ProcessGroupCollection.use_mpu_process_groups().pp)
    except ValueError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""


@pytest.mark.parametrize(
    ("tied", "frozen", "refused"),
    [(True, WEIGHTS[:1], True), (True, WEIGHTS[1:], True), (True, WEIGHTS, False), (True, (), False), (False, WEIGHTS[:1], False)],
    ids=["the first copy", "the last copy", "both", "none", "not tied"],
)
def test_a_tied_weight_is_trained_by_both_stages_or_by_none(tied: bool, frozen: tuple[str, ...], refused: bool) -> None:
    """Frozen in one alone, one stage would wait for the other's gradient; all stages say why."""
    for found in ranks().run(2, report, tied, frozen):
        assert ("frozen in one of them alone" in found and all(name in found for name in WEIGHTS)) if refused else found == ""
