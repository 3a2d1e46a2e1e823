"""SwiGLU (Shazeer 2020): silu(gate) * up, where the last dim holds gate then up."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.kernels import kernels_run_on


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone; silu is computed again going back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return out


def bias_swiglu_impl(
    input: torch.Tensor, bias: torch.Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> torch.Tensor:
    """[.., 2n] (+ bias [2n]) -> [.., n]."""
    if fp8_input_store or cpu_offload_input:
        raise ValueError("bias_swiglu_impl: fp8_input_store and cpu_offload_input are not built yet; leave them out")
    x = input if bias is None else input + bias
    if kernels_run_on(x):
        from megatron.core.fusions.kernels.swiglu import swiglu

        return swiglu(x)
    return _SwiGLU.apply(x)


def weighted_bias_swiglu_impl(
    input: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, fp8_input_store: bool = False
) -> torch.Tensor:
    """[n, 2h] (+ bias [2h]) -> [n, h], row i times weights[i]: an expert's activation. `weights` [n] or [n, 1], of any float dtype."""
    x = input if bias is None else input + bias
    if not fp8_input_store and kernels_run_on(x):
        from megatron.core.fusions.kernels.swiglu import swiglu

        return swiglu(x, weights.reshape(x.shape[:-1]))
    out = bias_swiglu_impl(x, None, fp8_input_store)
    return (out * weights.reshape(*x.shape[:-1], 1)).to(out.dtype)


class SwiGLUActivation:
    """SwiGLU for tensor_parallel.activated_linear, where Triton's kernels run."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return bias_swiglu_impl(x, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., 2n] -> [.., n]."""
        from megatron.core.fusions.kernels import swiglu as kernels

        return kernels.forward(kernels.rows_of(x)).view(*x.shape[:-1], -1)

    def backward(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """grad [.., n] of the output -> (gradient of x [.., 2n], the output [.., n])."""
        from megatron.core.fusions.kernels import swiglu as kernels

        grad_x, _, out = kernels.backward(kernels.rows_of(x), kernels.rows_of(grad), with_out=True)
        assert out is not None
        return grad_x.view(x.shape), out.view(grad.shape)


def bias_swiglu_plain(input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The plain twin of bias_swiglu_impl."""
    gate, up = (input if bias is None else input + bias).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
