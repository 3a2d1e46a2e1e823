"""Quantization to FP8 of rows that are sorted by group, with one scale or scales of 1 x 128: as they lie, and transposed group by group.

How many rows a group has is read on the device. Plain twins and layouts: with one scale fp8/grouped.py; of blocks quantize_blocks of each
group (fp8/quantize.py), and fp8/grouped_blocks.py.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.grouped import room_for
from megatron.core.fp8.quantize import BLOCK
from megatron.core.fusions.kernels.fp8_tiles import load_fours
from megatron.core.fusions.kernels.quantize import REGISTERS, factor_of, in_fours, quantize_tile
from megatron.core.fusions.kernels.quantize_blocks import LANE, LAUNCH, store_block_tile

TILE = 128, 128, 8  # rows (a multiple of 16), columns and warps of a program
_UNIT = tl.constexpr(16)  # fp8/settings.ALIGNMENT

Pair = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def group_of_tile(counts, groups, tile, GROUPS: tl.constexpr, TALL: tl.constexpr):
    """(group, first row, rows, first row and rows when each group is filled up to multiples of 16, the tile's number in the group)

    of a tile of TALL rows, where each group begins a tile of its own; 0 rows of a tile that is beyond the last."""
    lane = tl.arange(0, GROUPS)
    rows = tl.load(counts + lane, mask=lane < groups, other=0).to(tl.int32)
    tiles, units = tl.cdiv(rows, TALL), tl.cdiv(rows, _UNIT)
    end, tile_end, unit_end = tl.cumsum(rows, 0), tl.cumsum(tiles, 0), tl.cumsum(units, 0)
    group = tl.sum((tile_end <= tile).to(tl.int32), 0)
    mine = lane == group
    first = tl.sum(tl.where(mine, end - rows, 0), 0)
    filled_first = tl.sum(tl.where(mine, unit_end - units, 0), 0) * _UNIT
    within = tile - tl.sum(tl.where(mine, tile_end - tiles, 0), 0)
    return group, first, tl.sum(tl.where(mine, rows, 0), 0), filled_first, tl.sum(tl.where(mine, units, 0), 0) * _UNIT, within


@triton.jit
def quantize_groups_one_scale(
    x, counts, scale, amax, out_rows, out_columns, inverse, k, stride, groups,
    LARGEST: tl.constexpr, FROM_AMAX: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, first, rows, filled_first, filled, within = group_of_tile(counts, groups, tl.program_id(0), GROUPS, TALL)
    row, column = within * TALL, tl.program_id(1) * WIDE
    factor = factor_of(scale, inverse, LARGEST, FROM_AMAX)
    here, filled_here, quads = (first + row).to(tl.int64), filled_first.to(tl.int64) // 4 * k, filled // 4
    quantize_tile(
        x + here * stride + column, factor, amax, out_rows + here * k + column,
        out_columns + filled_here + column.to(tl.int64) * quads + row // 4, rows - row, k - column, stride, k, quads - row // 4, quads,
        LARGEST, FROM_AMAX, RECORD, ROWS, COLUMNS, False, TALL // 4, WIDE,
    )  # fmt: skip


def lanes_for(groups: int) -> int:
    """Of the vector that a program reads the counts into."""
    return max(16, triton.next_power_of_2(groups))


def quantize_groups(
    x: torch.Tensor,
    counts: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    inverse: torch.Tensor | None,
    found: torch.Tensor | None,
    amax: torch.Tensor | None,
    out_rows: torch.Tensor | None,
    out_columns: torch.Tensor | None,
) -> torch.Tensor:
    """x [n, k], n > 0, counts int [groups] -> out_rows [n, k] and out_columns [room, k] (either may be None); returns the inverse [1].

    With `scale` and `inverse` [1], or from the amax `found` [1]. amax [1]: raised to x's largest magnitude."""
    assert out_rows is not None or out_columns is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, k), groups = x.shape, counts.shape[0]
    from_amax = scale is None
    given = found if from_amax else scale
    assert given is not None and (out_columns is None or out_columns.numel() >= room_for(n, groups) * k)
    inverse = torch.empty(1, dtype=torch.float32, device=x.device) if inverse is None else inverse
    turned = in_fours(out_columns)
    tall, wide, warps = TILE
    quantize_groups_one_scale[(n // tall + groups, triton.cdiv(k, wide))](
        x, counts, given, given if amax is None else amax, turned if out_rows is None else out_rows,
        out_rows if turned is None else turned, inverse, k, x.stride(0), groups,
        LARGEST=LARGEST[dtype], FROM_AMAX=from_amax, RECORD=amax is not None, ROWS=out_rows is not None, COLUMNS=out_columns is not None,
        GROUPS=lanes_for(groups), TALL=tall, WIDE=wide, num_warps=warps, maxnreg=REGISTERS,
    )  # fmt: skip
    return inverse


@triton.jit
def quantize_groups_row_blocks(
    x, counts, out_rows, out_columns, row_inverse, column_inverse, k, stride, groups,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, across = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, first, rows, _, _, within = group_of_tile(counts, groups, tile, GROUPS, BLOCK)
    first, row, column = first.to(tl.int64), within.to(tl.int64) * BLOCK, across * BLOCK
    block, filled = (tile - within).to(tl.int64), tl.cdiv(rows, BLOCK) * BLOCK
    quads = filled // 4
    rows, columns = rows - within * BLOCK, (k - column).to(tl.int32)
    store_block_tile(
        load_fours(x + (first + row) * stride + column, rows, columns, stride, False, BLOCK // 4, BLOCK, LANE),
        out_rows + (first + row) * k + column, out_columns + block * (BLOCK // 4) * k + column * quads + within * (BLOCK // 4),
        row_inverse + block * BLOCK * tl.num_programs(1) + across * filled + row,
        column_inverse + tile.to(tl.int64) * k + column,
        rows, columns, filled - within * BLOCK, quads - within * (BLOCK // 4), k, quads, LARGEST, ROWS, COLUMNS, BLOCK, False,
    )  # fmt: skip


def quantize_row_blocks(
    x: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Pair | None, Pair | None]:
    """x [n, k], n > 0, counts int [groups] -> (rows, columns), each FP8 with its inverse scales, fp32, or None.

    rows: [n + 127, k], the last 127 of them empty; scales, flat, of each group [blocks, its rows filled up to whole blocks].
    columns, flat: of each group [k, its rows filled up with zeros to whole blocks]; scales [blocks of all groups, k].
    """
    assert rows or columns
    x = x if x.stride(1) == 1 else x.contiguous()
    (n, k), groups = x.shape, counts.shape[0]
    down, across = n // BLOCK + groups, triton.cdiv(k, BLOCK)  # blocks along the rows, at most
    of_rows = of_columns = None
    if rows:
        of_rows = x.new_empty(n + BLOCK - 1, k, dtype=dtype), x.new_empty(across * down * BLOCK, dtype=torch.float32)
    if columns:
        of_columns = x.new_empty(down * BLOCK * k, dtype=dtype), x.new_empty(down, k, dtype=torch.float32)
    some = of_rows or of_columns
    assert some is not None
    out_rows, row_inverse = of_rows or some
    out_columns, column_inverse = of_columns or some
    quantize_groups_row_blocks[(down, across)](
        x, counts, out_rows, out_columns.view(torch.int32) if columns else out_rows, row_inverse, column_inverse, k, x.stride(0), groups,
        LARGEST=LARGEST[dtype], ROWS=rows, COLUMNS=columns, GROUPS=lanes_for(groups), BLOCK=BLOCK, **LAUNCH[BLOCK],
    )  # fmt: skip
    return of_rows, of_columns
