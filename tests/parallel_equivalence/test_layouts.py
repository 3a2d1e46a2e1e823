"""Any layout of the table trains the model that one process trains."""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.context_parallel.partial_attention import PartialAttention
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.pipeline_parallel.p2p_communication import Incoming
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.transformer.moe import token_dispatcher
from tests.distributed import ranks
from tests.parallel_equivalence import comparison, harness
from tests.parallel_equivalence.comparison import assert_equals_one_process, bit_differences, coverage, largest, reference, report, trained
from tests.parallel_equivalence.layouts import A2A, GPU_TOLERANCES, LAYOUTS, MODELS, TOLERANCES, Layout


def cases(chosen: Callable[[Layout], bool]) -> list[Any]:
    return [
        pytest.param(layout, id=layout.name, marks=[] if layout.fast else [pytest.mark.slow])
        for layout in sorted(LAYOUTS, key=lambda layout: layout.world_size)  # a pool of processes grows with them
        if chosen(layout)
    ]


def check_bits(layout: Layout) -> None:
    """Overlap and recompute on and off."""
    for rank in ranks().run(layout.world_size, harness.train_each, (layout, layout.plain), (torch.float32,), name=layout.name):
        assert not bit_differences(*rank)


# Classes: `--dist loadscope` gives each to one worker, whose pool of processes serves all of it.
class TestUpToTwoProcesses:
    @pytest.mark.parametrize("layout", cases(lambda layout: layout.world_size <= 2))
    def test_layout_equals_one_process(self, layout: Layout) -> None:
        assert_equals_one_process(layout, TOLERANCES)

    @pytest.mark.parametrize("layout", cases(lambda layout: layout.world_size <= 2 and layout != layout.plain))
    def test_overlap_and_recompute_change_no_bit(self, layout: Layout) -> None:
        check_bits(layout)


class TestMoreProcesses:
    @pytest.mark.parametrize("layout", cases(lambda layout: layout.world_size > 2))
    def test_layout_equals_one_process(self, layout: Layout) -> None:
        assert_equals_one_process(layout, TOLERANCES)

    @pytest.mark.parametrize("layout", cases(lambda layout: layout.world_size > 2 and layout != layout.plain))
    def test_overlap_and_recompute_change_no_bit(self, layout: Layout) -> None:
        check_bits(layout)


# --- faults are found: one for each axis, and what it does not touch stays equal ---


def found_with(layout: Layout, fault: Any) -> list[str]:
    dtypes = {torch.float64: TOLERANCES[torch.float64]}
    return report(layout, trained(layout, list(dtypes), fault), dtypes)


@contextlib.contextmanager
def partial_gradients_stay_partial() -> Iterator[None]:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # the package has a function of that name
    with mock.patch.object(module, "_sum_partial_gradients"):
        yield


@contextlib.contextmanager
def tied_gradients_stay_apart() -> Iterator[None]:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    with mock.patch.object(module, "_sum_tied_gradients"):
        yield


@contextlib.contextmanager
def stages_receive_a_little_else() -> Iterator[None]:
    original = Incoming.wait
    with mock.patch.object(Incoming, "wait", lambda self: original(self) * (1 + 1e-8)):
        yield


@contextlib.contextmanager
def gradients_are_summed() -> Iterator[None]:
    original = ParamAndGradBuffer.__init__

    def unscaled(self: ParamAndGradBuffer, *args: Any, scale: float, **kwargs: Any) -> None:
        original(self, *args, scale=1.0, **kwargs)

    with mock.patch.object(ParamAndGradBuffer, "__init__", unscaled):
        yield


@contextlib.contextmanager
def a_bucket_is_not_gathered() -> Iterator[None]:
    original = ParamAndGradBuffer.gather_bucket
    with mock.patch.object(
        ParamAndGradBuffer, "gather_bucket", lambda self, index, async_op: None if index == 0 else original(self, index, async_op)
    ):
        yield


