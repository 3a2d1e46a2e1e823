"""The weights of a checkpoint of the legacy `torch` format for a conversion: by one process, a piece in memory at a time."""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.parts import Block, load_from_parts, overlap
from megatron.core.export.hf_configs import ConversionError
from megatron.core.export.weights import listed
from megatron.training.legacy_checkpoints import LegacyCheckpoint
from megatron.training.model_of_checkpoint import whole_model

AT_ONCE = 8 * 2**20  # bytes that are read at a time
_PAGEOUT = 21  # MADV_PAGEOUT of Linux
_ROWS = 128  # of a vocabulary whose size the arguments do not say: files have their own


class LegacyWeights:
    """megatron.core.export.weights.Weights of the `torch` format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoint = LegacyCheckpoint(folder)
        self.common: dict[str, Any] = checkpoint.common()
        version = self.common.get("checkpoint_version", 0)
        if version < 3.0:
            raise ConversionError(f"{folder} has checkpoint_version {version}, with another order of queries, keys and values: 3.0 is read")
        model = whole_model(checkpoint.saved, checkpoint.saved.get("padded_vocab_size") or _ROWS)
        parts = checkpoint.parts([model], with_optimizer=False)
        if checkpoint.unknown:
            raise ConversionError(f"{folder} holds tensors that the model of its arguments does not:{listed(checkpoint.unknown)}")
        self.tensors = {key: _whole(key, blocks) for key, blocks in parts.items()}
        self._parts: dict[tuple[str, int], list[tuple[Block, torch.Tensor]]] = {}
        for key, blocks in parts.items():
            for block, part in blocks:
                self._parts.setdefault((key, _first(block)), []).append((block, part))

    def load(self, shards: list[ShardedTensor]) -> None:
        for shard in shards:
            shard.init_data("cpu")
            parts = [part for first in _firsts(shard) for part in self._parts.get((shard.key, first), [])]
            for piece in _cut(shard):
                load_from_parts({"piece": piece}, {shard.key: parts}, str(self.folder))
                for block, part in parts:
                    if overlap(piece, block) is not None:
                        _forget(part)


def _cut(shard: ShardedTensor) -> Iterator[ShardedTensor]:
    """The same in stretches of rows: what a mapped file has in memory while one is read is no more than that."""
    assert shard.data is not None
    if shard.data.dim() == 0:
        yield shard
        return
    rows = max(1, AT_ONCE // max(1, shard.data[:1].nbytes))
    axis = shard.prepend_axis_num
    for start in range(0, len(shard.data), rows):
        data = shard.data[start : start + rows]
        offset = list(shard.global_offset)
        offset[axis] += start
        yield replace(shard, data=data, local_shape=tuple(data.shape), global_offset=tuple(offset), axis_fragmentations=None)


def _first(block: Block) -> int:
    """By which parts are looked up, so that not all of a key's are gone through for each of its layers or experts."""
    return block.offset[0] if len(block.shape) > 1 and block.shape[0] == 1 else -1


def _firsts(shard: ShardedTensor) -> Iterable[int]:
    return (-1, *range(shard.global_offset[0], shard.global_offset[0] + shard.chunk_shape[0]))


def _whole(key: str, blocks: list[tuple[Block, torch.Tensor]]) -> ShardedTensor:
    ends = [[start + length for start, length in zip(block.offset, block.shape, strict=True)] for block, _ in blocks]
    shape = tuple(map(max, zip(*ends, strict=True)))
    dtypes = {part.dtype for _, part in blocks}
    if len(dtypes) > 1:
        raise CheckpointError(f"{key} is of several types: {', '.join(sorted(map(str, dtypes)))}")
    return ShardedTensor(key, None, dtypes.pop(), shape, shape, (0,) * len(shape), (1,) * len(shape))


def _forget(part: torch.Tensor) -> None:
    """Let go of the memory that a mapped file's tensor takes since it was read. Of other memory the values stay what they are."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and part.is_contiguous():
        begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(part.data_ptr() + part.nbytes - begin), _PAGEOUT)
