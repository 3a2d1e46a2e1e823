"""One training step, and what is known about a run between steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches, update_num_microbatches
from megatron.training.phase import phase


@dataclass
class TrainState:
    """Position of a run. Saved in every checkpoint; the data order depends on `consumed_train_samples` and `data_order` alone."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    data_order: Any = None  # data_order.DataOrder: which samples the numbers stand for


@dataclass
class StepRecord:
    """What one step did. Tensors stay on the device: reading them is a synchronization, and logging's business."""

    iteration: int  # the step's number, from 1
    global_batch_size: int
    losses: dict[str, torch.Tensor]  # name -> [sum, count] over this rank's micro batches
    learning_rate: float  # of the NEXT step, as Megatron-LM logs it
    loss_scale: torch.Tensor | float
    grad_norm: torch.Tensor | None  # 0-d, before clipping
    num_zeros: torch.Tensor | None
    updated: torch.Tensor  # 0-d bool: False when NaN or Inf held the update back


@dataclass
class TrainingRun:
    """Everything a step works on. Callbacks get it at every phase boundary."""

    model: list[Any]  # DistributedDataParallel chunks
    optimizer: Any
    scheduler: Any
    forward_step_func: Callable
    forward_backward_func: Callable
    state: TrainState
    seq_length: int
    micro_batch_size: int
    train_iters: int
    flops_per_sample: float
    sync_skips: bool = False  # fp16: a step without update does not advance the schedule, so its outcome is read at once
    stop_reason: str | None = field(default=None)  # set by a callback: the loop ends after this step


def sum_reports(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Per name the [sum, count] over micro batches; a 0-d report is a mean of weight 1."""
    totals: dict[str, torch.Tensor] = {}
    for report in reports:
        for name, value in report.items():
            value = value.detach()
            pair = torch.stack([value.float(), torch.ones_like(value, dtype=torch.float32)]) if value.numel() == 1 else value.float()
            pair = pair.reshape(2)
            totals[name] = totals[name] + pair if name in totals else pair
    return totals


def train_step(run: TrainingRun, batches: Iterator) -> StepRecord:
    """Forward and backward over the step's micro batches, then one update of weights and learning rate."""
    state = run.state
    update_num_microbatches(state.consumed_train_samples, consistency_check=True)
    batch_size = get_current_global_batch_size()
    with phase("forward and backward", state.iteration + 1):
        for chunk in run.model:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        reports = run.forward_backward_func(
            forward_step_func=run.forward_step_func,
            data_iterator=batches,
            model=run.model,
            num_microbatches=get_num_microbatches(),
            seq_length=run.seq_length,
            micro_batch_size=run.micro_batch_size,
            forward_only=False,
        )
    with phase("optimizer", state.iteration + 1):
        updated, grad_norm, num_zeros = run.optimizer.step()
    with phase("learning rate", state.iteration + 1):
        if not run.sync_skips or bool(updated):
            run.scheduler.step(increment=batch_size)
    state.iteration += 1
    state.consumed_train_samples += batch_size
    state.num_floating_point_operations_so_far += run.flops_per_sample * batch_size
    return StepRecord(
        iteration=state.iteration,
        global_batch_size=batch_size,
        losses=sum_reports(reports),
        learning_rate=learning_rate(run.optimizer),
        loss_scale=run.optimizer.get_loss_scale(),
        grad_norm=grad_norm,
        num_zeros=num_zeros,
        updated=updated,
    )


def learning_rate(optimizer: Any) -> float:
    """The rate of the ordinary parameter groups (not of those with --decoupled-lr)."""
    rates = [group["lr"] for group in optimizer.param_groups if not group.get("is_decoupled_lr", False)]
    return float(rates[0]) if rates else 0.0
