"""Sharing the work among the ranks of a group that hold the same shards: who writes or reads each, and handing round what was read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.utils import Group, get_pg_rank, get_pg_size

from .mapping import ShardedTensor, is_main_replica

ShardId = tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offset, shape


def id_of(tensor: ShardedTensor) -> ShardId:
    return tensor.key, tensor.global_offset, tensor.local_shape


@dataclass(frozen=True)
class Held:
    """A shard that a rank holds."""

    shard: ShardId
    dtype: torch.dtype
    is_main: bool
    device: str  # type of the device that it is on

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shard[2]).numel() * self.dtype.itemsize


def held_by_all(tensors: list[ShardedTensor], group: Group) -> list[list[Held]]:
    """What each rank of the group holds. Collective."""
    own = [
        Held(id_of(tensor), tensor.dtype, is_main_replica(tensor.replica_id), tensor.data.device.type if tensor.data is not None else "cpu")
        for tensor in tensors
    ]
    found: list[list[Held]] = [[] for _ in range(get_pg_size(group))]
    if len(found) == 1:
        return [own]
    dist.all_gather_object(found, own, group=group)
    return found


def share_out(held: Sequence[Sequence[Held]]) -> dict[ShardId, int]:
    """Shard -> the rank, among those that hold it, whose work it is: largest first, to the one that has the least.

    The same on every rank, in the same order. Shards that one rank alone holds are its own.
    """
    holders: dict[ShardId, list[int]] = {}
    sizes: dict[ShardId, int] = {}
    for rank, shards in enumerate(held):
        for one in shards:
            ranks = holders.setdefault(one.shard, [])
            if rank not in ranks:
                ranks.append(rank)
            sizes[one.shard] = one.nbytes
    load = [0] * len(held)
    shares: dict[ShardId, int] = {}
    for shard in sorted(holders, key=lambda shard: (len(holders[shard]) > 1, -sizes[shard], shard)):
        rank = min(holders[shard], key=lambda rank: load[rank])
        shares[shard] = rank
        load[rank] += sizes[shard]
    return shares


def keys_of_copies(held: list[list[Held]]) -> set[str]:
    """Keys of the shards that ranks of the group hold, with the main replica on none of them."""
    main = {one.shard for shards in held for one in shards if one.is_main}
    return {one.shard[0] for shards in held for one in shards if one.shard not in main}


def to_write(tensors: list[ShardedTensor], held: list[list[Held]], group: Group) -> dict[ShardId, ShardedTensor]:
    """Those of a rank's tensors that it writes: each shard whose main replica is in the group is written by one of its ranks.

    A group of one writes its main replicas. Raises ValueError for a shard with two of them.
    """
    main: dict[ShardId, int] = {}
    for rank, shards in enumerate(held):
        for one in shards:
            if one.is_main and one.shard in main:
                key, offset, shape = one.shard
                who = f"ranks {main[one.shard]} and {rank} of the group" if len(held) > 1 else "two tensors of one rank"
                raise ValueError(f"{key}: {who} have replica_id 0 for the block {shape} at {offset}: of its copies one alone may")
            if one.is_main:
                main[one.shard] = rank
    shares = share_out([[one for one in shards if one.shard in main] for shards in held])
    return {id_of(tensor): tensor for tensor in tensors if shares.get(id_of(tensor)) == get_pg_rank(group)}


@dataclass
class Reading:
    """Who of a group reads which shard. Building one is collective."""

    held: list[list[Held]]
    shares: dict[ShardId, int]
    rank: int
    group: Group

    @classmethod
    def of(cls, tensors: list[ShardedTensor], group: Group) -> "Reading":
        held = held_by_all(tensors, group)
        return cls(held, share_out(held), get_pg_rank(group), group)

    def own(self, tensors: list[ShardedTensor]) -> list[ShardedTensor]:
        """Those that this rank reads."""
        return [tensor for tensor in tensors if self.shares[id_of(tensor)] == self.rank]

    def hand_round(self, tensors: list[ShardedTensor]) -> None:
        """Fill the shards that other ranks have read, from them. Collective."""
        wanted: dict[ShardId, list[ShardedTensor]] = {}
        for tensor in tensors:
            wanted.setdefault(id_of(tensor), []).append(tensor)
        seen: dict[ShardId, tuple[Held, set[int]]] = {}
        for rank, shards in enumerate(self.held):
            for one in shards:
                seen.setdefault(one.shard, (one, set()))[1].add(rank)
        for shard, reader in self.shares.items():
            one, ranks = seen[shard]
            if len(ranks) == 1:
                continue
            own = wanted.get(shard, [])
            data = (
                own[0].data.detach() if own and own[0].data is not None else torch.empty(one.nbytes, dtype=torch.uint8, device=one.device)
            )
            carrier = data.contiguous().view(-1).view(torch.uint8)
            dist.broadcast(carrier, group=self.group, group_src=reader)
            for tensor in own if reader != self.rank else []:
                assert tensor.data is not None
                tensor.data.detach().copy_(carrier.view(tensor.dtype).view(tensor.local_shape))
