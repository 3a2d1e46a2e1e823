"""Global batch by constant, ramp and steps, against tables worked out by hand."""

import pytest

from megatron.core import num_microbatches_calculator as calculators
from megatron.core.num_microbatches_calculator import build_num_microbatches_calculator, parse_step_batch_size_schedule


@pytest.fixture(autouse=True)
def no_calculator():
    calculators.unset_num_microbatches_calculator()
    yield
    calculators.unset_num_microbatches_calculator()


def test_constant():
    calculators.init_num_microbatches_calculator(0, None, 32, 2, 4)
    assert calculators.get_num_microbatches() == 4
    assert calculators.get_current_global_batch_size() == 32
    assert calculators.get_micro_batch_size() == 2
    calculators.update_num_microbatches(10**9)
    assert calculators.get_num_microbatches() == 4


def test_no_global_batch_size_is_one_micro_batch_a_rank():
    calculator = build_num_microbatches_calculator(0, None, None, 2, 4)
    assert (calculator.get(), calculator.get_current_global_batch_size()) == (1, 8)


# start 8, increment 8, 120 samples, to 32: 3 increments, one every 40 samples; the full size beyond 120
RAMP = [(0, 8), (39, 8), (40, 16), (79, 16), (80, 24), (119, 24), (120, 32), (121, 32), (10_000, 32)]


@pytest.mark.parametrize(("consumed", "size"), RAMP)
def test_ramp(consumed, size):
    calculator = build_num_microbatches_calculator(0, [8, 8, 120], 32, 2, 2)
    calculator.update(consumed)
    assert calculator.get_current_global_batch_size() == size
    assert calculator.get() == size // 4


def test_ramp_follows_a_run():
    """Consumed samples grow by the batch that ran, as in training."""
    calculator = build_num_microbatches_calculator(0, [2, 2, 20], 8, 1, 2)
    consumed, sizes = 0, []
    for _ in range(9):
        calculator.update(consumed)
        sizes.append(calculator.get_current_global_batch_size())
        consumed += sizes[-1]
    # 3 increments over 20 samples: at 20/3 and 40/3 samples, and the full size from 20
    assert sizes == [2, 2, 2, 2, 4, 4, 6, 8, 8]


def test_decrease_batch_size_if_needed():
    calculator = build_num_microbatches_calculator(0, None, 30, 2, 4, decrease_batch_size_if_needed=True)
    assert calculator.get_current_global_batch_size() == 30
    assert calculator.get_current_running_global_batch_size() == 24
    assert calculator.get() == 3


def test_step_schedule_counts_tokens():
    assert parse_step_batch_size_schedule("0:384 200B:768, 1.5T:1536") == [(0, 384), (2 * 10**11, 768), (15 * 10**11, 1536)]
    calculator = build_num_microbatches_calculator(0, None, None, 2, 2, step_batch_size_schedule="0:8 1K:16 4K:32", seq_length=10)
    for consumed, size in [(0, 8), (99, 8), (100, 16), (399, 16), (400, 32), (10**6, 32)]:
        calculator.update(consumed)
        assert calculator.get_current_global_batch_size() == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch_size": 30, "micro_batch_size": 2, "data_parallel_size": 4}, "24 or 32"),
        ({"global_batch_size": 4, "micro_batch_size": 2, "data_parallel_size": 4}, "8 would work"),
        ({"global_batch_size": 32, "micro_batch_size": 0, "data_parallel_size": 4}, "micro batch size is 0"),
        (
            {"global_batch_size": 32, "micro_batch_size": 2, "data_parallel_size": 2, "rampup_batch_size": [8, 7, 100]},
            "multiple of the increment",
        ),
        ({"global_batch_size": 32, "micro_batch_size": 2, "data_parallel_size": 2, "rampup_batch_size": [8, 6, 100]}, "batch size 14"),
        (
            {"global_batch_size": 32, "micro_batch_size": 2, "data_parallel_size": 2, "rampup_batch_size": [8, 8]},
            "start, increment and samples",
        ),
        ({"global_batch_size": 4, "micro_batch_size": 2, "data_parallel_size": 4, "decrease_batch_size_if_needed": True}, "8 would work"),
        (
            {"global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 1, "step_batch_size_schedule": "5:8", "seq_length": 8},
            "start at 0",
        ),
        ({"global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 1, "step_batch_size_schedule": "0:8"}, "sequence length"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        build_num_microbatches_calculator(0, **{"rampup_batch_size": None, **arguments})


def test_facade_is_initialized_once():
    with pytest.raises(AssertionError):
        calculators.get_num_microbatches()
    calculators.init_num_microbatches_calculator(0, None, 8, 2, 2)
    with pytest.raises(AssertionError):
        calculators.init_num_microbatches_calculator(0, None, 8, 2, 2)
    calculators.reconfigure_num_microbatches_calculator(0, None, 16, 2, 2)
    assert calculators.get_num_microbatches() == 4
