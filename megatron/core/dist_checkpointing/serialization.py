"""Save and load sharded state dicts in the `torch_dist` format.

On disk (a contract): torch.distributed.checkpoint data files `__<rank>_<n>.distcp`, its index `.metadata`, and, written last,
`metadata.json` = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}. Tensors stand under their keys in global shape,
objects under `<key>/shard_<offset>_<shape>`, each a torch.save of a one-element list. What is not sharded is one object,
`common_state/shard_0_1`; older checkpoints have it as a file `common.pt` instead, and both are read.
"""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megatron.core.utils import Group, get_pg_size, get_world_rank, world_is_initialized

from .errors import CheckpointError
from .mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from .planners import ShardedLoadPlanner
from .reading import Reader, dcp_load
from .replicas import Reading
from .safe_pickle import load_torch
from .saving import METADATA_FILE, PendingSave, SaveStrategy
from .state_dicts import common_state, merged, split, with_built_factories
from .validation import BESIDE_WEIGHTS, StrictHandling, listed

COMMON_KEY = "common_state"
CONTENT_METADATA = "content_metadata"
logger = logging.getLogger(__name__)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike,
    sharded_strategy: SaveStrategy | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Any = None,
    content_metadata: dict | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = True,
) -> None:
    """Write `sharded_state_dict` into the existing, empty folder `checkpoint_dir`; every rank calls it.

    Leaves that are no sharded value go into the common state, as rank 0 has them. Raises ValueError when the ranks' shards leave a
    gap in a tensor, overlap or are written twice (unless `validate_access_integrity` is False), OSError as the file system does. The
    caller renames the folder when all is written. Megatron-LM's other arguments change nothing: checksums are always there.
    """
    if async_sharded_save:
        raise ValueError("async_sharded_save: give begin_save's result to async_writer.AsyncWriter.start instead, as --async-save does")
    pending = begin_save(sharded_state_dict, checkpoint_dir, content_metadata, sharded_strategy, validate_access_integrity)
    pending.commit(pending.write)


def begin_save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike,
    content_metadata: dict | None = None,
    sharded_strategy: SaveStrategy | None = None,
    validate_access_integrity: bool = True,
) -> PendingSave:
    """`save` up to the point where data are written: what the ranks write is agreed on."""
    state_dict = with_built_factories(sharded_state_dict)
    tensors, objects = split(state_dict)
    common = common_state(state_dict)
    if content_metadata is not None:
        common[CONTENT_METADATA] = content_metadata
    if get_world_rank() == 0:
        objects = objects + [ShardedObject(COMMON_KEY, common, (1,), (0,))]
    strategy = sharded_strategy or SaveStrategy()
    return PendingSave(Path(checkpoint_dir), *strategy.agree(tensors, objects, validate_access_integrity))


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


def _read_index(checkpoint_dir: str | os.PathLike) -> tuple[Reader, Metadata]:
    check_is_checkpoint(checkpoint_dir)
    reader = Reader(checkpoint_dir)
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


def _objects_in(index: Metadata) -> Iterator[ShardedObject]:
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata) and (found := ShardedObject.parsed(name)):
            yield found


def load_sharded_metadata(checkpoint_dir: str | os.PathLike) -> dict[str, ShardedTensor | ShardedObject]:
    """All that the checkpoint holds but the common state, without data: tensors by key, whole, objects by unique key."""
    _, index = _read_index(checkpoint_dir)
    objects = {item.unique_key: item for item in _objects_in(index) if item.key != COMMON_KEY}
    return {**load_tensors_metadata(checkpoint_dir), **objects}


def load_content_metadata(checkpoint_dir: str | os.PathLike) -> dict | None:
    """What `save` was given as content_metadata."""
    return load_common_state_dict(checkpoint_dir).get(CONTENT_METADATA)


def stored_objects(checkpoint_dir: str | os.PathLike, key: str) -> list[ShardedObject]:
    """The objects `key` that the checkpoint holds, each with its place in the grid of the layout that wrote it, without data."""
    _, index = _read_index(checkpoint_dir)
    return [item for item in _objects_in(index) if item.key == key]


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


def _common_of(reader: Reader, index: Metadata) -> StateDict:
    old = Path(reader.path) / "common.pt"
    if old.exists():
        return load_torch(str(old))
    wanted = ShardedObject(COMMON_KEY, None, (1,), (0,))
    if wanted.unique_key not in index.state_dict_metadata:
        return {}
    dcp_load(reader, ShardedLoadPlanner([], [wanted]), alone=True)
    return wanted.data


