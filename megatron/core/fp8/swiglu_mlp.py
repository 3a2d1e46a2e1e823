"""A SwiGLU MLP with both linears in FP8 as one function, so that what lies between its products is not written in bf16 and read again.

Of delayed, tensorwise and blockwise scaling, without biases, where Triton's kernels run. What it computes: what the linears and SwiGLU
compute one by one, which is its twin and runs elsewhere. Kept for the backward pass: the input in FP8, transposed, and fc1's output;
SwiGLU's is made again with its gradient.
"""

from typing import Any

import torch

from megatron.core.fp8.gemm import product
from megatron.core.fp8.linear import Fp8Linear, start_reducing, there
from megatron.core.fp8.quantize import BLOCK, ROW_BLOCKS, TENSOR, Operand, Quantized
from megatron.core.fp8.scaling import GRADIENT, INPUT, dtype_of
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.tensor_parallel.mappings import gather_first_dim
from megatron.core.tensor_parallel.weight_grad import wait_until_gathered, weight_grad


def takes(fc1: Any, fc2: Any, x: torch.Tensor) -> bool:
    """Whether these linears and this input are for `swiglu_mlp`."""
    if not all(isinstance(getattr(linear, "fp8", None), Fp8Linear) and linear.bias is None for linear in (fc1, fc2)):
        return False  # Transformer Engine's have a bool of that name
    if not fc2.input_is_parallel:
        return False
    settings = fc1.fp8.settings
    if settings.recipe == "blockwise" and fc2.weight.shape[1] % BLOCK:
        return False
    known = settings.recipe in ("delayed", "tensorwise", "blockwise")
    return known and settings.wgrad and x.dtype is torch.bfloat16 and kernels_run_on(x)


def swiglu_mlp(fc1: Any, fc2: Any, x: torch.Tensor) -> torch.Tensor:
    """x [s, b, in] -> fc2(swiglu(fc1(x))) [s, b, out], this rank's part of the sum over the tensor-parallel ranks.

    fc1, fc2: ColumnParallelLinear and RowParallelLinear."""
    wait_until_gathered(fc1.weight, fc2.weight)
    settings = fc1.config.gradient_accumulation_fusion, fc1.allreduce_dgrad, fc1.sequence_parallel, fc1.tp_group, fc1.training
    return _SwiGLUMLP.apply(x, fc1.weight, fc2.weight, fc1.fp8, fc2.fp8, settings, torch.is_grad_enabled())


class _SwiGLUMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight1: Any, weight2: Any, fc1: Fp8Linear, fc2: Fp8Linear, settings: tuple, recorded: bool
    ) -> torch.Tensor:
        _, _, sequence_parallel, group, training = settings
        ctx.linears, ctx.settings = (fc1, fc2), settings
        whole = gather_first_dim(x, group) if sequence_parallel else x
        quantized = fc1.quantize(INPUT, whole.reshape(-1, whole.shape[-1]), record=training, rows=True, columns=recorded)
        hidden = product(there(quantized.rows), there(fc1.weight_operands().rows), x.dtype, fast=True)
        activated = _activate(fc2, hidden, training)
        out = product(activated, there(fc2.weight_operands().rows), x.dtype, fast=True)
        if quantized.columns is not None:
            ctx.save_for_backward(quantized.columns.data, hidden)
            ctx.inverses, ctx.kind = (quantized.columns.inverse, activated.inverse), activated.kind
        return out.view(*whole.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (fc1, fc2), (fuse_weight_grad, reduce_input_grad, sequence_parallel, group, training) = ctx.linears, ctx.settings
        needs_input, needs_weight1, needs_weight2 = ctx.needs_input_grad[:3]
        inputs, hidden = ctx.saved_tensors
        inverse_of_input, inverse_of_activated = ctx.inverses
        grad = fc2.quantize(GRADIENT, grads[0].reshape(-1, grads[0].shape[-1]), record=training, rows=True, columns=needs_weight2)
        grad_activated = product(there(grad.rows), there(fc2.weight_operands().columns), hidden.dtype)
        activated, grad_hidden = _activate_backward(fc1, hidden, grad_activated, inverse_of_activated, training)
        del grad_activated
        grad_input, grad_weight1, grad_weight2, reduced = None, None, None, None
        if needs_input:
            grad_input = product(there(grad_hidden.rows), there(fc1.weight_operands().columns), hidden.dtype)
            grad_input = grad_input.view(*grads[0].shape[:-1], -1)
            grad_input, reduced = start_reducing(grad_input, reduce_input_grad, sequence_parallel, group)
        if needs_weight2:
            grad_weight2 = weight_grad(fc2.weight, there(grad.columns), activated, fuse_weight_grad)
        if needs_weight1:
            operand = Operand(inputs, inverse_of_input, ctx.kind)
            grad_weight1 = weight_grad(fc1.weight, there(grad_hidden.columns), operand, fuse_weight_grad)
        if reduced is not None:
            reduced.wait()
        return grad_input, grad_weight1, grad_weight2, *[None] * 4


def _activate(fc2: Fp8Linear, hidden: torch.Tensor, record: bool) -> Operand:
    """SwiGLU of hidden [m, 2n], quantized as fc2's input [m, n]."""
    from megatron.core.fusions.kernels import swiglu_quantize, swiglu_quantize_blocks

    dtype, known = dtype_of(fc2.settings, INPUT), fc2.known_scale(INPUT)
    if fc2.settings.recipe == "blockwise":
        return Operand(*swiglu_quantize_blocks.forward(hidden, dtype), ROW_BLOCKS)
    if known is not None:
        inverse, amax = known
        return Operand(swiglu_quantize.forward(hidden, dtype, inverse, amax if record else None), inverse, TENSOR)
    amax = torch.zeros(1, dtype=torch.float32, device=hidden.device)
    out = swiglu_quantize.forward(hidden, dtype, None, amax)
    return there(fc2.quantize(INPUT, out, record=record, rows=True, columns=False, found=amax).rows)


def _activate_backward(
    fc1: Fp8Linear, hidden: torch.Tensor, grad: torch.Tensor, inverse: torch.Tensor, record: bool
) -> tuple[Operand, Quantized]:
    """grad [m, n] of SwiGLU's output -> (that output, with the inverse scale `inverse` of the forward pass or with blocks, transposed;
    hidden's gradient as fc1's)."""
    from megatron.core.fusions.kernels import swiglu_quantize, swiglu_quantize_blocks

    out_dtype, dtype, known = dtype_of(fc1.settings, INPUT), dtype_of(fc1.settings, GRADIENT), fc1.known_scale(GRADIENT)
    if fc1.settings.recipe == "blockwise":
        return swiglu_quantize_blocks.backward(hidden, grad, out_dtype, dtype)
    if known is not None:
        grad_inverse, amax = known
        out, rows, columns = swiglu_quantize.backward(hidden, grad, out_dtype, inverse, dtype, grad_inverse, amax if record else None)
        assert columns is not None
        return Operand(out, inverse, TENSOR), Quantized(Operand(rows, grad_inverse, TENSOR), Operand(columns, grad_inverse, TENSOR))
    amax = torch.zeros(1, dtype=torch.float32, device=hidden.device)
    out, grad_hidden, _ = swiglu_quantize.backward(hidden, grad, out_dtype, inverse, dtype, None, amax)
    return Operand(out, inverse, TENSOR), fc1.quantize(GRADIENT, grad_hidden, record=record, rows=True, columns=True, found=amax)
