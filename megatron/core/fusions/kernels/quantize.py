"""Quantization to FP8 in one pass: rows as they lie and transposed, with one scale (of blocks: quantize_blocks.py).

The rule for scales and what becomes of numbers that are too large or not finite is that of fp8/formats.py.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST, SMALLEST_AMAX
from megatron.core.fp8.quantize import padded

Data = tuple[torch.Tensor | None, torch.Tensor | None]
TILE = 128, 128, 8  # rows, columns and warps of a program
# bits of fp32
_EXPONENT = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(127 << 23)
_SMALLEST = tl.constexpr(round(math.log2(SMALLEST_AMAX)) + 127 << 23)


@triton.jit
def scale_bits(amax, LARGEST: tl.constexpr):
    """The largest power of two that brings a tensor of this largest magnitude inside the format, both as the bits of fp32 (int32).

    0 where the magnitude is not finite.
    """
    # Both formats' largest number is 1.75 times a power of two. Subtracted as integers, the mantissas take one from the difference of the
    # exponents just where the quotient is below that power.
    TOP: tl.constexpr = 0x43E00000 if LARGEST == 448.0 else 0x47600000
    found = (TOP - tl.maximum(amax, _SMALLEST) + _ONE) & _EXPONENT
    return tl.where(amax >= _EXPONENT, 0, found)


@triton.jit
def inverse_of_bits(scale):
    """1 / a scale, fp32, from its bits; inf of 0."""
    return tl.where(scale == 0, _EXPONENT, 2 * _ONE - scale).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(amax, LARGEST: tl.constexpr):
    """The scale for a largest magnitude, both fp32."""
    return scale_bits(amax.to(tl.int32, bitcast=True), LARGEST).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(value):
    """|value| of fp32 as its bits, int32: they are ordered as the numbers are, NaN the largest."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_from(bits):
    """The number with these bits; inf for NaN."""
    return tl.minimum(bits, _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def to_fp8(value, LARGEST: tl.constexpr):
    """fp32 -> the format whose largest number that is; what is not finite becomes NaN."""
    bounded = tl.minimum(tl.maximum(value, -LARGEST), LARGEST) + value * 0.0
    if LARGEST == 448.0:
        return bounded.to(tl.float8e4nv)
    else:
        return bounded.to(tl.float8e5)


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
def quantize_fours(
    x, factor, out_rows, quad, column, rows, columns, stride,
    LARGEST: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile with one scale. ROWS: out_rows [rows, columns] gets it as it lies. Returns (what store_turned takes, with COLUMNS; the largest
    magnitudes, as bits, with RECORD)."""
    largest = tl.zeros([QUADS, WIDE], dtype=tl.int32)
    four = tl.zeros([QUADS, WIDE], dtype=tl.uint32)
    for half in tl.static_range(2):
        first = load_phase(x, quad, column, rows, columns, stride, 2 * half)
        second = load_phase(x, quad, column, rows, columns, stride, 2 * half + 1)
        if RECORD:
            largest = tl.maximum(largest, tl.maximum(magnitude(first), magnitude(second)))
        first *= factor
        second *= factor
        if ROWS:
            store_phase(out_rows, to_fp8(first, LARGEST), quad, column, rows, columns, columns, 2 * half)
            store_phase(out_rows, to_fp8(second, LARGEST), quad, column, rows, columns, columns, 2 * half + 1)
        if COLUMNS:
            four |= packed(first, second, LARGEST, half)
    return four, largest


@triton.jit
def quantize_one_scale(
    x, scale, amax, out_rows, out_columns, inverse, m, k, quads, stride,
    LARGEST: tl.constexpr, FROM_AMAX: tl.constexpr, RECORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    quad = tl.program_id(0).to(tl.int64) * (TALL // 4) + tl.arange(0, TALL // 4)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    factor = factor_of(scale, inverse, LARGEST, FROM_AMAX)
    four, largest = quantize_fours(x, factor, out_rows, quad, column, m, k, stride, LARGEST, RECORD, ROWS, COLUMNS, TALL // 4, WIDE)
    if RECORD:
        tl.atomic_max(amax, amax_from(tl.max(tl.max(largest, axis=1), axis=0)))
    if COLUMNS:
        store_turned(out_columns, four, quad, column, quads, k)


@triton.jit
def quantize_amax(x, amax, rows, columns, stride, TALL: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    largest = tl.zeros([TALL, WIDE], dtype=tl.int32)
    for start in range(0, columns, WIDE):
        column = start + tl.arange(0, WIDE)[None, :]
        value = tl.load(x + row * stride + column, mask=(row < rows) & (column < columns), other=0.0)
        largest = tl.maximum(largest, magnitude(value.to(tl.float32)))
    tl.atomic_max(amax, amax_from(tl.max(tl.max(largest, axis=1), axis=0)))


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
    out_rows, out_columns = outputs_for(x, dtype, rows, columns, into)
    from_amax = scale is None
    given = found if from_amax else scale
    assert given is not None
    inverse = torch.empty(1, dtype=torch.float32, device=x.device) if inverse is None else inverse
    tall, wide, warps = TILE
    quantize_one_scale[(triton.cdiv(padded(m), tall), triton.cdiv(k, wide))](
        x, given, given if amax is None else amax, *some_of(out_rows, in_fours(out_columns)), inverse, m, k, padded(m) // 4, x.stride(0),
        LARGEST=LARGEST[dtype], FROM_AMAX=from_amax, RECORD=amax is not None, ROWS=rows, COLUMNS=columns, TALL=tall, WIDE=wide,
        num_warps=warps,
    )  # fmt: skip
    return (out_rows, out_columns), inverse


def in_fours(out_columns: torch.Tensor | None) -> torch.Tensor | None:
    """FP8 [k, padded m] as int32 [k, padded m / 4]."""
    return None if out_columns is None else out_columns.view(torch.int32)


def outputs_for(x: torch.Tensor, dtype: torch.dtype, rows: bool, columns: bool, into: Data) -> Data:
    (m, k), (out_rows, out_columns) = x.shape, into
    if rows and out_rows is None:
        out_rows = torch.empty(m, k, dtype=dtype, device=x.device)
    if columns and out_columns is None:
        out_columns = torch.empty(k, padded(m), dtype=dtype, device=x.device)
    return out_rows if rows else None, out_columns if columns else None


def some_of(first: Any, second: Any) -> tuple[Any, Any]:
    """Both, one standing in for one that is not there and will not be touched."""
    return second if first is None else first, first if second is None else second
