"""Adam and AdamW in one pass over each tensor, with the gradient's scale, the decision to skip and the copy in the model's dtype."""

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def adam_update(
    param, grad, exp_avg, exp_avg_sq, target, corrections, grad_scale, found_inf, size, lr, weight_decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, DECOUPLED: tl.constexpr, WITH_TARGET: tl.constexpr,
    WITH_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) == 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        p = tl.load(param + place, mask=inside, other=0.0)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(exp_avg + place, mask=inside, other=0.0)
        v = tl.load(exp_avg_sq + place, mask=inside, other=0.0)
        if WITH_SCALE:
            g /= tl.load(grad_scale)
        if DECOUPLED:
            p -= lr * weight_decay * p
        else:
            g += weight_decay * p
        m += (1.0 - BETA1) * (g - m)
        v = BETA2 * v + (1.0 - BETA2) * g * g
        p -= lr * tl.load(corrections) * m / (tl.sqrt(v) * tl.load(corrections + 1) + EPS)
        tl.store(param + place, p, mask=inside)
        tl.store(exp_avg + place, m, mask=inside)
        tl.store(exp_avg_sq + place, v, mask=inside)
        if WITH_TARGET:
            tl.store(target + place, p.to(target.dtype.element_ty), mask=inside)


def bias_corrections(step: torch.Tensor, betas: tuple[float, float]) -> torch.Tensor:
    """fp32 [2]: 1 / (1 - beta1^step) and 1 / sqrt(1 - beta2^step), computed in fp64. step: 0-d, on the device."""
    first, second = (1.0 - beta ** step.double() for beta in betas)
    return torch.stack([first.reciprocal(), second.rsqrt()]).float()


def update(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    target: torch.Tensor | None,
    *,
    corrections: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    """Update the fp32 `param` and `state` (exp_avg, exp_avg_sq), and write `target`, unless the 0-d `found_inf` is 1.

    All are contiguous and of one size; `grad`, of any float dtype, is divided by the 0-d fp32 `grad_scale` and not changed. corrections:
    see `bias_corrections`. The formula is torch.optim.AdamW's (Adam's where not `decoupled`).
    """
    size = param.numel()
    adam_update[(triton.cdiv(size, BLOCK),)](
        param, grad, *state, param if target is None else target, corrections, found_inf if grad_scale is None else grad_scale, found_inf,
        size, lr, weight_decay, BETA1=betas[0], BETA2=betas[1], EPS=eps, DECOUPLED=decoupled, WITH_TARGET=target is not None,
        WITH_SCALE=grad_scale is not None, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
