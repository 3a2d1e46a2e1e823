"""Quantization to FP8 in one pass: rows as they lie and transposed, with one scale or a scale for each block.

The rule for scales and what becomes of numbers that are too large or not finite is that of fp8/formats.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.quantize import BLOCK, MX_BLOCK, SQUARE_BLOCKS, WIDTHS, padded
from megatron.core.fusions.kernels.fp8_tiles import (
    amax_from,
    amax_of_sizes,
    load_fours,
    load_part,
    magnitude,
    scale_of,
    size_of,
    size_of_fours,
    store_quantized,
    to_fp8,
)

Data = tuple[torch.Tensor | None, torch.Tensor | None]
TILE = 128, 128, 8  # rows, columns and warps of a program
REGISTERS = 80  # of a thread, at most: so three of those programs fit a multiprocessor of sm_90
WARPS = {BLOCK: 8, MX_BLOCK: 1}  # of a program that has a square of this width


@triton.jit
def packed(first, second, LARGEST: tl.constexpr, HALF: tl.constexpr):
    """Two rows in FP8 as that half of uint32.

    They are converted as pairs of rows, not taken from what is stored by row: ptxas 12.8 and its like lose bytes of results used both ways.
    """
    low, high = tl.split(to_fp8(tl.join(first, second), LARGEST).to(tl.uint8, bitcast=True))
    return (low.to(tl.uint32) | (high.to(tl.uint32) << 8)) << (16 * HALF)


@triton.jit
def store_turned(out, four, quad, column, quads, columns):
    """four [rows / 4, columns], uint32 of a row and the three after it in FP8, goes to out [columns, quads] (int32).

    So a quarter of the elements turn in shared memory, as words and not as bytes.
    """
    there = (column < columns)[:, None] & (quad < quads)[None, :]
    tl.store(out + column[:, None] * quads + quad[None, :], tl.trans(four).to(tl.int32, bitcast=True), mask=there)


@triton.jit
def load_phase(x, quad, column, rows, columns, stride, PHASE: tl.constexpr):
    """fp32 [quads, columns]: row PHASE of each four."""
    row = quad * 4 + PHASE
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_phase(out, result, quad, column, rows, columns, stride, PHASE: tl.constexpr):
    row = quad * 4 + PHASE
    tl.store(out + row[:, None] * stride + column[None, :], result, mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def factor_of(scale, inverse, LARGEST: tl.constexpr, FROM_AMAX: tl.constexpr):
    """What to multiply a tensor by: `scale` [1], or what follows from it where it is an amax; then one program writes `inverse` [1]."""
    factor = tl.load(scale)
    if FROM_AMAX:
        factor = scale_of(factor, LARGEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse, 1.0 / factor)
    return factor


@triton.jit
def quantize_tile(
    x, factor, amax, out_rows, out_columns, rows, columns, stride, row_stride, quads, column_stride,
    LARGEST: tl.constexpr, FITS: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    QUADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile with one scale: pointers are to its corner, rows, columns and quads what is left from there. RECORD: raises amax [1].

    FITS: factor follows from an amax of the whole, so nothing goes beyond the format, and what is not finite becomes NaN times 0.
    """
    fours = load_fours(x, rows, columns, stride, WHOLE, QUADS, WIDE)
    largest = 0.0
    if RECORD or not FITS:
        largest = amax_of_sizes(size_of_fours(fours))
    if RECORD:
        tl.atomic_max(amax, largest, sem="relaxed")
    store_quantized(
        out_rows, out_columns, fours, factor, largest, rows, columns, row_stride, quads, column_stride,
        LARGEST, FITS, ROWS, COLUMNS, WHOLE, QUADS, WIDE,
    )  # fmt: skip


