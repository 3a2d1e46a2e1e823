"""Save and load sharded state dicts in the `torch_dist` format.

On disk (a contract): torch.distributed.checkpoint data files `__<rank>_<n>.distcp`, its index `.metadata`, and, written last,
`metadata.json` = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}. Tensors stand under their keys in global shape,
objects under `<key>/shard_<offset>_<shape>`, each a torch.save of a one-element list. What is not sharded is one object,
`common_state/shard_0_1`; older checkpoints have it as a file `common.pt` instead, and both are read.
"""

import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.core.utils import get_world_rank, world_is_initialized

from .checksum import BLOCK
from .errors import CheckpointError, DamagedCheckpointError
from .integrity import Part, check_part, check_parts, parts_within, read_checksums
from .mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
    leaves,
    map_leaves,
)
from .planners import ShardedLoadPlanner, ShardedSavePlanner
from .safe_pickle import load_pickle, load_torch, tensor_within
from .saving import METADATA_FILE, PendingSave

COMMON_KEY = "common_state"
READERS = 2  # threads
LARGEST_READ = 2**30  # bytes; Linux reads at most 2 GiB at a time
MOST_LISTED = 8  # keys that an error message lists


class _Reader(dcp.FileSystemReader):
    """FileSystemReader whose index goes through the allow-list too, and that checks what it reads by its checksum."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    @cached_property
    def _index(self) -> Metadata:
        """Read once: torch asks for it at every load."""
        path = Path(self.path) / ".metadata"
        sums = read_checksums(self.path) or {}
        self.parts = {name: list(value.spans()) for name, value in sums.items()}
        data = path.read_bytes()
        check_parts(path, 0, data, self.parts.get(path.name, []))
        try:
            metadata = load_pickle(io.BytesIO(data))
        except Exception as error:  # what junk does to an unpickler has no common class
            raise DamagedCheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
        if not isinstance(metadata, Metadata):
            raise DamagedCheckpointError(f"{path} does not hold a checkpoint index")
        storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta = storage_meta
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every stored item that the plan needs, once each and in the order of the file."""
        wanted: dict[tuple[str, int, int], list[ReadItem]] = {}
        for request in plan.items:
            info = self.storage_data[request.storage_index]
            wanted.setdefault((info.relative_path, info.offset, info.length), []).append(request)
        # Two threads: one copies to where it belongs what it has read and checked, while the other reads.
        items = iter(sorted(wanted.items(), key=lambda entry: entry[0]))
        with ThreadPoolExecutor(READERS) as pool:
            for outcome in [pool.submit(self._read_items, items, planner) for _ in range(READERS)]:
                outcome.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, items: Iterator[tuple[tuple[str, int, int], list[ReadItem]]], planner: LoadPlanner) -> None:
        memory = memoryview(bytearray(0))  # used again for every item: new memory costs more than reading into it
        for (name, start, length), requests in items:
            path = Path(self.path) / name
            parts = parts_within(self.parts.get(name, []), start, length)
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_WILLNEED)  # all of it is under way when the first is there
                if len(parts) == 3 and _read_in_place(file, path, parts, requests, planner):
                    continue
                if len(memory) < length:
                    memory = memoryview(bytearray(length))
                data = memory[:length]
                data = data[: _read(file, start, data)]
            check_parts(path, start, data, parts)
            try:
                _deliver(data, requests, planner)
            except Exception as error:  # what junk does to the readers of zip files and pickles has no common class
                raise DamagedCheckpointError(f"{path} is damaged: {length} bytes at {start} hold no tensor or object ({error})") from None


def _read(file: io.FileIO, start: int, memory: memoryview) -> int:
    """Fill `memory` from `start` on; the number of bytes that there were."""
    file.seek(start)
    count = 0
    while count < len(memory) and (read := file.readinto(memory[count : count + LARGEST_READ])):
        count += read
    return count


def _read_in_place(file: io.FileIO, path: Path, parts: list[Part], requests: list[ReadItem], planner: LoadPlanner) -> bool:
    """Read a whole tensor to where it belongs, if it is wanted whole and at one place. False when it is not: nothing is read then."""
    part = parts[1]
    assert isinstance(planner, ShardedLoadPlanner)
    target = planner.memory_of(requests[0]) if len(requests) == 1 else None
    if target is None or target.numel() != part.length:
        return False
    memory, found = target.numpy().data, 0
    for place in range(0, part.length, BLOCK):  # the checksum finds in the cache what was just read
        piece = memory[place : place + BLOCK]
        found = part.add(piece[: _read(file, part.start + place, piece)], found)
    check_part(path, part, found)
    return True


