"""Tokens to the ranks of their experts, and the experts' outputs back.

Ranks of the group `expt_tp` split each expert; ranks of `ep` hold different experts. Every rank brings tokens of its own, except with
tensor parallelism without sequence parallelism, where all of them hold the same ones.

    dispatch: tokens are gathered over expt_tp, copied once for each of their experts, sent over ep, and sorted by expert
    combine:  rows are sent back, summed by token, and the parts that the ranks of expt_tp computed are added up (reduce-scatter)

Numbers of tokens differ from rank to rank: they are exchanged and read by the host once a layer. No read at all with one expert-parallel
rank where every token goes to top-k experts, with the dispatcher allgather there too, and with inputs padded to capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_first_dim,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.permutation import RowMap, make_row_map, permute, reorder, take_probs, transposed_chunks, unpermute
from megatron.core.transformer.moe.routing import capacity_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import Group, get_pg_rank, get_pg_size


class TokenCounts:
    """Rows of each local expert: [experts] on the device; as a list, read from there at most once."""

    def __init__(self, on_device: torch.Tensor, on_host: list[int] | None = None) -> None:
        self.on_device = on_device
        self._on_host = on_host
        self._on_its_way: device.HostCopy | None = None

    def prefetch(self) -> None:
        """Start the copy that a later `tolist` will want."""
        if self._on_host is None and self._on_its_way is None:
            self._on_its_way = device.HostCopy(self.on_device)

    def tolist(self) -> list[int]:
        if self._on_host is None:
            self._on_host = (self._on_its_way or self.on_device).tolist()
        return self._on_host


@dataclass
class Dispatched:
    """What the local experts get: tokens [n, h] sorted by expert, their weights [n] and counts; `back` turns outputs [n, h] into [T, h]."""

    tokens: torch.Tensor
    probs: torch.Tensor
    counts: TokenCounts
    back: Callable[[torch.Tensor], torch.Tensor]


# What is communicated


class _Exchange:
    """An all-to-all that is under way."""

    def __init__(self, group: Group, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received
        self.work: Any = None
        self.arriving: torch.Tensor | None = None

    def start(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        self.arriving = x.new_empty(sum(received), *x.shape[1:])
        self.work = dist.all_to_all_single(self.arriving, x.contiguous(), received, sent, group=self.group, async_op=True)
        return self.arriving

    def wait(self) -> torch.Tensor:
        self.work.wait()
        assert self.arriving is not None
        arrived, self.work, self.arriving = self.arriving, None, None
        return arrived


class _Start(torch.autograd.Function):
    """Returns what is sent, for `_Finish` alone. Its gradient arrives like it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.start(grads[0], back=True), None


def all_to_all(
    x: torch.Tensor, group: Group, sent: list[int], received: list[int], beside: Callable[[], None] | None = None
) -> torch.Tensor:
    """Rows of x to the ranks of `group`, sent[r] of them to rank r; received[r] come from it. Differentiable.

    `beside` runs while they are on their way (NCCL has a stream of its own). Autograd, which goes through nodes last first, runs its
    backward while the gradients are on theirs.
    """
    if get_pg_size(group) == 1:
        if beside is not None:
            beside()
        return x
    exchange = _Exchange(group, sent, received)
    sent_off = _Start.apply(x, exchange)
    if beside is not None:
        beside()
    return _Finish.apply(sent_off, exchange)


