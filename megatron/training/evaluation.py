"""Loss on held-out data."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.last_stage import from_last_stage
from megatron.training.phase import phase
from megatron.training.train_step import TrainingRun, sum_reports


def evaluate(run: TrainingRun, batches: Iterator, *, num_iterations: int, num_microbatches: int, group: Any) -> dict[str, float]:
    """Mean loss per name over `num_iterations` batches of `num_microbatches` micro batches on each data-parallel rank.

    Every token weighs the same. Dropout is off and no gradient is kept. The random state is left as it was.
    """
    for chunk in run.model:
        chunk.eval()
    totals: dict[str, torch.Tensor] = {}
    with phase("evaluation", run.state.iteration):
        for _ in range(num_iterations):
            reports = run.forward_backward_func(
                forward_step_func=run.forward_step_func,
                data_iterator=batches,
                model=run.model,
                num_microbatches=num_microbatches,
                seq_length=run.seq_length,
                micro_batch_size=run.micro_batch_size,
                forward_only=True,
            )
            for name, pair in sum_reports(reports).items():
                totals[name] = totals[name] + pair.double() if name in totals else pair.double()
    for chunk in run.model:
        chunk.train()
    if group is not None and dist.get_world_size(group) > 1:
        for pair in totals.values():
            dist.all_reduce(pair, group=group)
    return from_last_stage({name: (pair[0] / pair[1].clamp(min=1)).item() for name, pair in totals.items()})
