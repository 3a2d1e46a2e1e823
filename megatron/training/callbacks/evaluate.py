"""Evaluation during training."""

from collections.abc import Callable
from typing import Any

from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.interval_log import IntervalLog
from megatron.training.data import HeldOutSet
from megatron.training.evaluation import evaluate, report_evaluation
from megatron.training.train_step import StepRecord, TrainingRun


class Evaluate(Callback):
    """Every `interval` iterations, each set's loss and perplexity.

    Validation goes on through its samples: `counts_samples` says that their number is part of the run's position.
    """

    def __init__(
        self,
        sets: list[HeldOutSet],
        *,
        interval: int | None,
        num_microbatches: int,
        global_batch_size: int,
        counts_samples: bool,
        group: Any,
        tell: Callable[[TrainingRun, str, dict[str, float]], None],
        log: IntervalLog,
    ) -> None:
        self.sets = sets
        self.interval = interval
        self.num_microbatches = num_microbatches
        self.global_batch_size = global_batch_size
        self.counts_samples = counts_samples
        self.group = group
        self.tell = tell
        self.set_kind = "validation"  # what an unnamed set is called in logs
        self.log = log

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if self.interval and record.iteration % self.interval == 0:
            self.log.pause()
            self.run_all(run, f"iteration {record.iteration}")
            self.log.resume()

    def run_all(self, run: TrainingRun, title: str) -> dict[str, dict[str, float]]:
        """Evaluate every set now; the losses by set."""
        found = {}
        for held_out in self.sets:
            losses = evaluate(
                run, held_out.batches(), num_iterations=held_out.num_iterations, num_microbatches=self.num_microbatches, group=self.group
            )
            found[held_out.name] = losses
            report_evaluation(f"{title} on {held_out.name}" if held_out.name else title, losses)
            self.tell(run, held_out.name or self.set_kind, losses)
        if self.counts_samples and self.sets:
            run.state.consumed_valid_samples += self.sets[0].num_iterations * self.global_batch_size
        return found
