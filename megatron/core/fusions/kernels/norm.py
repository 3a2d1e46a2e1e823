"""LayerNorm and RMSNorm, forward and backward in one pass each. Statistics and sums in fp32 (fp64 for fp64), in one order.

With the residual stream's sums: what is normalized may be a sum that is made on the way, and that goes on beside its norm; the backward
pass adds up both gradients.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide

MOST_PROGRAMS = 1056  # rows of partial sums in a backward: a few for each of a GPU's multiprocessors


@triton.jit
def norm_forward(
    x, added, added_bias, total, weight, bias, out, mean, rstd, columns, stride, added_stride,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RMS: tl.constexpr, WITH_BIAS: tl.constexpr, SUM: tl.constexpr, SUM_BIAS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(WIDE)
    if SUM:  # rounded as where each sum is an operation
        value += tl.load(added + row * added_stride + column, mask=inside, other=0.0).to(WIDE)
        value = value.to(total.dtype.element_ty).to(WIDE)
        if SUM_BIAS:
            value += tl.load(added_bias + column, mask=inside, other=0.0).to(WIDE)
            value = value.to(total.dtype.element_ty).to(WIDE)
        tl.store(total + row * columns + column, value.to(total.dtype.element_ty), mask=inside)
    if not RMS:
        centre = tl.sum(value, axis=0) / columns
        tl.store(mean + row, centre)
        value = tl.where(inside, value - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / columns + EPS)
    tl.store(rstd + row, scale)
    value *= scale * (tl.load(weight + column, mask=inside, other=0.0).to(WIDE) + OFFSET)
    if WITH_BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(WIDE)
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    x, grad, grad_total, weight, mean, rstd, grad_x, sums, rows, columns, stride, grad_stride, total_stride, rows_each,
    OFFSET: tl.constexpr, RMS: tl.constexpr, WITH_BIAS: tl.constexpr, SUM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factor = tl.load(weight + column, mask=inside, other=0.0).to(WIDE) + OFFSET
    weight_sum = tl.zeros([BLOCK], dtype=WIDE)
    bias_sum = tl.zeros([BLOCK], dtype=WIDE)
    for index in range(0, rows_each):
        row = program * rows_each + index
        there = inside & (column < tl.where(row < rows, columns, 0))
        value = tl.load(x + row * stride + column, mask=there, other=0.0).to(WIDE)
        dy = tl.load(grad + row * grad_stride + column, mask=there, other=0.0).to(WIDE)
        scale = tl.load(rstd + tl.minimum(row, rows - 1))
        if not RMS:
            value = tl.where(there, value - tl.load(mean + tl.minimum(row, rows - 1)), 0.0)
        value *= scale  # normalized
        weight_sum += dy * value
        if WITH_BIAS:
            bias_sum += dy
        dy = tl.where(there, dy * factor, 0.0)
        dx = dy - value * (tl.sum(dy * value, axis=0) / columns)
        if not RMS:
            dx -= tl.sum(dy, axis=0) / columns
        dx *= scale
        if SUM:
            dx += tl.load(grad_total + row * total_stride + column, mask=there, other=0.0).to(WIDE)
        tl.store(grad_x + row * columns + column, dx.to(grad_x.dtype.element_ty), mask=there)
    tl.store(sums + program * columns + column, weight_sum, mask=inside)
    if WITH_BIAS:
        tl.store(sums + (tl.num_programs(0) + program) * columns + column, bias_sum, mask=inside)


class _Norm(torch.autograd.Function):
    """Keeps what it normalizes and a number or two a row. With `gives_total` that is a second output, whose gradient it adds."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        added: torch.Tensor | None,
        added_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        rms: bool,
        offset: float,
        gives_total: bool,
    ) -> Any:
        rows = _rows(x)
        other = rows if added is None else _rows(added)
        total = x if added is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        settings = _settings(rows)
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        rstd = torch.empty(rows.shape[0], dtype=dtype, device=x.device)
        mean = rstd if rms else torch.empty_like(rstd)
        norm_forward[(rows.shape[0],)](
            rows, other, weight if added_bias is None else added_bias, total, weight, weight if bias is None else bias, out, mean, rstd,
            rows.shape[1], rows.stride(0), other.stride(0),
            EPS=eps, OFFSET=offset, RMS=rms, WITH_BIAS=bias is not None, SUM=added is not None, SUM_BIAS=added_bias is not None, **settings,
        )  # fmt: skip
        ctx.save_for_backward(rows if added is None else total.view(rows.shape), weight, mean, rstd)
        ctx.settings = x.shape, rms, offset, bias is not None, settings
        ctx.set_materialize_grads(False)
        return (out.view(x.shape), total) if gives_total else out.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_out, grad_total = grads[0], grads[1] if len(grads) == 2 else None
        if grad_out is None:
            return *_of_sum(ctx, grad_total), None, None, *[None] * 4
        rows, weight, mean, rstd = ctx.saved_tensors
        shape, rms, offset, with_bias, settings = ctx.settings
        count, columns = rows.shape
        grad = _rows(grad_out)
        further = grad if grad_total is None else _rows(grad_total)
        grad_x = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        each = triton.cdiv(count, MOST_PROGRAMS)
        programs = triton.cdiv(count, each)
        sums = torch.empty(2 if with_bias else 1, programs, columns, dtype=rstd.dtype, device=rows.device)
        norm_backward[(programs,)](
            rows, grad, further, weight, mean, rstd, grad_x, sums, count, columns, rows.stride(0), grad.stride(0), further.stride(0), each,
            OFFSET=offset, RMS=rms, WITH_BIAS=with_bias, SUM=grad_total is not None, **settings,
        )  # fmt: skip
        totals = sums.sum(dim=1).to(weight.dtype)  # of the weight, and of the bias
        return *_of_sum(ctx, grad_x.view(shape)), totals[0], totals[1] if with_bias else None, *[None] * 4


def _of_sum(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Of a sum's gradient: those of its parts, x, added and added_bias."""
    _, needs_added, needs_bias = ctx.needs_input_grad[:3]
    by_column = grad.reshape(-1, grad.shape[-1]).sum(dim=0) if needs_bias and grad is not None else None
    return grad, grad if needs_added else None, by_column


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[.., h] -> [n, h], a row's numbers side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _settings(rows: torch.Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(rows.shape[1])
    return {"WIDE": wide(rows), "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, rms: bool, zero_centered: bool = False
) -> torch.Tensor:
    """As fused_layer_norm.norm, for a last dim that fits a program (16384)."""
    return _Norm.apply(x, None, None, weight, bias, eps, rms, 1.0 if zero_centered else 0.0, False)


def norm_of_sum(
    x: torch.Tensor,
    added: tuple[torch.Tensor | None, torch.Tensor | None],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    rms: bool,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As fused_layer_norm.norm_of_sum, for what `norm` takes, all of one dtype."""
    return _Norm.apply(x, *added, weight, bias, eps, rms, 1.0 if zero_centered else 0.0, True)
