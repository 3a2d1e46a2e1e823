"""Learning rate and weight decay against values worked out by hand, and against those that Megatron-LM printed."""

import json
import math
from types import SimpleNamespace

import pytest

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


def make(groups=None, **changes):
    settings = {
        "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 10, "lr_decay_steps": 110, "lr_decay_style": "linear",
        "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 100, "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
    }  # fmt: skip
    optimizer = SimpleNamespace(param_groups=groups if groups is not None else [{}])
    return OptimizerParamScheduler(optimizer, **{**settings, **changes})


def lr_at(samples, **changes):
    scheduler = make(**changes)
    scheduler.step(samples)
    return scheduler.optimizer.param_groups[0]["lr"]


WSD = {"lr_decay_style": "WSD", "wsd_decay_steps": 40}  # stays at 1 from 10 to 70, then decays to 0.1 at 110

TABLE = [
    # (samples, learning rate, settings)
    (0, 0.0, {}), (5, 0.5, {}), (10, 1.0, {}),  # warm-up
    (5, 0.6, {"init_lr": 0.2}), (0, 0.2, {"init_lr": 0.2}),
    (0, 1.0, {"lr_warmup_steps": 0}),
    (5, 0.5, {"lr_decay_style": "constant"}), (60, 1.0, {"lr_decay_style": "constant"}), (500, 1.0, {"lr_decay_style": "constant"}),
    (35, 0.775, {}), (60, 0.55, {}), (85, 0.325, {}), (110, 0.1, {}), (111, 0.1, {}), (500, 0.1, {}),
    (35, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, {"lr_decay_style": "cosine"}),
    (60, 0.55, {"lr_decay_style": "cosine"}), (110, 0.1, {"lr_decay_style": "cosine"}), (500, 0.1, {"lr_decay_style": "cosine"}),
    (40, 0.5, {"lr_decay_style": "inverse-square-root"}), (90, 1 / 3, {"lr_decay_style": "inverse-square-root"}),
    (90, 0.4, {"lr_decay_style": "inverse-square-root", "min_lr": 0.4}), (111, 0.1, {"lr_decay_style": "inverse-square-root"}),
    (4, 0.5, {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 0}),
    (0, 1.0, {"lr_decay_style": "inverse-square-root", "lr_warmup_steps": 0}),
    (40, 1.0, {**WSD, "lr_wsd_decay_style": "linear"}), (70, 1.0, {**WSD, "lr_wsd_decay_style": "linear"}),
    (80, 0.775, {**WSD, "lr_wsd_decay_style": "linear"}), (110, 0.1, {**WSD, "lr_wsd_decay_style": "linear"}),
    (90, 0.55, {**WSD, "lr_wsd_decay_style": "cosine"}), (110, 0.1, {**WSD, "lr_wsd_decay_style": "cosine"}),
    (90, 0.1 + 0.9 * (math.sqrt(2) - 1), {**WSD, "lr_wsd_decay_style": "exponential"}),
    (110, 0.1, {**WSD, "lr_wsd_decay_style": "exponential"}),
    (80, 0.55, {**WSD, "lr_wsd_decay_style": "minus_sqrt"}), (110, 0.1, {**WSD, "lr_wsd_decay_style": "minus_sqrt"}),
    (111, 0.1, {**WSD, "lr_wsd_decay_style": "minus_sqrt"}), (5, 0.5, {**WSD, "lr_wsd_decay_style": "minus_sqrt"}),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "expected", "changes"), TABLE)
def test_learning_rate(samples, expected, changes):
    assert lr_at(samples, **changes) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("run", ["gpt_fp32", "llama_fp32"])
def test_golden_learning_rates(golden, run):
    """Global batch 8; the rate on line N is the one after step N, and the first step runs at 0."""
    lines = json.loads((golden / "losses.json").read_text())[run]["train"]
    scheduler = make(max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=5 * 8, lr_decay_steps=20 * 8, lr_decay_style="cosine")
    assert scheduler.optimizer.param_groups[0]["lr"] == 0.0
    for line in lines:
        scheduler.step(8)
        assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(line["lr"], rel=1e-6)


