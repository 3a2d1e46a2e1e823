"""Adam and SGD as fused kernels, with the gradient's scale and the decision to skip read on the device.

On a GPU large tensors go through a Triton kernel that writes the model's copy too; the rest through torch's, which divide each gradient by
`grad_scale` in place. All leave everything alone when `found_inf` is 1. They take a learning rate
for each group from the host and keep one step count a group (checkpoints hold it there), which a skipped step does not move.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.core.fusions.kernels import kernels_run_on

Tensors = list[torch.Tensor]
Targets = list[torch.Tensor | None]
# Numbers of parameters that are updated together, counted through all groups, and what is called once their update has been issued
Part = tuple[Sequence[int], Callable[[], None] | None]
KERNEL_ELEMENTS = 1 << 23  # from this size on a launch of its own costs the host less than it saves the GPU


class FusedOptimizer:
    """What both share: groups, state (allocated at once, so that a checkpoint can be read into it) and the split by dtype.

    Args:
        param_groups: dicts with `params` (contiguous tensors), `lr`, `weight_decay` and whatever the caller keeps there.
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for group in param_groups:
            group["step"] = torch.zeros((), dtype=torch.float32, device=group["params"][0].device)
            for param in group["params"]:
                assert param.is_contiguous(), "the fused kernels walk parameter, gradient and state side by side"
                self.state[param] = {name: torch.zeros_like(param, requires_grad=False) for name in self.state_names}

    @torch.no_grad()
    def step(
        self,
        grads: Sequence[torch.Tensor],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor,
        targets: Sequence[torch.Tensor | None] | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """One update. `grads` follows the parameters of all groups in order, in their dtypes; they may be divided by grad_scale in place.

        grad_scale, found_inf: 0-d fp32 tensors on the parameters' device. targets: for each parameter where its rounded copy goes, or
        None; after a skipped step it holds what it held. parts: each parameter once; None: all at once, which gives the same bits.
        """
        if grad_scale is not None:
            # the kernels read the scale as fp32, which would cost fp64 gradients their precision
            wide = [grad for grad in grads if grad.dtype == torch.float64]
            if wide:
                torch._foreach_div_(wide, grad_scale)
            grad_scale = grad_scale.float()
        for group in self.param_groups:
            group["step"] += 1.0 - found_inf
        self._begin_step()
        numbered = [(group, param) for group in self.param_groups for param in group["params"]]
        copies = targets if targets is not None else [None] * len(numbered)
        assert len(numbered) == len(grads) == len(copies)
        for numbers, then in parts if parts is not None else [(range(len(numbered)), None)]:
            by_kind: dict[tuple[int, torch.dtype], list[int]] = {}
            for number in numbers:
                group, param = numbered[number]
                if param.numel() > 0:  # else a part of a parameter of which another rank has everything
                    by_kind.setdefault((id(group), param.dtype), []).append(number)
            for same in by_kind.values():
                chosen = [(numbered[number][1], grads[number], copies[number]) for number in same]
                self._update_alike(numbered[same[0]][0], chosen, grad_scale, found_inf)
            if then is not None:
                then()

    def _update_alike(
        self,
        group: dict[str, Any],
        chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor,
    ) -> None:
        """Update (parameter, gradient, target) of one group and dtype."""
        params, grads, targets = [param for param, _, _ in chosen], [grad for _, grad, _ in chosen], [target for _, _, target in chosen]
        states = [[self.state[param][name] for param in params] for name in self.state_names]
        scale = None if params[0].dtype == torch.float64 else grad_scale
        self._update(group, params, grads, states, targets, scale, found_inf)
        written = [(target, param) for target, param in zip(targets, params, strict=True) if target is not None]
        if written:
            torch._foreach_copy_([target for target, _ in written], [param for _, param in written])

    def _begin_step(self) -> None:
        """The step counts of all groups have moved; no parameter has."""

    def _update(
        self,
        group: dict[str, Any],
        params: Tensors,
        grads: Tensors,
        states: list[Tensors],
        targets: Targets,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor,
    ) -> None:
        """May write some of `targets`, and puts None in their places."""
        raise NotImplementedError


class FusedAdam(FusedOptimizer):
    """Adam, with weight decay apart from the gradient (AdamW, https://arxiv.org/abs/1711.05101) or added to it."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, param_groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, decoupled_weight_decay: bool = True
    ) -> None:
        for group in param_groups:
            group.update(betas=betas, eps=eps, bias_correction=True)
        self.decoupled = decoupled_weight_decay
        self.kernel: Callable[..., None] = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
        self._corrections: dict[int, torch.Tensor] = {}  # of the groups whose large tensors this step has met
        super().__init__(param_groups)

    def _begin_step(self) -> None:
        self._corrections.clear()

    def _update(self, group, params, grads, states, targets, grad_scale, found_inf):  # type: ignore[no-untyped-def]
        by_kernel = [_large(param, grad, target) for param, grad, target in zip(params, grads, targets, strict=True)]
        if any(by_kernel):
            self._update_large(group, params, grads, states, targets, grad_scale, found_inf, by_kernel)
            rest = [index for index, large in enumerate(by_kernel) if not large]
            params, grads = [params[index] for index in rest], [grads[index] for index in rest]
            states = [[state[index] for index in rest] for state in states]
        if not params:
            return
        self.kernel(
            params,
            grads,
            states[0],
            states[1],
            [],
            [group["step"]] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )

    def _update_large(self, group, params, grads, states, targets, grad_scale, found_inf, chosen):  # type: ignore[no-untyped-def]
        from megatron.core.fusions.kernels import adam

        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        if id(group) not in self._corrections:  # a dozen launches, once for all parts of a step
            self._corrections[id(group)] = adam.bias_corrections(group["step"], group["betas"])
        corrections = self._corrections[id(group)]
        for index in [index for index, large in enumerate(chosen) if large]:
            adam.update(
                params[index],
                grads[index],
                (states[0][index], states[1][index]),
                targets[index],
                corrections=corrections,
                grad_scale=grad_scale,
                found_inf=found_inf,
                decoupled=self.decoupled,
                **settings,
            )
            targets[index] = None


def _large(param: torch.Tensor, grad: torch.Tensor, target: torch.Tensor | None) -> bool:
    """Whether the Triton kernel updates it."""
    if param.numel() < KERNEL_ELEMENTS or param.dtype is not torch.float32 or not kernels_run_on(param):
        return False
    return grad.is_contiguous() and (target is None or target.is_contiguous())


class FusedSGD(FusedOptimizer):
    """SGD with momentum; weight decay is added to the gradient."""

    def __init__(self, param_groups: list[dict[str, Any]], momentum: float) -> None:
        self.state_names = ("momentum_buffer",) if momentum else ()
        for group in param_groups:
            group["momentum"] = momentum
        super().__init__(param_groups)

    def _update(self, group, params, grads, states, targets, grad_scale, found_inf):  # type: ignore[no-untyped-def]
        torch._fused_sgd_(
            params,
            grads,
            states[0] if states else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,  # the buffer starts at 0, which gives the same first step
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