def _deliver(data: memoryview, requests: list[ReadItem], planner: LoadPlanner) -> None:
    if requests[0].type == LoadItemType.BYTE_IO:
        for request in requests:
            planner.load_bytes(request, io.BytesIO(data))
        return
    tensor = tensor_within(data)
    for request in requests:
        piece = tensor
        for axis, (begin, count) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
            piece = piece.narrow(axis, begin, count)
        planner.commit_tensor(request, piece)


def _dcp_load(reader: dcp.FileSystemReader, planner: ShardedLoadPlanner, alone: bool = False) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({"unused": None}, storage_reader=reader, planner=planner, no_dist=alone or not world_is_initialized())
    except CheckpointException as error:
        cause = first_cause(error)
        if isinstance(cause, OSError | CheckpointError):
            raise cause from error
        raise CheckpointError(f"{reader.path} cannot be read, its files are damaged: {cause}") from error


def _build_factories(state_dict: ShardedStateDict) -> ShardedStateDict:
    return map_leaves(lambda leaf: _build_factories(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else leaf, state_dict)


def _split(state_dict: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    found = leaves(state_dict)
    return [leaf for leaf in found if isinstance(leaf, ShardedTensor)], [leaf for leaf in found if isinstance(leaf, ShardedObject)]


_NOTHING = object()


def _without(value: Any, kinds: type | tuple[type, ...]) -> Any:
    """`value` less the leaves of the given kinds and the dicts that only held such."""
    if isinstance(value, dict):
        kept = {key: _without(item, kinds) for key, item in value.items()}
        kept = {key: item for key, item in kept.items() if item is not _NOTHING}
        return kept if kept or not value else _NOTHING
    if isinstance(value, list):
        items = [item for item in (_without(item, kinds) for item in value) if item is not _NOTHING]
        return items if items or not value else _NOTHING
    return _NOTHING if isinstance(value, kinds) else value


def save(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike, content_metadata: dict | None = None) -> None:
    """Write `sharded_state_dict` into the existing, empty folder `checkpoint_dir`; every rank calls it.

    Leaves that are no sharded value go into the common state, as rank 0 has them. Raises ValueError when the ranks' shards leave a
    gap in a tensor or overlap, OSError as the file system does. The caller renames the folder when all is written.
    """
    pending = begin_save(sharded_state_dict, checkpoint_dir, content_metadata)
    pending.commit(pending.write)


def begin_save(
    sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike, content_metadata: dict | None = None
) -> PendingSave:
    """`save` up to the point where data are written: what the ranks write is agreed on."""
    state_dict = _build_factories(sharded_state_dict)
    tensors, objects = _split(state_dict)
    common = _without(state_dict, (ShardedTensor, ShardedObject, LocalNonpersistentObject))
    common = {} if common is _NOTHING else common
    if content_metadata is not None:
        common["content_metadata"] = content_metadata
    if get_world_rank() == 0:
        objects = objects + [ShardedObject(COMMON_KEY, common, (1,), (0,))]
    planner = ShardedSavePlanner(
        [tensor for tensor in tensors if is_main_replica(tensor.replica_id)], [item for item in objects if is_main_replica(item.replica_id)]
    )
    return PendingSave(Path(checkpoint_dir), planner)


def first_cause(error: CheckpointException) -> BaseException:
    """The lowest failing rank's own exception, with its rank in the message where the type allows, and as `failed_rank`."""
    rank, wrapped = min(error.failures.items())
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    if not isinstance(cause, OSError | CheckpointError):
        cause = ValueError(f"rank {rank}: {cause}")
    setattr(cause, "failed_rank", rank)  # noqa: B010
    return cause


def check_is_checkpoint(checkpoint_dir: str | os.PathLike) -> None:
    """Raise CheckpointError unless the folder holds a complete torch_dist checkpoint."""
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: there is no checkpoint to load")
    try:
        backend = json.loads((folder / METADATA_FILE).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has no readable {METADATA_FILE}: not a torch_dist checkpoint, or one whose writing was cut off ({error})"
        ) from None
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} was written by the backend {backend!r}: only torch_dist is read here")
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} has no .metadata: the checkpoint is incomplete")


def _read_index(checkpoint_dir: str | os.PathLike) -> tuple[_Reader, Metadata]:
    check_is_checkpoint(checkpoint_dir)
    reader = _Reader(checkpoint_dir)
    return reader, reader.read_metadata()


def load_tensors_metadata(checkpoint_dir: str | os.PathLike) -> dict[str, ShardedTensor]:
    """key -> the whole tensor's ShardedTensor, without data."""
    _, index = _read_index(checkpoint_dir)
    found = {}
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shape = tuple(entry.size)
            found[key] = ShardedTensor(key, None, entry.properties.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))
    return found


