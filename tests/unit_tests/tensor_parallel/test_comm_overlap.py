"""Chunked communication against its plain twin: gather all, multiply; multiply, reduce-scatter."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import comm_overlap
from megatron.core.tensor_parallel.comm_overlap import CHUNKS, num_chunks
from megatron.core.tensor_parallel.exchange import Exchange
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.distributed import ranks
from tests.file_memory import FileMemory, Queue

INIT = init_method_normal(1.0)
ROWS = (8, 6, 7)  # of a rank: in four chunks, in three, in one
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "gather": {"tp_comm_overlap_rs": False},
    "scatter": {"tp_comm_overlap_ag": False},
    "input gradients too": {"tp_comm_overlap_rs_dgrad": True},
}


def counting(counts: dict[str, int], name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    counts[name] = counts.get(name, 0) + 1
    return original(*args, **kwargs)


def block(size: int, rows: int, fuse: bool, frozen: bool, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Column, then row: output and gradients, and how many collectives there were."""
    config = ModelParallelConfig(
        params_dtype=torch.float64,
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        gradient_accumulation_fusion=fuse,
        **settings,
    )
    torch.manual_seed(0)
    column = ColumnParallelLinear(4, 16, config=config, init_method=INIT)
    row = RowParallelLinear(16, 4, config=config, init_method=INIT, bias=True, input_is_parallel=True, skip_bias_add=False)
    torch.manual_seed(rows + parallel_state.get_tensor_model_parallel_rank())
    x = torch.randn(rows, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(rows, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        for bias in (column.bias, row.bias):
            bias.copy_(torch.arange(bias.numel()))
    layers: dict[str, Any] = {"column": column, "row": row}
    for layer in layers.values():
        layer.weight.requires_grad_(not frozen)
        layer.weight.main_grad = torch.ones_like(layer.weight)
        layer.weight.main_grad_filled = True
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, partial(counting, counts, name, getattr(dist, name))))
        out = row(torch.tanh(column(x)[0]))[0]
        (out * weight).sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "dx": x.grad, "column bias": column.bias.grad, "row bias": row.bias.grad}
    for name, layer in layers.items():
        if not frozen:
            found[name] = layer.weight.main_grad if fuse else layer.weight.grad
    return found, counts


def blocks(size: int, folder: Path | None) -> list[Any]:
    """With `folder` overlapped blocks exchange through memory."""
    parallel_state.destroy_model_parallel()  # another test's, in a process that stays
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    found = []
    exchange = None if folder is None else Exchange(lambda capacity: FileMemory(folder / "memory", capacity, size), 1, Queue, Queue)
    for rows in ROWS:
        for fuse, frozen in ((True, False), (False, False), (True, True)):
            plain, _ = block(size, rows, fuse, frozen)
            for name, settings in SETTINGS.items():
                with mock.patch.object(comm_overlap, "exchange_of", lambda *_: exchange):
                    found.append((name, rows, frozen, plain, *block(size, rows, fuse, frozen, tp_comm_overlap=True, **settings)))
    parallel_state.destroy_model_parallel()
    return found


def assert_equal_blocks(name: str, plain: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert plain.keys() == got.keys()
    for what in plain:
        torch.testing.assert_close(got[what], plain[what], rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}, {name}: {text}")  # noqa: B023


@pytest.mark.parametrize("size", [2, 4])
def test_chunks_change_nothing(size: int) -> None:
    for results in ranks().run(size, blocks, size, None):
        for name, rows, frozen, plain, got, counts in results:
            assert_equal_blocks(name, plain, got)
            chunks = num_chunks(rows)
            # gathered: x in chunks; on the way back the row's gradient, and x again for the weight's gradient
            gathers = (1 if name == "scatter" else chunks) + 1 + (not frozen)
            scatters = (1 if name == "gather" else chunks) + (chunks if name == "input gradients too" else 1)
            assert counts == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}, name


@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_through_memory_change_nothing(size: int, tmp_path: Path) -> None:
    for results in ranks().run(size, blocks, size, tmp_path):
        for name, _, frozen, plain, got, counts in results:
            assert_equal_blocks(name, plain, got)
            # what a switch leaves to collectives: the column-parallel linear and the row's gradient; the row-parallel linear
            left = {
                "scatter": {"all_gather_into_tensor": 2 + (not frozen), "reduce_scatter_tensor": 1},
                "gather": {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
            }
            assert counts == left.get(name, {}), name


def test_rows_are_cut_evenly() -> None:
    assert CHUNKS == 4
    assert [num_chunks(rows) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9)] == [1, 2, 3, 4, 1, 3, 1, 4, 3]


def test_overlap_needs_sequence_parallel() -> None:
    with pytest.raises(ValueError, match="tp_comm_overlap needs sequence_parallel"):
        ModelParallelConfig(tensor_model_parallel_size=2, tp_comm_overlap=True)
    with pytest.raises(ValueError, match="tp_comm_overlap_rs_dgrad needs tp_comm_overlap"):
        ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap_rs_dgrad=True)
