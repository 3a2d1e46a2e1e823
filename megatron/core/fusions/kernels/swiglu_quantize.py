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
from megatron.core.fusions.kernels.fp8_tiles import (
    amax_of_sizes,
    load_fours,
    load_part,
    rounded,
    size_of,
    size_of_fours,
    store_fours,
    store_part,
    store_quantized,
    to_fp8,
)
from megatron.core.fusions.kernels.precision import rounded_to
from megatron.core.fusions.kernels.quantize import in_fours

# rows, columns and warps of a program
FORWARD_TILE = 8, 512, 4
BACKWARD_TILE = 32, 128, 8, 64  # and registers of a thread, at most: so four programs fit a multiprocessor of sm_90


@triton.jit
def sigmoid_of(x):
    """By way of exp2, which flushes what it makes below 2 ** -126 to 0: 1 is added to it, so no bit is lost, and three instructions are
    saved. The root is one, where a division is eight."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def output_of(x, weights, row, column, rows, columns, stride, half, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr):
    """SwiGLU (times its row's weight) in x's dtype: of a tile from its corner, where that many rows and columns are left of `half`."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * stride + column[None, :]
    gate = load_part(x, place, inside, WHOLE).to(tl.float32)
    up = load_part(x + half, place, inside, WHOLE).to(tl.float32)
    value = gate * sigmoid_of(gate) * up
    if WEIGHTED:
        value *= load_part(weights, row, row < rows, WHOLE).to(tl.float32)[:, None]
    return rounded_to(value, x.dtype.element_ty)


@triton.jit
def swiglu_quantize_forward(
    x, weights, inverse, amax, out, rows, columns, stride,
    LARGEST: tl.constexpr, WEIGHTED: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    top, left = tl.program_id(0).to(tl.int64) * TALL, tl.program_id(1) * WIDE
    row, column = tl.arange(0, TALL), tl.arange(0, WIDE)
    rows_left, columns_left = (rows - top).to(tl.int32), columns - left
    x += top * stride + left
    value = output_of(x, weights + top, row, column, rows_left, columns_left, stride, columns, WEIGHTED, WHOLE)
    largest = 0.0
    if RECORD or QUANTIZE:
        largest = amax_of_sizes(size_of(value))
    if RECORD:
        tl.atomic_max(amax, largest, sem="relaxed")
    place, inside = row[:, None] * columns + column[None, :], (row < rows_left)[:, None] & (column < columns_left)[None, :]
    out += top * columns + left
    if QUANTIZE:
        factor = 1.0 / tl.load(inverse)
        if largest * tl.abs(factor) <= LARGEST:  # as in store_quantized
            store_part(out, rounded(value.to(tl.float32) * factor, LARGEST), place, inside, WHOLE)
        else:
            store_part(out, to_fp8(value.to(tl.float32) * factor, LARGEST), place, inside, WHOLE)
    else:
        store_part(out, value, place, inside, WHOLE)


@triton.jit
def gradients_of(gate, up, dy):
    """(SwiGLU once more, to the bit; gradient of the gate; of the other half), rounded as those are."""
    dtype: tl.constexpr = gate.dtype
    gate, up, dy = gate.to(tl.float32), up.to(tl.float32), dy.to(tl.float32)
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    grad_gate = dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    return rounded_to(silu * up, dtype), rounded_to(grad_gate, dtype), rounded_to(dy * silu, dtype)


@triton.jit
def swiglu_quantize_backward(
    x, grad, inverse_out, inverse, amax, out_columns, grad_rows, grad_columns, rows, quads, columns, stride, grad_stride,
    LARGEST_OUT: tl.constexpr, LARGEST: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    QUADS: tl.constexpr = TALL // 4
    top, left = tl.program_id(0).to(tl.int64) * TALL, tl.program_id(1).to(tl.int64) * WIDE
    height, width, depth = (rows - top).to(tl.int32), (columns - left).to(tl.int32), (quads - top // 4).to(tl.int32)
    x += top * stride + left
    gate = load_fours(x, height, width, stride, WHOLE, QUADS, WIDE)
    up = load_fours(x + columns, height, width, stride, WHOLE, QUADS, WIDE)
    dy = load_fours(grad + top * grad_stride + left, height, width, grad_stride, WHOLE, QUADS, WIDE)
    out_a, gate_a, up_a = gradients_of(gate[0], up[0], dy[0])
    out_b, gate_b, up_b = gradients_of(gate[1], up[1], dy[1])
    out_c, gate_c, up_c = gradients_of(gate[2], up[2], dy[2])
    out_d, gate_d, up_d = gradients_of(gate[3], up[3], dy[3])
    out, of_gate, of_up = (out_a, out_b, out_c, out_d), (gate_a, gate_b, gate_c, gate_d), (up_a, up_b, up_c, up_d)
    largest_out, largest = amax_of_sizes(size_of_fours(out)), 0.0
    if RECORD or QUANTIZE:
        largest = amax_of_sizes(tl.maximum(size_of_fours(of_gate), size_of_fours(of_up)))
    if RECORD:
        tl.atomic_max(amax, largest, sem="relaxed")
    turned = left * quads + top // 4
    store_quantized(
        x, out_columns + turned, out, 1.0 / tl.load(inverse_out), largest_out, height, width, columns, depth, quads,
        LARGEST_OUT, False, False, True, WHOLE, QUADS, WIDE,
    )  # fmt: skip
    grad_rows += top * 2 * columns + left
    if QUANTIZE:
        factor = 1.0 / tl.load(inverse)
        grad_columns += turned
        store_quantized(
            grad_rows, grad_columns, of_gate, factor, largest, height, width, 2 * columns, depth, quads,
            LARGEST, False, True, True, WHOLE, QUADS, WIDE,
        )  # fmt: skip
        grad_rows += columns
        grad_columns += columns.to(tl.int64) * quads
        store_quantized(
            grad_rows, grad_columns, of_up, factor, largest, height, width, 2 * columns, depth, quads,
            LARGEST, False, True, True, WHOLE, QUADS, WIDE,
        )  # fmt: skip
    else:
        store_fours(grad_rows, of_gate, height, width, 2 * columns, WHOLE, QUADS, WIDE)
        store_fours(grad_rows + columns, of_up, height, width, 2 * columns, WHOLE, QUADS, WIDE)


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
        WHOLE=rows % tall == 0 and columns % wide == 0, TALL=tall, WIDE=wide, num_warps=warps,
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
    tall, wide, warps, registers = BACKWARD_TILE
    swiglu_quantize_backward[(triton.cdiv(filled, tall), triton.cdiv(columns, wide))](
        x, grad, inverse_out, inverse_out if inverse is None else inverse, inverse_out if amax is None else amax, in_fours(out_columns),
        grad_rows, in_fours(out_columns if grad_columns is None else grad_columns), rows, filled // 4, columns, x.stride(0), grad.stride(0),
        LARGEST_OUT=LARGEST[out_dtype], LARGEST=LARGEST[dtype], QUANTIZE=inverse is not None, RECORD=amax is not None,
        WHOLE=rows % tall == 0 and columns % wide == 0, TALL=tall, WIDE=wide, num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return out_columns, grad_rows, grad_columns
