"""A checkpoint's weights under the keys of the torch_dist format, whatever files hold them: what conversions read, a layer at a time."""

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.export.hf_configs import ConversionError
from megatron.core.tensor_parallel.param_sharding import ParamRecord, buffer_table, build_param_table

_NO_MODEL = ("optimizer.", "chained_", "rng_state")  # keys of a checkpoint that are no weights begin like this
MOST_LISTED = 8


def listed(items: Iterable[str]) -> str:
    """Lines for an error message."""
    items = sorted(items)
    more = f"\n  and {len(items) - MOST_LISTED} more" if len(items) > MOST_LISTED else ""
    return "".join(f"\n  {item}" for item in items[:MOST_LISTED]) + more


class Weights(Protocol):
    """A checkpoint that is there. common: what is no tensor, args, iteration, ...; tensors: key -> the whole weight, without data, and
    nothing of an optimizer."""

    @property
    def folder(self) -> Path: ...
    @property
    def common(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, ShardedTensor]: ...

    def load(self, shards: list[ShardedTensor]) -> None:
        """Fill their data, in place. Raises CheckpointError for what is missing or of another shape."""


class TorchDistWeights:
    """The torch_dist format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.common = dist_checkpointing.load_common_state_dict(folder)
        stored = dist_checkpointing.load_tensors_metadata(folder)
        self.tensors = {key: tensor for key, tensor in stored.items() if not key.startswith(_NO_MODEL)}

    def load(self, shards: list[ShardedTensor]) -> None:
        dist_checkpointing.load({"shards": shards}, self.folder)


def arguments_in(weights: Weights) -> dict[str, Any]:
    """The arguments that a checkpoint was saved with. Raises ConversionError where it has none."""
    found = weights.common.get("args")
    if not isinstance(found, argparse.Namespace):
        raise ConversionError(f"{weights.folder} was saved without its arguments (`args`): they give the model's shape")
    return vars(found)


class Slab(Protocol):
    """A tensor of a model, or of a stack of them one layer's, or one expert's: what is in memory at a time.

    key, global_shape: in the checkpoint; offset: this one's place along the leading dimensions that `shape` lacks.
    """

    @property
    def key(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def layer(self) -> int | None: ...


AnySlab = TypeVar("AnySlab", bound=Slab)


@dataclass(frozen=True)
class StoredSlab:
    """One of a checkpoint's own."""

    key: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    layer: int | None


def slabs_of(weights: Weights, model: torch.nn.Module) -> list[StoredSlab]:
    """All of a checkpoint whose whole model is `model` (of any device), in the order of its layers.

    Raises ConversionError where tensors are missing, unknown to the model or of another shape than the model's.
    """
    found: dict[tuple[str, tuple[int, ...]], StoredSlab] = {}
    wrong: dict[str, str] = {}
    records = [*build_param_table(model).values(), *buffer_table(model).values()]
    for record in sorted(records, key=_order):
        stored, sharding = weights.tensors.get(record.key), record.sharding
        whole = record.whole_shape
        if stored is None:
            wrong[record.key] = f"{record.key} is not there"
            continue
        if stored.global_shape != whole and (sharding.logical_size is None or stored.global_shape[1:] != whole[1:]):
            wrong[record.key] = f"{record.key} is {list(stored.global_shape)}, the model's is {list(whole)}"
            continue
        leading = len(record.place)
        layer = (record.layer,) if record.stacked else ()
        for expert in [(number,) for number in sharding.experts.held] if sharding.experts else [()]:
            slab = StoredSlab(record.key, stored.global_shape[leading:], stored.global_shape, (*layer, *expert), record.layer)  # type: ignore[arg-type]
            found[slab.key, slab.offset] = slab
    known = {record.key for record in records}
    wrong |= {key: f"{key} is unknown to the model" for key in weights.tensors.keys() - known}
    if wrong:
        raise ConversionError(f"{weights.folder} does not hold the model that its arguments describe:{listed(wrong.values())}")
    return list(found.values())


def _order(record: ParamRecord) -> float:
    """By layer, so that buffers, which a table lists last, come with theirs; embeddings before all, final norm and head last."""
    if record.layer is not None:
        return record.layer
    return -1 if record.key.startswith("embedding.") else math.inf


def shard_of(slab: Slab, data: torch.Tensor | None, dtype: torch.dtype) -> ShardedTensor:
    offset = (*slab.offset, *(0,) * len(slab.shape))
    return ShardedTensor(slab.key, data, dtype, slab.shape, slab.global_shape, offset, None, prepend_axis_num=len(slab.offset))


def together(slabs: Iterable[AnySlab]) -> Iterator[list[AnySlab]]:
    """Those that are read at once: a layer's; of what is outside of the layers, the largest tensors, one by one."""
    for layer, group in groupby(slabs, key=lambda slab: slab.layer):
        members = list(group)
        yield from [members] if layer is not None else ([member] for member in members)


def read(weights: Weights, slabs: Iterable[Slab]) -> list[torch.Tensor]:
    """The slabs' data, as stored."""
    wanted = [shard_of(slab, torch.empty(slab.shape, dtype=(dtype := weights.tensors[slab.key].dtype)), dtype) for slab in slabs]
    weights.load(wanted)
    return [shard.data for shard in wanted if shard.data is not None]
