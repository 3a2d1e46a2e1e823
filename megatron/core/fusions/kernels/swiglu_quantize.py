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
from megatron.core.fusions.kernels.quantize import (
    amax_from,
    in_fours,
    load_phase,
    magnitude,
    packed,
    store_phase,
    store_turned,
    to_fp8,
)

# rows, columns and warps of a program
FORWARD_TILE = 8, 512, 8
BACKWARD_TILE = 32, 128, 4


@triton.jit
def sigmoid_of(x):
    root = tl.rsqrt(1.0 + tl.exp(-x))  # one instruction, where a division is eight
    return root * root


@triton.jit
def output_of(x, weights, row, column, rows, columns, stride, WEIGHTED: tl.constexpr):
    """SwiGLU (times its row's weight), rounded to x's dtype, in fp32."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * stride + column[None, :]
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate * sigmoid_of(gate) * up
    if WEIGHTED:
        value *= tl.load(weights + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    return value.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _gradients(x, grad, quad, column, rows, columns, stride, grad_stride, PHASE: tl.constexpr):
    """Of row PHASE of each four: (SwiGLU once more, to the bit; gradient of the gate; of the other half), rounded as that, in fp32."""
    gate = load_phase(x, quad, column, rows, columns, stride, PHASE)
    up = load_phase(x + columns, quad, column, rows, columns, stride, PHASE)
    dy = load_phase(grad, quad, column, rows, columns, grad_stride, PHASE)
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    out = (silu * up).to(x.dtype.element_ty).to(tl.float32)
    grad_gate = (dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))).to(x.dtype.element_ty).to(tl.float32)
    return out, grad_gate, (dy * silu).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def swiglu_quantize_forward(
    x, weights, inverse, amax, out, rows, columns, stride,
    LARGEST: tl.constexpr, WEIGHTED: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    value = output_of(x, weights, row, column, rows, columns, stride, WEIGHTED)
    if RECORD:
        tl.atomic_max(amax, amax_from(tl.max(tl.max(magnitude(value), axis=1), axis=0)))
    if QUANTIZE:
        tl.store(out + place, to_fp8(value * (1.0 / tl.load(inverse)), LARGEST), mask=inside)
    else:
        tl.store(out + place, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _store_gradients(out, gate, up, quad, column, rows, columns, PHASE: tl.constexpr, LARGEST: tl.constexpr, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        store_phase(out, to_fp8(gate, LARGEST), quad, column, rows, columns, 2 * columns, PHASE)
        store_phase(out + columns, to_fp8(up, LARGEST), quad, column, rows, columns, 2 * columns, PHASE)
    else:
        store_phase(out, gate.to(out.dtype.element_ty), quad, column, rows, columns, 2 * columns, PHASE)
        store_phase(out + columns, up.to(out.dtype.element_ty), quad, column, rows, columns, 2 * columns, PHASE)


@triton.jit
def swiglu_quantize_backward(
    x, grad, inverse_out, inverse, amax, out_columns, grad_rows, grad_columns, rows, quads, columns, stride, grad_stride,
    LARGEST_OUT: tl.constexpr, LARGEST: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    quad = tl.program_id(0).to(tl.int64) * (TALL // 4) + tl.arange(0, TALL // 4)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    factor_out, factor = 1.0 / tl.load(inverse_out), 1.0 / tl.load(inverse)
    four_out = tl.zeros([TALL // 4, WIDE], dtype=tl.uint32)
    four_gate = tl.zeros([TALL // 4, WIDE], dtype=tl.uint32)
    four_up = tl.zeros([TALL // 4, WIDE], dtype=tl.uint32)
    largest = tl.zeros([TALL // 4, WIDE], dtype=tl.int32)
    for half in tl.static_range(2):
        out0, gate0, up0 = _gradients(x, grad, quad, column, rows, columns, stride, grad_stride, 2 * half)
        out1, gate1, up1 = _gradients(x, grad, quad, column, rows, columns, stride, grad_stride, 2 * half + 1)
        four_out |= packed(out0 * factor_out, out1 * factor_out, LARGEST_OUT, half)
        if RECORD:
            largest = tl.maximum(largest, tl.maximum(magnitude(gate0), magnitude(gate1)))
            largest = tl.maximum(largest, tl.maximum(magnitude(up0), magnitude(up1)))
        if QUANTIZE:
            gate0, gate1, up0, up1 = gate0 * factor, gate1 * factor, up0 * factor, up1 * factor
            four_gate |= packed(gate0, gate1, LARGEST, half)
            four_up |= packed(up0, up1, LARGEST, half)
        _store_gradients(grad_rows, gate0, up0, quad, column, rows, columns, 2 * half, LARGEST, QUANTIZE)
        _store_gradients(grad_rows, gate1, up1, quad, column, rows, columns, 2 * half + 1, LARGEST, QUANTIZE)
    if RECORD:
        tl.atomic_max(amax, amax_from(tl.max(tl.max(largest, axis=1), axis=0)))
    store_turned(out_columns, four_out, quad, column, quads, columns)
    if QUANTIZE:
        store_turned(grad_columns, four_gate, quad, column, quads, columns)
        store_turned(grad_columns + columns.to(tl.int64) * quads, four_up, quad, column, quads, columns)


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
        x, grad, inverse_out, inverse_out if inverse is None else inverse, inverse_out if amax is None else amax, in_fours(out_columns),
        grad_rows, in_fours(out_columns if grad_columns is None else grad_columns), rows, filled // 4, columns, x.stride(0), grad.stride(0),
        LARGEST_OUT=LARGEST[out_dtype], LARGEST=LARGEST[dtype], QUANTIZE=inverse is not None, RECORD=amax is not None,
        TALL=tall, WIDE=wide, num_warps=warps,
    )  # fmt: skip
    return out_columns, grad_rows, grad_columns
