"""Tensors to FP8: row-major for one product, transposed for the other, in one pass over the tensor.

On Hopper both operands of an FP8 product must have the contracted dimension last. So each 2-d tensor is made twice: `rows` as it lies, for
the product over its columns, and `columns` transposed, for the product over its rows. The functions ending in `_plain` are the twins of
the kernels, and what runs on a CPU.
"""

from typing import NamedTuple

import torch

from megatron.core.fp8.formats import LARGEST, amax_of, round_to, scale_for
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.fusions.kernels import kernels_run_on

BLOCK = 128  # of the blockwise recipe
MX_BLOCK = 32

TENSOR, ROW_BLOCKS, SQUARE_BLOCKS, MX_BLOCKS = "one scale", "1 x 128", "128 x 128", "1 x 32"
WIDTHS = {ROW_BLOCKS: BLOCK, SQUARE_BLOCKS: BLOCK, MX_BLOCKS: MX_BLOCK}  # of a block, along the contracted dimension


class Operand(NamedTuple):
    """data [rows, contracted] in FP8, contiguous; value = data * inverse, fp32.

    inverse: [1] of the whole; [rows, blocks] with stride 1 along the rows; [blocks of rows, blocks] contiguous for 128 x 128.
    """

    data: torch.Tensor
    inverse: torch.Tensor
    kind: str

    def value(self) -> torch.Tensor:
        """fp32 [rows, contracted]."""
        return self.data.float() * spread(self.inverse, self.data.shape, self.kind)


class Quantized(NamedTuple):
    """A 2-d tensor in FP8, and its transpose, whose contracted dimension is filled up with zeros to a multiple of 16."""

    rows: Operand | None
    columns: Operand | None


def spread(scales: torch.Tensor, shape: torch.Size, kind: str) -> torch.Tensor:
    """A scale for each element, or one that broadcasts."""
    if kind == TENSOR:
        return scales
    wide = scales.repeat_interleave(WIDTHS[kind], dim=1)[:, : shape[1]]
    return wide.repeat_interleave(BLOCK, dim=0)[: shape[0]] if kind == SQUARE_BLOCKS else wide


def padded(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _filled_up(x: torch.Tensor) -> torch.Tensor:
    """x [m, k] transposed, [k, padded m]."""
    return torch.nn.functional.pad(x.t(), (0, padded(x.shape[0]) - x.shape[0]))


# --- one scale ---


def quantize_tensor_plain(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """x [m, k] times `scale` [1] -> FP8 (rows [m, k], columns [k, padded m]). `amax` [1] is raised to x's largest magnitude."""
    if amax is not None:
        amax.copy_(torch.maximum(amax, amax_of(x)))
    return (
        round_to(x, scale, dtype) if rows else None,
        round_to(_filled_up(x), scale, dtype).contiguous() if columns else None,
    )


def quantize_tensor(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    inverse: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    found: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    into: Quantized | None = None,
) -> Quantized:
    """x [m, k] with one scale: `scale` [1] with its `inverse` [1] where they are known, raising `amax` [1]; else from x itself, whose
    largest magnitude `found` [1] may be known.

    into: an earlier result of the same shapes, to be overwritten.
    """
    if kernels_run_on(x):
        from megatron.core.fusions.kernels import quantize as kernels

        if scale is None and found is None:
            found = kernels.largest_magnitude(x)
        data, inverse = kernels.quantize_tensor(x, dtype, scale, inverse, found, amax, rows, columns, _data(into))
        return _pair(data, (inverse, inverse), (TENSOR, TENSOR), into)
    if scale is None:
        scale = scale_for(amax_of(x).view(1) if found is None else found, LARGEST[dtype])
        inverse = scale.reciprocal()
    assert inverse is not None
    return _pair(quantize_tensor_plain(x, scale, dtype, rows, columns, amax), (inverse, inverse), (TENSOR, TENSOR), into)


# --- blocks ---


def quantize_blocks_plain(x: torch.Tensor, dtype: torch.dtype, kind: str) -> Operand:
    """x [m, k], blocks along k (and m, of SQUARE_BLOCKS)."""
    width, height = WIDTHS[kind], BLOCK if kind == SQUARE_BLOCKS else 1
    m, k = x.shape
    filled = torch.nn.functional.pad(x, (0, -k % width, 0, -m % height))
    blocks = filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)
    scales = scale_for(amax_of(blocks, dim=(1, 3)), LARGEST[dtype])
    if kind != SQUARE_BLOCKS:
        scales = scales.t().contiguous().t()
    return Operand(round_to(x, spread(scales, x.shape, kind), dtype), scales.reciprocal(), kind)


def quantize_blocks(
    x: torch.Tensor, dtype: torch.dtype, kind: str, *, rows: bool = True, columns: bool = True, into: Quantized | None = None
) -> Quantized:
    """x [m, k] with a scale for each block; `columns` has blocks of its own along m, but for square ones, which are the same."""
    if not (rows or columns):
        return Quantized(None, None)
    if kernels_run_on(x):
        from megatron.core.fusions.kernels import quantize_blocks as kernels

        data, inverses = kernels.quantize_blocks(x, dtype, kind, rows, columns, _data(into), _inverses(into))
        return _pair(data, inverses, (kind, kind), into)
    by_row = quantize_blocks_plain(x, dtype, kind) if rows else None
    by_column = quantize_blocks_plain(_filled_up(x).contiguous(), dtype, kind) if columns else None
    made = Quantized(by_row, by_column)
    return _pair(_data(made), _inverses(made), (kind, kind), into)


def quantized_rows(x: torch.Tensor, dtype: torch.dtype, kind: str) -> Operand:
    """x [m, k] with scales of that kind, found from x itself, for a product over its columns."""
    made = quantize_tensor(x, dtype, columns=False) if kind == TENSOR else quantize_blocks(x, dtype, kind, columns=False)
    assert made.rows is not None
    return made.rows


Data = tuple[torch.Tensor | None, torch.Tensor | None]


def _data(pair: Quantized | None) -> Data:
    return (None, None) if pair is None else (pair.rows and pair.rows.data, pair.columns and pair.columns.data)


def _inverses(pair: Quantized | None) -> Data:
    return (None, None) if pair is None else (pair.rows and pair.rows.inverse, pair.columns and pair.columns.inverse)


def _pair(data: Data, inverses: Data, kinds: tuple[str, str], into: Quantized | None) -> Quantized:
    """What was made, as operands; copied over those of `into` unless it was made there."""
    made = [
        None if values is None or inverse is None else Operand(values, inverse, kind)
        for values, inverse, kind in zip(data, inverses, kinds, strict=True)
    ]
    if into is None:
        return Quantized(*made)
    for new, old in zip(made, into, strict=True):
        if new is not None and old is not None:
            for source, target in ((new.data, old.data), (new.inverse, old.inverse)):
                if source.data_ptr() != target.data_ptr():
                    target.copy_(source)
    return into
