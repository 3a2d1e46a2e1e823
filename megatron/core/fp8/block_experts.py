"""A linear of experts, all of a rank's in one parameter, whose three products are in FP8 with scales of blocks: `blockwise` and `mxfp8`.

Each expert's matrix and rows have blocks of their own, so that it computes what an expert with a linear of its own does. What is
communicated for scales: nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.fp8.grouped_blocks import quantize_row_blocks, rows_product, weight_grads
from megatron.core.fp8.linear import Fp8Linear, there
from megatron.core.fp8.quantize import Operand, Quantized
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT, dtype_of
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.tensor_parallel.weight_grad import mark_written
from megatron.core.transformer.moe.grouped_gemm import grouped_weight_grad
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


class Fp8BlockExperts(Fp8Linear):
    """What the linear has beside its weight [experts, out, in], with scales of blocks."""

    _of_experts: list[Quantized] | None = None

    def quantize_rows(self, role: int, x: torch.Tensor, counts: TokenCounts, *, rows: bool, columns: bool) -> list[Quantized]:
        """x [n, k], sorted by expert, as `role`: each expert's. The host reads the counts."""
        if self.settings.recipe == "blockwise" and (rows or columns) and kernels_run_on(x):
            return quantize_row_blocks(x, counts, dtype_of(self.settings, role), rows=rows, columns=columns)
        return [self.quantize(role, part, record=False, rows=rows, columns=columns) for part in x.split(counts.tolist())]

    @torch.no_grad()
    def matrices(self) -> list[Quantized]:
        """Of each expert W [out, in] and W^T [in, out], quantized now unless they are of this epoch. They stay where they are."""
        version = (self.weight._version, self.weight.data_ptr())
        if self._of_experts is None or self._version != version:
            parts = self.weight.detach().unbind(0)
            places: Sequence[Quantized | None] = self._of_experts or [None] * len(parts)
            wanted: dict[str, Any] = {"record": True, "rows": True, "columns": True}
            self._of_experts = [self.quantize(WEIGHT, part, into=into, **wanted) for part, into in zip(parts, places, strict=True)]
            self._version = version
        return self._of_experts

    def quantize_weight(self) -> None:
        self.matrices()

    def of_rows(self, x: torch.Tensor, counts: TokenCounts, *, fuse_weight_grad: bool, training: bool, keep_input: bool) -> torch.Tensor:
        """x [n, in] sorted by expert -> [n, out]. keep_input: x is freed, and there again for the backward pass. training: no matter."""
        settings = fuse_weight_grad, keep_input or not self.settings.wgrad
        return _Fp8BlockExperts.apply(x, self.weight, counts, self, settings, torch.is_grad_enabled())


class _Fp8BlockExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: TokenCounts, linear: Fp8BlockExperts, settings: tuple, recorded: bool
    ) -> torch.Tensor:
        counts.prefetch()  # the layer's one copy of them: it is waited for while x is quantized
        ctx.counts, ctx.linear, ctx.settings = counts, linear, settings
        keeps, keep_input = recorded and ctx.needs_input_grad[1], settings[1]
        quantized = linear.quantize_rows(INPUT, x, counts, rows=True, columns=keeps and not keep_input)
        if keeps and keep_input:
            ctx.save_for_backward(x)
        elif keeps:
            ctx.kept = [(operand.inverse, operand.kind) for operand in _columns(quantized)]
            ctx.save_for_backward(*(operand.data for operand in _columns(quantized)))
        return rows_product(_rows(quantized), _rows(linear.matrices()), counts.tolist(), x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        linear, counts, fuse_weight_grad = ctx.linear, ctx.counts, ctx.settings[0]
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad, in_fp8 = grads[0].contiguous(), linear.settings.wgrad
        quantized = linear.quantize_rows(GRADIENT, grad, counts, rows=needs_input, columns=needs_weight and in_fp8)
        grad_input = grad_weight = None
        if needs_input:
            grad_input = rows_product(_rows(quantized), _columns(linear.matrices()), counts.tolist(), grad.dtype)
        if needs_weight and in_fp8:
            grad_weight = _put_weight_grad(linear, _columns(quantized), _kept_inputs(ctx), fuse_weight_grad)
        elif needs_weight:
            grad_weight = grouped_weight_grad(linear.weight, grad, ctx.saved_tensors[0], counts, fuse_weight_grad)
        return grad_input, grad_weight, *[None] * 4


def _rows(parts: list[Quantized]) -> list[Operand]:
    return [there(part.rows) for part in parts]


def _columns(parts: list[Quantized]) -> list[Operand]:
    return [there(part.columns) for part in parts]


def _kept_inputs(ctx: Any) -> list[Operand]:
    """The input's columns: as they were kept, or of the input itself."""
    if not ctx.settings[1]:
        return [Operand(data, *rest) for data, rest in zip(ctx.saved_tensors, ctx.kept, strict=True)]
    return _columns(ctx.linear.quantize_rows(INPUT, ctx.saved_tensors[0], ctx.counts, rows=False, columns=True))


def _put_weight_grad(linear: Fp8BlockExperts, grads: list[Operand], inputs: list[Operand], fuse: bool) -> torch.Tensor | None:
    """The gradient for autograd to pass on; None where it went into the weight's main_grad. It is never put off."""
    weight: Any = linear.weight
    if fuse and hasattr(weight, "main_grad"):
        weight_grads(grads, inputs, weight.main_grad, add=weight.main_grad_filled)
        mark_written(weight)
        return None
    out = torch.empty_like(weight)
    weight_grads(grads, inputs, out, add=False)
    return out
