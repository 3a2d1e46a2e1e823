"""Writing this rank's file of a checkpoint in another process, from a copy of the state in memory that both see.

The copy is the only one in host memory: it lies in an anonymous file (memfd) that lives as long as the two processes, is used again by
every save, and is pinned where there is a GPU. The process is started once, before the first save, and gives nothing but the file: index,
checksums, names and tracker are written by the ranks together (PendingSave.commit), when all have written theirs.
"""

import io
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.core import device

from .async_worker import Job, tensor_at
from .saving import PendingSave, Written

ALIGNMENT = 64  # bytes
ROOT = Path(__file__).resolve().parents[3]
LEAVE = 5.0  # seconds that the process may take to end
STALL = 600.0  # seconds for which its file may stay as it is while it writes
LOOK = 1.0  # seconds between two looks at the file while it is waited for


class AsyncWriter:
    """One worker process and the memory for it. Not collective: each rank has its own."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "megatron.core.dist_checkpointing.async_worker", str(theirs.fileno()), str(self._descriptor)]
        # Signals to a whole job are for the one that trains: it decides to save and stop. The writer is born deaf to them and ends with its
        # connection, or by SIGKILL.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(), self._descriptor), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._memory: mmap.mmap | None = None
        self._size = 0
        self._outcome: Written | Exception | None = None
        self._file: Path | None = None  # that is being written
        self._seen, self._since = 0, 0.0  # its size, and since when it has that one

    def start(self, pending: PendingSave) -> None:
        """Copy what this rank writes, and let the worker write it. The state may change when this returns."""
        self._outcome = None
        planner = pending.planner
        assert planner is not None
        places, objects, tensors, size = [], [], [], 0
        for item in pending.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                objects.append(data.getvalue())
                continue
            assert isinstance(data, torch.Tensor)
            tensors.append(data)
            places.append((size, tuple(data.shape), data.dtype))
            size += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        self._reserve(size)
        for tensor, place in zip(tensors, places, strict=True):
            tensor_at(self._memory, *place).copy_(tensor, non_blocking=True)  # type: ignore[arg-type]
        device.synchronize()
        job = Job(str(pending.folder), pending.name, pending.items, places, objects, self._size)
        pending.planner = None  # the state belongs to training again
        self._file, self._seen, self._since = pending.folder / pending.name, 0, time.monotonic()
        try:
            self._connection.send(job)
        except OSError:
            self._outcome = self._death()

    def _reserve(self, size: int) -> None:
        """Shared memory of at least `size` bytes."""
        if size <= self._size:
            return
        if self._memory is not None:
            device.unpin_memory(torch.frombuffer(self._memory, dtype=torch.uint8))
        os.ftruncate(self._descriptor, size)
        self._memory, self._size = mmap.mmap(self._descriptor, size), size
        device.pin_memory(torch.frombuffer(self._memory, dtype=torch.uint8))

    def has_ended(self) -> bool:
        """Whether the worker is done with what was started, or has failed."""
        if self._outcome is None:
            self._look(0)
        return self._outcome is not None

    def has_failed(self) -> bool:
        return self.has_ended() and isinstance(self._outcome, Exception)

    def result(self) -> Written:
        """Wait for the file. Raises what the worker failed with, ChildProcessError when it is gone, TimeoutError when it hangs."""
        while self._outcome is None:
            self._look(LOOK)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _look(self, seconds: float) -> None:
        """See whether the worker reports within so many seconds, or hangs."""
        try:
            if self._connection.poll(seconds):
                self._outcome = self._connection.recv()
                return
        except (EOFError, OSError):
            self._outcome = self._death()
            return
        assert self._file is not None
        size, now = self._file.stat().st_size if self._file.exists() else 0, time.monotonic()
        if size != self._seen:
            self._seen, self._since = size, now
        elif now - self._since > STALL:
            self._outcome = TimeoutError(
                f"the process that writes checkpoints hangs: {self._file} has had {size:,} bytes for {STALL:.0f} s; look at the file system"
            )

    def _death(self) -> ChildProcessError:
        try:
            code = self.process.wait(LEAVE)
        except subprocess.TimeoutExpired:
            return ChildProcessError("the process that writes checkpoints has closed its connection")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ChildProcessError(f"the process that writes checkpoints {how}: the checkpoint is not complete")

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        self._connection.close()
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for a hanging disk cannot even be killed
            self.process.wait(LEAVE)
        if self._memory is not None:
            device.unpin_memory(torch.frombuffer(self._memory, dtype=torch.uint8))
            self._memory = None
        os.close(self._descriptor)
