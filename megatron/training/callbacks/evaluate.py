"""Evaluation during and after training."""

from typing import Any

from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.interval_log import IntervalLog
from megatron.training.data import HeldOutSet
from megatron.training.evaluation import evaluate
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import print_rank_last, validation_line


class Evaluate(Callback):
    """Every `interval` iterations each validation set's loss and perplexity; after the last iteration those of validation and test sets.

    Validation goes on through its samples: `counts_samples` says that their number is part of the run's position.
    `listeners` are told every result.
    """

    def __init__(
        self,
        validation: list[HeldOutSet],
        test: list[HeldOutSet],
        *,
        interval: int | None,
        num_microbatches: int,
        global_batch_size: int,
        counts_samples: bool,
        group: Any,
        listeners: list[Callback],
        log: IntervalLog,
    ) -> None:
        self.validation = validation
        self.test = test
        self.interval = interval
        self.num_microbatches = num_microbatches
        self.global_batch_size = global_batch_size
        self.counts_samples = counts_samples
        self.group = group
        self.listeners = listeners
        self.log = log

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if self.interval and record.iteration % self.interval == 0:
            with self.log.paused():
                self._validate(run, f"iteration {record.iteration}")

    def on_run_complete(self, run: TrainingRun) -> None:
        self._validate(run, f"iteration {run.state.iteration} on validation set")
        self._evaluate(run, self.test, "test", f"iteration {run.state.iteration} on test set")

    def _validate(self, run: TrainingRun, title: str) -> None:
        self._evaluate(run, self.validation, "validation", title)
        if self.counts_samples and self.validation:
            run.state.consumed_valid_samples += self.validation[0].num_iterations * self.global_batch_size

    def _evaluate(self, run: TrainingRun, sets: list[HeldOutSet], kind: str, title: str) -> None:
        for held_out in sets:
            losses = evaluate(
                run, held_out.batches(), num_iterations=held_out.num_iterations, num_microbatches=self.num_microbatches, group=self.group
            )
            print_rank_last(validation_line(f"{title} on {held_out.name}" if held_out.name else title, losses))
            for listener in self.listeners:
                listener.on_evaluation_end(run, held_out.name or kind, losses)
