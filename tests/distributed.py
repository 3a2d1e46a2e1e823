"""Run a function on N processes of this machine: the one way in which tests go parallel.

`run_on_ranks` starts processes for one call; `ranks().run` calls those of a pool that stay, for tests that have many calls to make.
"""

import atexit
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.core import device, parallel_state
from tests import fork_server
from tests.ports import free_port


def _entry(rank: int, world_size: int, port: int, folder: str, env: dict[str, str], function: Callable, arguments: tuple) -> None:
    os.environ.clear()  # the server's, of the time of its start
    os.environ.update(env)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        result = function(*arguments)
        torch.save(result, Path(folder) / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        # groups that a module still holds have threads, and Python may abort when it ends amid their work
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except Exception:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        raise


def run_on_ranks(world_size: int, function: Callable, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` in `world_size` processes with a default gloo group; return what each rank returned.

    `function` and `arguments` are pickled: use a function at module level. A rank that raises fails the test with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            fork_server.context()
            work = (world_size, free_port(), folder, dict(os.environ), function, arguments)
            mp.start_processes(_entry, work, nprocs=world_size, start_method=fork_server.METHOD)
        except Exception as error:
            errors = sorted(Path(folder).glob("*.error"))
            text = "\n".join(f"rank {path.stem}:\n{path.read_text()}" for path in errors[:1])
            raise AssertionError(text or str(error)) from None
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _serve(rank: int, backend: str, port: int, env: dict[str, str], connection: Connection) -> None:
    """A process of a pool: do what the connection says, each job in a default group of its own, until the connection ends."""
    os.environ.clear()
    os.environ.update(env)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    if backend == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks compute on the CPU, whatever the machine has
    else:
        device.set_device(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # as in the tests' own process
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            number, world_size, timeout, path, function, arguments = connection.recv()
        except EOFError:  # the tests are over
            return
        try:
            own = dist.PrefixStore(f"job {number}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
            torch.save(function(*arguments), path)
            dist.barrier()
            parallel_state.destroy_model_parallel()  # for a job that left it to the end of its process
            dist.destroy_process_group()
            connection.send("")
        except Exception:
            connection.send(traceback.format_exc())


DIED = "the process died"


def _answer(connection: Connection) -> str:
    """What went wrong in a process of a pool: nothing, a traceback, or DIED."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        return DIED


class RankPool:
    """Processes that stay, with a default group of the first N of them for each call: a call costs milliseconds, a start seconds.

    A rank that raises, dies or does not answer in time fails the call that it happened in, by name, and no other: all processes are
    replaced before the next call.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self._processes: list[tuple[Any, Connection]] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = 0
        atexit.register(self.close)

    def run(self, world_size: int, function: Callable, *arguments: Any, name: str = "", timeout: float = 240) -> list[Any]:
        """What each of `world_size` ranks returned from `function(*arguments)`, which are pickled: functions stand at module level.

        Raises AssertionError that begins with `name`, with the traceback of the first rank that failed; after `timeout` seconds too.
        """
        context: Any = fork_server.context() if self.backend == "gloo" else mp.get_context("spawn")
        for rank in range(len(self._processes), world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.backend, self._store.port, dict(os.environ), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))
        self._calls += 1
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{rank}.pt" for rank in range(world_size)]
            for (_, connection), path in zip(self._processes, paths):
                connection.send((self._calls, world_size, timeout, path, function, arguments))
            self._wait(world_size, name or function.__name__, timeout)
            return [torch.load(path, weights_only=False) for path in paths]

    def _wait(self, world_size: int, name: str, timeout: float) -> None:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._processes[:world_size])}
        end = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise AssertionError(f"{name}: ranks {sorted(waiting.values())} of {world_size} gave no answer within {timeout} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                if error := _answer(connection):
                    # others fail because one died, and may be heard first
                    late = [other for other in wait(list(waiting), timeout=0.5) if isinstance(other, Connection)]
                    dead = [waiting[other] for other in late if error != DIED and _answer(other) == DIED]
                    rank, error = (dead[0], DIED) if dead else (rank, error)
                    self.close()  # others may wait for this rank for ever
                    raise AssertionError(f"{name}: rank {rank} of {world_size}:\n{error}")

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
        for process, _ in self._processes:
            process.join()
        self._processes = []


@cache
def ranks(backend: str = "gloo") -> RankPool:
    """The pool of this test process."""
    return RankPool(backend)
