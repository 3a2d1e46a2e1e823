"""What ends a run early, agreed on by all ranks: a signal, Ctrl-C, a time limit, an iteration."""

import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.callbacks.base import Callback
from megatron.training.train_step import StepRecord, TrainingRun

SECOND_INTERRUPT_AFTER = 2.0  # seconds; a launcher may pass one Ctrl-C on twice


class ExitConditions(Callback):
    """Sets `run.stop_reason`, on every rank after the same step.

    A rank that is told to stop (signal or time) says so in a small reduction on the CPU that the others read one step later, so no step
    waits for it. When a peer has died the reduction fails and the run ends with that error: nothing is saved then.
    """

    def __init__(self, *, signal_to_catch: signal.Signals | None, interval: int | None, minutes: int | None) -> None:
        self.interval = interval
        self.deadline = time.monotonic() + minutes * 60 if minutes else None
        self.minutes = minutes
        self.received: signal.Signals | None = None
        self.first_interrupt = 0.0
        self.pending: tuple[torch.Tensor, Any] | None = None
        self.previous: dict[signal.Signals, Any] = {}
        for caught in {signal.SIGINT, signal_to_catch} - {None}:
            assert caught is not None
            self.previous[caught] = signal.signal(caught, self._note)

    def _note(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and self.received is signal.SIGINT and now - self.first_interrupt > SECOND_INTERRUPT_AFTER:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self.first_interrupt = signal.Signals(number), now

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        wish = int(self.received or 0)
        if not wish and self.deadline is not None and time.monotonic() > self.deadline:
            wish = -1
        agreed = self._agreed(wish)
        if agreed:
            run.stop_reason = f"{self.minutes} minutes are over" if agreed < 0 else f"signal {signal.Signals(agreed).name}"
        elif self.interval and record.iteration % self.interval == 0:
            run.stop_reason = f"--exit-interval {self.interval}"

    def _agreed(self, wish: int) -> int:
        """What any rank wished one step ago (alone: wishes now); 0 for nothing."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return wish
        agreed = 0
        if self.pending is not None:
            flags, work = self.pending
            work.wait()
            agreed = int(flags[0]) or -int(flags[1])
        flags = torch.tensor([max(wish, 0), int(wish < 0)])
        self.pending = (flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True))
        return agreed

    def on_train_end(self, run: TrainingRun) -> None:
        if self.pending is not None:
            self.pending[1].wait()
            self.pending = None

    def close(self) -> None:
        for caught, handler in self.previous.items():
            signal.signal(caught, handler)
        self.previous = {}
