"""Quantization to FP8 in one pass with a scale for each block: rows as they lie, and transposed, which has blocks of its own.

The rule for scales is that of fp8/formats.py. Blocks of 1 x 128 or 1 x 32: a program has a square tile of a block's width, and sees whole
blocks both ways. A block's own scale brings it inside the format, so nothing is clamped; what is not finite makes its block's scale 0, and
becomes NaN. Most instructions of a plain kernel are for addresses and scales: so places within a tile are 32 bits wide, scales are found
without a division, and sizes of bf16 compared as 16 bits. An H200 takes 0.044 ms for [8192, 4096], a copy 0.036.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.quantize import BLOCK, MX_BLOCK, SQUARE_BLOCKS, WIDTHS, padded
from megatron.core.fusions.kernels.quantize import (
    Data,
    amax_from,
    in_fours,
    inverse_of_bits,
    magnitude,
    outputs_for,
    quantize_fours,
    scale_bits,
    scale_of,
    some_of,
    store_turned,
)

# of a program that has a tile of this width; with 80 registers a multiprocessor holds three of 8 warps
LAUNCH: dict[int, dict[str, Any]] = {BLOCK: {"num_warps": 8, "maxnreg": 80}, MX_BLOCK: {"num_warps": 1}}


@triton.jit
def size_of(raw):
    """|raw| as bits that are ordered as the numbers are: of bf16 the upper half of fp32's."""
    if raw.dtype == tl.bfloat16:
        return raw.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return magnitude(raw.to(tl.float32))


@triton.jit
def scales_along(size, AXIS: tl.constexpr, LARGEST: tl.constexpr):
    """The scale of each block that runs along the axis, as bits."""
    if size.dtype == tl.int16:
        bits = tl.max(size, axis=AXIS).to(tl.int32) << 16
    else:
        bits = tl.max(size, axis=AXIS)
    return scale_bits(bits, LARGEST)


@triton.jit
def cast(value, LARGEST: tl.constexpr):
    """fp32 inside the format, or NaN, to it."""
    if LARGEST == 448.0:
        return value.to(tl.float8e4nv)
    else:
        return value.to(tl.float8e5)


@triton.jit
def words_of(first, second, third, fourth, LARGEST: tl.constexpr):
    """Four rows as words of a byte each, the first lowest; they are not taken from what is stored by row (quantize.packed says why)."""
    one, two = tl.split(cast(tl.join(first, second), LARGEST).to(tl.uint8, bitcast=True))
    three, four = tl.split(cast(tl.join(third, fourth), LARGEST).to(tl.uint8, bitcast=True))
    return one.to(tl.uint32) | (two.to(tl.uint32) << 8) | (three.to(tl.uint32) << 16) | (four.to(tl.uint32) << 24)


