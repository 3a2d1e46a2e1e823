"""One matrix product per expert over rows that are sorted by expert: torch's grouped_mm on GPUs in bf16, else a loop."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core import device
from megatron.core.tensor_parallel.weight_grad import write_grouped_weight_grad
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


def has_grouped_mm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether grouped_mm takes these: bf16 on a GPU, at least one row, of a multiple of 16 bytes."""
    return (
        device.on_accelerator(x)
        and x.shape[0] > 0
        and x.dtype is torch.bfloat16 is weight.dtype
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
        and hasattr(F, "grouped_mm")
    )


def grouped_linear_plain(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[n, in], [experts, out, in] -> [n, out]: the rows of expert e times weight[e] transposed."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for part, rows, matrix in zip(out.split(counts), x.split(counts), weight.unbind(0)):
        torch.mm(rows, matrix.t(), out=part)
    return out


class _GroupedLinear(torch.autograd.Function):
    """Writes the weight's gradient into the gradient buffer where there is one; experts without rows get zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: TokenCounts, fuse_weight_grad: bool) -> torch.Tensor:
        ctx.counts, ctx.weight, ctx.fuse_weight_grad = counts, weight, fuse_weight_grad
        ctx.offsets = counts.on_device.cumsum(0).to(torch.int32) if has_grouped_mm(x, weight) else None
        ctx.save_for_backward(x)
        if ctx.offsets is not None:
            if fuse_weight_grad and ctx.needs_input_grad[1]:
                counts.prefetch()
            return F.grouped_mm(x, weight.transpose(1, 2), offs=ctx.offsets)
        return grouped_linear_plain(x, weight, counts.tolist())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, grad = ctx.weight, grads[0].contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            if ctx.offsets is not None:
                grad_x = F.grouped_mm(grad, weight, offs=ctx.offsets)
            else:
                grad_x = grouped_linear_plain(grad, weight.transpose(1, 2), ctx.counts.tolist())
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_weight_grad(weight, grad, x, ctx.counts, ctx.fuse_weight_grad, ctx.offsets)
        return grad_x, grad_weight, None, None


def grouped_weight_grad(
    weight: Any, grad: torch.Tensor, x: torch.Tensor, counts: TokenCounts, fuse: bool, offsets: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The weight's gradient; None where it went into the buffer. offsets: where grouped_mm takes x."""
    fused = fuse and hasattr(weight, "main_grad")
    if offsets is not None and not fused:
        return F.grouped_mm(grad.t(), x, offs=offsets)
    sizes = counts.tolist()
    parts = list(zip(grad.split(sizes), x.split(sizes)))
    if fused:
        write_grouped_weight_grad(weight, parts)
        return None
    return torch.stack([part.t().mm(rows) for part, rows in parts])


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: TokenCounts, fuse_weight_grad: bool = False) -> torch.Tensor:
    """[n, in] (rows sorted by expert), [experts, out, in] -> [n, out]."""
    return _GroupedLinear.apply(x, weight, counts, fuse_weight_grad)


class _RowBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, counts: TokenCounts, rows: int) -> torch.Tensor:
        ctx.counts, ctx.shape = counts, bias.shape
        return bias.repeat_interleave(counts.on_device, dim=0, output_size=rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # sums by a matrix product: in one order, unlike atomic additions
        grad, counts = grads[0], ctx.counts.on_device
        ends = counts.cumsum(0).unsqueeze(1)
        place = torch.arange(grad.shape[0], device=grad.device)
        member = (place < ends) & (place >= ends - counts.unsqueeze(1))
        return member.to(grad.dtype).mm(grad), None, None


def row_bias(bias: torch.Tensor, counts: TokenCounts, rows: int) -> torch.Tensor:
    """[experts, out] -> [rows, out]: each row's expert's bias."""
    return _RowBias.apply(bias, counts, rows)
