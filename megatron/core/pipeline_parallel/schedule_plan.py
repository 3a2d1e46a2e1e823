"""Schedules as pure functions: what one pipeline stage does in one training step, as a list.

No torch in here: order, liveness and peak activations of any schedule are tested without a process.
"""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a step of a plan does."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Step:
    """One action on one micro batch of one model chunk.

    `last_backward` marks the backward after which the chunk's gradients are complete: data-parallel reduction may start during it.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    last_backward: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


Plan = list[Step]


def no_pipelining(num_microbatches: int, forward_only: bool = False) -> Plan:
    """One stage: each micro batch forward and straight backward, so that one micro batch's activations live at a time."""
    if num_microbatches < 1:
        raise ValueError(f"a step needs at least 1 micro batch, not {num_microbatches}")
    plan = []
    for microbatch in range(num_microbatches):
        plan.append(Step(Kind.FORWARD, microbatch))
        if not forward_only:
            plan.append(Step(Kind.BACKWARD, microbatch, last_backward=microbatch == num_microbatches - 1))
    return plan


def peak_activations(plan: Plan) -> int:
    """The most micro batches whose activations are held at once."""
    held, peak = set(), 0
    for step in plan:
        if step.kind is Kind.FORWARD:
            held.add((step.chunk, step.microbatch))
        else:
            held.discard((step.chunk, step.microbatch))
        peak = max(peak, len(held))
    return peak


def check_plan(plan: Plan, num_microbatches: int, num_chunks: int = 1, forward_only: bool = False) -> list[str]:
    """What is wrong with a plan: each (chunk, micro batch) forward once, then backward once, one last backward a chunk, at the end."""
    problems = []
    expected = {(chunk, microbatch) for chunk in range(num_chunks) for microbatch in range(num_microbatches)}
    forwards = [(s.chunk, s.microbatch) for s in plan if s.kind is Kind.FORWARD]
    backwards = [(s.chunk, s.microbatch) for s in plan if s.kind is Kind.BACKWARD]
    if sorted(forwards) != sorted(expected):
        problems.append(f"forwards are {forwards}")
    if sorted(backwards) != ([] if forward_only else sorted(expected)):
        problems.append(f"backwards are {backwards}")
    seen = set()
    for step in plan:
        place = (step.chunk, step.microbatch)
        if step.kind is Kind.FORWARD:
            seen.add(place)
        elif place not in seen:
            problems.append(f"backward of {place} before its forward")
    for chunk in range(0 if forward_only else num_chunks):
        flags = [s.last_backward for s in plan if s.kind is Kind.BACKWARD and s.chunk == chunk]
        if flags.count(True) != 1 or not flags[-1]:
            problems.append(f"chunk {chunk} does not mark its last backward")
    return problems
