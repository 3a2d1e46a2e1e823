"""--async-save: training goes on while worker processes write a checkpoint; it becomes one at a later step, when all ranks have written.

One save is under way at a time. Until all ranks agree that their files are written, its folder has the name of an unfinished one, and the
tracker the iteration before.
"""

import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.async_writer import AsyncWriter
from megatron.core.dist_checkpointing.saving import PendingSave, SaveStrategy, Written
from megatron.core.utils import world_is_initialized
from megatron.training import checkpointing
from megatron.training.phase import phase
from megatron.training.training_log import print_rank_0

RUNNING, WRITTEN, FAILED = 0, 1, 2


@dataclass
class _UnderWay:
    iteration: int
    final: Path
    pending: PendingSave
    started: datetime


class AsyncSaver:
    """Saves of one run. `start`, `poll` and `wait` are collective and raise on all ranks what failed on one."""

    def __init__(self, strategy: SaveStrategy) -> None:
        self.strategy = strategy
        self.writer = AsyncWriter()
        self._under_way: _UnderWay | None = None

    def start(self, save: str, iteration: int, contents: dict[str, Any], content_metadata: dict[str, Any]) -> None:
        """Copy `contents` and begin to write them. Nothing may be under way."""
        assert self._under_way is None
        final, unfinished = checkpointing.start_folder(save, iteration)
        try:
            pending = dist_checkpointing.begin_save(contents, unfinished, content_metadata, self.strategy)
            self.writer.start(pending)
        except (OSError, ValueError):
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._under_way = _UnderWay(iteration, final, pending, datetime.now())

    def poll(self) -> int | None:
        """Between steps: complete the save under way if all ranks have written, or one has failed. Its iteration if it is complete now."""
        if self._under_way is None:
            return None
        own = FAILED if self.writer.has_failed() else WRITTEN if self.writer.has_ended() else RUNNING
        least, most = _extremes(own)
        return self._complete() if least == WRITTEN or most == FAILED else None

    def wait(self) -> int | None:
        """Complete the save under way, however long it takes. Its iteration."""
        if self._under_way is None:
            return None
        with phase("waiting for a checkpoint to be written"):
            return self._complete(wait=True)

    def _complete(self, wait: bool = False) -> int:
        assert self._under_way is not None
        saved, self._under_way = self._under_way, None

        def written() -> Written:
            return self.writer.result() if wait or self.writer.has_ended() else _NOT_YET

        with phase("completing a checkpoint"):
            try:
                saved.pending.commit(written)
            except (OSError, ValueError):
                shutil.rmtree(saved.pending.folder, ignore_errors=True)
                raise
            checkpointing.publish_on_all(saved.pending.folder, saved.final)
        seconds = (datetime.now() - saved.started).total_seconds()
        text = f"successfully saved checkpoint from iteration {saved.iteration:7d} to {saved.final.parent}"
        print_rank_0(f"  [{datetime.now()}] {text} [ {seconds:.1f} s beside training ]")
        return saved.iteration

    def close(self) -> None:
        """End the worker; what is under way stays unfinished."""
        self.writer.close()


# of a rank that still writes while another has failed: the commit raises before anybody looks at it
_NOT_YET: Any = None


def _extremes(own: int) -> tuple[int, int]:
    """The least and the largest of all ranks' states."""
    if not world_is_initialized() or dist.get_world_size() == 1:
        return own, own
    states = torch.tensor([own, -own], dtype=torch.int32)  # on the CPU: a GPU is not waited for
    dist.all_reduce(states, op=dist.ReduceOp.MAX)
    return -int(states[1]), int(states[0])
