"""The process that writes checkpoints while training goes on: `python -m megatron.core.dist_checkpointing.async_worker SOCKET MEMORY`.

SOCKET and MEMORY are descriptors that it inherits: a connection to the process that trains, and the memory that holds a copy of the state.
It ends when the connection does. See async_writer.py.
"""

import io
import mmap
import os
import queue
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron.core.dist_checkpointing.saving import Written, write_shards


@dataclass
class Job:
    """One rank's file to write: tensors lie in the shared memory, in the order of `items`, objects are here."""

    folder: str
    name: str
    items: list[WriteItem]
    places: list[tuple[int, tuple[int, ...], torch.dtype]]  # of each tensor among `items`: where it begins, shape, dtype
    objects: list[bytes]
    memory_bytes: int

    def write(self, memory: mmap.mmap) -> Written:
        places, objects = iter(self.places), iter(self.objects)
        data = [next(objects) if item.type == WriteItemType.BYTE_IO else next(places) for item in self.items]
        by_item = {id(item): value for item, value in zip(self.items, data, strict=True)}

        def resolve(item: WriteItem) -> torch.Tensor | io.BytesIO:
            value = by_item[id(item)]
            return io.BytesIO(value) if isinstance(value, bytes) else tensor_at(memory, *value)

        return write_shards(Path(self.folder), self.name, self.items, resolve)


def tensor_at(memory: mmap.mmap, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that lies in `memory` from `start` on."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


def _receive(connection: Connection, jobs: "queue.Queue[Job]") -> None:
    """In a thread: the end of the connection is the end of the one that trains, and of what is written for it."""
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def main(socket_descriptor: int, memory_descriptor: int) -> None:
    torch.set_num_threads(1)
    connection = Connection(socket_descriptor)
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
    memory: mmap.mmap | None = None
    while True:
        job = jobs.get()
        try:
            if job.memory_bytes and (memory is None or len(memory) != job.memory_bytes):
                memory = mmap.mmap(memory_descriptor, job.memory_bytes)
            outcome: Written | Exception = job.write(memory)  # type: ignore[arg-type]
        except Exception as error:  # it is raised on the other side
            outcome = error if isinstance(error, OSError) else RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(outcome)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
