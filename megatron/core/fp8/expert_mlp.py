"""The SwiGLU MLPs of a rank's experts with both linears in FP8 as one function: swiglu_mlp.py for rows that are sorted by expert.

With one scale a tensor, without biases, where Triton's kernels run. What it computes: what the linears and SwiGLU compute one by one,
which is its twin and runs elsewhere. Kept for the backward pass: the input in FP8, transposed, and fc1's output; SwiGLU's is made again
with its gradient.
"""

from typing import Any

import torch

from megatron.core.fp8.experts import Fp8Experts, put_weight_grad
from megatron.core.fp8.grouped import Grouped, rows_product
from megatron.core.fp8.quantize import TENSOR, Operand
from megatron.core.fp8.scaling import GRADIENT, INPUT, dtype_of
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.tensor_parallel.weight_grad import wait_until_gathered
from megatron.core.transformer.moe.token_dispatcher import TokenCounts


def takes(fc1: Any, fc2: Any, x: torch.Tensor) -> bool:
    """Whether these linears and this input are for `expert_mlp`."""
    if not all(isinstance(getattr(linear, "fp8", None), Fp8Experts) and linear.bias is None for linear in (fc1, fc2)):
        return False
    return fc1.fp8.settings.wgrad and x.dtype is torch.bfloat16 and kernels_run_on(x)


def expert_mlp(fc1: Any, fc2: Any, x: torch.Tensor, counts: TokenCounts, weights: torch.Tensor) -> torch.Tensor:
    """x [n, in] sorted by expert, weights [n] -> fc2(swiglu(fc1(x)) * weights) [n, out]. fc1, fc2: moe.experts.GroupedLinear."""
    wait_until_gathered(fc1.weight, fc2.weight)
    settings = fc1.config.gradient_accumulation_fusion, fc1.training
    return _ExpertMLP.apply(x, weights, fc1.weight, fc2.weight, counts, (fc1.fp8, fc2.fp8), settings, torch.is_grad_enabled())


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        _1: Any,
        _2: Any,
        counts: TokenCounts,
        linears: tuple[Fp8Experts, Fp8Experts],
        settings: tuple[bool, bool],
        recorded: bool,
    ) -> torch.Tensor:
        (fc1, fc2), (_, training) = linears, settings
        quantized = fc1.quantize_rows(INPUT, x, counts, record=training, rows=True, columns=recorded)
        hidden = rows_product(quantized.row_operand(), fc1.matrices()[0], counts, x.dtype, fast=True)
        weights = weights.contiguous()
        activated = _activate(fc2, hidden, weights, counts, training)
        if recorded:
            counts.prefetch()
            ctx.save_for_backward(quantized.columns, hidden, weights)
            ctx.linears, ctx.settings, ctx.counts, ctx.inverses = linears, settings, counts, (quantized.inverse, activated.inverse)
        return rows_product(activated, fc2.matrices()[0], counts, x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (fc1, fc2), (fuse_weight_grad, training), counts = ctx.linears, ctx.settings, ctx.counts
        needs_input, _, needs_weight1, needs_weight2 = ctx.needs_input_grad[:4]
        inputs, hidden, weights = ctx.saved_tensors
        grad = fc2.quantize_rows(GRADIENT, grads[0].contiguous(), counts, record=training, rows=True, columns=needs_weight2)
        grad_activated = rows_product(grad.row_operand(), fc2.matrices()[1], counts, hidden.dtype, counts_are_here=True)
        activated, grad_hidden, grad_weights = _activate_backward(
            fc1, hidden, weights, grad_activated, counts, ctx.inverses[1], dtype_of(fc2.settings, INPUT), training
        )
        del grad_activated
        grad_input = None
        if needs_input:
            grad_input = rows_product(grad_hidden.row_operand(), fc1.matrices()[1], counts, hidden.dtype, counts_are_here=True)
        grad2 = put_weight_grad(fc2, grad, activated, counts, fuse_weight_grad) if needs_weight2 else None
        grad1 = None
        if needs_weight1:
            grad1 = put_weight_grad(fc1, grad_hidden, Grouped(None, inputs, ctx.inverses[0]), counts, fuse_weight_grad)
        return grad_input, grad_weights, grad1, grad2, *[None] * 4


def _activate(fc2: Fp8Experts, hidden: torch.Tensor, weights: torch.Tensor, counts: TokenCounts, record: bool) -> Operand:
    """SwiGLU of hidden [n, 2m] times weights [n], quantized as fc2's input [n, m]."""
    from megatron.core.fusions.kernels import swiglu_quantize

    dtype, known = dtype_of(fc2.settings, INPUT), fc2.known_scale(INPUT)
    if known is not None:
        inverse, amax = known
        return Operand(swiglu_quantize.forward(hidden, dtype, inverse, amax if record else None, weights), inverse, TENSOR)
    amax = torch.zeros(1, dtype=torch.float32, device=hidden.device)
    out = swiglu_quantize.forward(hidden, dtype, None, amax, weights)
    return fc2.quantize_rows(INPUT, out, counts, record=record, rows=True, columns=False, found=amax).row_operand()


def _activate_backward(
    fc1: Fp8Experts,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    grad: torch.Tensor,
    counts: TokenCounts,
    inverse_out: torch.Tensor,
    out_dtype: torch.dtype,
    record: bool,
) -> tuple[Grouped, Grouped, torch.Tensor]:
    """grad [n, m] of the activation's output -> (that output with the inverse scale `inverse_out`, its columns; hidden's gradient as
    fc1's; the weights' gradient)."""
    from megatron.core.fusions.kernels import swiglu_quantize_groups

    dtype, known = dtype_of(fc1.settings, GRADIENT), fc1.known_scale(GRADIENT)
    inverse, amax = known or (None, torch.zeros(1, dtype=torch.float32, device=hidden.device))
    raised = amax if record or known is None else None
    out, rows, columns, grad_weights = swiglu_quantize_groups.backward(
        hidden, weights, grad, counts.on_device, out_dtype, inverse_out, dtype, inverse, raised
    )
    activated = Grouped(None, out, inverse_out)
    if inverse is not None:
        return activated, Grouped(rows, columns, inverse), grad_weights
    return activated, fc1.quantize_rows(GRADIENT, rows, counts, record=record, rows=True, columns=True, found=amax), grad_weights
