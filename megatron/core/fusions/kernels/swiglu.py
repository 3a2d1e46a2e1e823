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
    x, scale, grad, grad_x, grad_scale, out, columns, stride, grad_stride,
    WITH_SCALE: tl.constexpr, WITH_OUT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        if WITH_OUT:  # by the formula of the forward pass, to the bit
            tl.store(out + row * columns + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
        if WITH_SCALE:
            dot += dy * silu * up
            dy *= weight
        tl.store(grad_x + row * 2 * columns + columns + column, (dy * silu).to(grad_x.dtype.element_ty), mask=inside)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(grad_x + row * 2 * columns + column, (dy * up * slope).to(grad_x.dtype.element_ty), mask=inside)
    if WITH_SCALE:
        tl.store(grad_scale + row, tl.sum(dot, axis=0).to(grad_scale.dtype.element_ty))


def forward(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [m, 2n], contiguous in its last dim, scale [m] -> [m, n]."""
    columns = x.shape[1] // 2
    out = x.new_empty(x.shape[0], columns)
    block = _block(columns)
    swiglu_forward[(x.shape[0], triton.cdiv(columns, block))](
        x, x if scale is None else scale, out, columns, x.stride(0), WITH_SCALE=scale is not None, WIDE=wide(x), BLOCK=block
    )
    return out


def backward(
    x: torch.Tensor, grad: torch.Tensor, scale: torch.Tensor | None = None, *, with_out: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """grad [m, n] of the output of x [m, 2n], scale [m] -> (x's gradient, scale's, the output without the scale, if asked for)."""
    columns = x.shape[1] // 2
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_scale = None if scale is None else torch.empty_like(scale)
    out = x.new_empty(x.shape[0], columns) if with_out else None
    swiglu_backward[(x.shape[0],)](
        x, grad_x if scale is None else scale, grad, grad_x, grad_x if grad_scale is None else grad_scale, grad_x if out is None else out,
        columns, x.stride(0), grad.stride(0), WITH_SCALE=scale is not None, WITH_OUT=with_out, WIDE=wide(x), BLOCK=_block(columns),
        num_warps=8,
    )  # fmt: skip
    return grad_x, grad_scale, out


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        rows = rows_of(x)
        flat = None if scale is None else scale.reshape(-1).contiguous()
        ctx.save_for_backward(rows, flat)
        ctx.shapes = x.shape, None if scale is None else scale.shape
        return forward(rows, flat).view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, scale = ctx.saved_tensors
        shape, scale_shape = ctx.shapes
        grad_x, grad_scale, _ = backward(rows, grads[0].reshape(-1, rows.shape[1] // 2), scale)
        return grad_x.view(shape), None if grad_scale is None else grad_scale.view(scale_shape)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [.., k] as [m, k], contiguous in its last dim."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


def swiglu(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """[.., 2n], gate then up -> [.., n]: silu(gate) * up, times scale [..]. Differentiable in both."""
    return _SwiGLU.apply(x, scale)