def _unreadable(index: Metadata, tensors: list[ShardedTensor], objects: list[ShardedObject]) -> tuple[set[str], set[str]]:
    """Keys that the checkpoint lacks; descriptions of tensors that it has in another shape."""
    missing, mismatched = set(), set()
    for tensor in tensors:
        entry = index.state_dict_metadata.get(tensor.key)
        if not isinstance(entry, TensorStorageMetadata):
            missing.add(tensor.key)
        elif tuple(entry.size) != tensor.global_shape and not _only_first_axis_differs(tensor, tuple(entry.size)):
            mismatched.add(f"{tensor.key} is {tuple(entry.size)} there and {tensor.global_shape} in this model")
    for item in objects:
        if not isinstance(index.state_dict_metadata.get(item.unique_key), BytesStorageMetadata):
            missing.add(item.unique_key)
    return missing, mismatched


def _only_first_axis_differs(tensor: ShardedTensor, stored: tuple[int, ...]) -> bool:
    return tensor.allow_shape_mismatch and len(stored) == len(tensor.global_shape) and stored[1:] == tensor.global_shape[1:]


def _of_all_ranks(*own: set[str]) -> list[set[str]]:
    """Each set joined with those of the other ranks."""
    if not world_is_initialized() or dist.get_world_size() == 1:
        return list(own)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [set().union(*of_ranks) for of_ranks in zip(*found, strict=True)]


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = True,
    process_group: Group = None,
) -> Any:
    """Fill the shards of `sharded_state_dict` from the checkpoint, whatever layout wrote it; every rank calls it.

    Returns the state dict with data in place of sharded values, joined with the common state; for the RETURN_ ways of `strict` a tuple
    with the missing and the unexpected keys. Tensors are filled in place. Raises CheckpointError, on all ranks, that lists the keys that
    are not there (as `strict` says) or the shapes that differ. sharded_strategy: None or a FullyParallelLoadStrategyWrapper.
    Megatron-LM's other arguments change nothing: checksums are always looked at, and shards need not make up whole tensors.
    """
    strict = StrictHandling(strict)
    reader, index = _read_index(checkpoint_dir)
    state_dict = with_built_factories(sharded_state_dict)
    tensors, objects = split(state_dict)
    wanted = {tensor.key for tensor in tensors} | {item.unique_key for item in objects} if strict.counts_missing else set()
    own_unexpected, own_mismatched = _unreadable(index, tensors, objects)
    unexpected, mismatched, wanted = _of_all_ranks(own_unexpected, own_mismatched, wanted)
    if mismatched:
        raise CheckpointError(f"{checkpoint_dir} holds a model of another shape:{listed(sorted(mismatched))}")
    common = ShardedObject(COMMON_KEY, None, (1,), (0,)).unique_key
    missing = index.state_dict_metadata.keys() - wanted - {common} if strict.counts_missing else set()
    missing = {key for key in missing if not BESIDE_WEIGHTS.search(key)}
    _judge(checkpoint_dir, strict, missing, unexpected)
    tensors = [tensor for tensor in tensors if tensor.key not in unexpected]
    objects = [item for item in objects if item.unique_key not in unexpected]
    for tensor in tensors:
        tensor.init_data("cpu")
    group = getattr(sharded_strategy, "group", None)
    if get_pg_size(group) == 1:
        dcp_load(reader, ShardedLoadPlanner(tensors, objects))
    else:
        reading = Reading.of(tensors, group)
        dcp_load(reader, ShardedLoadPlanner(reading.own(tensors), objects))
        reading.hand_round(tensors)
    result = {**_common_of(reader, index), **merged(sharded_state_dict, state_dict)}
    return (result, missing, unexpected) if strict.returns else result


def _judge(checkpoint_dir: str | os.PathLike, strict: StrictHandling, missing: set[str], unexpected: set[str]) -> None:
    """Raise or log, as `strict` says, what one side has and the other has not."""
    problems = [f"{checkpoint_dir} lacks what this run needs:{listed(sorted(unexpected))}"] if unexpected else []
    if missing:
        problems.append(f"{checkpoint_dir} holds what this run does not load:{listed(sorted(missing))}")
    if problems and strict.raises:
        raise CheckpointError("\n".join(problems))
    if problems and strict.logs and get_world_rank() == 0:
        logger.warning("\n".join(problems))
