"""The numbers of a log interval, and the console line.

The line is a contract (Megatron-LM's, field for field):
 [YYYY-mm-dd HH:MM:SS.ffffff] iteration %8d/%8d | consumed samples: %12d | [skipped samples: %12d |] elapsed time per iteration (ms): %.1f |
 [throughput per GPU (TFLOP/s/GPU): %.1f |] learning rate: %.6E | global batch size: %5d | <loss>: %.6E | ... loss scale: %.1f |
 [grad norm: %.3f |] [num zeros: %d |] [params norm: %.3f |] number of skipped iterations: %3d | number of nan iterations: %3d |
It is printed by the last rank.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO

import torch
import torch.distributed as dist

from megatron.core.utils import get_world_rank
from megatron.training.last_stage import from_last_stage
from megatron.training.train_step import StepRecord


def is_last_rank() -> bool:
    """Whether this is the rank that logs: the last one, which has the loss in every layout."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_0(message: str, rank: int | None = None) -> None:
    if (rank if rank is not None else get_world_rank()) == 0:
        print_line(message)


def print_rank_last(message: str) -> None:
    if is_last_rank():
        print_line(message)


def print_line(message: str, stream: TextIO | None = None) -> None:
    """Print in one write, so that the lines of several ranks do not mix."""
    stream = stream or sys.stdout
    stream.write(message + "\n")
    stream.flush()


@dataclass
class IntervalNumbers:
    """What a log line says, as plain numbers."""

    iteration: int
    train_iters: int
    consumed_samples: int
    skipped_samples: int
    milliseconds: float  # per iteration
    learning_rate: float
    global_batch_size: int
    losses: dict[str, float]  # mean over the interval's iterations; nan when one was
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    params_norm: float | None
    skipped_iterations: int
    nan_iterations: int
    tflops: float  # per device
    tokens_per_second: float  # of all devices
    mfu: float | None = None
    memory_bytes: int = 0
    details: dict[str, float] = field(default_factory=dict)  # means like those of losses, for files and TensorBoard alone
    expert_load: dict[int, list[float]] = field(default_factory=dict)  # MoE layer, from 1 -> tokens by expert, all steps and ranks


@dataclass
class StepNumbers:
    """One step, read from the device."""

    iteration: int
    global_batch_size: int
    losses: dict[str, float]  # mean over all data-parallel ranks
    learning_rate: float
    loss_scale: float
    grad_norm: float | None
    num_zeros: int | None
    updated: bool
    nonfinite_here: list[str] = field(default_factory=list)  # names of the losses that were NaN or Inf on this rank
    details: dict[str, float] = field(default_factory=dict)
    expert_load: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class StepWindow:
    """Collects steps between two log lines without reading the device; `read` reads everything at once."""

    records: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        self.records.append(record)

    def read(self, group: dist.ProcessGroup | None) -> list[StepNumbers]:
        """The collected steps in order, losses averaged over `group` (data parallel); empties the window. A collective."""
        records, self.records = self.records, []
        if not records:
            return []
        names = list(records[0].losses)
        means: list[list[float]] = [[] for _ in records]
        nonfinite: list[list[bool]] = [[] for _ in records]
        if names:
            pairs = torch.stack([torch.stack([record.losses[name] for name in names]) for record in records]).double()
            nonfinite = (~pairs[..., 0].isfinite()).tolist()
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(pairs, group=group)
            means = (pairs[..., 0] / pairs[..., 1].clamp(min=1)).tolist()  # [step][name]
        own_names = names
        names, means = from_last_stage((names, means))
        updated = torch.stack([record.updated for record in records]).tolist()
        norms = _read([record.grad_norm for record in records])
        zeros = _read([record.num_zeros for record in records])
        scales = _read([record.loss_scale for record in records])
        return [
            StepNumbers(
                iteration=record.iteration,
                global_batch_size=record.global_batch_size,
                losses=dict(zip(names, means[i], strict=True)),
                learning_rate=record.learning_rate,
                loss_scale=float(scales[i] or 1.0),
                grad_norm=norms[i],
                num_zeros=None if zeros[i] is None else int(zeros[i] or 0),
                updated=updated[i],
                nonfinite_here=[name for name, bad in zip(own_names, nonfinite[i], strict=True) if bad],
            )
            for i, record in enumerate(records)
        ]


def _read(values: Sequence[torch.Tensor | float | None]) -> list[float | None]:
    """Numbers of a list of 0-d tensors, numbers or None, with one transfer."""
    tensors = [value.double() for value in values if isinstance(value, torch.Tensor)]
    if len(tensors) < len(values):
        return [value if value is None else float(value) for value in values]
    return torch.stack(tensors).tolist()


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else (math.nan if values else 0.0)


def is_nan_iteration(step: StepNumbers) -> bool:
    """Whether one of the step's losses was NaN or Inf."""
    return any(not math.isfinite(value) for value in step.losses.values())


def console_line(numbers: IntervalNumbers, *, throughput: bool = False, now: datetime | None = None) -> str:
    """The line of the contract above."""
    stamp = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S.%f")
    n = numbers
    parts = [
        f" [{stamp}] iteration {n.iteration:8d}/{n.train_iters:8d} |",
        f" consumed samples: {n.consumed_samples:12d} |",
        f" skipped samples: {n.skipped_samples:12d} |" if n.skipped_samples else "",
        f" elapsed time per iteration (ms): {n.milliseconds:.1f} |",
        f" throughput per GPU (TFLOP/s/GPU): {n.tflops:.1f} |" if throughput else "",
        f" learning rate: {n.learning_rate:.6E} |",
        f" global batch size: {n.global_batch_size:5d} |",
        *(f" {name}: {scientific(value)} |" for name, value in n.losses.items() if value >= 0 or math.isnan(value)),
        f" loss scale: {n.loss_scale:.1f} |",
        f" grad norm: {n.grad_norm:.3f} |" if n.grad_norm is not None else "",
        f" num zeros: {n.num_zeros:d} |" if n.num_zeros is not None else "",
        f" params norm: {n.params_norm:.3f} |" if n.params_norm is not None else "",
        f" number of skipped iterations: {n.skipped_iterations:3d} |",
        f" number of nan iterations: {n.nan_iterations:3d} |",
    ]
    return "".join(parts)


def scientific(value: float) -> str:
    """%.6E, and `nan` as %f spells it."""
    return "nan" if math.isnan(value) else f"{value:.6E}"


def validation_line(title: str, losses: dict[str, float]) -> str:
    """` validation loss at iteration N | lm loss value: %.6E | lm loss PPL: %.6E | ` between two rules of dashes."""
    text = f" validation loss at {title} | "
    for name, value in losses.items():
        text += f"{name} value: {scientific(value)} | {name} PPL: {scientific(perplexity(value))} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """exp(loss), capped as Megatron-LM does at a loss of 20."""
    return math.exp(min(20.0, loss)) if not math.isnan(loss) else math.nan
