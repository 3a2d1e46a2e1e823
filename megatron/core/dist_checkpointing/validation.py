"""Whether the ranks' shards make up whole tensors, and what a checkpoint and a request have that the other has not."""

import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItemType

from .errors import CheckpointError
from .mapping import ShardedObject

MOST_LISTED = 8  # entries of a list in a message
# entries that are written for every module (or run) and that only some have a use for: nobody misses them
BESIDE_WEIGHTS = re.compile(r"(^|\.)(_extra_state|rerun_state_machine_state)/shard_")


class StrictHandling(Enum):
    """What `load` does about unexpected keys (wanted, and not in the checkpoint) and missing ones (there, and wanted by no rank).

    Missing keys (but those of BESIDE_WEIGHTS) count for `*_ALL` alone: ranks tell each other what they want. An unexpected key's tensor
    keeps its values where the load goes on. `RETURN_*`: `load` returns (state dict, missing keys, unexpected keys).
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"  # an error, when it comes to reading them
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def counts_missing(self) -> bool:
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @property
    def raises(self) -> bool:
        return self in (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)

    @property
    def logs(self) -> bool:
        return self in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)

    @property
    def returns(self) -> bool:
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def listed(items: list[str]) -> str:
    """Lines for a message, the first few of `items`."""
    more = f" (and {len(items) - MOST_LISTED} more)" if len(items) > MOST_LISTED else ""
    return "\n  ".join(["", *items[:MOST_LISTED]]) + more


@dataclass(frozen=True)
class _Block:
    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.shape} at {self.offset}"

    def overlaps(self, other: "_Block") -> bool:
        pairs = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        return all(first < start + length and start < first + size for first, size, start, length in pairs)


def check_whole(plans: list[SavePlan], copies: Collection[str] = ()) -> None:
    """Raise CheckpointError unless the plans, one a rank, write every element of every tensor and object once.

    copies: keys that ranks hold and do not write.
    """
    tensors: dict[str, list[tuple[int, TensorWriteData]]] = defaultdict(list)
    objects: dict[str, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn].append(rank)
            else:
                assert item.tensor_data is not None
                tensors[item.index.fqn].append((rank, item.tensor_data))
    problems = [problem for key, found in tensors.items() for problem in _tensor_problems(key, found)] + _object_problems(objects)
    unwritten = sorted(set(copies) - tensors.keys() - objects.keys())
    problems += [f"{key}: no rank writes it: none of its copies has replica_id 0" for key in unwritten]
    if problems:
        raise CheckpointError(f"the ranks' shards do not make up whole tensors:{listed(problems)}")


def _tensor_problems(key: str, found: list[tuple[int, TensorWriteData]]) -> list[str]:
    kinds = {(tuple(data.size), data.properties.dtype): rank for rank, data in reversed(found)}
    if len(kinds) > 1:
        said = [f"{shape} of {dtype} on rank {rank}" for (shape, dtype), rank in kinds.items()]
        return [f"{key} is {', '.join(reversed(said))}: it needs one shape and dtype"]
    blocks = [_Block(rank, tuple(data.chunk.offsets), tuple(data.chunk.sizes)) for rank, data in found]
    if pair := _overlapping(blocks):
        one, other = pair
        if (one.offset, one.shape) == (other.offset, other.shape):
            return [f"{key}: ranks {one.rank} and {other.rank} both write the block {one}: of its copies one alone may have replica_id 0"]
        return [f"{key}: the blocks {one} of rank {one.rank} and {other} of rank {other.rank} overlap"]
    total, covered = math.prod(found[0][1].size), sum(math.prod(block.shape) for block in blocks)
    if covered != total:
        return [f"{key}: {len(blocks)} shards hold {covered} of {total} elements (a block needs one copy whose replica_id is 0)"]
    return []


def _overlapping(blocks: list[_Block]) -> tuple[_Block, _Block] | None:
    """Two that have an element in common. Along the axis with the most blocks a block is compared with those beside it alone."""
    blocks = [block for block in blocks if math.prod(block.shape)]
    if len(blocks) < 2:
        return None
    axes = range(len(blocks[0].offset))
    axis = max(axes, key=lambda axis: len({block.offset[axis] for block in blocks}), default=None)
    if axis is None:
        return blocks[0], blocks[1]
    beside: list[_Block] = []
    for block in sorted(blocks, key=lambda block: block.offset[axis]):
        beside = [other for other in beside if other.offset[axis] + other.shape[axis] > block.offset[axis]]
        for other in beside:
            if block.overlaps(other):
                return other, block
        beside.append(block)
    return None


def _object_problems(objects: dict[str, list[int]]) -> list[str]:
    problems, grids = [], defaultdict(set)
    for name, ranks in objects.items():
        if len(ranks) > 1:
            problems.append(f"{name}: ranks {ranks[0]} and {ranks[1]} both write it: of its copies one alone may have replica_id 0")
        if place := ShardedObject.parsed(name):
            grids[place.key, place.global_shape].add(place.global_offset)
    for (key, shape), places in grids.items():
        if len(places) != math.prod(shape):
            problems.append(f"{key}: {len(places)} of its {math.prod(shape)} objects are written, a grid of {shape}")
    return problems
