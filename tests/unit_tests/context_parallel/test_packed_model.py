"""A packed batch through a whole model: each document as if it were alone, on one rank and on two."""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.context_parallel.sequence_split import join_from_context_parallel, split_for_context_parallel, split_packed
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import run_on_ranks
from tests.unit_tests.context_parallel.test_sequence_split import packed

REAL, PADDED = [7, 4, 12], [8, 4, 12]


def model_of(cp, groups, position="rope", **settings):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        init_method_std=0.3,
        context_parallel_size=cp,
        **settings,
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, 64, 32, position_embedding_type=position, pg_collection=groups)


def tokens():
    return torch.randint(0, 64, (1, sum(PADDED)), generator=torch.Generator().manual_seed(0))


def logits_on_ranks():
    """Of this rank's tokens: packed by ring and by exchanged heads; a plain sequence with learned positions and with angles."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    groups, rank = ProcessGroupCollection.use_mpu_process_groups(), parallel_state.get_context_parallel_rank()
    params, found = packed(REAL, PADDED), {}
    for kind in ("p2p", "a2a"):
        mine = split_packed(tokens(), 1, params, rank, 2)
        found[kind] = model_of(2, groups, cp_comm_type=[kind, "all_gather"])(mine, None, None, packed_seq_params=params)
    ids = [split_for_context_parallel(t, 1, rank, 2) for t in (tokens(), torch.arange(24)[None])]
    for position in ("rope", "learned_absolute"):
        found[position] = model_of(2, groups, position)(*ids, None)
    return {name: value.detach() for name, value in found.items()}


def test_documents_of_a_packed_batch_are_as_if_alone():
    ids = tokens()
    model = model_of(1, ProcessGroupCollection())
    whole = model(ids, None, None, packed_seq_params=packed(REAL, PADDED)).detach()
    start = 0
    for real, padded in zip(REAL, PADDED):
        alone = model(ids[:, start : start + real], None, None).detach()
        torch.testing.assert_close(whole[:, start : start + real], alone, rtol=1e-9, atol=1e-9)
        start += padded
    plain = {p: model_of(1, ProcessGroupCollection(), p)(ids, torch.arange(24)[None], None).detach() for p in ("rope", "learned_absolute")}
    params = packed(REAL, PADDED)
    ranks = run_on_ranks(2, logits_on_ranks)
    for rank, found in enumerate(ranks):
        for kind in ("p2p", "a2a"):
            torch.testing.assert_close(found[kind], split_packed(whole, 1, params, rank, 2), rtol=1e-9, atol=1e-9)
    for position, expected in plain.items():
        torch.testing.assert_close(join_from_context_parallel([found[position] for found in ranks], 1), expected, rtol=1e-9, atol=1e-9)


def test_a_packed_batch_takes_no_mask_and_one_row():
    model, params = model_of(1, ProcessGroupCollection()), packed(REAL, PADDED)
    with pytest.raises(ValueError, match="no attention_mask"):
        model(tokens(), None, torch.zeros(1, 1, 24, 24, dtype=torch.bool), packed_seq_params=params)
    with pytest.raises(ValueError, match="batch size 1"):
        model(tokens().expand(2, -1), None, None, packed_seq_params=params)