def test_decay_that_ends_before_training_follows_the_formula():
    """A decay length from which the warm-up was taken off, so that the rate is flat at the end.

    Warm-up 10, decay 90 of 100 samples: the decay is counted from 0, and the last 10 samples run at the minimum.
    """
    settings = {"lr_decay_steps": 90}
    for samples in range(101):
        expected = samples / 10 if samples <= 10 else max(0.1, 0.1 + 0.9 * (1 - (samples - 10) / 80))
        assert lr_at(samples, **settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "samples", "expected"),
    [("linear", 0, 0.1), ("linear", 25, 0.2), ("linear", 100, 0.5), ("linear", 999, 0.5), ("cosine", 50, 0.3), ("cosine", 0, 0.1)]
    + [("cosine", 25, 0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2), ("cosine", 100, 0.5)],
)
def test_weight_decay(style, samples, expected):
    groups: list[dict] = [{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"wd_mult": 0.5}]
    scheduler = make(groups, start_wd=0.1, end_wd=0.5, wd_incr_style=style)
    scheduler.step(samples)
    assert [group["weight_decay"] for group in groups] == pytest.approx([expected, 0.0, expected / 2])


def test_decoupled_group_and_lr_mult():
    groups: list[dict] = [{}, {"max_lr": 4.0, "min_lr": 0.4}, {"lr_mult": 0.5}, {"max_lr": 4.0, "min_lr": None}]
    scheduler = make(groups)
    scheduler.step(60)
    assert [group["lr"] for group in groups] == pytest.approx([0.55, 2.2, 0.275, 2.05])
    scheduler.step(60)
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.4, 0.05, 0.1])


def test_position_and_increments():
    one, many = make(), make()
    one.step(37)
    for _ in range(37):
        many.step(1)
    assert one.optimizer.param_groups == many.optimizer.param_groups


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_lr": 2.0}, "min <= max"),
        ({"init_lr": 2.0}, "--lr-warmup-init"),
        ({"lr_warmup_steps": 110}, "shorten the warm-up"),
        ({"lr_decay_style": "exp"}, "inverse-square-root"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}, "WSD decays over its last None"),
        (dict(WSD, lr_wsd_decay_style="square"), "minus_sqrt"),
        ({"end_wd": 0.2}, "use linear or cosine"),
        ({"start_wd": 0.3, "wd_incr_style": "linear"}, "start <= end"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)


def saved_state(**changes):
    scheduler = make(**changes)
    scheduler.step(60)
    return scheduler.state_dict()


def test_resume_of_the_same_schedule():
    scheduler = make()
    scheduler.load_state_dict(saved_state())
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    scheduler.load_state_dict(saved_state())  # twice does not move on twice
    assert scheduler.num_steps == 60


def test_mismatch_names_the_three_choices():
    """A resume that fails must say what to do. Training was lengthened, so the default decay length changed."""
    with pytest.raises(ValueError) as error:
        make(lr_decay_steps=220).load_state_dict(saved_state())
    for word in ("--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler", "--lr-decay-iters", "220", "110"):
        assert word in str(error.value)


def test_choices_on_mismatch():
    override = make(lr_decay_steps=210, override_opt_param_scheduler=True)
    override.load_state_dict(saved_state())
    assert (override.num_steps, override.lr_decay_steps) == (60, 210)
    assert override.optimizer.param_groups[0]["lr"] == pytest.approx(0.775)
    theirs = make(lr_decay_steps=210, use_checkpoint_opt_param_scheduler=True)
    theirs.load_state_dict(saved_state())
    assert theirs.lr_decay_steps == 110
    assert theirs.optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    both = make(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True)
    with pytest.raises(ValueError, match="exclude each other"):
        both.load_state_dict(saved_state())


def test_weight_decay_is_right_before_the_first_step_after_resume():
    """The value in force comes from where the flags say, not from the command line until the first step."""
    given = {"start_wd": 0.3, "end_wd": 0.3}
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    make(groups, **given, use_checkpoint_opt_param_scheduler=True).load_state_dict(saved_state())
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    make(groups, **given, override_opt_param_scheduler=True).load_state_dict(saved_state())
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_older_spellings():
    scheduler = make(use_checkpoint_opt_param_scheduler=True)
    scheduler.load_state_dict({"start_lr": 2.0, "warmup_iter": 0, "end_iter": 100, "decay_style": "linear", "min_lr": 0.0, "num_iters": 50})
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
