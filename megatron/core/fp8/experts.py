"""A linear of experts, all of a rank's in one parameter, whose three products are in FP8: x W^T, dy W, dy^T x of each expert. With one
scale a tensor: `delayed` and `tensorwise`; with scales of blocks block_experts.py.

One scale for the inputs of all experts, one for their weights, one for their gradients: like any linear, it has three tensors. Under
delayed scaling they are the same on all ranks that hold experts of the layer: a checkpoint's fit any number of expert-parallel ranks.
"""

from typing import Any

import torch

from megatron.core.fp8.grouped import Grouped, quantize_groups, rows_product, weight_grads
from megatron.core.fp8.linear import Fp8Linear
from megatron.core.fp8.quantize import TENSOR, Operand
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT, dtype_of
from megatron.core.tensor_parallel.weight_grad import mark_written
from megatron.core.transformer.moe.grouped_gemm import grouped_weight_grad
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


class Fp8Experts(Fp8Linear):
    """What the linear has beside its weight [experts, out, in], with one scale a tensor."""

    _even: TokenCounts | None = None
    _of_experts: tuple[Grouped, Operand, Operand] | None = None

    def quantize_rows(
        self,
        role: int,
        x: torch.Tensor,
        counts: TokenCounts,
        *,
        record: bool,
        rows: bool,
        columns: bool,
        into: Grouped | None = None,
        found: torch.Tensor | None = None,
    ) -> Grouped:
        """x [n, k], sorted by expert, as `role`. record: what delayed scaling sees of it counts for the next step. found [1]: x's largest
        magnitude."""
        scale, dtype = self.scale_of(role, x, record, found), dtype_of(self.settings, role)
        return quantize_groups(x, counts, dtype, **scale, rows=rows, columns=columns, into=into)

    @torch.no_grad()
    def matrices(self) -> tuple[Operand, Operand]:
        """(W [experts, out, in], W^T [experts, in, out]), quantized now unless they are of this epoch."""
        version = (self.weight._version, self.weight.data_ptr())
        if self._of_experts is None or self._version != version:
            experts, outputs, inputs = self.weight.shape
            if self._even is None:
                self._even = TokenCounts(torch.full((experts,), outputs, device=self.weight.device), [outputs] * experts)
            flat, into = self.weight.detach().view(-1, inputs), None if self._of_experts is None else self._of_experts[0]
            made = self.quantize_rows(WEIGHT, flat, self._even, record=True, rows=True, columns=True, into=into)
            assert made.rows is not None and made.columns is not None
            turned = made.columns[: self.weight.numel()].view(experts, inputs, outputs)
            rows = Operand(made.rows.view(self.weight.shape), made.inverse, TENSOR)
            self._of_experts, self._version = (made, rows, Operand(turned, made.inverse, TENSOR)), version
        return self._of_experts[1:]

    def quantize_weight(self) -> None:
        self.matrices()

    def of_rows(self, x: torch.Tensor, counts: TokenCounts, *, fuse_weight_grad: bool, training: bool, keep_input: bool) -> torch.Tensor:
        """x [n, in] sorted by expert -> [n, out]. keep_input: x is freed, and there again for the backward pass."""
        settings = fuse_weight_grad, training, keep_input or not self.settings.wgrad
        return _Fp8Experts.apply(x, self.weight, counts, self, settings, torch.is_grad_enabled())


class _Fp8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: TokenCounts, linear: Fp8Experts, settings: tuple, recorded: bool
    ) -> torch.Tensor:
        _, training, keep_input = settings
        keeps = recorded and ctx.needs_input_grad[1]
        quantized = linear.quantize_rows(INPUT, x, counts, record=training, rows=True, columns=keeps and not keep_input)
        ctx.counts, ctx.linear, ctx.settings, ctx.inverse = counts, linear, settings, quantized.inverse
        ctx.save_for_backward(x if keep_input and keeps else quantized.columns)
        if recorded:
            counts.prefetch()
        return rows_product(quantized.row_operand(), linear.matrices()[0], counts, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        linear, counts, (fuse_weight_grad, training, _) = ctx.linear, ctx.counts, ctx.settings
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad, in_fp8 = grads[0].contiguous(), linear.settings.wgrad
        quantized = linear.quantize_rows(GRADIENT, grad, counts, record=training, rows=needs_input, columns=needs_weight and in_fp8)
        grad_input = grad_weight = None
        if needs_input:
            grad_input = rows_product(quantized.row_operand(), linear.matrices()[1], counts, grad.dtype, counts_are_here=True)
        if needs_weight and in_fp8:
            grad_weight = put_weight_grad(linear, quantized, _kept_inputs(ctx), counts, fuse_weight_grad)
        elif needs_weight:
            grad_weight = grouped_weight_grad(linear.weight, grad, ctx.saved_tensors[0], counts, fuse_weight_grad)
        return grad_input, grad_weight, *[None] * 4


def _kept_inputs(ctx: Any) -> Grouped:
    """The input's columns: as they were kept, or of the input itself. The scale is that of the forward pass."""
    (saved,) = ctx.saved_tensors
    if not ctx.settings[2]:
        return Grouped(None, saved, ctx.inverse)
    return ctx.linear.quantize_rows(INPUT, saved, ctx.counts, record=False, rows=False, columns=True)


def put_weight_grad(linear: Fp8Experts, grad: Grouped, inputs: Grouped, counts: TokenCounts, fuse: bool) -> torch.Tensor | None:
    """The gradient for autograd to pass on; None where it went into the weight's main_grad. It is never put off."""
    weight: Any = linear.weight
    if fuse and hasattr(weight, "main_grad"):
        weight_grads(grad, inputs, counts, weight.main_grad, add=weight.main_grad_filled)
        mark_written(weight)
        return None
    out = torch.empty_like(weight)
    weight_grads(grad, inputs, counts, out, add=False)
    return out
