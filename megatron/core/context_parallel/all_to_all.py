"""Kinds a2a and a2a+p2p: ranks exchange heads for tokens (Jacobs et al. 2023), attend, and exchange back.

With n ranks that exchange, a rank sends (n - 1) / n of its queries, keys and values, and as much of the output; the same backward. Under
a2a+p2p the ranks that exchange hold neighbouring chunks, so that together they are one rank of the ring, with a longer chunk.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.context_parallel.communication import exchange
from megatron.core.tensor_parallel.mappings import gather_first_dim
from megatron.core.utils import Group, divide, get_pg_size


def _to_tokens(heads: torch.Tensor, group: Group, order: torch.Tensor) -> torch.Tensor:
    """[s, b, n, heads, d] for n ranks -> [n s, b, heads, d] from them, in the order of the sequence."""
    parts = exchange(heads.permute(2, 0, 1, 3, 4).contiguous(), group)
    return parts.flatten(0, 1).index_select(0, order)


def _to_heads(tokens: torch.Tensor, group: Group, order: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    by_rank = torch.empty_like(tokens, memory_format=torch.contiguous_format).index_copy_(0, order, tokens)
    parts = exchange(by_rank.unflatten(0, (get_pg_size(group), -1)), group)
    return parts.permute(1, 2, 0, 3, 4)


class _Exchange(torch.autograd.Function):
    """One of the two directions; the gradient goes the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Callable, back: Callable, group: Group, order: torch.Tensor) -> torch.Tensor:
        ctx.back, ctx.group, ctx.order = back, group, order
        return there(x, group, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.back(grads[0], ctx.group, ctx.order), None, None, None, None


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def all_to_all_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    group: Group,
    order: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """query [s, b, heads, d], key and value [s, b, groups, d] of this rank's tokens -> [s, b, heads, d].

    `attend(query, key, value, attention mask)` is attention with a share of the heads over all tokens of the ranks of `group`, which
    `order` puts in order. attention_mask [1 or b, 1, this rank's queries, keys]; `attend` gets the rows of all the ranks.
    """
    ranks = get_pg_size(group)
    shares = [divide(tensor.shape[2], ranks) for tensor in (query, key, value)]
    mixed = torch.cat([tensor.unflatten(2, (ranks, -1)) for tensor in (query, key, value)], dim=3)
    q, k, v = _Exchange.apply(mixed, _to_tokens, _to_heads, group, order).split(shares, dim=2)
    if attention_mask is not None:
        rows = attention_mask.movedim(2, 0).to(torch.uint8)
        attention_mask = gather_first_dim(rows, group).index_select(0, order).movedim(0, 2).to(torch.bool)
    out = attend(q, k, v, attention_mask)
    return _Exchange.apply(out, _to_heads, _to_tokens, group, order).flatten(2, 3)
