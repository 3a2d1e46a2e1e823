"""The plan of samples over restarts, against a loop that keeps counts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.helpers import plain_build_blending_indices
from megatron.core.datasets.sample_plan import Member, SamplePlan, place_in_stream
from megatron.core.datasets.utils import normalize

NAMES = "abcde"
# a history: stretches of (samples read, weight of each corpus or 0 for one that is not in the blend)
STRETCH = st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any))


def member(name, asked=10):
    return Member(name, f"identity of {name}", asked)


def blend(weights):
    names = [name for name, weight in zip(NAMES, weights) if weight]
    return [member(name) for name in names], [weight for weight in weights if weight]


def follow(stretches):
    """The plan after each restart of a history, with the position of that restart, saved and read back each time."""
    plan, position = None, 0
    for count, weights in stretches:
        members, shares = blend(weights)
        if plan is None:
            plan = SamplePlan.first(100, members, normalize(shares))
        elif not plan.has_blend([m.identity for m in members], shares):
            plan = plan.continued(position, plan.consumed_at(position), members, shares)
        yield plan, position
        position += count
        state = json.loads(json.dumps(plan.state_dict(position)))
        assert SamplePlan.from_state(state) == plan and state["consumed"] == plan.consumed_at(position)


def plain_line(stretches):
    """What a history reads, sample by sample: [(corpus name, sample in its stream)]."""
    line, streams, step = [], dict.fromkeys(NAMES, 0), 0
    before: list[float] = []
    drawn: list[int] = []
    for count, weights in stretches:
        shares = normalize(weights)
        if not before or not np.allclose(before, shares, atol=1e-9):
            before, drawn, step = shares, [0] * 5, 0
        for _ in range(count):
            corpus = max((d for d in range(5) if weights[d]), key=lambda d: (before[d] * max(step, 1) - drawn[d], -d))
            line.append((NAMES[corpus], streams[NAMES[corpus]]))
            streams[NAMES[corpus]] += 1
            drawn[corpus] += 1
            step += 1
    return line


@settings(deadline=None, max_examples=30)
@given(stretches=st.lists(STRETCH, min_size=1, max_size=5))
def test_any_history_reads_each_stream_once_and_in_order(stretches):
    line = plain_line(stretches)
    read = []
    for (plan, position), (count, _) in zip(follow(stretches), stretches):
        picks, numbers = plan.draws(plan.current, position + count - plan.current.start)
        for i in range(position, position + count):
            corpus = plan.current.members[picks[i - plan.current.start]]
            read.append((plan.members[corpus].name, plan.current.consumed[corpus] + int(numbers[i - plan.current.start])))
    assert read == line
    for name in NAMES:
        taken = [number for corpus, number in read if corpus == name]
        assert taken == list(range(len(taken)))  # nothing twice, nothing left out
    # the last plan still knows the whole line
    for i in range(0, len(line), 23):
        corpus, number = plan.locate(i)
        assert (plan.members[corpus].name, number) == line[i]
    assert sum(plan.consumed_at(len(line))) == len(line)


@settings(deadline=None, max_examples=15)
@given(weights=st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), cuts=st.lists(st.integers(0, 50), max_size=4))
def test_restarts_without_a_change_change_nothing(weights, cuts):
    *_, (plan, position) = follow([(count, weights) for count in [*cuts, 30]])
    assert len(plan.segments) == 1 and plan.size == 100
    _, shares = blend(weights)
    expected = plain_build_blending_indices(np.array(normalize(shares)), position + 30)
    assert all(np.array_equal(got, wanted) for got, wanted in zip(plan.draws(plan.current, position + 30), expected))
    assert plan.locate(position) == (int(expected[0][position]), int(expected[1][position]))


def test_weights_are_the_same_in_any_unit():
    plan = SamplePlan.first(10, [member("a"), member("b")], [0.7, 0.3])
    identities = ["identity of a", "identity of b"]
    assert plan.has_blend(identities, [0.7, 0.3]) and plan.has_blend(identities, [1.4, 0.6])
    assert not plan.has_blend(identities, [3, 7]) and not plan.has_blend(identities[::-1], [7, 3])
    assert not plan.has_blend(identities, None) and not plan.has_blend(identities[:1], [1.0])
    by_size = SamplePlan.first(10, [member("a"), member("b")], [0.7, 0.3], by_size=True)
    assert by_size.has_blend(identities, None) and not by_size.has_blend(identities, [70, 30])


def test_a_corpus_that_left_and_comes_back_goes_on_where_it_was():
    stretches = [(10, [1, 1, 0, 0, 0]), (7, [1, 0, 0, 0, 0]), (4, [0, 1, 0, 0, 0])]
    *_, (plan, _) = follow(stretches)
    assert [plan.locate(i) for i in (16, 17, 20)] == [(0, 11), (1, 5), (1, 8)]
    assert plan.consumed_at(21) == [12, 9]


def test_what_was_asked_at_first_stays():
    plan = SamplePlan.first(10, [member("a", 7)], [1.0])
    later = plan.continued(4, plan.consumed_at(4), [Member("moved/a", "identity of a", 900), member("b", 30)], [1, 1])
    assert later.members == (Member("moved/a", "identity of a", 7), member("b", 30)) and later.size == 10


@pytest.mark.parametrize(
    ("number", "place"), [(0, (0, 0)), (9, (0, 9)), (10, (1, 0)), (13, (1, 3)), (14, (2, 0)), (10 + 4 * 2**33, (1 + 2**33, 0))]
)
def test_a_stream_goes_on_by_epochs(number, place):
    assert place_in_stream(number, 10, 4) == place
