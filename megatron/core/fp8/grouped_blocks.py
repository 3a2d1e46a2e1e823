"""FP8 with scales of blocks for rows [n, k] that are sorted by group, an expert's rows each: no block crosses groups.

There is no library product of groups of blocks on Hopper: each group has a product of its own (gemm.product), for which the host reads
how many rows it has. Operands are lists, one of each group; a group without rows has empty ones, which nothing multiplies.

Blocks of 1 x 128 come from one kernel for all groups, which reads the numbers of rows on the device. A group may begin at any row with any
number of them, and cuBLAS wants of rows [m, k] m % 4 == 0 and their scales as [blocks, m]. So each group's scales lie apart, for its rows
filled up to whole blocks; the rows lie as in x, no copy of them is filled up: an operand takes those that come next, up to 127, and what
they give is overwritten by the next product (`rows_product`). Products compute tiles of 128 rows anyway, and their sizes are few, so that
the library's choice of a kernel for each is made once. Columns are what weight gradients contract over: each group's rows are filled up
with zeros to whole blocks.
"""

import torch

from megatron.core.fp8.gemm import product, write_product
from megatron.core.fp8.quantize import BLOCK, ROW_BLOCKS, Operand, Quantized
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


def quantize_row_blocks(x: torch.Tensor, counts: TokenCounts, dtype: torch.dtype, *, rows: bool, columns: bool) -> list[Quantized]:
    """x [n, k], n > 0, where Triton's kernels run -> each group's quantize.quantize_blocks of 1 x 128, but for what is filled up: both are
    filled up to whole blocks: rows [filled n, k] with the next groups' behind their own; columns [k, filled n].

    The host waits for the counts, unless it has them, after the kernel was launched.
    """
    from megatron.core.fusions.kernels import quantize_groups

    of_rows, of_columns = quantize_groups.quantize_row_blocks(x, counts.on_device, dtype, rows, columns)
    sizes = counts.tolist()
    row_parts = [None] * len(sizes) if of_rows is None else _row_operands(*of_rows, sizes)
    column_parts = [None] * len(sizes) if of_columns is None else _column_operands(*of_columns, sizes)
    return [Quantized(*pair) for pair in zip(row_parts, column_parts, strict=True)]


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def _row_operands(data: torch.Tensor, inverses: torch.Tensor, sizes: list[int]) -> list[Operand]:
    """Of data [n + 127, k] and, flat, each group's inverse scales [blocks, filled rows]."""
    k = data.shape[1]
    blocks = -(-k // BLOCK)
    found, first, filled_first = [], 0, 0
    for size in sizes:  # as_strided: one call for what slice and view take three, of each of many groups
        filled = _whole_blocks(size)
        scales = inverses.as_strided((filled, blocks), (1, filled), filled_first * blocks)
        found.append(Operand(data.as_strided((filled, k), (k, 1), first * k), scales, ROW_BLOCKS))
        first, filled_first = first + size, filled_first + filled
    return found


def _column_operands(data: torch.Tensor, inverses: torch.Tensor, sizes: list[int]) -> list[Operand]:
    """Of, flat, each group's data [k, filled rows], and inverse scales [blocks of all groups, k]."""
    k = inverses.shape[1]
    found, first = [], 0
    for size in sizes:
        filled = _whole_blocks(size)
        scales = inverses.as_strided((k, filled // BLOCK), (1, k), first // BLOCK * k)
        found.append(Operand(data.as_strided((k, filled), (filled, 1), first * k), scales, ROW_BLOCKS))
        first += filled
    return found


def rows_product(rows: list[Operand], matrices: list[Operand], counts: list[int], out_dtype: torch.dtype) -> torch.Tensor:
    """Each group's rows [its count or more, k] times its matrix [m, k] transposed -> [n, m].

    Of an operand with more rows than its group has, what these give lies where a later product writes, or behind the last group."""
    outputs, n = matrices[0].data.shape[0], sum(counts)
    out = torch.empty(n + BLOCK - 1, outputs, dtype=out_dtype, device=matrices[0].data.device)
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
