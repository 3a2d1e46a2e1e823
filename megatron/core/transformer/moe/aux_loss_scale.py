"""Losses that join the backward pass without being part of the loss that is returned: experts' balance, multi-token prediction."""

from typing import Any, ClassVar

import torch


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """`apply(output, aux_loss)` is `output`; in the backward pass aux_loss gets the gradient that the schedule set.

    The schedule sets it once a step, since a layer deep in a pipeline sees neither the loss scale nor how many micro batches there are.
    """

    main_loss_backward_scale: ClassVar[torch.Tensor | float] = 1.0

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.device = aux_loss.dtype, aux_loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        if isinstance(scale, torch.Tensor):
            return grads[0], scale.detach().reshape(()).to(ctx.device, ctx.dtype)
        return grads[0], torch.full((), scale, dtype=ctx.dtype, device=ctx.device)

    @staticmethod
    def set_loss_scale(scale: torch.Tensor | float) -> None:
        """The gradient of a micro batch's balance losses (whose sum over the ranks of the micro batch is the whole): the loss scale, times
        context-parallel ranks / micro batches where gradients will be averaged over these ranks; the loss scale alone where the step's
        gradient is divided by its tokens at the end (the losses are multiplied by theirs then)."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def balance_loss_scale(config: Any, num_microbatches: int, like: torch.Tensor) -> torch.Tensor | float:
    """What `set_loss_scale` wants, for a step of `num_microbatches`; `like`: a tensor on the device."""
    scale = 1.0 if config.calculate_per_token_loss else config.context_parallel_size / num_microbatches
    if config.grad_scale_func is None:
        return scale
    return config.grad_scale_func(torch.full((), scale, dtype=torch.float32, device=like.device))
