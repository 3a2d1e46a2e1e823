"""The dispatcher flex: a token goes once to each rank that has experts of it, by the kernels of the package DeepEP (`deep_ep`).

    dispatch: tokens are gathered over expt_tp, sent over ep together with their experts and weights, copied there to their experts' rows
    combine:  a token's rows are summed where the experts are, then over the ranks of ep, and over those of expt_tp (reduce-scatter)

The alltoall dispatcher sends a copy for each expert. Here one goes to each rank, so that less is communicated where several of a token's
experts share one. DeepEP's Buffer (https://github.com/deepseek-ai/DeepEP) is used by its public calls alone, one after the other: nothing
computes while tokens are on their way. Its tokens are bf16, its weights fp32: those of a router in fp64 are rounded.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from megatron.core.optional_imports import require
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.permutation import make_row_map, permute, take_probs, unpermute
from megatron.core.transformer.moe.token_dispatcher import Dispatched, MoETokenDispatcher, TokenCounts
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size

# (group, bytes for NVLink, bytes for RDMA) -> Buffer. They are large: all layers use one, which goes when the last of them does.
_buffers: WeakValueDictionary[tuple[Any, int, int], Any] = WeakValueDictionary()


# What is communicated


class _Exchange:
    """Tokens that were sent, and what DeepEP knows of the way back."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.handle: Any = None
        self.experts: torch.Tensor | None = (
            None  # [R, k] int64: of each token that arrived, its experts among the local ones; -1: elsewhere
        )
        self.counts: list[int] = []  # rows of each local expert

    def start(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens [T, h] and weights [T, k] to the ranks of their experts [T, k]; what arrived: ([R, h], [R, k])."""
        by_rank, by_rdma_rank, by_expert, in_rank, _ = self.buffer.get_dispatch_layout(experts, self.num_experts)
        arrived, self.experts, arrived_weights, counts, self.handle, _ = self.buffer.dispatch(
            tokens,
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=by_expert,
        )
        self.counts = list(counts)
        return arrived, arrived_weights


class _Dispatch(torch.autograd.Function):
    """([T, h], [T, k]) -> ([R, h], [R, k]). The gradient of a token is the sum of its copies' gradients: what combine computes."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, exchange: _Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        return exchange.start(tokens.contiguous(), experts, weights.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        exchange: _Exchange = ctx.exchange
        tokens, weights, _ = exchange.buffer.combine(grads[0].contiguous(), exchange.handle, topk_weights=grads[1].contiguous())
        return tokens, weights, None, None


class _Combine(torch.autograd.Function):
    """[R, h] -> [T, h], sums over the ranks that a token went to; 0 where it went nowhere. Gradients go the way of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.buffer.combine(x.contiguous(), exchange.handle)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.buffer.dispatch(grads[0].contiguous(), handle=ctx.exchange.handle)[0], None


# What is computed: choices in DeepEP's form and in ours


@torch.no_grad()
def chosen_experts(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """[T, E] bool, at most topk true a row -> int64 [T, topk]: each token's experts in rising order, -1 after the last."""
    tokens, experts = routing_map.shape
    # one place beyond the end for the experts that were not chosen, which alone may be written twice
    place = torch.where(routing_map, routing_map.cumsum(dim=1) - 1, topk)
    numbers = torch.arange(experts, device=routing_map.device).expand(tokens, experts)
    return place.new_full((tokens, topk + 1), -1).scatter_(1, place, numbers)[:, :topk].contiguous()


def chosen_weights(probs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """probs [T, E], experts [T, k] -> fp32 [T, k]: the experts' weights, 0 for -1. Differentiable."""
    return probs.gather(1, experts.clamp(min=0)).masked_fill(experts < 0, 0.0).float()


def local_choice(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse, of a rank's own experts: experts [R, k] (-1: elsewhere), weights [R, k] -> (routing map, weights) [R, num_experts]."""
    place = torch.where(experts < 0, num_experts, experts)
    routing_map = torch.zeros(len(place), num_experts + 1, dtype=torch.bool, device=place.device).scatter_(1, place, True)
    probs = weights.new_zeros(len(place), num_experts + 1).scatter(1, place, weights)
    return routing_map[:, :num_experts].contiguous(), probs[:, :num_experts].contiguous()


class MoEFlexTokenDispatcher(MoETokenDispatcher):
    """See the file's head. On one expert-parallel rank nothing is sent, and DeepEP not called.

    Dropped tokens, and those that are padding, go nowhere. Raises MissingPackageError (a ValueError) without the package, and ValueError
    for numbers of ranks that DeepEP has no configuration for.
    """

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        self._buffer_class = require("deep_ep", "moe_token_dispatcher_type flex").Buffer
        self._buffer: Any = None
        ranks = get_pg_size(self.ep_group)
        self._bytes = _buffer_bytes(self._buffer_class, ranks, config) if ranks > 1 else (0, 0)

    def dispatch(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        has_padding: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Dispatched:
        if beside is not None:
            beside()
        tokens, probs = self._gather(tokens, self.etp_group), self._gather(probs, self.etp_group)
        routing_map = self._gather_map(routing_map, self.etp_group)
        if get_pg_size(self.ep_group) == 1:
            full = self._every_token_has_topk(has_padding)
            counts = TokenCounts(routing_map.sum(dim=0))
            return self._to_rows(tokens, probs, routing_map, counts, lambda x: x, routing_map.shape[0] * self.topk if full else None)
        exchange = _Exchange(self._shared_buffer(), self.num_experts)
        experts = chosen_experts(routing_map, self.topk)
        arrived, weights = _Dispatch.apply(tokens, chosen_weights(probs, experts), experts, exchange)
        assert exchange.experts is not None
        local, weights = local_choice(exchange.experts, weights.to(probs.dtype), self.num_local_experts)
        counts = TokenCounts(local.sum(dim=0), exchange.counts)
        return self._to_rows(arrived, weights, local, counts, lambda x: _Combine.apply(x, exchange))

    def _to_rows(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        counts: TokenCounts,
        send_back: Callable[[torch.Tensor], torch.Tensor],
        full_rows: int | None = None,
    ) -> Dispatched:
        """Tokens that are here to the rows of their experts. full_rows: their number where every token has top-k experts here."""
        rows = sum(counts.tolist()) if full_rows is None else full_rows
        copies = min(self.topk, self.num_local_experts)
        row_map = make_row_map(routing_map, rows, copies, full=full_rows is not None, fused=self.config.moe_permute_fusion)
        return Dispatched(
            permute(tokens, row_map),
            take_probs(probs, row_map),
            counts,
            lambda out: self._scatter(send_back(unpermute(out, row_map)), self.etp_group),
        )

    def _shared_buffer(self) -> Any:
        """The group's; made when first needed, by all its ranks at once, and one for all layers."""
        if self._buffer is None:
            key = (self.ep_group, *self._bytes)
            self._buffer = _buffers.get(key)
            if self._buffer is None:
                self._buffer = _buffers[key] = self._buffer_class(self.ep_group, *self._bytes)
        return self._buffer


def _buffer_bytes(buffer_class: Any, ranks: int, config: TransformerConfig) -> tuple[int, int]:
    """What DeepEP wants for tokens of the model's width both ways: (for NVLink, for RDMA)."""
    try:
        configs = (buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks))
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"moe_token_dispatcher_type flex: DeepEP has no configuration for expert_model_parallel_size {ranks} ({error}); "
            "2, 4 and 8 work, and alltoall with any"
        ) from error
    token = config.hidden_size * max(config.params_dtype.itemsize, 2)
    nvlink = max(each.get_nvl_buffer_size_hint(token, ranks) for each in configs)
    return nvlink, max(each.get_rdma_buffer_size_hint(token, ranks) for each in configs)
