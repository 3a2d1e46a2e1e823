"""What stands around CUDA graphs, on a CPU: a stand-in for a graph runs its work again at every launch.

Layers that ranks share are in ../context_parallel/test_recorded.py. That graphs themselves are equal to the bit to running without is
tests/functional/test_on_gpu.py's.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import FullCudaGraphWrapper, LayerGraphs
from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, SEQ, STEPS, MICRO_BATCHES = 32, 8, 4, 3
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "num_query_groups": 2,
        "add_bias_linear": False,
    },
    # as the layers have experts, what comes before these is recorded
    "experts": {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.1,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
    "experts in some layers": {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 0], "bias_dropout_fusion": False, "add_bias_linear": False},
}
NO_EXPERTS = [kind for kind in KINDS if "num_moe_experts" not in KINDS[kind]]


class Recorder:
    """In place of device.capture_graph: a recording leaves gradients as they were."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0
        self.params: list[Any] = []

    def __call__(self, work: Callable[[], None], pool: Any, states: Any = ()) -> Callable[[], None]:
        self.recorded += 1
        before = [(param, param.main_grad.clone(), param.main_grad_filled) for param in self.params]
        work()
        for param, grad, filled in before:
            param.main_grad.copy_(grad)
            param.main_grad_filled = filled

        def launch() -> None:
            self.launched += 1
            work()

        return launch


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    monkeypatch.setattr(device, "capture_graph", recorder)
    monkeypatch.setattr(device, "graph_pool", object)
    monkeypatch.setattr(LayerGraphs, "_pools", {})
    yield recorder


def build(kind: str, tied=True, **settings: Any) -> Any:
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **KINDS[kind], **settings
    )
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCAB, SEQ, share_embeddings_and_output_weights=tied
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(step)
    return [{"ids": torch.randint(0, VOCAB, (2, SEQ + 1), generator=drawn)} for _ in range(MICRO_BATCHES)]


def forward_step(iterator: Iterator, model: Any) -> tuple[torch.Tensor, Callable]:
    ids = next(iterator)["ids"]
    losses = model(ids[:, :-1], torch.arange(SEQ).expand(2, -1), None, labels=ids[:, 1:])
    return losses, lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def train(model: Any, forward_backward: Callable = forward_backward_no_pipelining) -> list[torch.Tensor]:
    """Losses and gradients of some steps of gradient descent, each with several micro batches."""
    model_parallel_cuda_manual_seed(5)
    model.config.no_sync_func = model.no_sync
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=forward_step, data_iterator=iter(batches(step)), model=[model], num_microbatches=MICRO_BATCHES
        )
        model.finish_grad_sync()
        found += [report["lm loss"] for report in reports]
        for param in model.parameters():
            found.append(param.main_grad.clone())
            param.data -= 0.1 * param.main_grad
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_recorded_once_and_train_as_without(recorder: Recorder, kind: str) -> None:
    graphed = build(kind, cuda_graph_impl="local", cuda_graph_warmup_steps=2)
    recorder.params = list(graphed.parameters())
    torch.testing.assert_close(train(graphed), train(build(kind)), rtol=0, atol=0)
    assert recorder.recorded == 2 * 3  # forward and backward of each layer
    assert recorder.launched == 2 * 3 * (STEPS * MICRO_BATCHES - 2)


def test_each_micro_batch_in_flight_has_graphs_of_its_own(recorder: Recorder) -> None:
    def run(model: Any) -> list[torch.Tensor]:
        found = []
        for step in range(3):
            model.zero_grad_buffer()
            losses = [forward_step(iter([batch]), model)[0].mean() for batch in batches(step)]
            for loss in losses:
                loss.backward()
            model.finish_grad_sync()
            found += [loss.detach() for loss in losses] + [param.main_grad.clone() for param in model.parameters()]
        return found

    graphed = build("gpt", cuda_graph_impl="local", cuda_graph_warmup_steps=1)
    recorder.params = list(graphed.parameters())
    torch.testing.assert_close(run(graphed), run(build("gpt")), rtol=0, atol=0)
    assert recorder.recorded == 2 * 3 * MICRO_BATCHES


