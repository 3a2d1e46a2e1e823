"""Kind all_gather: every rank collects the keys and values of all tokens, and attends with its own queries.

Received by a rank for a layer, n ranks: n - 1 times a rank's keys and values forward; backward again, and as many gradients go to their
owners. Gathered keys are not kept for the backward pass.
"""

from typing import Any

import torch

from megatron.core.context_parallel.partial_attention import (
    Geometry,
    PartialAttention,
    PartialGradient,
    by_head,
    by_token,
    dense_last_dim,
)
from megatron.core.context_parallel.sequence_split import sequence_order
from megatron.core.tensor_parallel.mappings import gather_first_dim, reduce_scatter_first_dim
from megatron.core.utils import Group, get_pg_size


def _order(geometry: Geometry, group: Group, device: torch.device) -> torch.Tensor:
    return sequence_order(geometry.documents, tuple(range(get_pg_size(group))), geometry.size, device)


class _GatheredAttention(torch.autograd.Function):
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
        order = _order(geometry, group, query.device)
        keys, values = (by_head(gather_first_dim(t, group).index_select(0, order)) for t in (key, value))
        partial = PartialAttention(by_head(query), geometry, scale, kernel)
        partial.add(None, keys, values)
        out, lse = partial.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.settings = geometry, group, scale, kernel, order
        return by_token(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        geometry, group, scale, kernel, order = ctx.settings
        keys, values = (by_head(gather_first_dim(t, group).index_select(0, order)) for t in (key, value))
        partial = PartialGradient(by_head(dense_last_dim(grads[0])), by_head(query), out, lse, geometry, scale, kernel)
        sums = []
        for grad in partial.of(None, keys, values):
            by_rank = torch.empty_like(by_token(grad), memory_format=torch.contiguous_format).index_copy_(0, order, by_token(grad))
            sums.append(reduce_scatter_first_dim(by_rank, group))
        return by_token(partial.of_queries()), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None, None, None


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry, group: Group, scale: float, kernel: str
) -> torch.Tensor:
    """query [s / ranks, b, heads, d], key and value [s / ranks, b, groups, d] of this rank's tokens -> like query."""
    return _GatheredAttention.apply(query, key, value, geometry, group, scale, kernel)
