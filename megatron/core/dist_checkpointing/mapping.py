"""What a value in a sharded state dict can be: a piece of a global tensor, a piece of a global list of objects, or a recipe for pieces."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

StateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Of equal copies on several ranks the one that is written: all of its replica numbers are 0."""
    return all(number == 0 for number in (replica_id if isinstance(replica_id, tuple) else (replica_id,)))


@dataclass
class ShardedTensor:
    """A local tensor as a block of a global one.

    `prepend_axis_num` leading axes exist in the global tensor only (the layer of a stack, the expert): the block has length 1 there.
    `global_shape` and `global_offset` count all axes, `local_shape` those of `data`.
    `allow_shape_mismatch`: the stored tensor may have another size (padded vocabulary); what both have is read.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: None = None  # of older versions of Megatron-LM; another value is refused

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise ValueError when the block does not lie in the global tensor or the data has another shape or dtype."""
        if self.flattened_range is not None:
            raise ValueError(f"{self.key}: flattened_range {self.flattened_range} is not supported: give blocks of whole rows")
        axes = len(self.global_shape)
        if len(self.global_offset) != axes or len(self.local_shape) + self.prepend_axis_num != axes:
            raise ValueError(f"{self.key}: {self.local_shape} at {self.global_offset} does not fit a global shape of {self.global_shape}")
        for size, offset, length in zip(self.global_shape, self.global_offset, self.chunk_shape, strict=True):
            if offset < 0 or offset + length > size:
                raise ValueError(f"{self.key}: block {self.chunk_shape} at {self.global_offset} leaves the global {self.global_shape}")
        if self.data is not None and (tuple(self.data.shape) != self.local_shape or self.data.dtype != self.dtype):
            raise ValueError(f"{self.key}: data is {self.data.dtype} {tuple(self.data.shape)}, declared {self.dtype} {self.local_shape}")

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The block's shape with the prepended axes."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> "ShardedTensor":
        """A block of a regular grid: each `rank_offsets` entry is (axis, this block's index, number of blocks along it)."""
        local_shape = tuple(data.shape)
        chunk = [1] * prepend_axis_num + list(local_shape)
        offset, shape, fragments = [0] * len(chunk), list(chunk), [1] * len(chunk)
        for axis, index, count in rank_offsets:
            if not 0 <= index < count:
                raise ValueError(f"{key}: block {index} of {count} along axis {axis} does not exist")
            offset[axis], shape[axis], fragments[axis] = index * chunk[axis], count * chunk[axis], count
        place = (tuple(shape), tuple(offset), tuple(fragments))
        init_kwargs |= {"replica_id": replica_id, "prepend_axis_num": prepend_axis_num, "flattened_range": flattened_range}
        return cls(key, data, data.dtype, local_shape, *place, **init_kwargs)

    def has_regular_grid(self) -> bool:
        """Whether the global tensor is a grid of blocks of this one's shape (axis_fragmentations)."""
        return self.axis_fragmentations is not None

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """This block's place in the grid of blocks. Raises ValueError where there is no regular one."""
        if self.axis_fragmentations is None:
            raise ValueError(f"{self.key} is no part of a regular grid: it has no axis_fragmentations")
        counts = zip(self.global_offset, self.global_shape, self.axis_fragmentations, strict=True)
        return tuple(offset * count // size if size else 0 for offset, size, count in counts)

    def narrow(self, dim: int, start: int, length: int) -> list["ShardedTensor"]:
        """The elements [start, start + length) of the global tensor's axis `dim` as a tensor of its own: this block's part, or none of it.

        `dim` counts the prepended axes. The data of the result is a view.
        """
        if not 0 <= start <= start + length <= self.global_shape[dim]:
            raise ValueError(f"{self.key}: [{start}, {start + length}) is not within axis {dim} of {self.global_shape}")
        own = dim - self.prepend_axis_num
        first, size = self.global_offset[dim], self.chunk_shape[dim]
        low, high = max(first, start), min(first + size, start + length)
        if low >= high:
            return []
        data, local = self.data, list(self.local_shape)
        if own >= 0:
            data = None if data is None else data.narrow(own, low - first, high - low)
            local[own] = high - low
        shape, offset = list(self.global_shape), list(self.global_offset)
        shape[dim], offset[dim] = length, low - start
        changed = replace(self, data=None, local_shape=tuple(local), global_shape=tuple(shape), global_offset=tuple(offset))
        return [replace(changed, data=data, axis_fragmentations=None)]

    def without_data(self) -> "ShardedTensor":
        return replace(self, data=None)

    def init_data(self, device: torch.device | str, init_fn: Callable = torch.empty) -> None:
        """Allocate `data` on `device` when there is none."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)


@dataclass
class ShardedObject:
    """A picklable value as element `global_offset` of a grid of `global_shape` values."""

    key: str
    data: Any = field(repr=False)
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise ValueError when the element does not lie in the grid."""
        inside = (0 <= place < size for place, size in zip(self.global_offset, self.global_shape, strict=False))
        if len(self.global_offset) != len(self.global_shape) or not all(inside):
            raise ValueError(f"{self.key}: the grid of {self.global_shape} objects has none at {self.global_offset}")

    @classmethod
    def parsed(cls, unique_key: str, replica_id: ReplicaId = 0) -> "ShardedObject | None":
        """The object of that name on disk, without data; None where the name is not one of an object."""
        place = re.fullmatch(r"(.*)/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)", unique_key)
        if place is None:
            return None
        offset, shape = (tuple(map(int, numbers.split("."))) for numbers in place.groups()[1:])
        return cls(place[1], None, shape, offset, replica_id)

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> "ShardedObject":
        """`parsed`, with ValueError for another name."""
        found = cls.parsed(unique_key, replica_id)
        if found is None:
            raise ValueError(f"{unique_key} is no object's name: these are <key>/shard_<offset>_<shape>")
        return found

    @property
    def unique_key(self) -> str:
        """The name on disk: `<key>/shard_<offset>_<shape>`."""
        return f"{self.key}/shard_{'.'.join(map(str, self.global_offset))}_{'.'.join(map(str, self.global_shape))}"

    def without_data(self) -> "ShardedObject":
        return replace(self, data=None)


@dataclass
class LocalNonpersistentObject:
    """A value that stays out of the checkpoint; loading gives it back unchanged."""

    obj: Any

    def unwrap(self) -> Any:
        return self.obj


@dataclass
class ShardedTensorFactory:
    """A tensor that is stored as several (gate and up of a gated MLP): `build_fn` makes the pieces, `merge_fn` the tensor.

    build_fn(key, data, replica_id, flattened_range) -> sharded state dict; merge_fn(loaded state dict) -> tensor.
    """

    key: str
    data: torch.Tensor
    build_fn: Callable[..., ShardedStateDict]
    merge_fn: Callable[[Any], torch.Tensor]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def validate_metadata_integrity(self) -> None:
        """The pieces do that for themselves when they are built."""

    def without_data(self) -> "ShardedTensorFactory":
        return replace(self, data=None)  # type: ignore[arg-type]

    def build(self) -> ShardedStateDict:
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


ShardedBase = ShardedTensor | ShardedObject | ShardedTensorFactory


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The nested dicts and lists of `value` with `function` applied to every leaf."""
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]
    return function(value)


def leaves(value: Any) -> list[Any]:
    """All leaves of nested dicts and lists, in order."""
    found: list[Any] = []
    map_leaves(found.append, value)
    return found
