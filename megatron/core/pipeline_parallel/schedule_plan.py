"""Schedules as pure functions: what each pipeline stage does in one training step, as a list.

No torch in here: order, liveness and peak activations of any schedule are tested without a process.

A model of `stages x chunks` parts ("slots") is numbered in the order of its layers: slot = chunk * stages + stage. A schedule says in
which order a stage computes; where it sends and receives follows from that (`with_transfers`), for every schedule alike.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.enums import PIPELINE_SCHEDULES


class Kind(enum.Enum):
    """What a step of a plan does."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole of it, or in a zero-bubble plan the part that the stage before waits for
    WEIGHT = "W"  # the gradients of weights that a BACKWARD left over
    SEND = "S"
    RECV = "R"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)


@dataclass(frozen=True)
class Step:
    """One action on one micro batch of one model chunk.

    `last_backward` marks the backward (and the W) after which the chunk's gradients are complete: data-parallel reduction may start
    during it. SEND and RECV say what moves, `payload` FORWARD an activation and BACKWARD a gradient, and the stage at the other end,
    `peer`; their chunk is this stage's.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    last_backward: bool = False
    payload: Kind | None = None
    peer: int | None = None

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        if self.payload is None:
            return f"{self.kind.value}{self.microbatch}{chunk}"
        return f"{self.kind.value}({self.payload.value}{self.microbatch}{chunk}{'>' if self.kind is Kind.SEND else '<'}{self.peer})"


Plan = list[Step]
Costs = Mapping[Kind, int]
UNSPLIT: Costs = {Kind.FORWARD: 1, Kind.BACKWARD: 2}
SPLIT: Costs = {Kind.FORWARD: 1, Kind.BACKWARD: 1, Kind.WEIGHT: 1}


# --- the order in which a stage computes ---


def no_pipelining(num_microbatches: int, forward_only: bool = False) -> Plan:
    """One stage: each micro batch forward and straight backward, so that one micro batch's activations live at a time."""
    _check_microbatches(num_microbatches)
    plan = []
    for microbatch in range(num_microbatches):
        plan.append(Step(Kind.FORWARD, microbatch))
        if not forward_only:
            plan.append(Step(Kind.BACKWARD, microbatch))
    return _mark_last(plan)


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> Plan:
    """1F1B (PipeDream-Flush): as many forwards first as there are stages behind, then a backward for each forward."""
    return interleaved(stage, num_stages, 1, num_microbatches)


