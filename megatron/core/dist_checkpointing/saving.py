"""Writing the `torch_dist` format: every rank its file, then rank 0 the index, the checksums and `metadata.json`.

In three steps, so that the middle one can be done elsewhere and later (async_writer.py): `SaveStrategy` agrees on what each rank writes,
`write_shards` writes a rank's file, `PendingSave.commit` makes the folder a checkpoint.
"""

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.utils import Group, get_pg_rank, get_world_rank, world_is_initialized

from .errors import CheckpointError
from .integrity import ChecksummedFile, FileSum, sum_of_text, sync_folder, write_checksums, write_synced
from .mapping import ShardedObject, ShardedTensor, is_main_replica
from .planners import ShardedSavePlanner
from .replicas import ShardId, held_by_all, id_of, keys_of_copies, to_write
from .validation import check_whole

METADATA_FILE = "metadata.json"
METADATA = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
IN_PLACE_BYTES = 2**16  # tensors from this size on are written without torch's hands on their numbers
FULL_DISK_BYTES = 2**20  # with less free than this, a write that failed failed for want of space

skip_data = getattr(torch.serialization, "skip_data", None)  # of torch 2.6 and later

T = TypeVar("T")


@dataclass
class Written:
    """What a rank's file holds: results for the index, checksums."""

    name: str
    results: list[WriteResult]
    sum: FileSum


def write_shards(folder: Path, name: str, items: list[WriteItem], resolve: Callable[[WriteItem], torch.Tensor | io.BytesIO]) -> Written:
    """Write `items` into the file `name` of `folder`, synced: objects first, then tensors, each as a torch.save of its own.

    `resolve` gives an item's tensor, on any device, or its bytes. Raises OSError, ENOSPC when the disk is full.
    """
    results = []
    stream = ChecksummedFile(folder / name)
    try:
        for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
            start = stream.begin_part()
            data = resolve(item)
            if isinstance(data, io.BytesIO):
                stream.write(data.getbuffer())
            else:
                _save_tensor(_alone(data), stream)
            length = stream.sum.size - start
            results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        stream.sync()
    except (OSError, ValueError, RuntimeError) as error:
        if stream.failure is not None and error is not stream.failure:
            raise stream.failure from error
        if not isinstance(error, OSError) and shutil.disk_usage(folder).free < FULL_DISK_BYTES:
            raise OSError(errno.ENOSPC, "no space left on the disk", str(folder / name)) from error
        raise
    finally:
        stream.close()
    return Written(name, results, stream.sum)


class _DataInPlace:
    """A file in which torch.save leaves room for a tensor's numbers: they are written there from where they lie.

    torch would add up their CRC-32 first, which takes as long as a fast disk: the zip file has none of them, as after
    torch.serialization.set_crc32_options(False). Readers of torch.save do not look at it.
    """

    def __init__(self, stream: ChecksummedFile, data: memoryview) -> None:
        self.stream, self.data = stream, data
        self.write, self.flush = stream.write, stream.flush

    def seek(self, offset: int, whence: int) -> None:
        assert whence == os.SEEK_CUR and offset == len(self.data)
        self.stream.write_data(self.data)


def _save_tensor(tensor: torch.Tensor, stream: ChecksummedFile) -> None:
    """torch.save of a tensor from `_alone`."""
    if tensor.nbytes < IN_PLACE_BYTES or skip_data is None:
        torch.save(tensor, stream)  # type: ignore[arg-type]  # it writes and flushes, no more
        return
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    with skip_data():
        torch.save(tensor, _DataInPlace(stream, data))  # type: ignore[arg-type]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, its rows one after the other, in a storage of its own: torch.save writes whole storages."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """Every rank's result of `work` in order, on rank 0 (elsewhere: nothing). What failed on the lowest rank is raised on all."""
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = _told(error)
    if not world_is_initialized() or dist.get_world_size() == 1:
        if failure is not None:
            raise failure
        return [result]  # type: ignore[list-item]
    is_first = dist.get_rank() == 0
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object((result, failure), gathered if is_first else None, dst=0)
    box = [next(((rank, error) for rank, (_, error) in enumerate(gathered) if error is not None), None)] if is_first else [None]
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        rank, first = box[0]
        raised = failure if failure is not None and rank == dist.get_rank() else first
        setattr(raised, "failed_rank", rank)  # noqa: B010
        raise raised
    return [value for value, _ in gathered] if is_first else []


