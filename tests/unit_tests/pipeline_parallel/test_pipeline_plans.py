"""Pipeline plans for all (stages, chunks, micro batches) up to 8: complete, in order, free of deadlock, no more memory than they should."""

import itertools
from unittest import mock

import pytest

from megatron.core.pipeline_parallel.schedule_plan import (
    SPLIT,
    UNSPLIT,
    Kind,
    Step,
    check_plan,
    compute_orders,
    idle_time,
    in_batches,
    peak_activations,
    pipeline_plans,
    start_times,
    with_transfers,
)
from megatron.core.pipeline_parallel.schedule_simulator import draw, draw_png, find_deadlock

SIZES = range(1, 9)
# (schedule, stages, chunks, micro batches)
CASES = [
    *(("1f1b", stages, 1, batches) for stages in SIZES for batches in SIZES),
    *(("zero-bubble", stages, 1, batches) for stages in SIZES for batches in SIZES),
    *(("1f1b", stages, chunks, batches) for stages in SIZES[1:] for chunks in SIZES[1:] for batches in SIZES if batches % stages == 0),
    *(("1f1b", stages, chunks, 3 * stages) for stages in (2, 4, 8) for chunks in (2, 8)),
]


def moves(plan):
    return {(step.kind, step.payload, step.chunk, step.microbatch, step.peer) for step in plan if step.payload is not None}