def interleaved(stage: int, num_stages: int, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Plan:
    """1F1B over chunks of the model that go round the stages (Narayanan et al. 2021, arXiv:2104.04473).

    Micro batches pass in groups of `group_size` (None: num_stages): a group through chunk 0, then through chunk 1, ... Larger groups leave
    transfers more time and hold more activations. ValueError, with several chunks, for groups of which one is smaller than num_stages.
    """
    _check_microbatches(num_microbatches)
    group_size = num_stages if group_size is None else group_size
    if num_chunks > 1:
        problem = group_problem(num_stages, num_microbatches, group_size)
        if problem:
            raise ValueError(f"{num_microbatches} micro batches over {num_stages} stages with {num_chunks} chunks each: {problem}")
    total = num_microbatches * num_chunks
    behind = num_stages - stage - 1
    warmup = min(total, behind if num_chunks == 1 else 2 * behind + (num_chunks - 1) * min(group_size, num_microbatches))
    groups = [range(first, min(first + group_size, num_microbatches)) for first in range(0, num_microbatches, group_size)]
    places = [(microbatch, chunk) for group in groups for chunk in range(num_chunks) for microbatch in group]

    def unit(kind: Kind, number: int) -> Step:
        microbatch, chunk = places[number] if num_chunks > 1 else (number, 0)
        return Step(kind, microbatch, chunk if kind is Kind.FORWARD else num_chunks - 1 - chunk)

    plan = [unit(Kind.FORWARD, number) for number in range(warmup)]
    for number in range(total - warmup):
        plan += [unit(Kind.FORWARD, warmup + number), unit(Kind.BACKWARD, number)]
    plan += [unit(Kind.BACKWARD, number) for number in range(total - warmup, total)]
    return _mark_last(plan)


def group_problem(num_stages: int, num_microbatches: int, group_size: int) -> str | None:
    """Why micro batches cannot pass several chunks in groups of `group_size`: the chunks' round takes as many as there are stages."""
    if group_size < num_stages:
        return f"groups of {group_size} micro batches must be at least as large as the pipeline has stages; make it {num_stages} or more"
    rest = num_microbatches % group_size
    if not 0 < rest < num_stages:
        return None
    if group_size == num_stages:
        return f"the interleaved schedule needs a multiple of {num_stages}; change the global batch size"
    return (
        f"groups of {group_size} leave a last one of {rest}, which must have at least {num_stages}; change the global batch size or the "
        "groups' size"
    )


def zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Plan:
    """1F1B with split backwards, ZB-H1 (Qi et al. 2023, arXiv:2401.10241): later stages put off their weight gradients.

    Stage s lets s of them wait, so each stage holds as many activations as 1F1B's first, and fills with them what 1F1B idles at the end.
    """
    plan: Plan = []
    written = 0
    for step in one_f_one_b(stage, num_stages, num_microbatches):
        plan.append(replace(step, last_backward=False))
        if step.kind is Kind.BACKWARD and step.microbatch >= stage:
            plan.append(Step(Kind.WEIGHT, written))
            written += 1
    plan += [Step(Kind.WEIGHT, microbatch) for microbatch in range(written, num_microbatches)]
    return _mark_last(plan)


def _check_microbatches(num_microbatches: int) -> None:
    if num_microbatches < 1:
        raise ValueError(f"a step needs at least 1 micro batch, not {num_microbatches}")


def _mark_last(plan: Plan) -> Plan:
    """Mark the last backward, and the last W, of each chunk."""
    marked = list(plan)
    for kind in (Kind.BACKWARD, Kind.WEIGHT):
        last = {step.chunk: place for place, step in enumerate(plan) if step.kind is kind}
        for place in last.values():
            marked[place] = replace(plan[place], last_backward=True)
    return marked


def compute_orders(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, forward_only: bool = False, group_size: int | None = None
) -> list[Plan]:
    """Every stage's computations in order; `group_size` as in `interleaved`. Raises ValueError for what the schedule does not do."""
    if schedule not in PIPELINE_SCHEDULES:
        raise ValueError(f"pipeline schedule {schedule!r} must be one of {', '.join(PIPELINE_SCHEDULES)}")
    if schedule == "zero-bubble" and num_chunks > 1:
        raise ValueError(f"the zero-bubble schedule has one chunk a stage, not {num_chunks}; leave virtual stages out or use 1f1b")
    if num_stages == 1 and num_chunks > 1:
        raise ValueError(f"{num_chunks} chunks need at least 2 pipeline stages, there is 1")
    if num_stages == 1:
        return [no_pipelining(num_microbatches, forward_only)]
    plans = [
        zero_bubble(stage, num_stages, num_microbatches)
        if schedule == "zero-bubble"
        else interleaved(stage, num_stages, num_chunks, num_microbatches, group_size)
        for stage in range(num_stages)
    ]
    return [[step for step in plan if step.kind is Kind.FORWARD] for plan in plans] if forward_only else plans


# --- when things happen, and so what is sent when ---


def needs(step: Step, stage: int, num_stages: int, num_chunks: int) -> list[tuple[Kind, int, int]]:
    """The computations, as (kind, slot, micro batch) over the whole pipeline, that a computation of `stage` waits for."""
    slot = step.chunk * num_stages + stage
    if step.kind is Kind.WEIGHT:
        return [(Kind.BACKWARD, slot, step.microbatch)]
    if step.kind is Kind.FORWARD:
        return [(Kind.FORWARD, slot - 1, step.microbatch)] if slot > 0 else []
    behind = [(Kind.BACKWARD, slot + 1, step.microbatch)] if slot < num_stages * num_chunks - 1 else []
    return [(Kind.FORWARD, slot, step.microbatch), *behind]


def start_times(orders: Sequence[Plan], num_chunks: int, costs: Costs) -> list[list[int]]:
    """When each computation starts if it lasts `costs[kind]`, transfers take no time and nobody waits needlessly.

    Raises ValueError when the orders wait for each other.
    """
    num_stages = len(orders)
    starts: list[list[int]] = [[] for _ in orders]
    ends: dict[tuple[Kind, int, int], int] = {}
    free = [0] * num_stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while len(starts[stage]) < len(order):
                step = order[len(starts[stage])]
                waits = needs(step, stage, num_stages, num_chunks)
                if not all(need in ends for need in waits):
                    break
                start = max([free[stage], *(ends[need] for need in waits)])
                free[stage] = ends[step.kind, step.chunk * num_stages + stage, step.microbatch] = start + costs[step.kind]
                starts[stage].append(start)
                moved = True
    stuck = [f"stage {stage} at {order[len(starts[stage])]}" for stage, order in enumerate(orders) if len(starts[stage]) < len(order)]
    if stuck:
        raise ValueError(f"these orders wait for each other: {', '.join(stuck)}")
    return starts


def costs_of(orders: Iterable[Plan]) -> Costs:
    """Costs in which a backward is twice a forward, whether it is split or not."""
    return SPLIT if any(step.kind is Kind.WEIGHT for order in orders for step in order) else UNSPLIT


def with_transfers(orders: Sequence[Plan], num_chunks: int) -> list[Plan]:
    """The plans of all stages with their SEND and RECV steps.

    All computations and transfers of the pipeline are brought in one order, by the time at which they would happen; each stage's plan is
    its part of that order. So the first thing that has not happened can always happen: no plan can deadlock, whether transfers block or
    not, and however many of them share a communicator that takes one at a time.
    """
    num_stages, costs = len(orders), costs_of(orders)
    last_slot = num_stages * num_chunks - 1
    # (time, transfers before computations, then any order that all stages agree on) -> step
    timed: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in orders]
    for stage, (order, starts) in enumerate(zip(orders, start_times(orders, num_chunks, costs), strict=True)):
        for step, start in zip(order, starts, strict=True):
            timed[stage].append(((start, 1), step))
            slot = step.chunk * num_stages + stage
            target = {Kind.FORWARD: slot + 1, Kind.BACKWARD: slot - 1}.get(step.kind, -1)
            if not 0 <= target <= last_slot:
                continue
            chunk, peer = divmod(target, num_stages)
            when = (start + costs[step.kind], 0, int(step.kind is Kind.BACKWARD), slot, step.microbatch)
            timed[stage].append((when, Step(Kind.SEND, step.microbatch, step.chunk, payload=step.kind, peer=peer)))
            timed[peer].append((when, Step(Kind.RECV, step.microbatch, chunk, payload=step.kind, peer=stage)))
    return [[step for _, step in sorted(entries, key=lambda entry: entry[0])] for entries in timed]