@contextlib.contextmanager
def sums_over_tensor_ranks_are_a_little_off() -> Iterator[None]:
    original = mappings.all_reduce
    with mock.patch.object(mappings, "all_reduce", lambda x, group: original(x, group) * (1 + 1e-8)):
        yield


@contextlib.contextmanager
def keys_of_other_ranks_are_not_seen() -> Iterator[None]:
    original = PartialAttention.add

    def own_alone(self: PartialAttention, key_rank: int | None, *keys: torch.Tensor) -> None:
        if key_rank == self.geometry.rank:
            original(self, key_rank, *keys)

    with mock.patch.object(PartialAttention, "add", own_alone):
        yield


@contextlib.contextmanager
def tokens_arrive_a_little_changed() -> Iterator[None]:
    original = token_dispatcher.all_to_all
    with mock.patch.object(token_dispatcher, "all_to_all", lambda x, *arguments: original(x, *arguments) * (1 + 1e-8)):
        yield


@contextlib.contextmanager
def gradients_of_experts_stay_apart() -> Iterator[None]:
    original = ParamAndGradBuffer.reduce_bucket

    def skipping(self: ParamAndGradBuffer, index: int, async_op: bool) -> None:
        if is_expert(self.params[0]):
            self.group = None
        original(self, index, async_op)

    with mock.patch.object(ParamAndGradBuffer, "reduce_bucket", skipping):
        yield


