"""What a run takes from a checkpoint by its flags: one report says it, by one rank; what would harm is refused with all reasons."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import load_common_state_dict
from tests.functional.forked import each_rank
from tests.functional.runner import TINY, Result, on, train

MORE = "--train-iters 6 --lr-decay-iters 4"  # a longer training on the schedule that ended


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    assert train(*on(corpus), f"--save {folder} --save-interval 2").code == 0
    return folder


@pytest.fixture(scope="module")
def released(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a checkpoint without an iteration, as converters make them."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "release").symlink_to(saved / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def told(result: Result) -> dict[str, str]:
    """The report's lines, by their first words; there is one report."""
    assert result.code == 0, result.err
    assert len(re.findall("successfully loaded checkpoint", result.out)) == 1
    after = result.out[result.out.index("successfully loaded checkpoint") :].splitlines()[1:]
    lines = [line.strip() for line in after]
    count = next(number for number, line in enumerate(lines) if not after[number].startswith("    "))
    return dict(line.split(": ", 1) for line in lines[:count])


ALL = "weights, optimizer, random states, schedule, position"
NOTHING = "optimizer, random states, schedule, position"
# flags -> iterations that follow, and what the report says
TABLE: dict[str, tuple[str, list[int], dict[str, str]]] = {
    "all": (MORE, [5, 6], {"restored": ALL, "next": "iteration 5, after 16 samples"}),
    "ckpt_step": (f"{MORE} --ckpt-step 2", [3, 4, 5, 6], {"restored": ALL, "next": "iteration 3, after 8 samples"}),
    "no_load_optim": (
        f"{MORE} --no-load-optim",
        [5, 6],
        {"restored": "weights, random states, schedule, position", "reset": "optimizer (--no-load-optim)"},
    ),
    "no_load_rng": (
        f"{MORE} --no-load-rng --no-load-optim",
        [5, 6],
        {"restored": "weights, schedule, position", "reset": "optimizer (--no-load-optim), random states (--no-load-rng)"},
    ),
    "finetune": (
        "--finetune",
        [1, 2, 3, 4],
        {"restored": "weights", "reset": f"{NOTHING} (--finetune)", "next": "iteration 1, after 0 samples"},
    ),
    "use_checkpoint_schedule": (
        "--train-iters 6 --use-checkpoint-opt_param-scheduler",
        [5, 6],
        {
            "restored over this run's flags": "schedule (--use-checkpoint-opt_param-scheduler): "
            "lr_decay_steps 16, not 24, wd_incr_steps 16, not 24",
            "changed": "--train-iters 4 -> 6",
        },
    ),
    "override_schedule": (
        "--train-iters 6 --override-opt_param-scheduler --lr 2e-2",
        [5, 6],
        {
            "overridden": "schedule (--override-opt_param-scheduler): max_lr 0.01 -> 0.02, lr_decay_steps 16 -> 24, wd_incr_steps 16 -> 24",
            "changed": "--train-iters 4 -> 6; --lr 0.01 -> 0.02",
        },
    ),
    "other settings": (
        f"{MORE} --micro-batch-size 1 --clip-grad 0.5 --hidden-dropout 0.1",
        [5, 6],
        {
            "changed": "--hidden-dropout 0.0 -> 0.1; --micro-batch-size 2 -> 1; --train-iters 4 -> 6; "
            "--clip-grad 1.0 -> 0.5; --lr-decay-iters None -> 4"
        },
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_was_restored_reset_and_overridden(corpus: Path, saved: Path, name: str) -> None:
    flags, iterations, expected = TABLE[name]
    result = train(*on(corpus), f"--load {saved} {flags}")
    report = told(result)
    assert result.column("iteration") == iterations
    assert {key: report[key] for key in expected} == expected
    assert ("reset" in report) == ("reset" in expected) and ("overridden" in report) == ("overridden" in expected)


def test_a_flag_that_is_left_out_is_told(corpus: Path, saved: Path) -> None:
    """Its default holds, not the checkpoint's value, unless --use-checkpoint-args says otherwise."""
    without = TINY.replace("--clip-grad 1.0 ", "").replace("--attention-dropout 0 ", "")
    report = told(train(*on(corpus), f"--load {saved} {MORE}", base=without))
    assert "--attention-dropout 0.0 -> 0.1 (not given)" in report["changed"]
    taken = train(*on(corpus), f"--load {saved} {MORE} --use-checkpoint-args", base=without)
    assert "attention-dropout" not in told(taken)["changed"] and "attention_dropout=0.0" in taken.err


def test_a_release_gives_weights_alone(corpus: Path, released: Path) -> None:
    result = train(*on(corpus), f"--load {released} --weight-decay 0.3")
    assert told(result)["reset"] == f"{NOTHING} (a release)" and result.column("iteration") == [1, 2, 3, 4]
    assert result.losses() == train(*on(corpus), f"--load {released} --finetune --weight-decay 0.3").losses()


def test_a_line_that_only_evaluates_need_not_describe_the_training(corpus: Path, tmp_path: Path) -> None:
    """Nor need the checkpoint hold more than weights."""
    held_out = "--eval-iters 2 --eval-interval 4"
    trained = train(*on(corpus), f"{held_out} --save {tmp_path} --no-save-optim --no-save-rng")
    base = re.sub("--(train-iters|lr|min-lr|lr-decay-style|clip-grad|weight-decay) [^ ]+ ?", "", TINY)
    result = train(*on(corpus), f"{held_out} --skip-train --load {tmp_path}", base=base)
    report = told(result)
    assert report["restored"] == "weights, position" and report["reset"] == "optimizer, random states, schedule (--skip-train)"
    last = {row["evaluation"]: row["lm_loss"] for row in trained.evaluations}
    assert {row["evaluation"] for row in result.evaluations} == set(last) and result.steps == []
    assert [row["iteration"] for row in result.evaluations] == [4] * len(result.evaluations)
    assert result.evaluations[-1]["lm_loss"] == last["test"], "the same samples of the test data"


def test_a_pretrained_checkpoint_begins_a_run_that_then_goes_on(corpus: Path, saved: Path, tmp_path: Path) -> None:
    """The same command line again goes on from --load: its own checkpoint, all of it."""
    flags = f"--pretrained-checkpoint {saved} --load {tmp_path} --save {tmp_path} --exit-on-missing-checkpoint"
    first = train(*on(corpus), f"{flags} --exit-interval 2")
    assert told(first)["reset"] == f"{NOTHING} (--pretrained-checkpoint)"
    second = train(*on(corpus), flags)
    assert told(second)["restored"] == ALL
    tuned = train(*on(corpus), f"--finetune --load {saved}")
    assert first.losses() + second.losses() == tuned.losses()
    base = TINY.replace("--hidden-size 64 ", "")
    taken = train(*on(corpus), f"--pretrained-checkpoint {saved} --load {tmp_path}/new --use-checkpoint-args --exit-interval 1", base=base)
    assert "hidden_size=64" in taken.err and taken.losses() == tuned.losses()[:1]
    missing = train(*on(corpus), f"--pretrained-checkpoint {tmp_path}/nothing")
    assert missing.code == 2 and "--pretrained-checkpoint" in missing.err and "holds no checkpoint" in missing.err


def test_the_tokenizers_flags_are_left_to_the_line(corpus: Path, saved: Path) -> None:
    base = TINY.replace("--tokenizer-type NullTokenizer ", "").replace("--vocab-size 100 ", "")
    flags = f"--load {saved} {MORE} --use-checkpoint-args"
    assert train(*on(corpus), flags, base=base).code == 0
    refused = train(*on(corpus), f"{flags} --no-use-tokenizer-model-from-checkpoint-args", base=base)
    assert refused.code == 2 and "--tokenizer-type: is required" in refused.err


def test_flags_that_are_not_built_are_refused_by_name(corpus: Path) -> None:
    flags = ["--non-persistent-save-interval 1", "--non-persistent-ckpt-type global", "--non-persistent-global-ckpt-dir x"]
    flags += ["--non-persistent-local-ckpt-dir x", "--non-persistent-local-ckpt-algo atomic", "--override-ckpt-iteration 3"]
    flags += ["--use-mp-args-from-checkpoint-args", "--load-main-params-from-ckpt", "--optimizer-cpu-offload"]
    flags += ["--use-precision-aware-optimizer"]
    result = train(*on(corpus), " ".join(flags), "--optimizer muon")
    assert result.code == 2 and "--optimizer muon: muon is not built yet" in result.err
    for flag in flags:
        assert f"{flag}: is a Megatron-LM flag that this version does not support yet" in result.err


# --- what is refused ---

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-load-balancing-type none"
REFUSED: list[tuple[str, str]] = [
    ("--hidden-size 32", "--hidden-size is 32 here and 64 there"),
    ("--num-layers 3", "--num-layers is 3 here and 2 there"),
    ("--num-attention-heads 8", "--num-attention-heads is 8 here and 4 there"),
    ("--max-position-embeddings 128", "--max-position-embeddings is 128 here and 64 there"),
    ("--position-embedding-type rope", "--position-embedding-type is rope here and learned_absolute there"),
    ("--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights is True here and False there"),
    ("--swiglu", "--swiglu is True here and False there"),
    ("--normalization RMSNorm", "--normalization is RMSNorm here and LayerNorm there"),
    (EXPERTS, "--num-experts is 4 here and None there"),
    ("--vocab-size 110", "the tokenizer is NullTokenizer of 111 ids"),
    ("--optimizer sgd", "--optimizer is sgd here and adam there: give --optimizer adam, or --no-load-optim"),
    ("--train-iters 8 --lr-decay-iters 8", "lr_decay_steps is 32 here and 16 there"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED, ids=[flags.split()[0].lstrip("-") for flags, _ in REFUSED])
def test_what_would_harm_is_refused(corpus: Path, saved: Path, flags: str, reason: str) -> None:
    result = train(*on(corpus), f"--train-iters 6 --lr-decay-iters 4 --load {saved} {flags}")
    assert result.code == 1 and result.steps == [] and len(result.errors) == 1 and "Traceback" not in result.err
    assert f"{saved / 'iter_0000004'} is not for this run:" in result.err and reason in result.err


def test_all_reasons_at_once_on_every_rank(corpus: Path, saved: Path) -> None:
    flags = f"--train-iters 8 --load {saved} --optimizer sgd --num-layers 4 --normalization RMSNorm --vocab-size 110"
    results = each_rank(2, *on(corpus), flags, timeout=60)
    assert [result.code for result in results] == [1, 1]
    (line,) = {line for result in results for line in result.errors}
    (teller,) = [result for result in results if result.errors]
    assert "is not for this run:" in line
    for reason in ("--optimizer is sgd", "--num-layers is 4", "--normalization is RMSNorm", "of 111 ids", "lr_decay_steps is"):
        assert reason in teller.err


@pytest.mark.parametrize(("ids", "is_right"), [(101, True), (128, True), (129, False), (300, False)])
def test_another_programs_rows_say_how_many_ids_there_were(
    corpus: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, ids: int, is_right: bool
) -> None:
    """Megatron-LM's checkpoints do not name their tokenizer; more ids than rows would be trained from random weights."""
    common = load_common_state_dict(saved / "iter_0000004")
    assert common["args"].tokenizer_record["vocab_size"] == 101
    without_record(monkeypatch)
    result = train(*on(corpus), f"--load {saved} {MORE} --vocab-size {ids - 1}")
    assert (result.code == 0) == is_right, result.err
    if not is_right:
        assert f"the tokenizer has {ids} ids here, and there the vocabulary has 128 rows" in result.err
        tuned = train(*on(corpus), f"--load {saved} --finetune --vocab-size {ids - 1}")
        assert tuned.code == 0 and f"WARNING: the tokenizer has {ids} ids here" in tuned.out


def without_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are as of a program that does not keep the tokenizer's."""
    from megatron.training import resume_checks

    original = resume_checks.vocabulary_differences

    def differences(saved: Any, args: Any) -> list[str]:
        return original({key: value for key, value in saved.items() if key != "tokenizer_record"}, args)

    monkeypatch.setattr(resume_checks, "vocabulary_differences", differences)
    monkeypatch.setattr("megatron.training.resume_report.vocabulary_differences", differences)


def test_ranks_that_see_different_checkpoints_end_at_once(corpus: Path, saved: Path, tmp_path: Path) -> None:
    """--load on the nodes' own disks: one rank would begin anew, and the others wait for it."""
    script = tmp_path / "own_disk.py"
    script.write_text(
        "import os, runpy\n"
        "from megatron.training import checkpointing\n"
        "find = checkpointing.find_checkpoint\n"
        "checkpointing.find_checkpoint = lambda load, step=None: None if os.environ['RANK'] == '1' else find(load, step)\n"
        "runpy.run_path('pretrain_gpt.py', run_name='__main__')\n"
    )
    results = each_rank(2, *on(corpus), f"--load {saved} {MORE}", script=str(script), timeout=60)
    assert [result.code for result in results] == [1, 1]
    (line,) = {line for result in results for line in result.errors}
    assert f"rank 0 sees {saved}/iter_0000004, rank 1 sees no checkpoint" in line
