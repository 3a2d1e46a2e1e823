"""The one runner that executes any schedule plan."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .schedule_plan import Kind, Plan

ForwardStep = Callable[[int, int], tuple[torch.Tensor, Any]]
BackwardStep = Callable[[torch.Tensor], None]


def run_plan(
    plan: Plan,
    forward: ForwardStep,
    backward: BackwardStep,
    no_sync: Callable[[], AbstractContextManager],
) -> list[Any]:
    """Execute `plan`; return what each forward reported, in order.

    forward(chunk, microbatch) -> (scalar loss to run backward from, report); backward(loss).
    All but a chunk's last backward run under `no_sync()`: gradients accumulate locally there.
    """
    in_flight: dict[tuple[int, int], torch.Tensor] = {}
    reports = []
    for step in plan:
        place = (step.chunk, step.microbatch)
        if step.kind is Kind.FORWARD:
            in_flight[place], report = forward(*place)
            reports.append(report)
        elif step.last_backward:
            backward(in_flight.pop(place))
        else:
            with no_sync():
                backward(in_flight.pop(place))
    return reports
