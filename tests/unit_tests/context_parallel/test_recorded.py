"""CUDA graphs of layers and of steps that two ranks share, with a stand-in for a graph on CPUs: equal to running without, and what is
recorded reads nothing from the device, makes no tensor of the host's numbers, and waits for all that it sends."""

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import device, parallel_state
from megatron.core.context_parallel.sequence_split import split_for_context_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import FullCudaGraphWrapper, LayerGraphs
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import ranks
from tests.unit_tests.transformer.test_cuda_graphs import Recorder

VOCAB, SEQ, STEPS, MICRO_BATCHES = 32, 16, 3, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "p2p": {"context_parallel_size": 2},
    "all_gather": {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    "a2a": {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "a2a+p2p": {"context_parallel_size": 2, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 1]},
    "p2p, a window": {"context_parallel_size": 2, "window_size": (3, 0)},
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "experts apart": {**EXPERTS, "expert_model_parallel_size": 2},
    "experts, tensor parallel": {**EXPERTS, "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
}
STARTS = ("batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
READS = ("_local_scalar_dense", "nonzero", "masked_select")


class _Work:
    def __init__(self, work: Any) -> None:
        self.work, self.waited = work, False

    def wait(self) -> Any:
        self.waited = True
        return self.work.wait()


class _OnlyKernels(TorchDispatchMode):
    """What a recording on a GPU cannot do, or would do once and never again, fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS or (name == "lift_fresh" and args[0].dim()):  # x[i] = 0 lifts a number, which a kernel takes as an argument
            callers = [frame.line or "" for frame in traceback.extract_stack()]
            assert any('device.type == "cpu" and' in line for line in callers), f"{func} while a graph is recorded"
        return func(*args, **(kwargs or {}))


class StrictRecorder(Recorder):
    """`before_launch`: a launch of a step does what the recording did, where first micro batches overwrite."""

    def __init__(self, params: list[Any], before_launch: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.params, self.before_launch = params, before_launch
        self.works: list[_Work] = []

    def __call__(self, work: Callable[[], None], pool: Any, states: Any = ()) -> Callable[[], None]:
        def watched(start: Callable) -> Callable:
            def started(*args: Any, **kwargs: Any) -> Any:
                result = start(*args, **kwargs)
                made = [_Work(work) for work in (result if isinstance(result, list) else [result] if result else [])]
                self.works += made
                return made if isinstance(result, list) else made[0] if made else None

            return started

        with pytest.MonkeyPatch.context() as patch, _OnlyKernels():
            for name in STARTS:
                patch.setattr(dist, name, watched(getattr(dist, name)))
            launch = super().__call__(work, pool, states)
        assert all(work.waited for work in self.works), "a transfer that nobody waited for in the recording"

        def launched() -> None:
            self.before_launch()
            launch()

        return launched


def build(impl: str, layout: dict[str, Any]) -> Any:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm", cuda_graph_impl=impl,
        cuda_graph_warmup_steps=1, finalize_model_grads_func=finalize_model_grads, **layout,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    model = GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="rope")
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def forward_step(iterator: Iterator, model: Any) -> tuple[torch.Tensor, Callable]:
    ids = next(iterator)["ids"]
    cp = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    tokens, labels = (split_for_context_parallel(part, 1, *cp) for part in (ids[:, :-1], ids[:, 1:]))
    losses = model(tokens, None, None, labels=labels)

    def loss_func(losses: torch.Tensor) -> tuple:
        return losses.sum(), torch.ones_like(losses).sum().to(torch.int), {"lm loss": losses.sum().detach()}

    return losses, loss_func


def train(model: Any, forward_backward: Callable) -> list[torch.Tensor]:
    model_parallel_cuda_manual_seed(5)
    model.config.no_sync_func = model.no_sync
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        drawn = torch.Generator().manual_seed(step)
        batches = [{"ids": torch.randint(0, VOCAB, (2, SEQ + 1), generator=drawn)} for _ in range(MICRO_BATCHES)]
        model.zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[model], num_microbatches=MICRO_BATCHES
        )
        found += [report["lm loss"] for report in reports]
        for param in model.parameters():
            found.append(param.main_grad.clone())
            param.data -= 0.1 * param.main_grad
    return found


def compare(impl: str, layout: dict[str, Any]) -> tuple[int, int, int]:
    """Trains with and without graphs; (recordings, launches, works that recordings started)."""
    sizes = ("context_parallel_size", "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    names = *sizes, "hierarchical_context_parallel_sizes"
    parallel_state.initialize_model_parallel(**{name: layout[name] for name in names if name in layout})
    expected = train(build("none", layout), forward_backward_no_pipelining)
    graphed = build(impl, layout)
    full = impl == "full_iteration"
    recorder = StrictRecorder(list(graphed.parameters()), graphed.zero_grad_buffer if full else lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "capture_graph", recorder)
        patch.setattr(device, "graph_pool", object)
        patch.setattr(LayerGraphs, "_pools", {})
        found = train(graphed, FullCudaGraphWrapper(forward_backward_no_pipelining, 1) if full else forward_backward_no_pipelining)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return recorder.recorded, recorder.launched, len(recorder.works)


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_ranks_exchange_can_be_recorded(name: str, impl: str) -> None:
    expected = (1, STEPS - 1) if impl == "full_iteration" else (2 * 2, 2 * 2 * (STEPS * MICRO_BATCHES - 1))
    for recorded, launched, works in ranks().run(2, compare, impl, LAYOUTS[name], name=name):
        assert (recorded, launched) == expected
        assert works or name in ("all_gather", "a2a", "a2a+p2p")  # which wait at once


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_what_comes_before_experts_can_be_recorded(name: str) -> None:
    for recorded, launched, _ in ranks().run(2, compare, "local", WITH_EXPERTS[name], name=name):
        assert (recorded, launched) == (2 * 2, 2 * 2 * (STEPS * MICRO_BATCHES - 1))
