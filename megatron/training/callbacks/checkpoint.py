"""Saving during training."""

import argparse
from datetime import datetime
from pathlib import Path

from megatron.core.utils import get_world_rank
from megatron.training.async_save import AsyncSaver
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.interval_log import IntervalLog
from megatron.training.checkpoint_contents import content_metadata, contents_of
from megatron.training.checkpoint_folders import remove_old
from megatron.training.checkpointing import save_checkpoint
from megatron.training.phase import phase
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import is_last_rank, print_rank_0

PROGRESS_FILE = "progress.txt"


class SaveCheckpoints(Callback):
    """Every `interval` iterations, when the run stops early, and at the end."""

    def __init__(
        self,
        save: str,
        args: argparse.Namespace,
        *,
        interval: int | None,
        with_optimizer: bool,
        with_rng: bool,
        log: IntervalLog,
        keep_progress: bool = False,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        beside_training: bool = False,
    ) -> None:
        self.save = save
        self.args = args  # stored in the checkpoint; of them ckpt_format is read
        self.interval = interval
        self.with_optimizer = with_optimizer
        self.with_rng = with_rng
        self.log = log
        self.keep_progress = keep_progress
        self.keep_last = keep_last
        self.retain_interval = retain_interval
        self.beside_training = beside_training
        self.saver: AsyncSaver | None = None
        self.saved_iteration: int | None = None

    def on_train_start(self, run: TrainingRun) -> None:
        self.saved_iteration = run.state.iteration  # what was just loaded, or nothing to save yet
        self.saver = AsyncSaver() if self.beside_training else None
        self._note(run, "started")

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if self.saver is not None:
            self._completed(run, self.saver.poll())
        if run.stop_reason or (self.interval and record.iteration % self.interval == 0):
            self._save(run)

    def on_train_end(self, run: TrainingRun) -> None:
        self._save(run)
        if self.saver is not None:
            with self.log.paused():
                self._completed(run, self.saver.wait())

    def close(self) -> None:
        if self.saver is not None:
            self.saver.close()
            self.saver = None

    def _save(self, run: TrainingRun) -> None:
        if self.saved_iteration == run.state.iteration:
            return
        optimizer, scheduler = (run.optimizer, run.scheduler) if self.with_optimizer else (None, None)
        self.saved_iteration = run.state.iteration
        with self.log.paused():
            if self.saver is None:
                save_checkpoint(self.save, self.args, run.state, run.model, optimizer, scheduler, save_rng=self.with_rng)
                self._completed(run, run.state.iteration)
                return
            self._completed(run, self.saver.wait())
            with phase("saving a checkpoint", run.state.iteration):
                contents = contents_of(self.args, run.state, run.model, optimizer, scheduler, save_rng=self.with_rng)
                self.saver.start(self.save, run.state.iteration, contents, content_metadata(optimizer))

    def _completed(self, run: TrainingRun, iteration: int | None) -> None:
        """The checkpoint of that iteration is whole and the tracker names it."""
        if iteration is not None:
            self._remove_old(iteration)
            self._note(run, f"saved the checkpoint of iteration {iteration}" if self.saver else "saved a checkpoint")

    def _remove_old(self, latest: int) -> None:
        """Once `latest` is complete. What cannot be removed costs space, not the run."""
        if get_world_rank() == 0:
            for problem in remove_old(Path(self.save), latest, self.keep_last, self.retain_interval):
                print_rank_0(f"WARNING: {problem}")

    def _note(self, run: TrainingRun, event: str) -> None:
        """--log-progress: a line in progress.txt."""
        if not self.keep_progress or not is_last_rank():
            return
        state = run.state
        tokens = state.consumed_train_samples * run.seq_length
        Path(self.save).mkdir(parents=True, exist_ok=True)
        with open(Path(self.save) / PROGRESS_FILE, "a") as file:
            file.write(
                f"{datetime.now():%Y-%m-%d %H:%M:%S} | {event} | iteration {state.iteration} of {run.train_iters} | samples "
                f"{state.consumed_train_samples} | tokens {tokens} | model FLOPs {state.num_floating_point_operations_so_far:.4E}\n"
            )
