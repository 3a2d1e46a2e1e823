"""Any layout of the table trains the model that one process trains."""

import contextlib
import importlib
from collections.abc import Iterator
from functools import cache
from unittest import mock

import pytest
import torch

from tests.distributed import run_on_ranks
from tests.parallel_equivalence.harness import (
    Trace,
    coverage,
    differences,
    train_all,
    train_alone,
    unmarked_differences,
)
from tests.parallel_equivalence.layouts import LAYOUTS, TOLERANCES, Layout

EVERY_LAYOUT = [pytest.param(layout, id=layout.name, marks=[] if layout.fast else [pytest.mark.slow]) for layout in LAYOUTS]
Results = list[dict[tuple[str, torch.dtype], Trace]]


@cache
def ran(layout: Layout) -> Results:
    """What each rank saw, for each model and dtype."""
    return run_on_ranks(layout.world_size, train_all, layout)


@cache
def reference(global_microbatches: int, per_token: bool, model: str, dtype: torch.dtype) -> Trace:
    return train_alone(Layout("one process", microbatches=global_microbatches, per_token=per_token), model, dtype)


def report(layout: Layout, results: Results) -> list[str]:
    """All differences from one process, each with the model, the dtype and the rank."""
    found = []
    for model, dtype in results[0]:
        expected = reference(layout.global_microbatches, layout.per_token, model, dtype)
        traces = [rank[model, dtype] for rank in results]
        found += [f"{model} {dtype}: {text}" for text in coverage(traces, expected)]
        for rank, trace in enumerate(traces):
            found += [f"{model} {dtype} rank {rank}: {text}" for text in differences(trace, expected, dtype)]
    return found


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_layout_equals_one_process(layout: Layout) -> None:
    results = ran(layout)
    assert {dtype for _, dtype in results[0]} == set(TOLERANCES) and {model for model, _ in results[0]} == set(layout.models)
    found = report(layout, results)
    assert not found, f"{len(found)} differences, the first of them:\n" + "\n".join(found[:20])


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_parameter_is_equal_on_all_ranks_or_marked_as_split(layout: Layout) -> None:
    """After all steps: what the sharding record says is what is there."""
    for model, dtype in ran(layout)[0]:
        assert not unmarked_differences([rank[model, dtype] for rank in ran(layout)])


@contextlib.contextmanager
def partial_gradients_stay_partial() -> Iterator[None]:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # the package has a function of that name
    with mock.patch.object(module, "_sum_partial_gradients"):
        yield


def test_a_fault_is_found() -> None:
    """The harness sees gradients of norms that are not summed over the ranks of sequence parallelism."""
    layout = Layout("tp2 sp", tp=2, sp=True, models=("gpt",))
    results = run_on_ranks(2, train_all, layout, (torch.float64,), partial_gradients_stay_partial)
    found = report(layout, results)
    assert any("gradient of ('decoder.final_layernorm.weight'" in text for text in found)
    assert any("gradient norm of step 1 " in text for text in found) and any("later loss" in text for text in found)
    assert not any("initial weight" in text or "forward" in text or "first loss" in text for text in found)
    assert unmarked_differences([rank["gpt", torch.float64] for rank in results])


def test_names_of_layouts_are_unique() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS)