def test_other_shapes_and_evaluations_run_as_without(recorder: Recorder) -> None:
    graphed = build("gpt", cuda_graph_impl="local", cuda_graph_warmup_steps=1)
    recorder.params = list(graphed.parameters())
    train(graphed)
    launched = recorder.launched
    graphed.zero_grad_buffer()
    ids = batches(0)[0]["ids"][:, :5]
    graphed(ids, torch.arange(5).expand(2, -1), None, labels=ids).mean().backward()
    with torch.no_grad():
        forward_step(iter(batches(0)), graphed)
    assert recorder.launched == launched


@pytest.mark.parametrize("kind", NO_EXPERTS)
def test_a_step_is_recorded_once_and_trains_as_without(recorder: Recorder, kind: str) -> None:
    graphed = build(kind, cuda_graph_impl="full_iteration")
    recorder.params = list(graphed.parameters())

    class AgainFromUnwritten(Recorder):
        """A launch does what the recording did: first micro batches overwrite."""

        def __call__(self, work: Callable[[], None], pool: Any, states: Any = ()) -> Callable[[], None]:
            launch = super().__call__(work, pool, states)

            def launched() -> None:
                graphed.zero_grad_buffer()
                launch()

            return launched

    again = AgainFromUnwritten()
    again.params = list(graphed.parameters())
    device.capture_graph = again  # type: ignore[assignment]  # the fixture puts it back
    wrapped = FullCudaGraphWrapper(forward_backward_no_pipelining, 1)
    torch.testing.assert_close(train(graphed, wrapped), train(build(kind)), rtol=0, atol=0)
    assert (again.recorded, again.launched) == (1, STEPS - 1)


def test_reports_of_a_step_outlive_the_next(recorder: Recorder) -> None:
    graphed = build("gpt", cuda_graph_impl="full_iteration")
    recorder.params = list(graphed.parameters())
    wrapped = FullCudaGraphWrapper(forward_backward_no_pipelining, 0)

    def step(number: int) -> list:
        graphed.zero_grad_buffer()
        return wrapped(forward_step_func=forward_step, data_iterator=iter(batches(number)), model=[graphed], num_microbatches=MICRO_BATCHES)

    first = step(0)
    values = [report["lm loss"].clone() for report in first]
    step(1)
    assert [report["lm loss"] for report in first] == values


REFUSED: dict[str, dict[str, Any]] = {
    "moe_layer_recompute": {"num_moe_experts": 4, "add_bias_linear": False, "moe_layer_recompute": True},
    "moe_shared_expert_overlap": {
        "num_moe_experts": 4,
        "add_bias_linear": False,
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_overlap": True,
        "moe_token_dispatcher_type": "alltoall",
    },
    "recompute_granularity": {"recompute_granularity": "selective"},
    "tp_comm_overlap": {"tp_comm_overlap": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "zero-bubble": {"pipeline_schedule": "zero-bubble", "pipeline_model_parallel_size": 3, "pipeline_dtype": torch.float32},
    "cuda_graph_warmup_steps": {"cuda_graph_warmup_steps": 0},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_what_cannot_be_recorded_is_refused_by_name(name: str, impl: str) -> None:
    with pytest.raises(ValueError, match=name):
        TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, cuda_graph_impl=impl, **REFUSED[name])


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("pipeline_model_parallel_size above 1", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}),
        ("num_moe_experts: experts read", {"num_moe_experts": 4, "add_bias_linear": False}),
    ],
)
def test_what_full_iteration_alone_cannot_record(match: str, settings: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **settings}
    TransformerConfig(**sizes, cuda_graph_impl="local")
    with pytest.raises(ValueError, match=match):
        TransformerConfig(**sizes, cuda_graph_impl="full_iteration")
