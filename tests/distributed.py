"""Run a function on N gloo processes of this machine: the one way in which tests go parallel."""

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _entry(rank: int, world_size: int, port: int, folder: str, function: Callable, arguments: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
            mp.spawn(_entry, (world_size, _free_port(), folder, function, arguments), nprocs=world_size)
        except Exception as error:
            errors = sorted(Path(folder).glob("*.error"))
            text = "\n".join(f"rank {path.stem}:\n{path.read_text()}" for path in errors[:1])
            raise AssertionError(text or str(error)) from None
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