@triton.jit
def quantize_one_scale(
    x, scale, amax, out_rows, out_columns, inverse, m, k, quads, stride,
    LARGEST: tl.constexpr, FROM_AMAX: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * TALL, tl.program_id(1) * WIDE
    factor = factor_of(scale, inverse, LARGEST, FROM_AMAX)
    quantize_tile(
        x + row.to(tl.int64) * stride + column, factor, amax, out_rows + row.to(tl.int64) * k + column,
        out_columns + column.to(tl.int64) * quads + row // 4, m - row, k - column, stride, k, quads - row // 4, quads,
        LARGEST, FROM_AMAX, RECORD, ROWS, COLUMNS, WHOLE, TALL // 4, WIDE,
    )  # fmt: skip


@triton.jit
def quantize_amax(x, amax, rows, columns, stride, WHOLE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    first = tl.program_id(0) * TALL
    row, column = tl.arange(0, TALL)[:, None], tl.max_contiguous(tl.arange(0, WIDE), 8)[None, :]
    x += first.to(tl.int64) * stride
    place, inside = row * stride + column, row < rows - first
    largest = size_of(load_part(x, place, inside & (column < columns), WHOLE))
    for start in range(WIDE, columns, WIDE):
        largest = tl.maximum(largest, size_of(load_part(x + start, place, inside & (column < columns - start), WHOLE)))
    tl.atomic_max(amax, amax_of_sizes(largest), sem="relaxed")


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """x [m, k] -> fp32 [1]; inf where something is not finite."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), tall, wide = x.shape, 8, 1024
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    whole = m % tall == 0 and k % wide == 0
    quantize_amax[(triton.cdiv(m, tall),)](x, amax, m, k, x.stride(0), WHOLE=whole, TALL=tall, WIDE=wide, num_warps=8)
    return amax


def quantize_tensor(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor | None,
    inverse: torch.Tensor | None,
    found: torch.Tensor | None,
    amax: torch.Tensor | None,
    rows: bool,
    columns: bool,
    into: Data,
) -> tuple[Data, torch.Tensor]:
    """x [m, k] -> ((rows [m, k], columns [k, padded m]), inverse [1]): with `scale` and `inverse` [1], or from the amax `found` [1].

    amax [1]: raised to x's largest magnitude. into: where the results go, or None.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    out_rows, out_columns = _outputs(x, dtype, rows, columns, into)
    from_amax = scale is None
    given = found if from_amax else scale
    assert given is not None
    inverse = torch.empty(1, dtype=torch.float32, device=x.device) if inverse is None else inverse
    tall, wide, warps = TILE
    quantize_one_scale[(triton.cdiv(padded(m), tall), triton.cdiv(k, wide))](
        x, given, given if amax is None else amax, *_some(out_rows, in_fours(out_columns)), inverse, m, k, padded(m) // 4, x.stride(0),
        LARGEST=LARGEST[dtype], FROM_AMAX=from_amax, RECORD=amax is not None, ROWS=rows, COLUMNS=columns,
        WHOLE=m % tall == 0 and k % wide == 0, TALL=tall, WIDE=wide, num_warps=warps, maxnreg=REGISTERS,
    )  # fmt: skip
    return (out_rows, out_columns), inverse


@triton.jit
def store_row_blocks(out, inverse, value, quad, column, rows, columns, block, stride, lines, PHASE: tl.constexpr, LARGEST: tl.constexpr):
    """value [quads, block]: a block a row; out [rows, stride]; inverse [blocks, lines], lines >= rows."""
    row = quad * 4 + PHASE
    factors = scale_of(amax_from(tl.max(magnitude(value), axis=1)), LARGEST)
    tl.store(inverse + block * lines + row, 1.0 / factors, mask=row < lines)
    store_phase(out, to_fp8(value * factors[:, None], LARGEST), quad, column, rows, columns, stride, PHASE)


@triton.jit
def store_column_blocks(out, inverse, first, second, third, fourth, quad, column, quads, columns, block, stride, LARGEST: tl.constexpr):
    """The phases of a block's rows: a block a column; out [columns, quads] int32; inverse [blocks, stride]."""
    size = tl.maximum(tl.maximum(magnitude(first), magnitude(second)), tl.maximum(magnitude(third), magnitude(fourth)))
    factors = scale_of(amax_from(tl.max(size, axis=0)), LARGEST)
    tl.store(inverse + block * stride + column, 1.0 / factors, mask=column < columns)
    wide = factors[None, :]
    four = packed(first * wide, second * wide, LARGEST, 0) | packed(third * wide, fourth * wide, LARGEST, 1)
    store_turned(out, four, quad, column, quads, columns)


@triton.jit
def quantize_row_blocks(
    x, out_rows, out_columns, row_inverse, column_inverse, m, k, quads, stride,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    quad = down * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    column = across * BLOCK + tl.arange(0, BLOCK)
    first = load_phase(x, quad, column, m, k, stride, 0)
    second = load_phase(x, quad, column, m, k, stride, 1)
    third = load_phase(x, quad, column, m, k, stride, 2)
    fourth = load_phase(x, quad, column, m, k, stride, 3)
    if ROWS:
        store_row_blocks(out_rows, row_inverse, first, quad, column, m, k, across, k, m, 0, LARGEST)
        store_row_blocks(out_rows, row_inverse, second, quad, column, m, k, across, k, m, 1, LARGEST)
        store_row_blocks(out_rows, row_inverse, third, quad, column, m, k, across, k, m, 2, LARGEST)
        store_row_blocks(out_rows, row_inverse, fourth, quad, column, m, k, across, k, m, 3, LARGEST)
    if COLUMNS:
        store_column_blocks(out_columns, column_inverse, first, second, third, fourth, quad, column, quads, k, down, k, LARGEST)


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
    top, left = down * BLOCK, across * BLOCK
    # x comes out of the cache
    quantize_tile(
        x + top * stride + left, factor, x, out_rows + top * k + left, out_columns + left * quads + top // 4,
        (m - top).to(tl.int32), (k - left).to(tl.int32), stride, k, (quads - top // 4).to(tl.int32), quads,
        LARGEST, True, False, ROWS, COLUMNS, False, BLOCK // 4, BLOCK,
    )  # fmt: skip


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, kind: str, rows: bool, columns: bool, into: Data, inverses_into: Data
) -> tuple[Data, Data]:
    """x [m, k] -> ((rows [m, k], columns [k, padded m]), (their inverse scales, as fp8/quantize.Operand says)).

    A program has a square of a block's width, so that it sees whole blocks both ways.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (m, k), width, square = x.shape, WIDTHS[kind], kind == SQUARE_BLOCKS
    out_rows, out_columns = _outputs(x, dtype, rows, columns, into)
    down, across = triton.cdiv(padded(m), width), triton.cdiv(k, width)
    by_row, by_column = inverses_into
    if square:
        m_lines, k_lines = triton.cdiv(m, width), across
        by_row = x.new_empty(m_lines, across, dtype=torch.float32) if rows and by_row is None else by_row
        by_column = x.new_empty(k_lines, down, dtype=torch.float32) if columns and by_column is None else by_column
    else:
        by_row = inverses_of_blocks(x, m, across) if rows and by_row is None else by_row
        by_column = inverses_of_blocks(x, k, down) if columns and by_column is None else by_column
    kernel = quantize_square_blocks if square else quantize_row_blocks
    kernel[(down, across)](
        x, *_some(out_rows, in_fours(out_columns)), *_some(by_row, by_column), m, k, padded(m) // 4, x.stride(0),
        LARGEST=LARGEST[dtype], ROWS=rows, COLUMNS=columns, BLOCK=width, num_warps=WARPS[width],
    )  # fmt: skip
    return (out_rows, out_columns), (by_row, by_column)


def inverses_of_blocks(like: torch.Tensor, lines: int, blocks: int) -> torch.Tensor:
    """fp32 [lines, blocks], the lines' next to each other."""
    return like.new_empty(blocks, lines, dtype=torch.float32).t()


def in_fours(out_columns: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 [k, padded m] as int32 [k, padded m / 4]."""
    return None if out_columns is None else out_columns.view(torch.int32)


def _outputs(x: torch.Tensor, dtype: torch.dtype, rows: bool, columns: bool, into: Data) -> Data:
    (m, k), (out_rows, out_columns) = x.shape, into
    if rows and out_rows is None:
        out_rows = torch.empty(m, k, dtype=dtype, device=x.device)
    if columns and out_columns is None:
        out_columns = torch.empty(k, padded(m), dtype=dtype, device=x.device)
    return out_rows if rows else None, out_columns if columns else None


def _some(first: Any, second: Any) -> tuple[Any, Any]:
    """Both, one standing in for one that is not there and will not be touched."""
    return second if first is None else first, first if second is None else second
