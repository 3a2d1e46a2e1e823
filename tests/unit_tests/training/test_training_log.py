"""The console line and the numbers behind it."""

import math
import re
from datetime import datetime

import pytest
import torch

from megatron.training.train_step import StepRecord, sum_reports
from megatron.training.training_log import IntervalNumbers, StepWindow, console_line, is_nan_iteration, mean, validation_line

NUMBERS = IntervalNumbers(
    iteration=12, train_iters=200, consumed_samples=96, skipped_samples=0, milliseconds=61.26, learning_rate=1e-4, global_batch_size=8,
    losses={"lm loss": 6.434205}, loss_scale=1.0, grad_norm=0.6251, num_zeros=3, params_norm=2.5, skipped_iterations=1, nan_iterations=0,
    tflops=12.34, tokens_per_second=1e3,
)  # fmt: skip


def test_line_field_for_field():
    assert console_line(NUMBERS, throughput=True, now=datetime(2026, 8, 22, 1, 2, 3, 45)) == (
        " [2026-08-22 01:02:03.000045] iteration       12/     200 | consumed samples:           96 |"
        " elapsed time per iteration (ms): 61.3 | throughput per GPU (TFLOP/s/GPU): 12.3 | learning rate: 1.000000E-04 |"
        " global batch size:     8 | lm loss: 6.434205E+00 | loss scale: 1.0 | grad norm: 0.625 | num zeros: 3 | params norm: 2.500 |"
        " number of skipped iterations:   1 | number of nan iterations:   0 |"
    )


def test_a_loss_that_is_nan_is_printed_as_nan():
    numbers = IntervalNumbers(**{**vars(NUMBERS), "losses": {"lm loss": math.nan}})
    assert re.search(r"lm loss: nan \|", console_line(numbers), re.IGNORECASE)


def test_validation_line():
    rule, line, end = validation_line("iteration 10", {"lm loss": 2.0}).split("\n")
    assert line == " validation loss at iteration 10 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert set(rule) == {"-"} and rule == end


def record(loss, updated=True):
    return StepRecord(1, 8, {"lm loss": torch.tensor(loss)}, 1e-3, 1.0, torch.tensor(0.5), None, torch.tensor(updated))


def test_window_reads_every_step_once():
    window = StepWindow()
    window.add(record([10.0, 5.0]))
    window.add(record([math.nan, 5.0], updated=False))
    first, second = window.read(None)
    assert first.losses == {"lm loss": 2.0} and first.grad_norm == 0.5 and first.num_zeros is None and first.updated
    assert is_nan_iteration(second) and not second.updated and not is_nan_iteration(first)
    assert window.read(None) == []


@pytest.mark.parametrize("values, expected", [([1.0, 2.0], 1.5), ([1.0, math.nan], math.nan), ([math.inf], math.nan), ([], 0.0)])
def test_mean(values, expected):
    assert mean(values) == pytest.approx(expected, nan_ok=True)


def test_reports_are_summed_over_microbatches():
    reports = [
        {"lm loss": torch.tensor([4.0, 2.0]), "extra": torch.tensor(3.0)},
        {"lm loss": torch.tensor([8.0, 2.0]), "extra": torch.tensor(5.0)},
    ]
    totals = sum_reports(reports)
    assert totals["lm loss"].tolist() == [12.0, 4.0] and totals["extra"].tolist() == [8.0, 2.0]
