"""Garbage collection on our terms."""

import gc

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
