"""Plans are data: their order, completeness and peak activations, for all sizes up to 8."""

import pytest

from megatron.core.pipeline_parallel.schedule_plan import Kind, Step, check_plan, no_pipelining, peak_activations


@pytest.mark.parametrize("num_microbatches", range(1, 9))
@pytest.mark.parametrize("forward_only", [False, True])
def test_no_pipelining_is_complete(num_microbatches, forward_only):
    plan = no_pipelining(num_microbatches, forward_only)
    assert check_plan(plan, num_microbatches, forward_only=forward_only) == []
    assert len(plan) == num_microbatches * (1 if forward_only else 2)


@pytest.mark.parametrize("num_microbatches", range(1, 9))
def test_no_pipelining_holds_one_microbatch(num_microbatches):
    assert peak_activations(no_pipelining(num_microbatches)) == 1


def test_a_step_needs_a_microbatch():
    with pytest.raises(ValueError, match="at least 1 micro batch, not 0"):
        no_pipelining(0)


@pytest.mark.parametrize(
    "plan, fault",
    [
        ([Step(Kind.BACKWARD, 0, last_backward=True), Step(Kind.FORWARD, 0)], "before its forward"),
        ([Step(Kind.FORWARD, 0)], "backwards are"),
        ([Step(Kind.FORWARD, 0), Step(Kind.FORWARD, 0), Step(Kind.BACKWARD, 0, last_backward=True)], "forwards are"),
        ([Step(Kind.FORWARD, 0), Step(Kind.BACKWARD, 0)], "last backward"),
    ],
)
def test_check_plan_sees_faults(plan, fault):
    assert any(fault in problem for problem in check_plan(plan, 1))
