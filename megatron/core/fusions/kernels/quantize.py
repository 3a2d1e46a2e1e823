"""Quantization to FP8 in one pass: rows as they lie and transposed, with one scale (of blocks: quantize_blocks.py).

The rule for scales and what becomes of numbers that are too large or not finite is that of fp8/formats.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.quantize import padded
from megatron.core.fusions.kernels.fp8_tiles import (
    amax_of_sizes,
    load_fours,
    load_part,
    scale_of,
    size_of,
    size_of_fours,
    store_quantized,
)

Data = tuple[torch.Tensor | None, torch.Tensor | None]
TILE = 128, 128, 8  # rows, columns and warps of a program
REGISTERS = 80  # of a thread, at most: so three of those programs fit a multiprocessor of sm_90


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
    out_rows, out_columns = outputs_for(x, dtype, rows, columns, into)
    from_amax = scale is None
    given = found if from_amax else scale
    assert given is not None
    inverse = torch.empty(1, dtype=torch.float32, device=x.device) if inverse is None else inverse
    tall, wide, warps = TILE
    quantize_one_scale[(triton.cdiv(padded(m), tall), triton.cdiv(k, wide))](
        x, given, given if amax is None else amax, *some_of(out_rows, in_fours(out_columns), x), inverse, m, k, padded(m) // 4, x.stride(0),
        LARGEST=LARGEST[dtype], FROM_AMAX=from_amax, RECORD=amax is not None, ROWS=rows, COLUMNS=columns,
        WHOLE=m % tall == 0 and k % wide == 0, TALL=tall, WIDE=wide, num_warps=warps, maxnreg=REGISTERS,
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


def some_of(first: Any, second: Any, other: Any) -> tuple[Any, Any]:
    """Both, one (of neither, `other`) standing in for one that is not there and will not be touched: a kernel computes places from it."""
    some = next((one for one in (first, second) if one is not None), other)
    return some if first is None else first, some if second is None else second