class MoETokenDispatcher:
    """What the dispatchers share. `local_expert_indices`: the experts of this rank, consecutive."""

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        assert config.num_moe_experts is not None
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self.config, self.num_experts, self.topk = config, config.num_moe_experts, config.moe_router_topk
        self.ep_group, self.etp_group, self.tp_ep_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.tp_ep
        self.same_tokens = get_pg_size(pg_collection.tp) > 1 and not config.sequence_parallel

    def dispatch(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        has_padding: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Dispatched:
        """tokens [T, h], weights and choice [T, E]. has_padding: some tokens go nowhere. `beside`: see `all_to_all`."""
        raise NotImplementedError

    def _gather(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """Tokens (or weights) of all ranks of the group, which each compute a part of what comes of them."""
        if get_pg_size(group) == 1:
            return x
        if self.same_tokens:
            return copy_to_tensor_model_parallel_region(x, group=group)
        return gather_from_sequence_parallel_region(x, group=group)

    def _gather_map(self, routing_map: torch.Tensor, group: Group) -> torch.Tensor:
        if get_pg_size(group) == 1 or self.same_tokens:
            return routing_map
        return gather_first_dim(routing_map.to(torch.uint8), group).bool()

    def _scatter(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum of the ranks' parts, of this rank's own tokens."""
        if get_pg_size(group) == 1:
            return x
        if self.same_tokens:
            return reduce_from_tensor_model_parallel_region(x, group=group)
        return reduce_scatter_to_sequence_parallel_region(x, group=group)

    def _every_token_has_topk(self, has_padding: bool) -> bool:
        return not has_padding and self.config.moe_expert_capacity_factor is None


class MoEAllGatherTokenDispatcher(MoETokenDispatcher):
    """Every rank gets all tokens of its expert group, takes those of its experts, and gives back what it computed of each.

    More is communicated than by all-to-all; with few experts, or top-k near their number, it is the faster one.
    """

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
        group = self.tp_ep_group
        tokens, probs = self._gather(tokens, group), self._gather(probs, group)
        mine = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        local = self._gather_map(routing_map, group)[:, mine]
        counts = TokenCounts(local.sum(dim=0))
        full = self._every_token_has_topk(has_padding) and self.num_local_experts == self.num_experts
        rows = local.shape[0] * self.topk if full else sum(counts.tolist())
        row_map = make_row_map(local, rows, min(self.topk, self.num_local_experts), full=full, fused=self.config.moe_permute_fusion)
        return Dispatched(
            permute(tokens, row_map),
            take_probs(probs[:, mine].contiguous(), row_map),
            counts,
            lambda out: self._scatter(unpermute(out, row_map), group),
        )


class MoEAlltoAllTokenDispatcher(MoETokenDispatcher):
    """Each rank sends its tokens' copies to the ranks of their experts alone."""

    def dispatch(
        self,
        tokens: torch.Tensor,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        has_padding: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Dispatched:
        tokens, probs = self._gather(tokens, self.etp_group), self._gather(probs, self.etp_group)
        routing_map = self._gather_map(routing_map, self.etp_group)
        row_map, by_rank, host = self._rows(routing_map, has_padding)
        rows, weights = permute(tokens, row_map), take_probs(probs, row_map)
        ranks, local = get_pg_size(self.ep_group), self.num_local_experts
        if ranks == 1:
            if beside is not None:
                beside()
            counts = TokenCounts(by_rank[0], host[0] if host else None)
            return Dispatched(rows, weights, counts, lambda out: self._scatter(unpermute(out, row_map), self.etp_group))
        me = get_pg_rank(self.ep_group)
        assert host is not None
        sent = [sum(host[me][rank * local : (rank + 1) * local]) for rank in range(ranks)]
        mine = [row[me * local : (me + 1) * local] for row in host]  # [rank][local expert]
        received = [sum(row) for row in mine]
        weights = all_to_all(weights, self.ep_group, sent, received)
        rows = all_to_all(rows, self.ep_group, sent, received, beside)
        here = by_rank[:, me * local : (me + 1) * local]
        order, inverse = transposed_chunks(here, sum(received))
        sort = local > 1

        def back(out: torch.Tensor) -> torch.Tensor:
            out = reorder(out, inverse, order) if sort else out
            out = all_to_all(out, self.ep_group, received, sent)
            return self._scatter(unpermute(out, row_map), self.etp_group)

        return Dispatched(
            reorder(rows, order, inverse) if sort else rows,
            reorder(weights, order, inverse) if sort else weights,
            TokenCounts(here.sum(dim=0), [sum(column) for column in zip(*mine)]),
            back,
        )

    def _rows(self, routing_map: torch.Tensor, has_padding: bool) -> tuple[RowMap, torch.Tensor, list[list[int]] | None]:
        """(this rank's rows, rows by expert-parallel rank and expert [ranks, E] on the device, the same on the host where it is known)."""
        ranks = get_pg_size(self.ep_group)
        if self.config.moe_pad_expert_input_to_capacity:
            capacity = self._padded_rows(routing_map.shape[0])
            rows = capacity * self.num_experts
            row_map = make_row_map(routing_map, rows, self.topk, capacity=capacity, fused=self.config.moe_permute_fusion)
            even = torch.full((ranks, self.num_experts), capacity, device=routing_map.device)
            return row_map, even, [[capacity] * self.num_experts] * ranks
        counts = routing_map.sum(dim=0)
        by_rank = counts.unsqueeze(0) if ranks == 1 else gather_first_dim(counts.unsqueeze(0), self.ep_group)
        full = self._every_token_has_topk(has_padding)
        # The one read of a layer. What the permutation needs of it, the number of rows, is known without it where every token has top-k.
        host = None if ranks == 1 and full else by_rank.tolist()
        rows = routing_map.shape[0] * self.topk if full else sum(host[get_pg_rank(self.ep_group)])  # type: ignore[index]
        return make_row_map(routing_map, rows, self.topk, full=full, fused=self.config.moe_permute_fusion), by_rank, host

    def _padded_rows(self, tokens: int) -> int:
        """Rows of an expert from `tokens` tokens that lie here: the whole micro batch's capacity, or all of them where they are fewer."""
        config = self.config
        assert config.moe_expert_capacity_factor is not None
        etp = 1 if self.same_tokens else get_pg_size(self.etp_group)
        split = config.tensor_model_parallel_size if config.sequence_parallel else 1
        whole = tokens // etp * split * config.context_parallel_size
        # of etp gathered ranks each may belong to another micro batch
        return min(tokens, etp * capacity_of(whole, self.topk, self.num_experts, config.moe_expert_capacity_factor))


# flex stands in a file of its own
DISPATCHERS = {"allgather": MoEAllGatherTokenDispatcher, "alltoall": MoEAlltoAllTokenDispatcher}


def build_dispatcher(
    num_local_experts: int, local_expert_indices: list[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
) -> MoETokenDispatcher:
    """The dispatcher that config.moe_token_dispatcher_type names. Raises ValueError for flex without DeepEP."""
    if config.moe_token_dispatcher_type == "flex":
        from megatron.core.transformer.moe.flex_dispatcher import MoEFlexTokenDispatcher  # it derives from a class of this file

        return MoEFlexTokenDispatcher(num_local_experts, local_expert_indices, config, pg_collection)
    return DISPATCHERS[config.moe_token_dispatcher_type](num_local_experts, local_expert_indices, config, pg_collection)