@lru_cache(maxsize=64)
def pipeline_plans(
    schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, forward_only: bool = False, group_size: int | None = None
) -> tuple[tuple[Step, ...], ...]:
    """What each stage does in one step, transfers included. `schedule`: one of enums.PIPELINE_SCHEDULES; several chunks interleave, in
    groups of `group_size` micro batches."""
    orders = compute_orders(schedule, num_stages, num_chunks, num_microbatches, forward_only, group_size)
    return tuple(map(tuple, with_transfers(orders, num_chunks)))


def in_batches(plan: Iterable[Step]) -> list[list[Step]]:
    """The plan's steps, with those transfers together that have no computation between them.

    A batch's transfers start together and none waits for another. It starts when its first could, and all that must be over before
    that comes earlier in the order that all stages share, so that batches cannot deadlock where single transfers do not.
    """
    batches: list[list[Step]] = []
    for step in plan:
        if step.payload is not None and batches and batches[-1][0].payload is not None:
            batches[-1].append(step)
        else:
            batches.append([step])
    return batches


# --- what is checked about plans ---


def peak_activations(plan: Iterable[Step]) -> int:
    """The most (chunk, micro batch) whose activations are held at once: until the backward, where that is split until its W."""
    plan = list(plan)
    end = Kind.WEIGHT if any(step.kind is Kind.WEIGHT for step in plan) else Kind.BACKWARD
    held, peak = set(), 0
    for step in plan:
        if step.kind is Kind.FORWARD:
            held.add((step.chunk, step.microbatch))
        elif step.kind is end:
            held.discard((step.chunk, step.microbatch))
        peak = max(peak, len(held))
    return peak


def idle_time(schedule: str, num_stages: int, num_chunks: int, num_microbatches: int, costs: Costs) -> int:
    """How long the pipeline's slowest stage is not computing from the step's first computation to its last: the bubble."""
    orders = compute_orders(schedule, num_stages, num_chunks, num_microbatches)
    starts = start_times(orders, num_chunks, costs)
    end = max(start + costs[step.kind] for order, row in zip(orders, starts) for step, start in zip(order, row))
    return end - min(sum(costs[step.kind] for step in order) for order in orders)


def check_plan(plan: Iterable[Step], num_microbatches: int, num_chunks: int = 1, forward_only: bool = False) -> list[str]:
    """What is wrong with a plan's computations: each (chunk, micro batch) forward once, then backward once (and where backwards are split
    its W once), one last of each a chunk, at the end."""
    plan = [step for step in plan if step.kind in COMPUTE]
    problems = []
    expected = {(chunk, microbatch) for chunk in range(num_chunks) for microbatch in range(num_microbatches)}
    places = {kind: [(step.chunk, step.microbatch) for step in plan if step.kind is kind] for kind in COMPUTE}
    wanted = {Kind.FORWARD: expected, Kind.BACKWARD: set() if forward_only else expected}
    if places[Kind.WEIGHT]:
        wanted[Kind.WEIGHT] = wanted[Kind.BACKWARD]
    for kind, names in wanted.items():
        if sorted(places[kind]) != sorted(names):
            problems.append(f"{kind.name.lower()}s are {places[kind]}")
    before = {Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.BACKWARD}
    seen = set()
    for step in plan:
        place = (step.chunk, step.microbatch)
        if step.kind in before and (before[step.kind], *place) not in seen:
            problems.append(f"{step.kind.name.lower()} of {place} before its {before[step.kind].name.lower()}")
        seen.add((step.kind, *place))
    for kind in wanted.keys() - {Kind.FORWARD}:
        for chunk in range(0 if forward_only else num_chunks):
            flags = [step.last_backward for step in plan if step.kind is kind and step.chunk == chunk]
            if flags.count(True) != 1 or not flags[-1]:
                problems.append(f"chunk {chunk} does not mark its last {kind.name.lower()}")
    return problems
