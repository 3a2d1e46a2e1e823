"""Every log interval: read what the steps left on the device, and hand the numbers to the sinks."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.timers import Timers
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.expert_log import ExpertLog
from megatron.training.phase import phase
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import IntervalNumbers, StepNumbers, StepWindow, is_last_rank, is_nan_iteration, mean, print_line


class LogSink:
    """Where numbers go. Only the rank that logs calls these."""

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        """One log interval: its summary, and its steps."""

    def write_evaluation(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        """One evaluation."""

    def close(self) -> None:
        """Let go of files."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or Inf and the run was told to stop on it."""


class IntervalLog(Callback):
    """Collects steps and logs every `interval`.

    `stop_on_nan`: a step whose loss or gradient is not finite ends the run, at the log line after it, with an error that names rank,
    iteration and tensor. The weights never took it in: the update of that very step was held back on the device. Under fp16 loss
    scaling an overflow is part of the method and does not stop; a loss that is NaN does.
    `timers`: those of the phases, printed after the line when their log level is above 0.
    """

    def __init__(
        self,
        sinks: list[LogSink],
        *,
        interval: int,
        group: Any,
        dtype: torch.dtype,
        stop_on_nan: bool,
        params_norm: bool,
        loss_scaling: bool,
        timers: Timers,
        timers_writer: Any = None,
        experts: ExpertLog | None = None,
    ) -> None:
        self.sinks = sinks
        self.interval = interval
        self.group = group
        self.stop_on_nan = stop_on_nan
        self.params_norm = params_norm
        self.loss_scaling = loss_scaling
        self.timers = timers
        self.timers_writer = timers_writer  # TensorBoard's, on the rank that logs
        self.peak_tflops = device.peak_tflops(dtype)
        self.experts = experts
        self.window = StepWindow()
        self.stopwatch = device.Stopwatch()

    def on_train_start(self, run: TrainingRun) -> None:
        device.synchronize()
        self.stopwatch = device.Stopwatch()

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        self.window.add(record)
        if record.iteration % self.interval == 0:
            self.flush(run)

    def on_train_end(self, run: TrainingRun) -> None:
        self.flush(run)

    def close(self) -> None:
        for sink in self.sinks:
            try:
                sink.close()
            except Exception as error:  # a picture that cannot be drawn is no reason to fail, nor to hide why the run failed
                print_line(f"WARNING: {type(sink).__name__} could not end: {type(error).__name__}: {error}", sys.stderr)

    def on_evaluation_end(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        if is_last_rank():
            for sink in self.sinks:
                sink.write_evaluation(run, set_name, losses)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock: what is done inside (evaluation, saving) is not training time."""
        before = self.stopwatch.elapsed(wait_for_device=True, reset=False)
        yield
        self.stopwatch.started += self.stopwatch.elapsed(reset=False) - before

    def flush(self, run: TrainingRun) -> None:
        """Read and write what was collected since the last line; a collective."""
        with phase("logging", run.state.iteration):
            self._flush(run)

    def _flush(self, run: TrainingRun) -> None:
        steps = self.window.read(self.group)
        if not steps:
            return
        if self.experts is not None:
            self.experts.read_into(steps)
        seconds = self.stopwatch.elapsed(wait_for_device=True)
        params_norm = float(run.optimizer.get_params_norm()) if self.params_norm else None
        numbers = self.summarize(run, steps, seconds, params_norm)
        if is_last_rank():
            for sink in self.sinks:
                sink.write(numbers, steps)
        if self.timers.log_level > 0:
            self.timers.write(self.timers.names(), self.timers_writer, numbers.iteration, normalizer=len(steps), reset=False)
            self.timers.log(normalizer=len(steps))
        if self.stop_on_nan:
            self.raise_on_nan(run, steps)

    def summarize(self, run: TrainingRun, steps: list[StepNumbers], seconds: float, params_norm: float | None) -> IntervalNumbers:
        last = steps[-1]
        samples = sum(step.global_batch_size for step in steps)
        world = dist.get_world_size() if dist.is_initialized() else 1
        tflops = run.flops_per_sample * samples / seconds / world / 1e12
        return IntervalNumbers(
            iteration=last.iteration,
            train_iters=run.train_iters,
            consumed_samples=run.state.consumed_train_samples,
            skipped_samples=run.state.skipped_train_samples,
            milliseconds=seconds / len(steps) * 1000,
            learning_rate=last.learning_rate,
            global_batch_size=last.global_batch_size,
            losses={name: mean([step.losses[name] for step in steps]) for name in last.losses},
            loss_scale=last.loss_scale,
            grad_norm=last.grad_norm,
            num_zeros=last.num_zeros,
            params_norm=params_norm,
            skipped_iterations=sum(not step.updated for step in steps),
            nan_iterations=sum(map(is_nan_iteration, steps)),
            tflops=tflops,
            tokens_per_second=samples * run.seq_length / seconds,
            mfu=tflops / self.peak_tflops if self.peak_tflops else None,
            memory_bytes=device.peak_memory_bytes(),
            details={name: mean([step.details[name] for step in steps]) for name in last.details},
            expert_load={n: [sum(counts) for counts in zip(*(step.expert_load[n] for step in steps))] for n in last.expert_load},
        )

    def raise_on_nan(self, run: TrainingRun, steps: list[StepNumbers]) -> None:
        """End the run when one of `steps` was not finite; all ranks judge alike, and tell each other where it was."""
        bad = [
            step for step in steps if is_nan_iteration(step) or (not step.updated and not self.loss_scaling and not _finite(step.grad_norm))
        ]
        if bad:
            first = bad[0]
            losses = ", ".join(f"{name} {value}" for name, value in first.losses.items())
            raise NonFiniteError(
                f"iteration {first.iteration}: {losses}, grad norm {first.grad_norm}; {first_on_any_rank(where_nonfinite(run, first))}. "
                "The weights were not updated with it. To go on past such steps give --no-check-for-nan-in-loss-and-grad"
            )


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def where_nonfinite(run: TrainingRun, step: StepNumbers) -> tuple[int, str]:
    """What is not finite on this rank, with a number that is smaller the nearer that is to the cause."""
    for chunk in run.model:
        chunk.finish_param_sync()
        for name, parameter in chunk.named_parameters():
            if not bool(parameter.detach().isfinite().all()):
                return 0, f"the parameter {name.removeprefix('module.').removeprefix('module.')} itself holds NaN or Inf"
    report = run.optimizer.nonfinite_report()
    more = f" (and {len(report) - 1} more)" if len(report) > 1 else ""
    gradients = f"the gradient of {report[0][0]} was not{more}" if report else "no gradient was seen that is not"
    if step.nonfinite_here:
        return 1, f"all parameters are finite, its own {step.nonfinite_here[0]} was not, and {gradients}"
    return 2, f"all parameters and its own losses are finite, {gradients}"


def first_on_any_rank(found: tuple[int, str]) -> str:
    """Of what the ranks found the nearest to the cause, with its rank."""
    everyone: list[Any] = [found]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
    (_, text), rank = min((found, rank) for rank, found in enumerate(everyone))
    return f"on rank {rank} {text}"
