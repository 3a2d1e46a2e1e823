"""SwiGLU between two FP8 products: forward and backward in one pass each, which hand over quantized what the products take.

Forward gives the second product's input. Backward takes that input's gradient, and gives the gradient of SwiGLU's input, quantized both
ways, and SwiGLU's output once more, quantized transposed: for the second weight's gradient it was not kept. With a scale that is not known
yet the result is in bf16, and its largest magnitude beside it. Plain twin: SwiGLU, then quantize_tensor.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.quantize import padded
from megatron.core.fusions.kernels.quantize import magnitude, saturated

# rows, columns and warps of a program
FORWARD_TILE = 8, 512, 8
BACKWARD_TILE = 64, 64, 4


@triton.jit
def swiglu_quantize_forward(
    x, weights, inverse, amax, out, rows, columns, stride,
    LARGEST: tl.constexpr, WEIGHTED: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)[None, :]
    inside = (row < rows) & (column < columns)
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * stride + columns + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    value = wide * (1.0 / (1.0 + tl.exp(-wide))) * up.to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)
    value = value.to(x.dtype.element_ty)
    if RECORD:
        tl.atomic_max(amax, tl.max(tl.max(magnitude(value.to(tl.float32)), axis=1), axis=0))
    if QUANTIZE:
        scaled = saturated(value.to(tl.float32) * (1.0 / tl.load(inverse)), LARGEST)
        tl.store(out + row * columns + column, scaled.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row * columns + column, value, mask=inside)


@triton.jit
def swiglu_quantize_backward(
    x, grad, inverse_out, inverse, amax, out_columns, grad_rows, grad_columns, rows, filled, columns, stride, grad_stride,
    LARGEST_OUT: tl.constexpr, LARGEST: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * stride + column[None, :]
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    there = (column < columns)[:, None] & (row < filled)[None, :]
    turned = column[:, None] * filled + row[None, :]
    out = (silu * up).to(x.dtype.element_ty).to(tl.float32)  # by the formula of the forward pass, to the bit
    out = saturated(out * (1.0 / tl.load(inverse_out)), LARGEST_OUT).to(out_columns.dtype.element_ty)
    tl.store(out_columns + turned, tl.trans(out), mask=there)
    grad_up = (dy * silu).to(x.dtype.element_ty)
    grad_gate = (dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))).to(x.dtype.element_ty)
    target = row[:, None] * 2 * columns + column[None, :]
    if RECORD:
        size = tl.maximum(magnitude(grad_up.to(tl.float32)), magnitude(grad_gate.to(tl.float32)))
        tl.atomic_max(amax, tl.max(tl.max(size, axis=1), axis=0))
    if QUANTIZE:
        factor = 1.0 / tl.load(inverse)
        low = saturated(grad_gate.to(tl.float32) * factor, LARGEST).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + target, low, mask=inside)
        tl.store(grad_columns + turned, tl.trans(low), mask=there)
        high = saturated(grad_up.to(tl.float32) * factor, LARGEST).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + target + columns, high, mask=inside)
        tl.store(grad_columns + columns * filled + turned, tl.trans(high), mask=there)
    else:
        tl.store(grad_rows + target, grad_gate, mask=inside)
        tl.store(grad_rows + target + columns, grad_up, mask=inside)


def forward(
    x: torch.Tensor, dtype: torch.dtype, inverse: torch.Tensor | None, amax: torch.Tensor | None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """x [m, 2n] contiguous in its last dim -> [m, n]: in FP8 with the inverse scale `inverse` [1], in x's dtype without.

    amax [1]: raised to the largest magnitude of the output. weights [m], contiguous: of each row."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=x.dtype if inverse is None else dtype, device=x.device)
    tall, wide, warps = FORWARD_TILE
    swiglu_quantize_forward[(triton.cdiv(rows, tall), triton.cdiv(columns, wide))](
        x, x if weights is None else weights, x if inverse is None else inverse, x if amax is None else amax, out,
        rows, columns, x.stride(0),
        LARGEST=LARGEST[dtype], WEIGHTED=weights is not None, QUANTIZE=inverse is not None, RECORD=amax is not None,
        TALL=tall, WIDE=wide, num_warps=warps,
    )  # fmt: skip
    return out


def backward(
    x: torch.Tensor,
    grad: torch.Tensor,
    out_dtype: torch.dtype,
    inverse_out: torch.Tensor,
    dtype: torch.dtype,
    inverse: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [m, 2n], grad [m, n] of the output -> (output in out_dtype transposed [n, padded m], gradient of x [m, 2n], and transposed).

    With the inverse scale `inverse` [1] the gradient is in `dtype`; without, in x's, and not transposed too. amax [1]: raised to its
    largest magnitude."""
    rows, columns, filled = x.shape[0], x.shape[1] // 2, padded(x.shape[0])
    out_columns = torch.empty(columns, filled, dtype=out_dtype, device=x.device)
    grad_rows = torch.empty(rows, 2 * columns, dtype=x.dtype if inverse is None else dtype, device=x.device)
    grad_columns = None if inverse is None else torch.empty(2 * columns, filled, dtype=dtype, device=x.device)
    tall, wide, warps = BACKWARD_TILE
    swiglu_quantize_backward[(triton.cdiv(filled, tall), triton.cdiv(columns, wide))](
        x, grad, inverse_out, inverse_out if inverse is None else inverse, inverse_out if amax is None else amax, out_columns, grad_rows,
        grad_rows if grad_columns is None else grad_columns, rows, filled, columns, x.stride(0), grad.stride(0),
        LARGEST_OUT=LARGEST[out_dtype], LARGEST=LARGEST[dtype], QUANTIZE=inverse is not None, RECORD=amax is not None,
        TALL=tall, WIDE=wide, num_warps=warps,
    )  # fmt: skip
    return out_columns, grad_rows, grad_columns