def _told(error: Exception) -> Exception:
    """An exception of a type that survives the way to other ranks."""
    if isinstance(error, CheckpointError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
        return error
    told = ValueError(f"rank {get_world_rank()}: {error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _true_on_all_ranks(own: bool) -> bool:
    if not world_is_initialized() or dist.get_world_size() == 1:
        return own
    flag = torch.tensor(int(own), dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


@dataclass
class Agreement:
    """What the ranks agreed to write. It holds for every state of the same structure."""

    structure: list[tuple]  # of all that this rank holds
    mine: set[ShardId]  # tensors that it writes
    items: list[WriteItem]  # these and its objects
    index: Metadata | None  # of the whole, on rank 0


@dataclass
class SaveStrategy:
    """Who writes what. The object is kept from save to save where the agreement is to be.

    group: ranks that share out the shards that several of them hold; None: main replicas alone are written.
    assume_constant_structure: agree once, and again when a rank's tensors or objects are others than they were; the ranks then
    exchange one number instead of their plans, which are not validated again.
    """

    group: Group = None
    assume_constant_structure: bool = False
    agreed: Agreement | None = None

    def agree(self, tensors: list[ShardedTensor], objects: list[ShardedObject], validate: bool) -> tuple[ShardedSavePlanner, Agreement]:
        """Collective. Raises ValueError when the shards do not make up whole tensors."""
        structure: list[tuple] = [(*id_of(one), one.global_shape, one.dtype, one.replica_id, one.prepend_axis_num) for one in tensors]
        structure += [(item.unique_key, item.replica_id) for item in objects]
        if self.assume_constant_structure and _true_on_all_ranks(self.agreed is not None and self.agreed.structure == structure):
            assert self.agreed is not None
            return self._planner({id_of(one): one for one in tensors if id_of(one) in self.agreed.mine}, objects), self.agreed
        planner, items, index = self._plan(tensors, objects, validate)
        agreement = Agreement(structure, {id_of(one) for one in planner.tensors}, items, index)
        self.agreed = agreement if self.assume_constant_structure else None
        return planner, agreement

    def _planner(self, mine: dict[ShardId, ShardedTensor], objects: list[ShardedObject]) -> ShardedSavePlanner:
        return ShardedSavePlanner(list(mine.values()), [item for item in objects if is_main_replica(item.replica_id)])

    def _plan(
        self, tensors: list[ShardedTensor], objects: list[ShardedObject], validate: bool
    ) -> tuple[ShardedSavePlanner, list[WriteItem], Metadata | None]:
        """(a planner of what this rank writes, its items, the index of the whole on rank 0)."""
        held = held_by_all(tensors, self.group)
        copies = {item.unique_key for item in objects} | (keys_of_copies(held) if get_pg_rank(self.group) == 0 else set())
        made: list[tuple[ShardedSavePlanner, SavePlan]] = []
        index: list[Metadata] = []

        def plan() -> tuple[SavePlan, set[str]]:
            planner = self._planner(to_write(tensors, held, self.group), objects)
            made.append((planner, planner.create_local_plan()))
            return made[0][1], copies - planner.by_key.keys()

        gathered = on_all_ranks(plan)

        def whole() -> None:
            plans = [found for found, _ in gathered]
            if plans and validate:
                check_whole(plans, set().union(*(keys for _, keys in gathered)))
            if plans:
                index.append(made[0][0].create_global_plan(plans)[1])

        on_all_ranks(whole)
        return made[0][0], made[0][1].items, index[0] if index else None


class PendingSave:
    """A save into an existing, empty folder that all ranks have agreed on."""

    def __init__(self, folder: Path, planner: ShardedSavePlanner, agreement: Agreement) -> None:
        self.folder = folder
        self.planner: ShardedSavePlanner | None = planner
        self.name = f"__{get_world_rank()}_0.distcp"
        self.items = agreement.items
        self._index = agreement.index

    def write(self) -> Written:
        """Write this rank's file here and now."""
        assert self.planner is not None
        return write_shards(self.folder, self.name, self.items, self.planner.resolve_data)

    def commit(self, work: Callable[[], Written]) -> None:
        """With every rank's `work` done: write index, checksums and metadata.json. Collective; a failure is raised on all ranks."""
        written = on_all_ranks(work)
        on_all_ranks(lambda: self._finish(written) if written else None)

    def _finish(self, written: list[Written]) -> None:
        assert self._index is not None
        writer = dcp.FileSystemWriter(self.folder, sync_files=True)
        writer.finish(self._index, [one.results for one in written])
        sums = {one.name: one.sum for one in written}
        write_checksums(self.folder, {**sums, METADATA_FILE: sum_of_text(METADATA)})
        write_synced(self.folder / METADATA_FILE, METADATA)
        sync_folder(self.folder)
