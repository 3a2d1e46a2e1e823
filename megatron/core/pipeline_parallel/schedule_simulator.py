"""Run the plans of all stages together without a process: do they finish? And draw them.

Transfers are a rendezvous: one happens when both ends are at it, and an end that waits holds up what its communicator was given later.
A simulation in which sent messages wait in a buffer would pass plans that hang under NCCL.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from megatron.core.pipeline_parallel.schedule_plan import COMPUTE, Kind, Step, compute_orders, costs_of, in_batches, needs, start_times


class _Run:
    """The state of all stages: how far each is in its plan, what its communicators were given, what has happened.

    A communicator is given batches and takes one after another. The transfers of a batch happen each for itself, those between the same two
    stages in their order; what was received can be used, as on NCCL, when the whole batch is over.
    """

    def __init__(self, plans: Sequence[Sequence[Step]], num_chunks: int, per_pair: bool, blocking: bool, batched: bool) -> None:
        self.plans = [in_batches(plan) if batched else [[step] for step in plan] for plan in plans]
        self.num_chunks, self.per_pair, self.blocking = num_chunks, per_pair, blocking
        self.at = [0] * len(plans)
        self.queues: list[dict[Hashable, deque[tuple[list[Step], list[Step]]]]] = [{} for _ in plans]  # (batch, what is left of it)
        self.computed: set[tuple[int, Kind, int, int]] = set()
        self.done: set[tuple[int, Step]] = set()  # transfers
        self.received: set[tuple[int, Kind | None, int, int]] = set()

    def communicator(self, stage: int, step: Step) -> Hashable:
        return frozenset((stage, step.peer)) if self.per_pair else "all"

    def slot(self, stage: int, chunk: int) -> int:
        return chunk * len(self.plans) + stage

    def can_compute(self, stage: int, step: Step) -> bool:
        for kind, slot, microbatch in needs(step, stage, len(self.plans), self.num_chunks):
            chunk, owner = divmod(slot, len(self.plans))
            if slot == self.slot(stage, step.chunk):
                if (owner, kind, chunk, microbatch) not in self.computed:
                    return False
            elif (stage, kind, step.chunk, microbatch) not in self.received:
                return False
        return True

    def advance(self, stage: int) -> bool:
        """Let a stage do its next step or batch, if it can."""
        if self.at[stage] == len(self.plans[stage]):
            return False
        batch = self.plans[stage][self.at[stage]]
        step = batch[0]
        if step.kind in COMPUTE:
            if not self.can_compute(stage, step):
                return False
            self.computed.add((stage, step.kind, step.chunk, step.microbatch))
        else:
            if any(one.kind is Kind.SEND and (stage, one.payload, one.chunk, one.microbatch) not in self.computed for one in batch):
                return False
            queue = self.queues[stage].setdefault(self.communicator(stage, step), deque())
            if self.blocking and (stage, step) not in self.done:
                if queue:
                    return False
                queue.append((batch, list(batch)))
                return True
            if not self.blocking:
                queue.append((batch, list(batch)))
        self.at[stage] += 1
        return True

    def transfer(self, stage: int) -> bool:
        """Let something that a stage sends in the first batch of one of its communicators arrive, if the other end is at it."""
        for communicator, queue in self.queues[stage].items():
            tried = set()
            for send in queue[0][1] if queue else ():
                if send.kind is not Kind.SEND or send.peer in tried:
                    continue
                tried.add(send.peer)  # only the first to a peer
                assert send.peer is not None
                other = self.queues[send.peer].get(communicator)
                receive = next((step for step in other[0][1] if step.kind is Kind.RECV and step.peer == stage), None) if other else None
                step = 1 if send.payload is Kind.FORWARD else -1
                if receive is None or receive.payload is not send.payload or receive.microbatch != send.microbatch:
                    continue
                if self.slot(send.peer, receive.chunk) != self.slot(stage, send.chunk) + step:
                    continue
                self._happened(stage, communicator, send)
                self._happened(send.peer, communicator, receive)
                return True
        return False

    def _happened(self, stage: int, communicator: Hashable, step: Step) -> None:
        queue = self.queues[stage][communicator]
        batch, left = queue[0]
        left.remove(step)
        if not left:
            queue.popleft()
            self.done.update((stage, one) for one in batch)
            self.received.update((stage, one.payload, one.chunk, one.microbatch) for one in batch if one.kind is Kind.RECV)


def find_deadlock(
    plans: Sequence[Sequence[Step]], num_chunks: int = 1, *, per_pair: bool = True, blocking: bool = False, batched: bool = False
) -> list[str]:
    """Where each stage stands when nothing moves any more; empty when all plans end with nothing left to transfer.

    per_pair: a communicator for each two stages, as NCCL makes them for single sends; else one for all stages, as for batches.
    blocking: a stage waits for each transfer (or batch) before its next step; else only computations wait, for what they need.
    batched: transfers that are adjacent in a plan go together (and per_pair does not apply): what the runner does.
    """
    run = _Run(plans, num_chunks, per_pair and not batched, blocking, batched)
    moved = True
    while moved:
        moved = False
        for stage in range(len(plans)):
            while run.advance(stage) or run.transfer(stage):
                moved = True
    found = []
    for stage, plan in enumerate(run.plans):
        waiting = [str(step) for queue in run.queues[stage].values() if queue for step in queue[0][1]]
        if run.at[stage] < len(plan) or waiting:
            step = str(plan[run.at[stage]][0]) if run.at[stage] < len(plan) else "its end"
            found.append(f"stage {stage} is at {step}" + (f", transfers waiting: {', '.join(waiting)}" if waiting else ""))
    return found


def draw(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> str:
    """A schedule as text: a line a stage, a column a unit of time; `F3.1` is micro batch 3 forward through chunk 1, `=` goes on."""
    orders = compute_orders(schedule, num_stages, num_chunks, num_microbatches)
    costs = costs_of(orders)
    starts = start_times(orders, num_chunks, costs)
    width = 1 + max(len(str(step)) for order in orders for step in order)
    end = max(row[-1] + costs[order[-1].kind] for order, row in zip(orders, starts))
    lines = []
    for stage, (order, row) in enumerate(zip(orders, starts)):
        cells = ["."] * end
        for step, start in zip(order, row):
            cells[start : start + costs[step.kind]] = [str(step)] + ["="] * (costs[step.kind] - 1)
        lines.append(f"stage {stage:<2} " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def draw_png(path: str | Path, schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> None:
    """The same as a picture. Needs matplotlib."""
    from megatron.core.optional_imports import require

    figures: Any = require("matplotlib.figure", "drawing a schedule")
    orders = compute_orders(schedule, num_stages, num_chunks, num_microbatches)
    costs = costs_of(orders)
    colors = {Kind.FORWARD: "#7aa6d8", Kind.BACKWARD: "#8cc68c", Kind.WEIGHT: "#e3b36b"}
    starts = start_times(orders, num_chunks, costs)
    end = max(row[-1] for row in starts)
    figure = figures.Figure(figsize=(max(4.0, 0.3 * end), 0.5 * num_stages + 1))
    axes = figure.subplots()
    for stage, (order, row) in enumerate(zip(orders, starts)):
        for step, start in zip(order, row):
            shade = 1 - 0.6 * step.chunk / num_chunks
            axes.barh(stage, costs[step.kind], left=start, color=colors[step.kind], alpha=shade, edgecolor="white")
            axes.text(start + costs[step.kind] / 2, stage, str(step.microbatch), ha="center", va="center", fontsize=7)
    axes.invert_yaxis()
    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.set_xlabel("time [forwards of one chunk]")
    figure.tight_layout()
    figure.savefig(path)
