"""Quantization to FP8 in one pass: rows as they lie and transposed, with one scale or a scale for each block.

The rule for scales and what becomes of numbers that are too large or not finite is that of fp8/formats.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST, SMALLEST_AMAX
from megatron.core.fp8.quantize import BLOCK, padded

Data = tuple[torch.Tensor | None, torch.Tensor | None]
TILE = 64, 128, 4  # rows, columns and warps of a program
_FINITE = tl.constexpr(3.4028234663852886e38)
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    """The largest power of two that brings amax (fp32) inside the format."""
    room = LARGEST / tl.maximum(amax, _SMALLEST)
    return (room.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(value):
    """|value|; inf for NaN."""
    size = tl.abs(value)
    return tl.where(size <= _FINITE, size, float("inf"))


@triton.jit
def saturated(value, LARGEST: tl.constexpr):
    return tl.where(tl.abs(value) <= _FINITE, tl.minimum(tl.maximum(value, -LARGEST), LARGEST), float("nan"))


@triton.jit
def quantize_one_scale(
    x, scale, amax, out_rows, out_columns, inverse, m, k, filled_m, stride,
    LARGEST: tl.constexpr, FROM_AMAX: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (row < m)[:, None] & (column < k)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if RECORD:
        tl.atomic_max(amax, tl.max(tl.max(magnitude(value), axis=1), axis=0))
    factor = tl.load(scale)
    if FROM_AMAX:
        factor = scale_of(factor, LARGEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse, 1.0 / factor)
    if ROWS:
        result = saturated(value * factor, LARGEST).to(out_rows.dtype.element_ty)
        tl.store(out_rows + row[:, None] * k + column[None, :], result, mask=inside)
    if COLUMNS:
        result = tl.trans(saturated(value * factor, LARGEST).to(out_columns.dtype.element_ty))
        there = (column < k)[:, None] & (row < filled_m)[None, :]
        tl.store(out_columns + column[:, None] * filled_m + row[None, :], result, mask=there)


@triton.jit
def quantize_amax(x, amax, rows, columns, stride, TALL: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    largest = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(0, columns, WIDE):
        column = start + tl.arange(0, WIDE)[None, :]
        value = tl.load(x + row * stride + column, mask=(row < rows) & (column < columns), other=0.0)
        largest = tl.maximum(largest, magnitude(value.to(tl.float32)))
    tl.atomic_max(amax, tl.max(tl.max(largest, axis=1), axis=0))


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """x [m, k] -> fp32 [1]; inf where something is not finite."""
    x = x if x.stride(1) == 1 else x.contiguous()
    amax = torch.zeros(1, dtype=torch.float32, device=x.device)
    tall, wide = 8, 1024
    quantize_amax[(triton.cdiv(x.shape[0], tall),)](x, amax, *x.shape, x.stride(0), TALL=tall, WIDE=wide, num_warps=8)
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
        x, given, given if amax is None else amax, *_some(out_rows, out_columns), inverse, m, k, padded(m), x.stride(0),
        LARGEST=LARGEST[dtype], FROM_AMAX=from_amax, RECORD=amax is not None, ROWS=rows, COLUMNS=columns, TALL=tall, WIDE=wide,
        num_warps=warps,
    )  # fmt: skip
    return (out_rows, out_columns), inverse


@triton.jit
def quantize_in_blocks(
    x, out_rows, out_columns, row_inverse, column_inverse, m, k, filled_m, stride, row_blocks, column_blocks,
    LARGEST: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = down * BLOCK + tl.arange(0, BLOCK)
    column = across * BLOCK + tl.arange(0, BLOCK)
    inside = (row < m)[:, None] & (column < k)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    size = magnitude(value)
    there = (column < k)[:, None] & (row < filled_m)[None, :]
    if SQUARE:
        factor = scale_of(tl.max(tl.max(size, axis=1), axis=0), LARGEST)
        result = saturated(value * factor, LARGEST).to(out_rows.dtype.element_ty)
        if ROWS:
            tl.store(row_inverse + down * row_blocks + across, 1.0 / factor)
            tl.store(out_rows + row[:, None] * k + column[None, :], result, mask=inside)
        if COLUMNS:
            tl.store(column_inverse + across * column_blocks + down, 1.0 / factor)
            tl.store(out_columns + column[:, None] * filled_m + row[None, :], tl.trans(result), mask=there)
    else:
        if ROWS:
            factors = scale_of(tl.max(size, axis=1), LARGEST)
            tl.store(row_inverse + across * m + row, 1.0 / factors, mask=row < m)
            result = saturated(value * factors[:, None], LARGEST).to(out_rows.dtype.element_ty)
            tl.store(out_rows + row[:, None] * k + column[None, :], result, mask=inside)
        if COLUMNS:
            factors = scale_of(tl.max(size, axis=0), LARGEST)
            tl.store(column_inverse + down * k + column, 1.0 / factors, mask=column < k)
            result = saturated(value * factors[None, :], LARGEST).to(out_columns.dtype.element_ty)
            tl.store(out_columns + column[:, None] * filled_m + row[None, :], tl.trans(result), mask=there)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, square: bool, rows: bool, columns: bool, into: Data, inverses_into: Data
) -> tuple[Data, Data]:
    """x [m, k] -> ((rows [m, k], columns [k, padded m]), (their inverse scales, as fp8/quantize.Operand says))."""
    x = x if x.stride(1) == 1 else x.contiguous()
    m, k = x.shape
    out_rows, out_columns = _outputs(x, dtype, rows, columns, into)
    filled, down, across = padded(m), triton.cdiv(padded(m), BLOCK), triton.cdiv(k, BLOCK)
    by_row, by_column = inverses_into

    def inverse_scales(lines: int, blocks: int) -> torch.Tensor:
        if square:
            return torch.empty(triton.cdiv(lines, BLOCK), blocks, dtype=torch.float32, device=x.device)
        return torch.empty(blocks, lines, dtype=torch.float32, device=x.device).t()

    by_row = inverse_scales(m, across) if rows and by_row is None else by_row
    by_column = inverse_scales(k, down) if columns and by_column is None else by_column
    quantize_in_blocks[(down, across)](
        x, *_some(out_rows, out_columns), *_some(by_row, by_column), m, k, filled, x.stride(0), across, down,
        LARGEST=LARGEST[dtype], SQUARE=square, ROWS=rows, COLUMNS=columns, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return (out_rows, out_columns), (by_row, by_column)


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
