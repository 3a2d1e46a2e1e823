"""Which experts a token goes to, with which weights, and how unbalanced that is. Functions of tensors alone.

T tokens (s sequence positions x b samples), E experts, K = top-k. Scores are computed in fp32 at least.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron.core.transformer.moe.permutation import count_down

Sum = Callable[[torch.Tensor], torch.Tensor]  # over the ranks that share a micro batch, in a new tensor


def alone(x: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return x


def widened(logits: torch.Tensor) -> torch.Tensor:
    """In fp32, or as they are where that is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def scores_of(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """[.., E] -> the gate's scores: softmax, sigmoid (DeepSeek-V3), or sqrt(softplus)."""
    if score_function == "softmax":
        return logits.softmax(dim=-1)
    return logits.sigmoid() if score_function == "sigmoid" else F.softplus(logits).sqrt()


def log_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """Their logarithms up to a constant of the token. scores / sum(scores) is the softmax of them: exact where all scores are tiny, where
    a quotient would need an epsilon that a router could hide behind."""
    if score_function == "softmax":
        return logits
    if score_function == "sigmoid":
        return F.logsigmoid(logits)
    low = logits < -20.0  # softplus(x) is exp(x) there, to the last digit of fp32; its logarithm must not see an underflow
    return 0.5 * torch.where(low, logits, F.softplus(logits.masked_fill(low, 0.0)).log())


def normalized_scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    """[.., E] scores that sum to 1 per token, with the gate's own function (DeepSeek-V3, eq. 18)."""
    return log_scores(widened(logits), score_function).softmax(dim=-1)


def choose(scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> torch.Tensor:
    """Indices [T, K] of the largest of `scores` [T, E].

    Group-limited (DeepSeek-V2 and V3): only in the group_topk groups of consecutive experts with the largest sums of their topk //
    group_topk best scores.
    """
    scores = scores.detach()
    if num_groups is not None and group_topk is not None:
        grouped = scores.unflatten(-1, (num_groups, -1))
        best = grouped.topk(min(max(1, topk // group_topk), grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(group_topk, dim=-1).indices, False)
        scores = grouped.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(-2)
    return scores.topk(topk, dim=-1).indices


def route(
    logits: torch.Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices [T, K], weights [T, K] in fp32 at least) of `logits` [T, E].

    softmax: over the chosen experts, or with `pre_softmax` over all of them, then not renormalised. Other scores sum to 1 over the chosen
    experts (K > 1). `expert_bias` [E] is added to the scores that choose and never enters the weights. `chosen`: take these indices.
    """
    x = widened(logits)
    if score_function == "softmax" and not pre_softmax:
        indices = choose(x, topk, num_groups, group_topk) if chosen is None else chosen
        weights = x.gather(-1, indices).softmax(dim=-1)
    else:
        scores = scores_of(x, score_function)
        if chosen is None:
            chosen = choose(scores if expert_bias is None else scores + expert_bias, topk, num_groups, group_topk)
        indices = chosen
        if score_function == "softmax" or topk == 1:
            weights = scores.gather(-1, indices)
        else:
            weights = log_scores(x, score_function).gather(-1, indices).softmax(dim=-1)
    return indices, weights if scaling_factor is None else weights * scaling_factor


def dense(
    indices: torch.Tensor, weights: torch.Tensor, num_experts: int, padding: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs [T, E], map [T, E] bool) of indices and weights [T, K]; tokens of `padding` [T] (True: padding) go nowhere."""
    probs = weights.new_zeros(indices.shape[0], num_experts).scatter(1, indices, weights)
    return without_padding(probs, torch.zeros_like(probs, dtype=torch.bool).scatter(1, indices, True), padding)


def without_padding(probs: torch.Tensor, routing_map: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """probs and map [T, E] with nothing at the tokens of `padding` [T]."""
    if padding is None:
        return probs, routing_map
    return probs.masked_fill(padding.unsqueeze(-1), 0.0), routing_map & ~padding.unsqueeze(-1)


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, tolerance: float = 1e-4, most: int = 1000) -> torch.Tensor:
    """exp(logits) [T, E] scaled so that each token and each expert has the same mass (S-BASE, Clark et al. 2022, appendix B).

    Waits for the device once an iteration.
    """
    cost = (logits - logits.max()).exp() if logits.numel() else logits
    tokens, experts = cost.shape
    rows, columns = cost.new_ones(tokens), cost.new_ones(experts)
    tiny = torch.finfo(cost.dtype).tiny
    for _ in range(most if cost.numel() else 0):
        rows = 1.0 / (tokens * (cost * columns).sum(dim=1)).clamp(min=tiny)
        before, columns = columns, 1.0 / (experts * (cost * rows.unsqueeze(1)).sum(dim=0)).clamp(min=tiny)
        if (columns - before).abs().mean() <= tolerance * columns.abs().mean():
            break
    return cost * columns * rows.unsqueeze(1)


def switch_loss(scores: torch.Tensor, counts: torch.Tensor, num_tokens: torch.Tensor | int, topk: int) -> torch.Tensor:
    """Balance loss E / (K T^2) sum_e P_e f_e (Switch Transformer, eq. 4 to 6, for top-k), 1 where balanced.

    scores [T', .., E] of this rank's tokens, summing to 1 per token and 0 for padding; counts [.., E]: tokens that chose each expert, over
    all ranks of the micro batch, as num_tokens T. Summed over these ranks it is the whole loss, and its gradient is the whole one's.
    """
    experts = scores.shape[-1]
    product = (scores.sum(dim=0) * counts.to(scores.dtype)).sum(dim=-1)
    if isinstance(num_tokens, int):
        return product * (experts / (topk * max(num_tokens, 1) ** 2))
    return product * experts / (topk * num_tokens.clamp(min=1).to(scores.dtype).square())


def sequence_loss(scores: torch.Tensor, counts: torch.Tensor, num_tokens: torch.Tensor | int, topk: int) -> torch.Tensor:
    """The mean over the samples of each one's balance loss (DeepSeek-V3, eq. 17 to 20). scores [s', b, E], counts [b, E], num_tokens: of a
    sequence, int or [b]. Samples of padding alone do not count."""
    losses = switch_loss(scores, counts, num_tokens, topk)
    if isinstance(num_tokens, int):
        return losses.mean()
    return losses.sum() / (num_tokens > 0).sum().clamp(min=1)


def global_loss(
    scores: torch.Tensor, num_tokens: torch.Tensor | int, counts: torch.Tensor, counted_tokens: torch.Tensor, topk: int
) -> torch.Tensor:
    """Like `switch_loss` with mean scores of this micro batch (num_tokens) but the share of choices of all `counted_tokens` so far."""
    share = counts.to(scores.dtype) / counted_tokens.clamp(min=1).to(scores.dtype)
    tokens = max(num_tokens, 1) if isinstance(num_tokens, int) else num_tokens.clamp(min=1).to(scores.dtype)
    return (scores.sum(dim=0) * share).sum() * (scores.shape[-1] / topk) / tokens


def z_loss(logits: torch.Tensor, num_tokens: torch.Tensor | int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """mean over tokens of logsumexp(logits)^2 (ST-MoE, eq. 5): this rank's part of it. logits [T', E]."""
    squares = widened(logits).logsumexp(dim=-1).square()
    if padding is not None:
        squares = squares.masked_fill(padding, 0.0)
    return squares.sum() / (max(num_tokens, 1) if isinstance(num_tokens, int) else num_tokens.clamp(min=1).to(squares.dtype))


def capacity_of(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Most tokens of a micro batch of `num_tokens` that an expert takes: their even share times `factor`, at least 1, at most all."""
    return min(num_tokens, max(1, math.ceil(num_tokens * topk / num_experts * factor)))


def capacity_tensor(num_tokens: torch.Tensor, topk: int, num_experts: int, factor: float) -> torch.Tensor:
    """`capacity_of` for a number that lies on the device, without reading it."""
    share = torch.ceil(num_tokens.double() * topk / num_experts * factor).clamp(min=1)
    return torch.minimum(share, num_tokens.double()).long()


@torch.no_grad()
def within_capacity(probs: torch.Tensor, routing_map: torch.Tensor, capacity: torch.Tensor | int, policy: str) -> torch.Tensor:
    """The part of `routing_map` [T, E] that stays when no expert takes more than `capacity` tokens.

    policy "probs": those with the largest weights stay (ties: the first); "position": the first.
    """
    if policy == "position":
        return routing_map & (count_down(routing_map) <= capacity)
    order = probs.masked_fill(~routing_map, -math.inf).argsort(dim=0, descending=True, stable=True)
    places = torch.arange(probs.shape[0], device=probs.device).unsqueeze(1).expand_as(order)
    rank = torch.empty_like(order).scatter_(0, order, places)
    return routing_map & (rank < capacity)
