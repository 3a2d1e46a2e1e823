"""A router's choice and weights from its logits in one pass, forward and backward. In fp32 (fp64 for fp64) inside.

The choice is that of the largest logits, since softmax and sigmoid keep their order; of equal ones the first, where torch.topk may take
any. Experts are columns of one tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide

ELEMENTS = 2048  # of a program's tile
MOST_EXPERTS = 1024  # router.py of transformer/moe asks for no more


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def softmax_where(x, there):
    """Over the columns that are there, 0 elsewhere. Of a row without any 0."""
    most = tl.max(tl.where(there, x, float("-inf")), axis=1)
    parts = tl.where(there, tl.exp(x - most[:, None]), 0.0)
    return tl.where(there, parts / tl.sum(parts, axis=1)[:, None], 0.0)


@triton.jit
def router_forward(
    logits, probs, chosen, scores, rows, experts, stride,
    FACTOR: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, BEFORE: tl.constexpr, WITH_SCORES: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < experts)[None, :]
    place = row[:, None] * experts + column[None, :]
    x = tl.load(logits + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
    order = tl.where(x == x, x, float("inf"))  # NaN is above all, as in torch.topk: k experts are chosen whatever comes
    free = inside
    for _ in range(TOPK):
        best = tl.max(tl.where(free, order, float("-inf")), axis=1)
        first = tl.min(tl.where(free & (order == best[:, None]), column[None, :], BLOCK), axis=1)
        free = free & (column[None, :] != first[:, None])
    picked = inside & (free == 0)
    logs = log_sigmoid(x) if SIGMOID else x
    if BEFORE:
        weights = tl.where(picked, softmax_where(x, inside), 0.0)
    elif SIGMOID and TOPK == 1:
        weights = tl.where(picked, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        weights = softmax_where(logs, picked)
    tl.store(probs + place, weights * FACTOR, mask=inside)
    tl.store(chosen + place, picked.to(tl.uint8), mask=inside)
    if WITH_SCORES:
        tl.store(scores + place, softmax_where(logs, inside), mask=inside)


@triton.jit
def router_backward(
    logits, chosen, grad_probs, grad_scores, grad, rows, experts, stride,
    FACTOR: tl.constexpr, TOPK: tl.constexpr, SIGMOID: tl.constexpr, BEFORE: tl.constexpr,
    WITH_PROBS: tl.constexpr, WITH_SCORES: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < experts)[None, :]
    place = row[:, None] * experts + column[None, :]
    x = tl.load(logits + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(WIDE)
    logs = log_sigmoid(x) if SIGMOID else x
    slope = 1.0 / (1.0 + tl.exp(x)) if SIGMOID else 1.0  # of the logs
    dx = tl.zeros([ROWS, BLOCK], dtype=WIDE)
    if WITH_PROBS:
        picked = inside & (tl.load(chosen + place, mask=inside, other=0) != 0)
        dy = tl.where(picked, tl.load(grad_probs + place, mask=inside, other=0.0).to(WIDE) * FACTOR, 0.0)
        if SIGMOID and TOPK == 1:
            dx += dy * (1.0 - slope)
        else:
            weights = softmax_where(x, inside) if BEFORE else softmax_where(logs, picked)
            dx += weights * (dy - tl.sum(weights * dy, axis=1)[:, None])
    if WITH_SCORES:
        shares = softmax_where(logs, inside)
        dy = tl.load(grad_scores + place, mask=inside, other=0.0).to(WIDE)
        dx += shares * (dy - tl.sum(shares * dy, axis=1)[:, None])
    tl.store(grad + place, (dx * slope).to(grad.dtype.element_ty), mask=inside)


def _settings(logits: torch.Tensor) -> dict[str, Any]:
    block = triton.next_power_of_2(logits.shape[1])
    return {"WIDE": wide(logits), "ROWS": max(1, min(64, ELEMENTS // block)), "BLOCK": block}


class _Router(torch.autograd.Function):
    """Keeps the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, topk: int, sigmoid: bool, before: bool, factor: float, with_scores: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        probs = torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        chosen = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
        scores = torch.empty_like(probs) if with_scores else None
        settings = _settings(logits)
        router_forward[(triton.cdiv(len(logits), settings["ROWS"]),)](
            logits, probs, chosen.view(torch.uint8), probs if scores is None else scores, *logits.shape, logits.stride(0),
            FACTOR=factor, TOPK=topk, SIGMOID=sigmoid, BEFORE=before, WITH_SCORES=with_scores, **settings,
        )  # fmt: skip
        ctx.save_for_backward(logits, chosen)
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        ctx.settings = topk, sigmoid, before, factor, settings
        return probs, chosen, scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        topk, sigmoid, before, factor, settings = ctx.settings
        of_probs, of_scores = (None if given is None else given.contiguous() for given in (grads[0], grads[2]))
        grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        router_backward[(triton.cdiv(len(logits), settings["ROWS"]),)](
            logits, chosen.view(torch.uint8), grad if of_probs is None else of_probs, grad if of_scores is None else of_scores, grad,
            *logits.shape, logits.stride(0), FACTOR=factor, TOPK=topk, SIGMOID=sigmoid, BEFORE=before,
            WITH_PROBS=of_probs is not None, WITH_SCORES=of_scores is not None, **settings,
        )  # fmt: skip
        return grad, *[None] * 5


def route(
    logits: torch.Tensor, topk: int, *, score_function: str, pre_softmax: bool, scaling_factor: float | None, with_scores: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """logits [T, E] -> (probs [T, E] in fp32 at least, choice [T, E] bool, with `with_scores` normalized scores like probs).

    As routing.route and routing.dense, and routing.normalized_scores; softmax and sigmoid, at most MOST_EXPERTS experts.
    """
    assert score_function in ("softmax", "sigmoid") and 1 <= topk <= logits.shape[1] <= MOST_EXPERTS
    sigmoid, factor = score_function == "sigmoid", 1.0 if scaling_factor is None else scaling_factor
    return _Router.apply(logits, topk, sigmoid, pre_softmax and not sigmoid, factor, with_scores)