@pytest.mark.parametrize("schedule, stages, chunks, batches", CASES)
def test_every_stage_does_everything_once_in_order(schedule, stages, chunks, batches):
    for forward_only in (False, True):
        plans = pipeline_plans(schedule, stages, chunks, batches, forward_only)
        assert len(plans) == stages
        moved = [moves(plan) for plan in plans]
        for stage, plan in enumerate(plans):
            assert check_plan(plan, batches, chunks, forward_only) == []
            assert len(moved[stage]) == sum(step.payload is not None for step in plan)
            for step in plan:
                if step.payload is None:
                    continue
                # what leaves here arrives there, in the slot that comes next in the direction of the payload
                forward = (step.payload is Kind.FORWARD) == (step.kind is Kind.SEND)
                slot = step.chunk * stages + stage + (1 if forward else -1)
                other = Kind.RECV if step.kind is Kind.SEND else Kind.SEND
                assert step.peer is not None and step.peer == slot % stages
                assert (other, step.payload, slot // stages, step.microbatch, stage) in moved[step.peer]
        count = (stages * chunks - 1) * batches * (1 if forward_only else 2)
        assert sum(step.kind is Kind.SEND for plan in plans for step in plan) == count


@pytest.mark.parametrize("schedule, stages, chunks, batches", CASES)
def test_no_plan_deadlocks(schedule, stages, chunks, batches):
    for forward_only, per_pair, blocking in itertools.product((False, True), repeat=3):
        plans = pipeline_plans(schedule, stages, chunks, batches, forward_only)
        assert find_deadlock(plans, chunks, per_pair=per_pair, blocking=blocking) == []


@pytest.mark.parametrize("schedule, stages, chunks, batches", CASES)
def test_no_batches_deadlock(schedule, stages, chunks, batches):
    for forward_only, blocking in itertools.product((False, True), repeat=2):
        plans = pipeline_plans(schedule, stages, chunks, batches, forward_only)
        assert find_deadlock(plans, chunks, blocking=blocking, batched=True) == []
    for plan in plans:
        groups = in_batches(plan)
        assert [step for group in groups for step in group] == list(plan)
        kinds = [group[0].payload is not None for group in groups]
        assert not any(one and other for one, other in itertools.pairwise(kinds)), "two batches with nothing between them"
        assert all(len(group) == 1 for group, moving in zip(groups, kinds) if not moving)


# (stages, chunks, micro batches, size of a group)
GROUPS = [
    (stages, chunks, batches, size)
    for stages in (2, 3, 4)
    for chunks in (2, 3)
    for batches in SIZES
    for size in range(stages, 7)
    if batches % size == 0 or batches % size >= stages
]


@pytest.mark.parametrize("stages, chunks, batches, size", GROUPS)
def test_larger_groups(stages, chunks, batches, size):
    for forward_only in (False, True):
        plans = pipeline_plans("1f1b", stages, chunks, batches, forward_only, size)
        assert all(check_plan(plan, batches, chunks, forward_only) == [] for plan in plans)
        assert find_deadlock(plans, chunks, batched=True) == find_deadlock(plans, chunks, blocking=True, batched=True) == []
        if size == stages:
            assert plans == pipeline_plans("1f1b", stages, chunks, batches, forward_only)
        for stage, plan in enumerate(plans):
            first = [(step.chunk, step.microbatch) for step in plan if step.kind is Kind.FORWARD]
            length = min(size, batches)
            assert first[: 2 * length] == [(chunk, number) for chunk in (0, 1) for number in range(length)]
            if not forward_only:
                bound = (chunks - 1) * length + 2 * (stages - stage - 1) + 1
                assert peak_activations(plan) == min(bound, batches * chunks)


def test_a_batch_is_a_rendezvous():
    """Two stages whose sends would wait for each other: one by one they hang, as a batch each they meet. In another order they do not."""

    def stage(number):
        send = Step(Kind.SEND, number, payload=Kind.FORWARD if number == 0 else Kind.BACKWARD, peer=1 - number)
        receive = Step(Kind.RECV, 1 - number, payload=Kind.BACKWARD if number == 0 else Kind.FORWARD, peer=1 - number)
        compute = Step(Kind.FORWARD if number == 0 else Kind.BACKWARD, number)
        return [compute, send, receive]

    plans = [stage(0), stage(1)]
    with mock.patch("megatron.core.pipeline_parallel.schedule_simulator.needs", lambda *arguments: []):
        assert len(find_deadlock(plans)) == 2
        assert find_deadlock(plans, batched=True) == find_deadlock(plans, blocking=True, batched=True) == []
        # with a computation in between each stage has two batches, and both wait with their first
        apart = [[*plan[:2], Step(Kind.FORWARD, 7), plan[2]] for plan in plans]
        assert len(find_deadlock(apart, batched=True)) == 2
    # two transfers between the same stages meet in their order, whatever they are
    first, second = (Step(Kind.SEND, number, payload=Kind.FORWARD, peer=1) for number in (0, 1))
    swapped = [Step(Kind.RECV, number, payload=Kind.FORWARD, peer=0) for number in (1, 0)]
    both = [[Step(Kind.FORWARD, 0), Step(Kind.FORWARD, 1), first, second], swapped]
    assert "stage 0 is at its end, transfers waiting: S(F0>1), S(F1>1)" in find_deadlock(both, batched=True)
    assert find_deadlock([both[0], swapped[::-1]], batched=True) == []


@pytest.mark.parametrize("schedule, stages, chunks, batches", CASES)
def test_peak_activations(schedule, stages, chunks, batches):
    for stage, plan in enumerate(pipeline_plans(schedule, stages, chunks, batches)):
        if schedule == "zero-bubble":
            bound = stages  # as 1F1B's first stage
        elif chunks == 1:
            bound = stages - stage
        else:
            bound = (chunks - 1) * stages + 2 * (stages - stage - 1) + 1
        assert peak_activations(plan) == min(bound, batches * chunks)


@pytest.mark.parametrize("stages, batches", [(stages, batches) for stages in SIZES for batches in SIZES if batches >= stages])
def test_bubbles_are_the_papers(stages, batches):
    assert idle_time("1f1b", stages, 1, batches, UNSPLIT) == (stages - 1) * (1 + 2)
    if stages > 1 and batches % stages == 0:
        for chunks in (2, 4, 8):  # one forward of a whole stage is `chunks` units here
            assert idle_time("1f1b", stages, chunks, batches, UNSPLIT) == (stages - 1) * (1 + 2)
    # ZB-H1: (stages - 1) (F + B - W)
    assert idle_time("zero-bubble", stages, 1, batches, SPLIT if stages > 1 else UNSPLIT) == (stages - 1) * (1 + 1 - 1)


def test_the_simulator_finds_the_deadlock_that_buffers_hide():
    """Each stage sends first and then receives: with messages in a buffer it ends, as a rendezvous on one communicator it does not."""

    def stage(number):
        send, receive = (Kind.FORWARD, Kind.BACKWARD) if number == 0 else (Kind.BACKWARD, Kind.FORWARD)
        return [Step(Kind.SEND, 1, payload=send, peer=1 - number), Step(Kind.RECV, 1, payload=receive, peer=1 - number)]

    plans = [list(plan) for plan in pipeline_plans("1f1b", 2, 1, 2)]
    assert find_deadlock(plans) == []
    texts = [[str(step) for step in plan] for plan in plans]
    assert texts == [
        ["F0", "S(F0>1)", "F1", "S(F1>1)", "R(B0<1)", "B0", "R(B1<1)", "B1"],
        ["R(F0<0)", "F0", "R(F1<0)", "B0", "S(B0>0)", "F1", "B1", "S(B1>0)"],
    ]
    # the second stage sends its gradient before it takes the activation that the first sends before it takes the gradient
    wrong = [plans[0], [plans[1][i] for i in (0, 1, 3, 4, 2, 5, 6, 7)]]
    for per_pair in (True, False):
        found = find_deadlock(wrong, per_pair=per_pair)
        assert len(found) == 2 and "stage 0 is at B0" in found[0] and "S(F1>1)" in found[0] and "stage 1 is at F1" in found[1]
    assert find_deadlock([stage(0), stage(1)]) != []


def test_orders_that_wait_for_each_other_are_refused():
    orders = compute_orders("1f1b", 2, 1, 2)
    orders[1] = [orders[1][i] for i in (1, 0, 2, 3)]
    with pytest.raises(ValueError, match=r"wait for each other: stage 0 at .*, stage 1 at B0"):
        with_transfers(orders, 1)
    with pytest.raises(ValueError, match="stage 1 at B0"):
        start_times(orders, 1, UNSPLIT)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f1b", 2, 2, 3), "3 micro batches over 2 stages with 2 chunks each: the interleaved schedule needs a multiple of 2"),
        (("zero-bubble", 2, 2, 2), "zero-bubble schedule has one chunk a stage, not 2"),
        (("1f1b", 1, 2, 2), "2 chunks need at least 2 pipeline stages"),
        (("gpipe", 2, 1, 2), "'gpipe' must be one of 1f1b, zero-bubble"),
        (("1f1b", 4, 2, 8, False, 3), "groups of 3 micro batches must be at least as large as the pipeline has stages; make it 4"),
        (("1f1b", 2, 2, 7, False, 3), "groups of 3 leave a last one of 1, which must have at least 2"),
        (("1f1b", 2, 1, 0), "at least 1 micro batch, not 0"),
    ],
)
def test_refusals_say_what_works(arguments, message):
    with pytest.raises(ValueError, match=message):
        pipeline_plans(*arguments)


def test_a_drawing(tmp_path):
    assert draw("1f1b", 2, 1, 2).splitlines() == [
        "stage 0  F0 F1 .  .  B0 =  .  B1 =",
        "stage 1  .  F0 B0 =  F1 B1 =  .  .",
    ]
    lines = draw("zero-bubble", 4, 1, 8).splitlines()
    assert len(lines) == 4 and all(f"W{number}" in line for line in lines for number in range(8))
    pytest.importorskip("matplotlib")
    draw_png(tmp_path / "plan.png", "1f1b", 4, 2, 8)
    assert (tmp_path / "plan.png").stat().st_size > 1000
