"""Fill sharded tensors from whatever parts of the whole there are: files of another layout's ranks, stretches of flat buffers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import CheckpointError
from .mapping import ShardedStateDict, ShardedTensor, StateDict
from .state_dicts import merged, split, with_built_factories
from .validation import listed


@dataclass(frozen=True)
class Block:
    """A box of a whole tensor, and where it begins in one rank's part of it.

    All three count the leading dimensions (layer, expert) that the whole tensor has and the part has not: the part has length 1 there.
    """

    offset: tuple[int, ...]  # in the whole
    shape: tuple[int, ...]
    inside: tuple[int, ...]  # in the part


@dataclass(frozen=True)
class Overlap:
    """What a wanted shard and a stored block have in common: where it begins in each of the two, and its shape."""

    wanted: tuple[int, ...]
    stored: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def overlap(wanted: ShardedTensor, block: Block) -> Overlap | None:
    """None where they have nothing in common."""
    starts, lengths = [], []
    for first, size, other, extent in zip(wanted.global_offset, wanted.chunk_shape, block.offset, block.shape, strict=True):
        start, end = max(first, other), min(first + size, other + extent)
        if start >= end:
            return None
        starts.append(start)
        lengths.append(end - start)
    in_wanted = tuple(start - first for start, first in zip(starts, wanted.global_offset, strict=True))
    in_part = tuple(start - first + at for start, first, at in zip(starts, block.offset, block.inside, strict=True))
    return Overlap(in_wanted, in_part, tuple(lengths))


def narrowed(tensor: torch.Tensor, dims: int, starts: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    """The box of `tensor`, seen with as many leading dimensions of length 1 as make `dims`."""
    view = tensor.detach()[(None,) * (dims - tensor.dim())]
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        view = view.narrow(axis, start, length)
    return view


def copy_overlap(wanted: ShardedTensor, part: torch.Tensor, common: Overlap) -> None:
    assert wanted.data is not None
    dims = len(wanted.global_shape)
    source = narrowed(part, dims, common.stored, common.shape)
    narrowed(wanted.data, dims, common.wanted, common.shape).copy_(source)


def uncovered(wanted: ShardedTensor, filled: int) -> bool:
    """Whether `filled` elements are too few. Padding of a vocabulary may be more than was stored: those rows keep what they had."""
    return filled == 0 or (filled < torch.Size(wanted.chunk_shape).numel() and not wanted.allow_shape_mismatch)


Parts = Mapping[str, list[tuple[Block, torch.Tensor]]]


def load_from_parts(sharded_state_dict: ShardedStateDict, parts: Parts, where: str) -> StateDict:
    """Fill the tensors of `sharded_state_dict`, in place; objects keep their data. Returns it with data in place of sharded values.

    parts: key -> every stored block of it and the tensor that it lies in. Raises CheckpointError that lists what `where` lacks.
    """
    built = with_built_factories(sharded_state_dict)
    missing: list[str] = []
    for tensor in split(built)[0]:
        tensor.init_data("cpu")
        filled = 0
        stored = parts.get(tensor.key, [])
        if stored and len(stored[0][0].shape) != len(tensor.global_shape):
            raise CheckpointError(f"{where} holds a model of another shape: {tensor.key} has {len(stored[0][0].shape)} dimensions there")
        for block, part in stored:
            common = overlap(tensor, block)
            if common is not None:
                copy_overlap(tensor, part, common)
                filled += common.numel
        if uncovered(tensor, filled) and torch.Size(tensor.chunk_shape).numel():
            missing.append(tensor.key)
    if missing:
        raise CheckpointError(f"{where} lacks what this run needs, or has it in another shape:{listed(sorted(set(missing)))}")
    return merged(sharded_state_dict, built)


def sharded_tensors(sharded_state_dict: Any) -> list[ShardedTensor]:
    """All of them, factories' pieces among them (views of the factory's tensor)."""
    return split(with_built_factories(sharded_state_dict))[0]
