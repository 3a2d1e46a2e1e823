"""Kind p2p: keys and values travel round the ring (Liu et al. 2023), zigzag so that every rank computes the same under a causal mask.

Sent by a rank for a layer, n ranks: n - 1 times its keys and values forward, and again backward with as many of their gradients (in fp32
where sums of more than two travel). A transfer starts before the computation that hides it. In step i a rank holds the keys of rank
r - i; gradients of keys set out at the first rank that is not their owner, and end at the owner.
"""

from typing import Any

import torch

from megatron.core.context_parallel.communication import Ring, Transfer
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
    ) -> torch.Tensor:
        ring = Ring(group)
        q, k, v = (by_head(t) for t in (query, key, value))
        partial = PartialAttention(q, geometry, scale, kernel)
        held, transfer = _together(k, v), None
        for step in range(ring.size):
            if transfer is not None:
                held = transfer.wait()
                k, v = (by_head(t) for t in held)
            transfer = ring.start(held) if step + 1 < ring.size else None
            partial.add((ring.rank - step) % ring.size, k, v)
        out, lse = partial.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = geometry, group, scale, kernel
        return by_token(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        geometry, group, scale, kernel = ctx.settings
        ring = Ring(group)
        q, k, v = (by_head(t) for t in (query, key, value))
        partial = PartialGradient(by_head(dense_last_dim(grads[0])), q, out, lse, geometry, scale, kernel)
        held, transfer, going = _together(k, v), None, None
        own: torch.Tensor | None = None
        for step in range(ring.size):
            if transfer is not None:
                held = transfer.wait()
                k, v = (by_head(t) for t in held)
            transfer = ring.start(held) if step + 1 < ring.size else None
            part = _together(*partial.of((ring.rank - step) % ring.size, k, v))
            if step == 0:
                own = part
            else:
                going = ring.start(part if going is None else _added(part, going))
        assert own is not None
        total = own if going is None else _added(own, going)
        return by_token(partial.of_queries()), total[0].to(key.dtype), total[1].to(value.dtype), None, None, None, None


def _added(part: torch.Tensor, going: Transfer) -> torch.Tensor:
    return part.add_(going.wait())


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry, group: Group, scale: float, kernel: str
) -> torch.Tensor:
    """query [s / ranks, b, heads, d], key and value [s / ranks, b, groups, d] of this rank's tokens -> like query."""
    return _RingAttention.apply(query, key, value, geometry, group, scale, kernel)
