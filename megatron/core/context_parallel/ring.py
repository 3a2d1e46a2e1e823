"""Kind p2p: keys and values travel round the ring (Liu et al. 2023), zigzag so that every rank computes the same under a causal mask.

Sent by a rank for a layer, n ranks: n - 1 times its keys and values forward; backward n - 2 times, because what came first is kept, and
n - 1 times as many of their gradients (in fp32 where sums of more than two travel). In step i of the forward pass a rank holds the keys of
rank r - i; the backward pass begins with step 1 and ends with step 0, the rank's own. Gradients of keys set out at the first rank that is
not their owner, and end at the owner. So every transfer, the last one of gradients too, starts before a computation that hides it.
"""

from typing import Any

import torch

from megatron.core.context_parallel.communication import Arriving, Ring
from megatron.core.context_parallel.partial_attention import (
    Geometry,
    PartialAttention,
    PartialGradient,
    by_head,
    by_token,
    dense_last_dim,
)
from megatron.core.utils import Group


def _together(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Both [b, groups, s, d] in one message, [2, s, b, groups, d]."""
    return torch.stack([by_token(key), by_token(value)])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        geometry: Geometry,
        group: Group,
        scale: float,
        kernel: str,
        by_copies: bool,
    ) -> torch.Tensor:
        ring = Ring(group, by_copies)
        q, k, v = (by_head(t) for t in (query, key, value))
        partial = PartialAttention(q, geometry, scale, kernel)
        held, transfer, first = _together(k, v), None, None
        for step in range(ring.size):
            if transfer is not None:
                held = transfer()
                k, v = (by_head(t) for t in held)
            if step == 1:
                first = held
            transfer = ring.start(held) if step + 1 < ring.size else None
            partial.add((ring.rank - step) % ring.size, k, v)
        out, lse = partial.result()
        ctx.save_for_backward(query, key, value, out, lse, first)
        ctx.settings = geometry, ring, scale, kernel
        return by_token(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse, held = ctx.saved_tensors
        geometry, ring, scale, kernel = ctx.settings
        partial = PartialGradient(by_head(dense_last_dim(grads[0])), by_head(query), out, lse, geometry, scale, kernel)
        going: Arriving | None = None
        for step in range(1, ring.size):
            transfer = ring.start(held) if step + 1 < ring.size else None
            part = _together(*partial.of((ring.rank - step) % ring.size, *(by_head(t) for t in held)))
            going = ring.start(part if going is None else _added(part, going))
            if transfer is not None:
                held = transfer()
        own = _together(*partial.of(ring.rank, by_head(key), by_head(value)))
        total = own if going is None else _added(own, going)
        return by_token(partial.of_queries()), total[0].to(key.dtype), total[1].to(value.dtype), None, None, None, None, None


def _added(part: torch.Tensor, going: Arriving) -> torch.Tensor:
    return part.add_(going())


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    geometry: Geometry,
    group: Group,
    scale: float,
    kernel: str,
    by_copies: bool,
) -> torch.Tensor:
    """query [s / ranks, b, heads, d], key and value [s / ranks, b, groups, d] of this rank's tokens -> like query."""
    return _RingAttention.apply(query, key, value, geometry, group, scale, kernel, by_copies)