# name -> (layout, fault, texts that the report has, texts that it has not)
FAULTS: dict[str, tuple[Layout, Any, tuple[str, ...], tuple[str, ...]]] = {
    "sequence": (
        Layout("tp2 sp", tp=2, sp=True, models=("gpt",)),
        partial_gradients_stay_partial,
        ("gradient of ('decoder.final_layernorm.weight'", "gradient norm of step 1 ", "later loss", "marked as replicated and differs"),
        ("initial weight", "forward", "first loss"),
    ),
    "tensor": (
        Layout("tp2", tp=2, models=("gpt",)),
        sums_over_tensor_ranks_are_a_little_off,
        ("forward of (0, 'embedding')", "forward of (0, 'layer 1')", "gradient of ('decoder.layers"),
        ("initial weight", "differs between ranks"),
    ),
    "context": (
        Layout("cp2", cp=2, cp_comm_type="p2p", models=("gpt",)),
        keys_of_other_ranks_are_not_seen,
        ("forward of (0, 'layer 1')", "gradient of ('decoder.layers", "first loss"),
        ("initial weight", "forward of (0, 'embedding')", "differs between ranks"),
    ),
    "experts, what is dispatched": (
        Layout("ep2", dp=2, ep=2, config=A2A, models=("moe",)),
        tokens_arrive_a_little_changed,
        ("forward of (0, 'layer 1')", "gradient of ('decoder.layers.mlp.experts"),
        ("initial weight", "forward of (0, 'embedding')", "differs between ranks"),
    ),
    "experts, what is reduced": (
        Layout("dp2 experts", dp=2, config=A2A, models=("moe",)),
        gradients_of_experts_stay_apart,
        ("gradient of ('decoder.layers.mlp.experts", "gradient norm of step 1 ", "marked as replicated and differs"),
        ("initial weight", "forward", "first loss", "gradient of ('decoder.layers.self_attention"),
    ),
    "pipeline, tied weights": (
        Layout("pp2", pp=2, models=("gpt",)),
        tied_gradients_stay_apart,
        ("gradient of ('embedding.word_embeddings.weight'", "gradient norm of step 1 ", "later loss", "differs between ranks"),
        ("initial weight", "forward", "first loss", "gradient of ('decoder"),
    ),
    "pipeline, what is received": (
        Layout("pp2", pp=2, models=("gpt",)),
        stages_receive_a_little_else,
        ("rank 1: forward of (0, 'layer 2')", "rank 0: gradient of ('decoder.layers"),
        ("initial weight", "layer 1", "rank 0: forward"),
    ),
    "data": (
        Layout("dp2", dp=2, models=("gpt",)),
        gradients_are_summed,
        ("gradient of ('decoder.final_layernorm.weight'", "gradient norm of step 1 is off by 1.0e+00"),
        ("initial weight", "forward", "first loss", "differs between ranks"),
    ),
    "sharded optimizer": (
        Layout("dp2 sharded", dp=2, distributed_optimizer=True, models=("gpt",)),
        a_bucket_is_not_gathered,
        ("later loss", "trained weight", "marked as replicated and differs"),
        ("initial weight", "forward", "first loss", "gradient of", "gradient norm of step 1 "),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    layout, fault, there, absent = FAULTS[name]
    found = found_with(layout, fault)
    for text in there:
        assert any(text in line for line in found), f"{text} is missing in {found}"
    assert not [line for line in found if any(text in line for text in absent)]


def test_what_was_not_compared_is_found() -> None:
    layout = Layout("tp2", tp=2, models=("gpt",))
    traces = [rank["gpt", torch.float64] for rank in trained(layout, (torch.float64,))]
    expected = reference(layout.alone, "gpt", torch.float64, "gloo")
    assert not coverage(traces, expected, layout)
    for trace in traces:
        del trace.activations[0, "layer 2"], trace.gradients["decoder.final_layernorm.weight", None, None], trace.losses[-1]
    found = " ".join(coverage(traces, expected, layout))
    assert "layer 2" in found and "gradients: " in found and "losses of some steps" in found and "norms" not in found


def test_the_largest_differences() -> None:
    layout = Layout("tp2", tp=2, models=("gpt",))
    results = trained(layout, (torch.float32,))
    found = largest(layout, results)[torch.float32]
    assert set(found) == {*TOLERANCES[torch.float32], "trained weight"}
    assert all(0 <= found[kind] <= allowed for kind, allowed in TOLERANCES[torch.float32].items())
    assert found["forward"] > 0 and found["gradient"] > 0, "of many numbers some differ; a loss, one number, may be equal"
    results[1]["gpt", torch.float32].norms[3] *= 1.5
    assert largest(layout, results)[torch.float32]["gradient norm"] == pytest.approx(0.5, abs=1e-4)
    results[0]["gpt", torch.float32].norms[2] = float("nan")
    changed = largest(layout, results)[torch.float32]
    assert math.isnan(changed.pop("gradient norm")) and changed == {kind: found[kind] for kind in changed}


def test_other_bits_are_found() -> None:
    layout = Layout("tp2", tp=2, models=("gpt",))
    one, two = (trained(layout, (torch.float32,))[0] for _ in range(2))
    assert not bit_differences(one, two)
    two["gpt", torch.float32].gradients["decoder.final_layernorm.weight", None, None].value[0] += 1e-8
    assert "gradients of [('decoder.final_layernorm.weight'" in " ".join(bit_differences(one, two))


@pytest.mark.parametrize("layout", [Layout("tp2 sp", tp=2, sp=True), Layout("dp2 sharded", dp=2, distributed_optimizer=True, overlap=True)])
def test_the_gpus_precisions(layout: Layout) -> None:
    """What test_layouts_gpu.py does, bf16 among it, here with gloo."""
    assert_equals_one_process(layout, GPU_TOLERANCES)


def test_the_table() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 35
    assert all(layout.world_size <= 8 for layout in LAYOUTS)
    assert sum(layout.fast for layout in LAYOUTS) * 2 <= len(LAYOUTS)
    settings = [(model, replace(layout, name="", models=(), fast=False)) for layout in LAYOUTS for model in layout.models]
    assert all(settings.count(one) == 1 for one in settings), "a model is in the same layout twice"
    assert {model for layout in LAYOUTS for model in layout.models} == set(MODELS), "a model is in no layout"
    assert comparison.STEPS >= 10
