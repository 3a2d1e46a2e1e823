"""SwiGLU, forward and backward in one pass each, with a weight for each row where there is one. In fp32 (fp64 for fp64) inside."""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide

BLOCK = 2048  # columns at a time


@triton.jit
def swiglu_forward(x, scale, out, columns, stride, WITH_SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(WIDE)
    up = tl.load(x + row * stride + columns + column, mask=inside, other=0.0).to(WIDE)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if WITH_SCALE:
        value *= tl.load(scale + row).to(WIDE)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    x, scale, grad, grad_x, grad_scale, columns, stride, grad_stride, WITH_SCALE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if WITH_SCALE:
        weight = tl.load(scale + row).to(WIDE)
        dot = tl.zeros([BLOCK], dtype=WIDE)
    for start in range(0, columns, BLOCK):
        column = start + lanes
        inside = column < columns
        gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(WIDE)
        up = tl.load(x + row * stride + columns + column, mask=inside, other=0.0).to(WIDE)
        dy = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(WIDE)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        if WITH_SCALE:
            dot += dy * silu * up
            dy *= weight
        tl.store(grad_x + row * 2 * columns + columns + column, (dy * silu).to(grad_x.dtype.element_ty), mask=inside)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_x + row * 2 * columns + column, (dy * up * slope).to(grad_x.dtype.element_ty), mask=inside)
    if WITH_SCALE:
        tl.store(grad_scale + row, tl.sum(dot, axis=0).to(grad_scale.dtype.element_ty))


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        columns = rows.shape[1] // 2
        flat = None if scale is None else scale.reshape(-1).contiguous()
        ctx.save_for_backward(rows, flat)
        ctx.shapes = x.shape, None if scale is None else scale.shape
        out = rows.new_empty(rows.shape[0], columns)
        block = _block(columns)
        grid = (rows.shape[0], triton.cdiv(columns, block))
        swiglu_forward[grid](
            rows, rows if flat is None else flat, out, columns, rows.stride(0), WITH_SCALE=flat is not None, WIDE=wide(rows), BLOCK=block
        )
        return out.view(*x.shape[:-1], columns)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, scale = ctx.saved_tensors
        shape, scale_shape = ctx.shapes
        columns = rows.shape[1] // 2
        grad = grads[0].reshape(-1, columns)
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        grad_x = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_scale = grad_x if scale is None else torch.empty_like(scale)
        block = _block(columns)
        swiglu_backward[(rows.shape[0],)](
            rows, grad_x if scale is None else scale, grad, grad_x, grad_scale, columns, rows.stride(0), grad.stride(0),
            WITH_SCALE=scale is not None, WIDE=wide(rows), BLOCK=block, num_warps=8,
        )  # fmt: skip
        return grad_x.view(shape), None if scale is None else grad_scale.view(scale_shape)


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


def swiglu(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """[.., 2n], gate then up -> [.., n]: silu(gate) * up, times scale [..]. Differentiable in both."""
    return _SwiGLU.apply(x, scale)
