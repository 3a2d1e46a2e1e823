"""Parts of the kernels that quantize to FP8: what becomes of a number, and of a tile whose rows are taken by fours.

A tile's functions get pointers to its corner, and how many rows and columns are left from there. The rule for scales and what becomes of
numbers that are too large or not finite is that of fp8/formats.py.
"""

import math

import triton
import triton.language as tl

from megatron.core.fp8.formats import SMALLEST_AMAX

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
def bounded(value, LARGEST: tl.constexpr):
    """fp32: what is too large as the largest; what is not finite becomes NaN."""
    return tl.minimum(tl.maximum(value, -LARGEST), LARGEST) + value * 0.0


@triton.jit
def rounded(value, LARGEST: tl.constexpr):
    """fp32 inside the format whose largest number that is -> the format."""
    if LARGEST == 448.0:
        return value.to(tl.float8e4nv)
    else:
        return value.to(tl.float8e5)


@triton.jit
def to_fp8(value, LARGEST: tl.constexpr):
    """fp32 -> the format whose largest number that is; what is not finite becomes NaN."""
    return rounded(bounded(value, LARGEST), LARGEST)


@triton.jit
def pair_of(first, second, LARGEST: tl.constexpr):
    """The bytes of two rows (fp32, inside the format) as uint16 in uint32, the first lowest.

    They are converted as pairs of rows, not taken from what is stored by row: ptxas 12.8 and its like lose bytes of results used both ways.
    """
    low, high = tl.split(rounded(tl.join(first, second), LARGEST).to(tl.uint8, bitcast=True))
    return (low.to(tl.uint16) | (high.to(tl.uint16) << 8)).to(tl.uint32)


@triton.jit
def load_part(x, place, inside, WHOLE: tl.constexpr):
    """WHOLE: all of it is there, so that no mask is worked out."""
    if WHOLE:
        return tl.load(x + place)
    else:
        return tl.load(x + place, mask=inside, other=0.0)


@triton.jit
def store_part(out, value, place, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(out + place, value)
    else:
        tl.store(out + place, value, mask=inside)


@triton.jit
def load_fours(x, rows, columns, stride, WHOLE: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr, LANE: tl.constexpr = 8):
    """The first, second, third, fourth row of each four, 0 where nothing is left. LANE: elements of a row that a lane has together.

    Places inside a tile are 32 bits wide, only its corner is 64: with 64 for each element addresses were a third of the instructions.
    """
    row, column = tl.arange(0, QUADS)[:, None] * 4, tl.max_contiguous(tl.arange(0, WIDE), LANE)[None, :]
    place, beside = row * stride + column, column < columns
    return (
        load_part(x, place, (row < rows) & beside, WHOLE),
        load_part(x + stride, place, (row + 1 < rows) & beside, WHOLE),
        load_part(x + 2 * stride, place, (row + 2 < rows) & beside, WHOLE),
        load_part(x + 3 * stride, place, (row + 3 < rows) & beside, WHOLE),
    )


@triton.jit
def store_fours(
    out, fours, rows, columns, stride, WHOLE: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr, LANE: tl.constexpr = 8
):  # fmt: skip
    row, column = tl.arange(0, QUADS)[:, None] * 4, tl.max_contiguous(tl.arange(0, WIDE), LANE)[None, :]
    place, beside = row * stride + column, column < columns
    store_part(out, fours[0], place, (row < rows) & beside, WHOLE)
    store_part(out + stride, fours[1], place, (row + 1 < rows) & beside, WHOLE)
    store_part(out + 2 * stride, fours[2], place, (row + 2 < rows) & beside, WHOLE)
    store_part(out + 3 * stride, fours[3], place, (row + 3 < rows) & beside, WHOLE)


@triton.jit
def store_turned(
    out, a, b, c, d, columns, quads, stride, LARGEST: tl.constexpr, WHOLE: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The rows of each four (fp32, inside the format) transposed to out [columns, quads] as int32, a row's byte and those of the three
    after it: so a quarter of the elements turn in shared memory, as words and not as bytes."""
    column, quad = tl.arange(0, WIDE)[:, None], tl.arange(0, QUADS)[None, :]
    words = tl.trans(pair_of(a, b, LARGEST) | (pair_of(c, d, LARGEST) << 16)).to(tl.int32, bitcast=True)
    store_part(out, words, column * stride + quad, (column < columns) & (quad < quads), WHOLE)


@triton.jit
def size_of(raw):
    """|raw| as bits, ordered as the numbers are, NaN the largest: bf16's own, which are compared in pairs, or fp32's."""
    if raw.dtype == tl.bfloat16:
        return raw.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return magnitude(raw.to(tl.float32))


@triton.jit
def size_of_fours(fours):
    return tl.maximum(tl.maximum(size_of(fours[0]), size_of(fours[1])), tl.maximum(size_of(fours[2]), size_of(fours[3])))


@triton.jit
def largest_size(size, AXIS: tl.constexpr):
    """Along an axis, or (None) of all that size_of was taken of: as the bits of fp32."""
    largest = tl.max(size, axis=AXIS)
    if size.dtype == tl.int16:
        return largest.to(tl.int32) << 16
    else:
        return largest


@triton.jit
def amax_of_sizes(size):
    """The largest number, fp32, of those that size_of was taken of; inf where one is not finite."""
    return amax_from(largest_size(size, None))


@triton.jit
def store_scaled(
    out_rows, out_columns, fours, factor, rows, columns, stride, quads, column_stride,
    LARGEST: tl.constexpr, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    QUADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """store_quantized, FITS: without bounds."""
    a, b = fours[0].to(tl.float32) * factor, fours[1].to(tl.float32) * factor
    c, d = fours[2].to(tl.float32) * factor, fours[3].to(tl.float32) * factor
    if not FITS:
        a, b, c, d = bounded(a, LARGEST), bounded(b, LARGEST), bounded(c, LARGEST), bounded(d, LARGEST)
    if ROWS:
        made = rounded(a, LARGEST), rounded(b, LARGEST), rounded(c, LARGEST), rounded(d, LARGEST)
        store_fours(out_rows, made, rows, columns, stride, WHOLE, QUADS, WIDE)
    if COLUMNS:
        store_turned(out_columns, a, b, c, d, columns, quads, column_stride, LARGEST, WHOLE, QUADS, WIDE)


@triton.jit
def store_quantized(
    out_rows, out_columns, fours, factor, amax, rows, columns, stride, quads, column_stride,
    LARGEST: tl.constexpr, FITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    QUADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile, as load_fours gives it, times factor, as to_fp8 does: to out_rows as it lies; to out_columns transposed, by fours.

    amax: the tile's largest magnitude. Where it stays inside the format, as nearly everywhere, the three instructions for each element that
    bound it are spared. FITS: it does in all tiles.
    """
    if FITS or amax * tl.abs(factor) <= LARGEST:
        store_scaled(
            out_rows, out_columns, fours, factor, rows, columns, stride, quads, column_stride,
            LARGEST, True, ROWS, COLUMNS, WHOLE, QUADS, WIDE,
        )  # fmt: skip
    else:
        store_scaled(
            out_rows, out_columns, fours, factor, rows, columns, stride, quads, column_stride,
            LARGEST, False, ROWS, COLUMNS, WHOLE, QUADS, WIDE,
        )  # fmt: skip
