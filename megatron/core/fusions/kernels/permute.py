"""Rows copied and summed by index, one pass over each: the two directions of a permutation with copies.

No atomic additions: a program owns what it writes, and sums in the order of the index, in fp32 (fp64 for fp64).
"""

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide

WIDEST = 4096  # columns that a program handles


@triton.jit
def permute_take(source, index, out, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + row)
    inside = column < columns
    there = tl.where(place < rows, columns, 0)  # columns to read
    value = tl.load(source + place * columns + column, mask=column < there, other=0.0)
    tl.store(out + row * columns + column, value, mask=inside)


@triton.jit
def permute_sum(source, index, out, rows, columns, COPIES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], dtype=WIDE)
    for copy in tl.static_range(COPIES):
        place = tl.load(index + row * COPIES + copy)
        there = tl.where(place < rows, columns, 0)
        total += tl.load(source + place * columns + column, mask=column < there, other=0.0).to(WIDE)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def _grid(rows: int, columns: int) -> tuple[tuple[int, int], int]:
    block = min(WIDEST, triton.next_power_of_2(columns))
    return (rows, triton.cdiv(columns, block)), block


def take_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """source [n, h], index int64 [r] -> [r, h]: source[index]; an index of n or more gives zeros."""
    source, index = source.contiguous(), index.contiguous()
    out = source.new_empty(index.shape[0], source.shape[1])
    grid, block = _grid(index.shape[0], source.shape[1])
    permute_take[grid](source, index, out, source.shape[0], source.shape[1], BLOCK=block)
    return out


def sum_rows(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """source [n, h], index int64 [T, copies] -> [T, h]: the sum of each token's rows; an index of n or more adds nothing."""
    source, index = source.contiguous(), index.contiguous()
    out = source.new_empty(index.shape[0], source.shape[1])
    grid, block = _grid(index.shape[0], source.shape[1])
    permute_sum[grid](source, index, out, source.shape[0], source.shape[1], COPIES=index.shape[1], WIDE=wide(source), BLOCK=block)
    return out