@triton.jit
def load_row(x, offset, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(x + offset)
    else:
        return tl.load(x + offset, mask=inside, other=0.0)


@triton.jit
def store_row(out, value, scale, offset, inside, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    result = cast(value.to(tl.float32) * scale.to(tl.float32, bitcast=True)[:, None], LARGEST)
    if WHOLE:
        tl.store(out + offset, result)
    else:
        tl.store(out + offset, result, mask=inside)


@triton.jit
def store_tile_turned(out, words, columns, quads, stride, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """words [BLOCK / 4, BLOCK] transposed to out [columns, quads] (int32)."""
    line, quad = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK // 4)[None, :]
    turned = tl.trans(words).to(tl.int32, bitcast=True)
    if WHOLE:
        tl.store(out + line * stride + quad, turned)
    else:
        tl.store(out + line * stride + quad, turned, mask=(line < columns) & (quad < quads))


@triton.jit
def tile_places(stride, BLOCK: tl.constexpr):
    """int32 [BLOCK / 4, BLOCK]: where the first row of each four lies."""
    # a lane has four columns and a warp a whole row, whose largest is then found by one instruction
    column = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    return tl.arange(0, BLOCK // 4)[:, None] * 4 * stride + column[None, :]


@triton.jit
def tile_inside(rows, columns, BLOCK: tl.constexpr, PHASE: tl.constexpr):
    """Of row PHASE of each four."""
    return (tl.arange(0, BLOCK // 4) * 4 + PHASE < rows)[:, None] & (tl.arange(0, BLOCK) < columns)[None, :]


@triton.jit
def quantize_fours_of_rows(
    a, b, c, d, out_rows, out_columns, row_inverse, column_inverse, rows, columns, lines, quads, row_stride, column_stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As quantize_tile, of values that are there: a, b, c, d [BLOCK / 4, BLOCK] are the rows of each four."""
    size_a, size_b, size_c, size_d = size_of(a), size_of(b), size_of(c), size_of(d)
    line = tl.arange(0, BLOCK)
    if COLUMNS:
        of_columns = scales_along(tl.maximum(tl.maximum(size_a, size_b), tl.maximum(size_c, size_d)), 0, LARGEST)
    if ROWS:
        of_a, of_b = scales_along(size_a, 1, LARGEST), scales_along(size_b, 1, LARGEST)
        of_c, of_d = scales_along(size_c, 1, LARGEST), scales_along(size_d, 1, LARGEST)
        place = tile_places(row_stride, BLOCK)
        store_row(out_rows, a, of_a, place, tile_inside(rows, columns, BLOCK, 0), LARGEST, WHOLE)
        store_row(out_rows + row_stride, b, of_b, place, tile_inside(rows, columns, BLOCK, 1), LARGEST, WHOLE)
        store_row(out_rows + 2 * row_stride, c, of_c, place, tile_inside(rows, columns, BLOCK, 2), LARGEST, WHOLE)
        store_row(out_rows + 3 * row_stride, d, of_d, place, tile_inside(rows, columns, BLOCK, 3), LARGEST, WHOLE)
        in_order = tl.reshape(tl.join(tl.join(of_a, of_c), tl.join(of_b, of_d)), [BLOCK])
        tl.store(row_inverse + line, inverse_of_bits(in_order), mask=line < lines)
    if COLUMNS:
        tl.store(column_inverse + line, inverse_of_bits(of_columns), mask=line < columns)
        wide = of_columns.to(tl.float32, bitcast=True)[None, :]
        words = words_of(
            a.to(tl.float32) * wide, b.to(tl.float32) * wide, c.to(tl.float32) * wide, d.to(tl.float32) * wide, LARGEST
        )  # fmt: skip
        store_tile_turned(out_columns, words, columns, quads, column_stride, BLOCK, WHOLE)


@triton.jit
def quantize_tile(
    x, out_rows, out_columns, row_inverse, column_inverse, rows, columns, lines, quads, stride, row_stride, column_stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Pointers to where the tile begins; from there on there are so many rows and columns of x, lines of row_inverse, fours of rows of
    out_columns (int32). WHOLE: at least BLOCK of each. Strides: of x, out_rows and out_columns."""
    place = tile_places(stride, BLOCK)
    quantize_fours_of_rows(
        load_row(x, place, tile_inside(rows, columns, BLOCK, 0), WHOLE),
        load_row(x + stride, place, tile_inside(rows, columns, BLOCK, 1), WHOLE),
        load_row(x + 2 * stride, place, tile_inside(rows, columns, BLOCK, 2), WHOLE),
        load_row(x + 3 * stride, place, tile_inside(rows, columns, BLOCK, 3), WHOLE),
        out_rows, out_columns, row_inverse, column_inverse, rows, columns, lines, quads, row_stride, column_stride,
        LARGEST, ROWS, COLUMNS, BLOCK, WHOLE,
    )  # fmt: skip


@triton.jit
def quantize_row_blocks(
    x, out_rows, out_columns, row_inverse, column_inverse, m, k, quads, stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """x [m, k] -> out_rows [m, k], row_inverse [blocks, m], out_columns [k, quads] (int32), column_inverse [blocks, k]."""
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, column = down * BLOCK, across * BLOCK
    quantize_tile(
        x + row * stride + column, out_rows + row * k + column, out_columns + column * quads + down * (BLOCK // 4),
        row_inverse + across * m + row, column_inverse + down * k + column,
        (m - row).to(tl.int32), (k - column).to(tl.int32), (m - row).to(tl.int32), (quads - down * (BLOCK // 4)).to(tl.int32),
        stride, k, quads, LARGEST, ROWS, COLUMNS, BLOCK, WHOLE,
    )  # fmt: skip


@triton.jit
def quantize_square_blocks(
    x, out_rows, out_columns, row_inverse, column_inverse, m, k, quads, stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = down * BLOCK + tl.arange(0, BLOCK)
    column = across * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=(row < m)[:, None] & (column < k)[None, :], other=0.0)
    factor = scale_of(amax_from(tl.max(tl.max(magnitude(value.to(tl.float32)), axis=1), axis=0)), LARGEST)
    if ROWS:
        tl.store(row_inverse + down * tl.num_programs(1) + across, 1.0 / factor)
    if COLUMNS:
        tl.store(column_inverse + across * tl.num_programs(0) + down, 1.0 / factor)
    quad = down * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    # x comes out of the cache
    four, _ = quantize_fours(x, factor, out_rows, quad, column, m, k, stride, LARGEST, False, ROWS, COLUMNS, BLOCK // 4, BLOCK)
    if COLUMNS:
        store_turned(out_columns, four, quad, column, quads, k)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, kind: str, rows: bool, columns: bool, into: Data, inverses_into: Data
) -> tuple[Data, Data]:
    """x [m, k] -> ((rows [m, k], columns [k, padded m]), (their inverse scales, as fp8/quantize.Operand says))."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), width, square = x.shape, WIDTHS[kind], kind == SQUARE_BLOCKS
    out_rows, out_columns = outputs_for(x, dtype, rows, columns, into)
    down, across = triton.cdiv(padded(m), width), triton.cdiv(k, width)
    by_row, by_column = inverses_into
    if square:
        m_lines, k_lines = triton.cdiv(m, width), across
        by_row = x.new_empty(m_lines, across, dtype=torch.float32) if rows and by_row is None else by_row
        by_column = x.new_empty(k_lines, down, dtype=torch.float32) if columns and by_column is None else by_column
    else:
        by_row = inverses_of_blocks(x, m, across) if rows and by_row is None else by_row
        by_column = inverses_of_blocks(x, k, down) if columns and by_column is None else by_column
    places = *some_of(out_rows, in_fours(out_columns)), *some_of(by_row, by_column), m, k, padded(m) // 4, x.stride(0)
    wanted = {"LARGEST": LARGEST[dtype], "ROWS": rows, "COLUMNS": columns, "BLOCK": width}
    if square:
        quantize_square_blocks[(down, across)](x, *places, **wanted, num_warps=8)
    else:
        quantize_row_blocks[(down, across)](x, *places, **wanted, WHOLE=m % width == 0 and k % width == 0, **LAUNCH[width])
    return (out_rows, out_columns), (by_row, by_column)


def inverses_of_blocks(like: torch.Tensor, lines: int, blocks: int) -> torch.Tensor:
    """fp32 [lines, blocks], the lines' next to each other."""
    return like.new_empty(blocks, lines, dtype=torch.float32).t()
