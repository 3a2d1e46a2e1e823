"""Planners that hand our shards to torch.distributed.checkpoint: which block of which tensor this rank writes or wants."""

import io
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_load_plan, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .mapping import ShardedObject, ShardedTensor
from .safe_pickle import load_torch


def _chunk(tensor: ShardedTensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(tensor.global_offset), sizes=torch.Size(tensor.chunk_shape))


class ShardedSavePlanner(SavePlanner):
    """Writes the given shards and objects under their unique keys, those that this rank writes."""

    def __init__(self, tensors: list[ShardedTensor], objects: list[ShardedObject]) -> None:
        self.tensors = tensors
        self.objects = objects
        self.by_index = {MetadataIndex(t.key, torch.Size(t.global_offset)): t for t in tensors}
        self.by_key = {o.unique_key: o for o in objects}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for tensor in self.tensors:
            properties = TensorProperties(dtype=tensor.dtype)
            data = TensorWriteData(chunk=_chunk(tensor), properties=properties, size=torch.Size(tensor.global_shape))
            index = MetadataIndex(tensor.key, torch.Size(tensor.global_offset))
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        items += [WriteItem(index=MetadataIndex(item.unique_key), type=WriteItemType.BYTE_IO) for item in self.objects]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([self.by_key[write_item.index.fqn].data], buffer)
            return buffer
        tensor = self.by_index[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        assert tensor.data is not None
        return tensor.data.detach().reshape(tensor.chunk_shape)


class ShardedLoadPlanner(LoadPlanner):
    """Reads into the given shards whatever layout wrote them, and objects by unique key.

    `missing` and `mismatched` hold, after planning, what the checkpoint lacks or has in another shape; those are not read.
    """

    def __init__(self, tensors: list[ShardedTensor], objects: list[ShardedObject]) -> None:
        # Several values may want the same block (replicas merged on one rank): each gets its own copy.
        self.tensors: dict[MetadataIndex, list[ShardedTensor]] = {}
        for tensor in tensors:
            self.tensors.setdefault(MetadataIndex(tensor.key, torch.Size(tensor.global_offset)), []).append(tensor)
        self.objects = {o.unique_key: o for o in objects}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        stored: dict[str, dict[tuple, TensorStorageMetadata]] = {}  # key -> box -> the entry with that chunk alone
        for index, wanted in self.tensors.items():
            entry = self.metadata.state_dict_metadata[index.fqn]
            assert isinstance(entry, TensorStorageMetadata)
            if index.fqn not in stored:
                stored[index.fqn] = {(one.offsets, one.sizes): replace(entry, chunks=[one]) for one in entry.chunks}
            chunk = _chunk(wanted[0])
            same = stored[index.fqn].get((chunk.offsets, chunk.sizes), entry)  # torch compares each wanted box with each stored one
            items += create_read_items_for_chunk_list(index.fqn, same, [chunk])
        for key in self.objects:
            place, zero = MetadataIndex(key), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, place, zero, place, zero, zero))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn].data = load_torch(value)[0]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise NotImplementedError("the reader hands tensors to commit_tensor, or reads into memory_of")

    def memory_of(self, read_item: ReadItem) -> torch.Tensor | None:
        """The bytes, uint8 [n], that are to hold the whole stored block, where it may be read right there; else None."""
        wanted = self.tensors[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        entry = self.metadata.state_dict_metadata[read_item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        data = wanted[0].data
        if len(wanted) > 1 or data is None or not data.is_cpu or not data.is_contiguous() or data.dtype != entry.properties.dtype:
            return None
        if tuple(read_item.lengths) != wanted[0].chunk_shape or any(read_item.dest_offsets) or any(read_item.storage_offsets):
            return None
        return data.detach().reshape(-1).view(torch.uint8)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Copy a block to where it belongs; the dtype may differ."""
        for wanted in self.tensors[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]:
            assert wanted.data is not None
            # by indexing, not by view: of experts that tensor parallelism splits the data is a stretch of a middle dimension
            target = wanted.data.detach()[(None,) * wanted.prepend_axis_num]
            for axis, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
                target = target.narrow(axis, start, length)
            target.copy_(tensor)
