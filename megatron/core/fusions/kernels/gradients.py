"""Gradients of a linear's bias and of an embedding's table. Sums in fp32 (fp64 for fp64) and in one order: no atomic additions."""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 16, 256  # a tile
PROGRAMS = 528  # enough for a GPU's multiprocessors


@triton.jit
def _column_sums(
    x, sums, rows, columns, stride, rows_each, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    first = tl.program_id(1).to(tl.int64) * rows_each
    total = tl.zeros([ROWS, COLUMNS], dtype=WIDE)
    for start in range(0, rows_each, ROWS):
        within = start + tl.arange(0, ROWS)[:, None]
        there = (within < rows_each) & (first + within < rows) & (column < columns)
        total += tl.load(x + (first + within) * stride + column, mask=there, other=0.0).to(WIDE)
    out = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums + tl.program_id(1).to(tl.int64) * columns + out, tl.sum(total, axis=0), mask=out < columns)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """[n, c], rows contiguous, n and c above 0 -> [c] of x's dtype."""
    rows, columns = x.shape
    blocks = triton.cdiv(columns, COLUMNS)
    each = max(ROWS, triton.cdiv(rows, max(1, PROGRAMS // blocks)))
    parts = triton.cdiv(rows, each)
    double = x.dtype is torch.float64
    sums = torch.empty(parts, columns, dtype=torch.float64 if double else torch.float32, device=x.device)
    _column_sums[(blocks, parts)](
        x, sums, rows, columns, x.stride(0), each, WIDE=tl.float64 if double else tl.float32, ROWS=ROWS, COLUMNS=COLUMNS
    )
    return sums.sum(dim=0).to(x.dtype)


@triton.jit
def _add_rows(table, ids, order, grad, count, columns, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(ids + place)
    before = tl.load(ids + tl.maximum(place - 1, 0))
    if (row >= 0) & ((place == 0) | (before != row)):  # the first of its id does all of them
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.load(table + row * columns + column, mask=inside, other=0.0)
        following = row
        while (place < count) & (following == row):
            source = tl.load(order + place)
            total += tl.load(grad + source * columns + column, mask=inside, other=0.0).to(total.dtype)
            place += 1
            following = tl.load(ids + tl.minimum(place, count - 1))
        tl.store(table + row * columns + column, total, mask=inside)


def add_rows(table: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> None:
    """table[ids[i]] += grad[i] for every i, in their order; ids below 0 are left out.

    table [n, h], ids int64 [t], grad [t, h], t above 0.
    """
    ids, order = torch.sort(ids, stable=True)
    grad, columns = grad.contiguous(), table.shape[1]
    block = min(512, triton.next_power_of_2(columns))
    _add_rows[(len(ids), triton.cdiv(columns, block))](table, ids, order, grad, len(ids), columns, BLOCK=block, num_warps=2)
