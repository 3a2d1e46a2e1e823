"""A linear that takes its input's activation over, so that the activation's output is not kept for the backward pass.

Kept is the activation's input alone. Going back, the activation's output is made again together with its gradient, just when the weight's
gradient needs it. Plain twin: the activation, then the linear.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel.weight_grad import weight_grad


class Activation(Protocol):
    """An activation of [.., in] -> [.., out], without parameters."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As autograd sees it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def backward(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(x's gradient from the output's, the output as `forward` gives it)."""


class ActivatedLinear(torch.autograd.Function):
    """activation(x) W^T + b; x [s, b, in], weight [out, ..]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, fuse_weight_grad: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.activation, ctx.fuse_weight_grad = weight, bias is not None, activation, fuse_weight_grad
        return F.linear(activation.forward(x), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x, activated = ctx.activation.backward(x, grad.matmul(ctx.weight))
        flat, grad_weight = grad.view(-1, grad.shape[-1]), None
        if ctx.needs_input_grad[1]:
            grad_weight = weight_grad(ctx.weight, flat, activated.view(-1, activated.shape[-1]), ctx.fuse_weight_grad)
        grad_bias = flat.sum(dim=0) if ctx.needs_input_grad[2] and ctx.has_bias else None
        return grad_x, grad_weight, grad_bias, None, None
