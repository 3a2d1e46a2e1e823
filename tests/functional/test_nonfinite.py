"""NaN and Inf: the update of that very step is held back, the next log line says so, and by default the run ends there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.functional.forked import on_ranks
from tests.functional.poisoned_gpt import POISONED_WEIGHT
from tests.functional.runner import ROOT, Result, assert_equal_tensors, checkpoint_tensors, checkpoints, on, torchrun, train

SCRIPT = "tests.functional.poisoned_gpt"
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
PRECISIONS = pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])


@PRECISIONS
@pytest.mark.parametrize(
    ("poison", "culprit"),
    [
        ("weight", f"on rank 0 the parameter {POISONED_WEIGHT} itself holds NaN or Inf"),
        ("loss", "on rank 0 all parameters are finite, its own lm loss was not"),
        ("inf", "on rank 0 all parameters are finite, its own lm loss was not"),
        ("gradient", "the gradient of embedding.word_embeddings.weight was not"),
    ],
)
def test_the_run_ends_and_names_the_culprit(corpus: Path, tmp_path: Path, precision: str, poison: str, culprit: str) -> None:
    result = train(*on(corpus, f"{precision} --poison {poison} --train-iters 9 --save {tmp_path}"), script=SCRIPT)
    assert result.code == 1
    *notes, line = result.err.strip().splitlines()
    assert all("--" in note for note in notes), "beside notes on flags there is one line"
    if (poison, precision) == ("weight", "--bf16"):  # the skipped update gave the weight back from its fp32 copy: it is no culprit now
        culprit = "on rank 0 all parameters are finite, its own lm loss was not"
    assert line.startswith("ERROR: rank 0, phase logging, iteration 3: ") and "iteration 3: lm loss" in line and culprit in line
    assert result.column("iteration") == [1, 2, 3], "the step's own line is still printed"
    assert checkpoints(tmp_path) == []


def test_the_run_ends_at_the_next_log_line(corpus: Path) -> None:
    result = train(*on(corpus, "--poison loss --train-iters 9 --log-interval 4"), script=SCRIPT)
    assert result.code == 1 and result.column("iteration") == [4]
    assert "iteration 3: lm loss nan" in result.err


@PRECISIONS
def test_unchecked_the_weights_stay_clean_and_the_counters_go_up(corpus: Path, tmp_path: Path, precision: str) -> None:
    flags = f"{precision} {UNCHECKED} --poison loss --train-iters 6 --save {tmp_path} --save-interval 1 --min-lr 1e-2"
    result = train(*on(corpus, flags), script=SCRIPT)
    assert result.code == 0, result.err
    assert result.column("lm_loss")[2] is None and None not in result.column("lm_loss")[:2] + result.column("lm_loss")[3:]
    assert result.column("skipped_iterations") == result.column("nan_iterations") == [0, 0, 1, 0, 0, 0]
    line = next(text for text in result.out.splitlines() if " iteration        3/" in text)
    assert " lm loss: nan |" in line and " grad norm: nan |" in line
    assert " number of skipped iterations:   1 |" in line and " number of nan iterations:   1 |" in line
    assert_equal_tensors(checkpoint_tensors(tmp_path, 2), checkpoint_tensors(tmp_path, 3))
    after = checkpoint_tensors(tmp_path, 6)
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(after["decoder.final_layernorm.weight"], checkpoint_tensors(tmp_path, 3)["decoder.final_layernorm.weight"])


def test_unchecked_a_poisoned_weight_spreads_to_no_other(corpus: Path, tmp_path: Path) -> None:
    flags = f"{UNCHECKED} --poison weight --train-iters 6 --save {tmp_path} --save-interval 2"
    result = train(*on(corpus, flags), script=SCRIPT)
    assert result.code == 0, result.err
    assert result.column("nan_iterations") == [0, 0, 1, 1, 1, 1]
    before, after = checkpoint_tensors(tmp_path, 2), checkpoint_tensors(tmp_path, 6)
    (poisoned,) = [key for key, value in after.items() if not value.isfinite().all()]
    assert poisoned == "decoder.layers.mlp.linear_fc1.weight" and int((~after[poisoned].isfinite()).sum()) == 1
    before[poisoned], after[poisoned] = before[poisoned].flatten()[:1], after[poisoned].flatten()[:1]
    assert_equal_tensors(before, after)


def test_counters_add_up_over_a_log_interval(corpus: Path) -> None:
    result = train(*on(corpus, f"{UNCHECKED} --poison weight --train-iters 6 --log-interval 3"), script=SCRIPT)
    assert result.column("nan_iterations") == [1, 3] and result.column("lm_loss") == [None, None]


def test_an_overflow_of_fp16_is_no_fault_but_a_nan_loss_is(corpus: Path) -> None:
    flags = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1 --train-iters 6"
    assert train(*on(corpus, flags), script=SCRIPT).code == 0
    result = train(*on(corpus, flags, "--poison loss"), script=SCRIPT)
    assert result.code == 1 and "iteration 3: lm loss nan" in result.err


SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.mark.parametrize(("start", "flags"), [(torchrun, ""), (on_ranks, SHARDED)], ids=["plain", "sharded"])
def test_every_rank_names_the_rank_it_came_from(corpus: Path, tmp_path: Path, start: Callable[..., Result], flags: str) -> None:
    script = str(Path(__file__).with_name("poisoned_gpt.py").relative_to(ROOT))
    result = start(2, *on(corpus, f"--poison loss --poison-rank 1 --train-iters 9 --save {tmp_path} {flags}"), script=script)
    assert result.code == 1 and result.errors, "torchrun may end the second rank before it has spoken"
    for line in result.errors:
        assert "iteration 3: lm loss nan" in line and "on rank 1 all parameters are finite, its own lm loss was not" in line
    if start is torchrun:
        table = result.err[result.err.index("Root Cause") :]
        assert "NonFiniteError: iteration 3: lm loss nan" in table
    assert checkpoints(tmp_path) == []
