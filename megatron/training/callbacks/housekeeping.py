"""Garbage collection on our terms, and profiles."""

import gc
from typing import Any

import torch

from megatron.core import device
from megatron.training.callbacks.base import Callback
from megatron.training.train_step import StepRecord, TrainingRun


class GarbageCollection(Callback):
    """--manual-gc: Python collects every `interval` iterations (0: never) on all ranks alike, and not in between."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_train_start(self, run: TrainingRun) -> None:
        gc.disable()
        gc.collect()

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if self.interval and record.iteration % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        gc.enable()


class Profile(Callback):
    """A trace of iterations [first, last] in Chrome's format, readable in Perfetto."""

    def __init__(self, path: str, first: int, last: int) -> None:
        self.path = path
        self.first = first
        self.last = last
        self.profiler: Any = None

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if record.iteration == self.first - 1:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if device.has_accelerator():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self.profiler = torch.profiler.profile(activities=kinds)
            self.profiler.start()
        elif record.iteration == self.last:
            self.close()

    def close(self) -> None:
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler.export_chrome_trace(self.path)
            self.profiler = None