def stored_objects(checkpoint_dir: str | os.PathLike, key: str) -> list[ShardedObject]:
    """The objects `key` that the checkpoint holds, each with its place in the grid of the layout that wrote it, without data."""
    _, index = _read_index(checkpoint_dir)
    found = []
    for name, entry in index.state_dict_metadata.items():
        place = re.fullmatch(re.escape(key) + r"/shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)", name)
        if place and isinstance(entry, BytesStorageMetadata):
            offset, shape = (tuple(map(int, numbers.split("."))) for numbers in place.groups())
            found.append(ShardedObject(key, None, shape, offset))
    return found


def load_plain_tensors(checkpoint_dir: str | os.PathLike) -> dict[str, torch.Tensor]:
    """key -> whole tensor on the CPU, of every tensor in the checkpoint (in one process)."""
    wanted = load_tensors_metadata(checkpoint_dir)
    for tensor in wanted.values():
        tensor.init_data("cpu")
    loaded = load(dict(wanted), checkpoint_dir)
    return {key: loaded[key] for key in wanted}


def load_common_state_dict(checkpoint_dir: str | os.PathLike) -> StateDict:
    """What the checkpoint holds besides shards: args, iteration, scheduler, param groups."""
    return _common_of(*_read_index(checkpoint_dir))


def _common_of(reader: _Reader, index: Metadata) -> StateDict:
    old = Path(reader.path) / "common.pt"
    if old.exists():
        return load_torch(str(old))
    wanted = ShardedObject(COMMON_KEY, None, (1,), (0,))
    if wanted.unique_key not in index.state_dict_metadata:
        return {}
    _dcp_load(reader, ShardedLoadPlanner([], [wanted]), alone=True)
    return wanted.data


def _unreadable(index: Metadata, tensors: list[ShardedTensor], objects: list[ShardedObject]) -> tuple[list[str], list[str]]:
    """Keys that the checkpoint lacks; descriptions of tensors that it has in another shape."""
    missing, mismatched = [], []
    for tensor in tensors:
        entry = index.state_dict_metadata.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata):
            missing.append(tensor.key)
        elif tuple(entry.size) != tensor.global_shape and not _only_first_axis_differs(tensor, tuple(entry.size)):
            mismatched.append(f"{tensor.key} is {tuple(entry.size)} there and {tensor.global_shape} in this model")
    missing += [item.unique_key for item in objects if not isinstance(index.state_dict_metadata.get(item.unique_key), BytesStorageMetadata)]
    return sorted(set(missing)), sorted(set(mismatched))


def _only_first_axis_differs(tensor: ShardedTensor, stored: tuple[int, ...]) -> bool:
    return tensor.allow_shape_mismatch and len(stored) == len(tensor.global_shape) and stored[1:] == tensor.global_shape[1:]


def _listed(items: list[str]) -> str:
    more = f" (and {len(items) - MOST_LISTED} more)" if len(items) > MOST_LISTED else ""
    return "\n  ".join(["", *items[:MOST_LISTED]]) + more


def load(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | os.PathLike, strict: bool = True) -> StateDict:
    """Fill the shards of `sharded_state_dict` from the checkpoint, whatever layout wrote it; every rank calls it.

    Returns the state dict with data in place of sharded values, joined with the common state. Tensors are filled in place.
    Raises CheckpointError that lists the keys missing (unless `strict` is False: those keep their data) and the shapes that differ.
    """
    reader, index = _read_index(checkpoint_dir)
    state_dict = _build_factories(sharded_state_dict)
    tensors, objects = _split(state_dict)
    missing, mismatched = _unreadable(index, tensors, objects)
    if mismatched:
        raise CheckpointError(f"{checkpoint_dir} holds a model of another shape:{_listed(mismatched)}")
    if missing and strict:
        raise CheckpointError(f"{checkpoint_dir} lacks what this run needs:{_listed(missing)}")
    tensors = [tensor for tensor in tensors if tensor.key not in missing]
    objects = [item for item in objects if item.unique_key not in missing]
    for tensor in tensors:
        tensor.init_data("cpu")
    _dcp_load(reader, ShardedLoadPlanner(tensors, objects))
    result = _merge(sharded_state_dict, state_dict)
    return {**_common_of(reader, index), **result}


def _merge(original: Any, built: Any) -> Any:
    """The values loaded into `built`, in the structure of `original` (factories merged back)."""
    if isinstance(original, dict):
        return {key: _merge(item, built[key]) for key, item in original.items()}
    if isinstance(original, list):
        return [_merge(item, built[place]) for place, item in enumerate(original)]
    if isinstance(original, ShardedTensorFactory):
        return original.merge_fn(_merge(original.build(), built))
    if isinstance(built, ShardedTensor | ShardedObject):
        return built.data
    return built.unwrap() if isinstance(built, LocalNonpersistentObject) else built
