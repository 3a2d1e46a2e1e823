"""FP8 with scales of blocks for rows [n, k] that are sorted by group, an expert's rows each: no block crosses groups.

There is no library product of groups of blocks on Hopper: each group has a product of its own (gemm.product), for which the host reads
how many rows it has. Operands are lists, one of each group; a group without rows has empty ones, which nothing multiplies.

Blocks of 1 x 128 come from one kernel for all groups, which reads the numbers of rows on the device. cuBLAS wants of rows [m, k]
m % 4 == 0 and their scales as [blocks, m], without gaps and at a multiple of 16 bytes, and a group may begin at any row with any number
of them. So each group's scales lie apart, for its rows filled up to a multiple of 16. The rows themselves lie as in x, no copy of them is
filled up: an operand takes those that come next, up to 15, and what they give is overwritten by the next product (`rows_product`).
Columns are what weight gradients contract over: each group's rows are filled up with zeros to whole blocks, so that a product's depth,
for which cuBLAS chooses a kernel, is one of few.
"""

import torch

from megatron.core.fp8.gemm import product, write_product
from megatron.core.fp8.quantize import BLOCK, ROW_BLOCKS, Operand, Quantized, padded
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


def quantize_row_blocks(x: torch.Tensor, counts: TokenCounts, dtype: torch.dtype, *, rows: bool, columns: bool) -> list[Quantized]:
    """x [n, k], n > 0, where Triton's kernels run -> each group's quantize.quantize_blocks of 1 x 128, but for what is filled up: rows
    [padded n, k], behind a group's own the next ones'; columns [k, n filled up to whole blocks].

    The host waits for the counts, unless it has them, after the kernel was launched.
    """
    from megatron.core.fusions.kernels import quantize_groups

    k = x.shape[1]
    of_rows, of_columns = quantize_groups.quantize_row_blocks(x, counts.on_device, dtype, rows, columns)
    sizes = counts.tolist()
    row_parts = [None] * len(sizes) if of_rows is None else _row_operands(*of_rows, sizes)
    column_parts = [None] * len(sizes) if of_columns is None else _column_operands(*of_columns, sizes, k)
    return [Quantized(*pair) for pair in zip(row_parts, column_parts, strict=True)]


def _row_operands(data: torch.Tensor, inverses: torch.Tensor, sizes: list[int]) -> list[Operand]:
    """Of data [n + 15, k] and, flat, each group's inverse scales [blocks, padded rows]."""
    blocks = -(-data.shape[1] // BLOCK)
    scales = inverses[: blocks * sum(map(padded, sizes))].split([blocks * padded(size) for size in sizes])
    found, first = [], 0
    for size, part in zip(sizes, scales, strict=True):
        found.append(Operand(data[first : first + padded(size)], part.view(blocks, padded(size)).t(), ROW_BLOCKS))
        first += size
    return found


def _column_operands(data: torch.Tensor, inverses: torch.Tensor, sizes: list[int], k: int) -> list[Operand]:
    """Of, flat, each group's data [k, filled rows], and inverse scales [blocks, k], those of all groups one after the other."""
    found, first = [], 0
    for size in sizes:
        last = first - (-size // BLOCK)
        part = data[first * BLOCK * k : last * BLOCK * k].view(k, (last - first) * BLOCK)
        found.append(Operand(part, inverses[first:last].t(), ROW_BLOCKS))
        first = last
    return found


def rows_product(rows: list[Operand], matrices: list[Operand], counts: list[int], out_dtype: torch.dtype) -> torch.Tensor:
    """Each group's rows [its count or more, k] times its matrix [m, k] transposed -> [n, m].

    Of an operand with more rows than its group has, what these give lies where a later product writes, or behind the last group."""
    outputs, n = matrices[0].data.shape[0], sum(counts)
    out = torch.empty(n + ALIGNMENT - 1, outputs, dtype=out_dtype, device=matrices[0].data.device)
    first = 0
    for part, matrix, count in zip(rows, matrices, counts, strict=True):
        if count:
            product(part, matrix, out_dtype, out=out[first : first + part.data.shape[0]])
        first += count
    return out[:n]


def weight_grads(left: list[Operand], right: list[Operand], out: torch.Tensor, *, add: bool) -> None:
    """out[group] becomes, or is raised by, left [m, its rows] times right [n, its rows] transposed; out [groups, m, n], contiguous."""
    for part, one, other in zip(out.unbind(0), left, right, strict=True):
        if one.data.shape[1]:
            write_product(part, one, other, add=add)
        elif not add:
            part.zero_()
