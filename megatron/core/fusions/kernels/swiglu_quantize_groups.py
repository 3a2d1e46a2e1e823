"""SwiGLU of experts' rows, each times its weight, between two FP8 products: the backward pass in one go, as swiglu_quantize's.

What is transposed is so group by group: fp8/grouped.py. The forward pass is swiglu_quantize's. Plain twin: SwiGLU with weights, then
quantize_groups.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.grouped import room_for
from megatron.core.fusions.kernels.fp8_tiles import amax_from, magnitude, to_fp8
from megatron.core.fusions.kernels.quantize_groups import group_of_tile, lanes_for
from megatron.core.fusions.kernels.swiglu_quantize import sigmoid_of

TILE = 64, 64, 4  # rows (a multiple of 16), columns and warps of a program


@triton.jit
def swiglu_quantize_groups_backward(
    x, weights, grad, counts, inverse_out, inverse, amax, out_columns, grad_rows, grad_columns, dots, n, columns, groups,
    LARGEST_OUT: tl.constexpr, LARGEST: tl.constexpr, QUANTIZE: tl.constexpr, RECORD: tl.constexpr,
    GROUPS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    _, first, rows, filled_first, filled, within = group_of_tile(counts, groups, tl.program_id(0), GROUPS, TALL)
    local = within * TALL + tl.arange(0, TALL)
    row = first.to(tl.int64) + local
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    inside = (local < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * 2 * columns + column[None, :]
    gate = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + place + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row, mask=local < rows, other=0.0).to(tl.float32)[:, None]
    sigmoid = sigmoid_of(gate)
    silu = gate * sigmoid
    tl.store(dots + tl.program_id(1).to(tl.int64) * n + row, tl.sum(dy * silu * up, axis=1), mask=local < rows)
    there = (column < columns)[:, None] & (local < filled)[None, :]
    turned = column[:, None] * filled + local[None, :]
    out = (silu * up * weight).to(x.dtype.element_ty).to(tl.float32)  # by the formula of the forward pass, to the bit
    out = to_fp8(out * (1.0 / tl.load(inverse_out)), LARGEST_OUT)
    tl.store(out_columns + filled_first.to(tl.int64) * columns + turned, tl.trans(out), mask=there)
    dy *= weight
    grad_up = (dy * silu).to(x.dtype.element_ty)
    grad_gate = (dy * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))).to(x.dtype.element_ty)
    if RECORD:
        size = tl.maximum(magnitude(grad_up.to(tl.float32)), magnitude(grad_gate.to(tl.float32)))
        tl.atomic_max(amax, amax_from(tl.max(tl.max(size, axis=1), axis=0)))
    if QUANTIZE:
        factor = 1.0 / tl.load(inverse)
        block = grad_columns + filled_first.to(tl.int64) * 2 * columns
        low = to_fp8(grad_gate.to(tl.float32) * factor, LARGEST)
        tl.store(grad_rows + place, low, mask=inside)
        tl.store(block + turned, tl.trans(low), mask=there)
        high = to_fp8(grad_up.to(tl.float32) * factor, LARGEST)
        tl.store(grad_rows + place + columns, high, mask=inside)
        tl.store(block + columns.to(tl.int64) * filled + turned, tl.trans(high), mask=there)
    else:
        tl.store(grad_rows + place, grad_gate, mask=inside)
        tl.store(grad_rows + place + columns, grad_up, mask=inside)


def backward(
    x: torch.Tensor,
    weights: torch.Tensor,
    grad: torch.Tensor,
    counts: torch.Tensor,
    out_dtype: torch.dtype,
    inverse_out: torch.Tensor,
    dtype: torch.dtype,
    inverse: torch.Tensor | None,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """x [n, 2m], weights [n], grad [n, m] of the output, all contiguous, counts [groups] ->
    (output in out_dtype, transposed; gradient of x [n, 2m], and transposed; gradient of the weights).

    With the inverse scale `inverse` [1] the gradient of x is in `dtype`; without, in x's, and not transposed too. amax [1]: raised to its
    largest magnitude."""
    (n, columns), groups = grad.shape, counts.shape[0]
    tall, wide, warps = TILE
    across = triton.cdiv(columns, wide)
    out_columns = torch.empty(room_for(n, groups) * columns, dtype=out_dtype, device=x.device)
    grad_rows = torch.empty(n, 2 * columns, dtype=x.dtype if inverse is None else dtype, device=x.device)
    grad_columns = None if inverse is None else torch.empty(2 * out_columns.numel(), dtype=dtype, device=x.device)
    dots = torch.empty(across, n, dtype=torch.float32, device=x.device)  # added up in one order, unlike atomic additions
    swiglu_quantize_groups_backward[(n // tall + groups, across)](
        x, weights, grad, counts, inverse_out, inverse_out if inverse is None else inverse, inverse_out if amax is None else amax,
        out_columns, grad_rows, grad_rows if grad_columns is None else grad_columns, dots, n, columns, groups,
        LARGEST_OUT=LARGEST[out_dtype], LARGEST=LARGEST[dtype], QUANTIZE=inverse is not None, RECORD=amax is not None,
        GROUPS=lanes_for(groups), TALL=tall, WIDE=wide, num_warps=warps,
    )  # fmt: skip
    return out_columns, grad_rows, grad_columns, dots.sum(dim=0).to(weights.dtype)
