"""Writing the `torch_dist` format: every rank its file, then rank 0 the index, the checksums and `metadata.json`.

In three steps, so that the middle one can be done elsewhere and later (async_writer.py): `PendingSave` agrees on what each rank writes,
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
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.utils import get_world_rank, world_is_initialized

from .integrity import ChecksummedFile, FileSum, sum_of_text, sync_folder, write_checksums, write_synced
from .planners import ShardedSavePlanner

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
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return error
    told = ValueError(f"rank {get_world_rank()}: {error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class PendingSave:
    """A save into an existing, empty folder that all ranks have agreed on. Building one is collective.

    Raises ValueError when the ranks' shards leave a gap in a tensor or overlap.
    """

    def __init__(self, folder: Path, planner: ShardedSavePlanner) -> None:
        self.folder = folder
        self.planner: ShardedSavePlanner | None = planner
        self.name = f"__{get_world_rank()}_0.distcp"
        self.items: list[WriteItem] = planner.create_local_plan().items
        plans = on_all_ranks(planner.create_local_plan)
        self._index: Metadata | None = None

        def plan_all() -> None:
            if plans:
                self._index = planner.create_global_plan(plans)[1]

        on_all_ranks(plan_all)

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


def make_folder(folder: str | os.PathLike[str]) -> None:
    os.mkdir(folder)
    sync_folder(Path(folder).parent)
