"""Reading a `torch_dist` checkpoint's files: straight to where the numbers belong, each tensor checked by its checksum."""

import io
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.core.utils import world_is_initialized

from .checksum import BLOCK
from .errors import CheckpointError, DamagedCheckpointError
from .integrity import Part, check_part, check_parts, parts_within, read_checksums
from .planners import ShardedLoadPlanner
from .safe_pickle import load_pickle, tensor_within

READERS = 2  # threads
AHEAD = 4  # items that the system is told of before they are read
LARGEST_READ = 2**30  # bytes; Linux reads at most 2 GiB at a time

Item = tuple[tuple[str, int, int], list[ReadItem]]  # (file, start, length) of what is stored, and who wants it


class Reader(dcp.FileSystemReader):
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
        items = sorted(wanted.items(), key=lambda entry: entry[0])
        turns = iter(range(len(items)))
        # Two threads: one copies to where it belongs what it has read and checked, while the other reads.
        with ThreadPoolExecutor(READERS) as pool:
            for outcome in [pool.submit(self._read_items, items, turns, planner) for _ in range(READERS)]:
                outcome.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, items: list[Item], turns: Iterator[int], planner: LoadPlanner) -> None:
        memory = memoryview(bytearray(0))  # used again for every item: new memory costs more than reading into it
        for turn in turns:
            (name, start, length), requests = items[turn]
            path = Path(self.path) / name
            parts = parts_within(self.parts.get(name, []), start, length)
            with open(path, "rb", buffering=0) as file:
                for (other, at, size), _ in items[turn : turn + AHEAD] if turn == 0 else items[turn + AHEAD - 1 : turn + AHEAD]:
                    if other == name:  # the disk has it under way when its turn comes
                        os.posix_fadvise(file.fileno(), at, size, os.POSIX_FADV_WILLNEED)
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


def dcp_load(reader: dcp.FileSystemReader, planner: ShardedLoadPlanner, alone: bool = False) -> None:
    """Read what the planner wants. Collective unless `alone`; what fails on one rank is raised on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({"unused": None}, storage_reader=reader, planner=planner, no_dist=alone or not world_is_initialized())
    except CheckpointException as error:
        cause = first_cause(error)
        if isinstance(cause, OSError | CheckpointError):
            raise cause from error
        raise CheckpointError(f"{reader.path} cannot be read, its files are damaged: {cause}") from error


def first_cause(error: CheckpointException) -> BaseException:
    """The lowest failing rank's own exception, with its rank in the message where the type allows, and as `failed_rank`."""
    rank, wrapped = min(error.failures.items())
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    if not isinstance(cause, OSError | CheckpointError):
        cause = ValueError(f"rank {rank}: {cause}")
    setattr(cause, "failed_rank", rank)  # noqa: B010
    return cause
