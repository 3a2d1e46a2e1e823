"""Where a log interval's numbers go: console, JSON lines, TensorBoard, wandb, the terminal's progress line."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from megatron.core import device, optional_imports
from megatron.training.callbacks.base import Callback
from megatron.training.callbacks.expert_log import max_over_mean
from megatron.training.callbacks.interval_log import LogSink
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import IntervalNumbers, StepNumbers, console_line, perplexity, print_rank_last


class ConsoleSink(LogSink):
    """Megatron-LM's line on standard output."""

    def __init__(self, *, throughput: bool) -> None:
        self.throughput = throughput
        self.told_memory = False

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        print_rank_last(console_line(numbers, throughput=self.throughput))
        if not self.told_memory:
            self.told_memory = True
            print_rank_last(f"   peak memory after the first interval: {numbers.memory_bytes / 2**30:.2f} GiB ({device.device_name()})")


class MetricsFileSink(LogSink):
    """One JSON object a line and logged iteration, floats at full precision (not-a-number is null), appended on resume."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.file: TextIO = open(path, "a")  # noqa: SIM115 - open as long as the run

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        row: dict[str, Any] = {"iteration": numbers.iteration, "consumed_samples": numbers.consumed_samples}
        row.update({name.replace(" ", "_"): value for name, value in numbers.losses.items()})
        row.update(
            grad_norm=numbers.grad_norm,
            lr=numbers.learning_rate,
            elapsed_ms=numbers.milliseconds,
            tokens_per_second=numbers.tokens_per_second,
            tflops=numbers.tflops,
            mfu=numbers.mfu,
            memory=numbers.memory_bytes,
            loss_scale=numbers.loss_scale,
            skipped_iterations=numbers.skipped_iterations,
            nan_iterations=numbers.nan_iterations,
            **numbers.details,
        )
        if numbers.expert_load:
            row["tokens_per_expert"] = numbers.expert_load
            row["expert_load_max_over_mean"] = {n: max_over_mean(tokens) for n, tokens in numbers.expert_load.items()}
        self._line(row)

    def write_evaluation(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        row: dict[str, Any] = {"iteration": run.state.iteration, "evaluation": set_name}
        self._line(row | {name.replace(" ", "_"): value for name, value in losses.items()})

    def _line(self, row: dict[str, Any]) -> None:
        strict = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
        self.file.write(json.dumps(strict, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardSink(LogSink):
    """Scalars under Megatron-LM's tags, each step's, against iterations and against samples."""

    def __init__(self, writer: Any, *, interval: int, memory: bool, perplexities: bool, world_size: int | None, loss_scale: bool) -> None:
        self.writer = writer
        self.interval = interval
        self.memory = memory
        self.perplexities = perplexities
        self.world_size = world_size
        self.loss_scale = loss_scale

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        samples = numbers.consumed_samples - sum(step.global_batch_size for step in steps)
        for step in steps:
            samples += step.global_batch_size
            if step.iteration % self.interval == 0:
                self._step(step, samples)
        self._both("iteration-time", numbers.milliseconds / 1000, numbers.iteration, numbers.consumed_samples)
        self._both("throughput", numbers.tflops, numbers.iteration, numbers.consumed_samples)
        if numbers.params_norm is not None:
            self._both("params-norm", numbers.params_norm, numbers.iteration, numbers.consumed_samples)
        if self.world_size is not None:
            self._both("world-size", self.world_size, numbers.iteration, numbers.consumed_samples)
        if self.memory:
            for tag, value in device.memory_stats().items():
                self.writer.add_scalar(tag, value, numbers.iteration)

    def _step(self, step: StepNumbers, samples: int) -> None:
        self._both("learning-rate", step.learning_rate, step.iteration, samples)
        self._both("batch-size", step.global_batch_size, step.iteration, samples)
        for name, value in (step.losses | step.details).items():
            self._both(name, value, step.iteration, samples)
        for layer, tokens in step.expert_load.items():
            self._both(f"moe/expert_load_max_over_mean_layer_{layer}", max_over_mean(tokens), step.iteration, samples)
            if step.details:
                for expert, count in enumerate(tokens):
                    self.writer.add_scalar(f"moe/tokens_layer_{layer}_expert_{expert}", count, step.iteration)
        if self.loss_scale:
            self._both("loss-scale", step.loss_scale, step.iteration, samples)
        if step.grad_norm is not None:
            self._both("grad-norm", step.grad_norm, step.iteration, samples)
        if step.num_zeros is not None:
            self._both("num-zeros", step.num_zeros, step.iteration, samples)

    def write_evaluation(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        suffix = "" if set_name == "validation" else f" {set_name}"
        place = (run.state.iteration, run.state.consumed_train_samples)
        for name, value in losses.items():
            self._both(f"{name} validation{suffix}", value, *place)
            if self.perplexities:
                self._both(f"{name} validation{suffix} ppl", perplexity(value), *place)

    def _both(self, tag: str, value: float, iteration: int, samples: int) -> None:
        self.writer.add_scalar(tag, value, iteration)
        self.writer.add_scalar(f"{tag} vs samples", value, samples)

    def close(self) -> None:
        self.writer.close()


def open_tensorboard(folder: str, queue_size: int) -> Any:
    """A SummaryWriter."""
    optional_imports.require("tensorboard", "--tensorboard-dir")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=folder, max_queue=queue_size)


class WandbSink(LogSink):
    """The interval's numbers in wandb, under TensorBoard's tags."""

    def __init__(self, *, project: str, name: str, entity: str | None, folder: str | None, config: dict[str, Any]) -> None:
        self.wandb = optional_imports.require("wandb", "--wandb-project")
        self.wandb.init(project=project, name=name or None, entity=entity or None, dir=folder or None, config=config)

    def write(self, numbers: IntervalNumbers, steps: list[StepNumbers]) -> None:
        row = {
            **numbers.losses,
            **numbers.details,
            **{f"moe/expert_load_max_over_mean_layer_{n}": max_over_mean(tokens) for n, tokens in numbers.expert_load.items()},
            "learning-rate": numbers.learning_rate,
            "batch-size": numbers.global_batch_size,
            "loss-scale": numbers.loss_scale,
            "grad-norm": numbers.grad_norm,
            "iteration-time": numbers.milliseconds / 1000,
            "throughput": numbers.tflops,
            "samples": numbers.consumed_samples,
        }
        self.wandb.log({name: value for name, value in row.items() if value is not None}, step=numbers.iteration)

    def write_evaluation(self, run: TrainingRun, set_name: str, losses: dict[str, float]) -> None:
        suffix = "" if set_name == "validation" else f" {set_name}"
        self.wandb.log({f"{name} validation{suffix}": value for name, value in losses.items()}, step=run.state.iteration)

    def close(self) -> None:
        self.wandb.finish()


class ProgressLine(Callback):
    """On a terminal: iteration, share done, tokens per second and time left, on one line that is overwritten. Reads no tensor."""

    WIDTH = 79

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self.stream = stream
        self.started = self.last = 0.0
        self.steps = self.samples = 0

    def on_train_start(self, run: TrainingRun) -> None:
        self.started = self.last = time.monotonic()

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        self.steps += 1
        self.samples += record.global_batch_size
        now = time.monotonic()
        if now - self.last < 0.5:
            return
        self.last = now
        left = (run.train_iters - record.iteration) * (now - self.started) / self.steps
        rate = self.samples * run.seq_length / (now - self.started)
        text = (
            f"{record.iteration}/{run.train_iters} ({record.iteration / run.train_iters:.0%})  {rate:,.0f} tokens/s  {duration(left)} left"
        )
        self.stream.write(f"\r{text:<{self.WIDTH}}\r")
        self.stream.flush()

    def on_train_end(self, run: TrainingRun) -> None:
        self.stream.write("\r" + " " * self.WIDTH + "\r")
        self.stream.flush()


def duration(seconds: float) -> str:
    """1 h 02 min, 3 min 20 s, 12 s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"
