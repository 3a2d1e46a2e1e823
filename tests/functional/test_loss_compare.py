"""tools/loss_compare.py as a program: equal runs are equal, and of different ones it names the step and the tensor."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from megatron.core.dist_checkpointing import load_plain_tensors
from tests.conftest import ROOT
from tests.functional.forked import Ranks, joined
from tests.functional.runner import TINY, environment, on, train
from tools import loss_compare

RECIPE = f"{TINY} --train-iters 2"


def compare(*words: str | Path) -> tuple[int, str]:
    """(exit code, what it printed)."""
    command = [sys.executable, "tools/loss_compare.py", *map(str, words)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=480)
    return result.returncode, result.stdout + result.stderr


def data(corpus: Path) -> str:
    return " ".join(map(str, on(corpus)))


def metrics(path: Path, **columns: list) -> Path:
    rows = [{"iteration": i + 1} | {name: values[i] for name, values in columns.items()} for i in range(len(columns["lm_loss"]))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + json.dumps({"iteration": 1, "evaluation": "valid", "lm_loss": 9}))
    return path


def test_metrics_files(tmp_path: Path) -> None:
    a = metrics(tmp_path / "a", lm_loss=[4.0, 3.0, 2.0], grad_norm=[1.0, 1.0, 1.0])
    b = metrics(tmp_path / "b", lm_loss=[4.0, 3.00001, 2.5], grad_norm=[1.0, 1.0, float("nan")])
    assert loss_compare.main(["--metrics-a", str(a), "--metrics-b", str(a), "--tolerance", "0"]) == 0
    code, text = compare("--metrics-a", a, "--metrics-b", b)
    assert code == 1 and text.splitlines()[-1] == "DIFFERENT"
    assert "first difference beyond 1e-05: step 3, lm_loss 2.0 and 2.5, 2.0e-01 apart; grad_norm 1.0 and nan, inf apart" in text
    assert [line.count("<") for line in text.splitlines()[1:4]] == [0, 0, 2]
    code, text = compare("--metrics-a", a, "--metrics-b", b, "--tolerance", "1e-6")
    assert "first difference beyond 1e-06: step 2, lm_loss 3.0 and 3.00001, 3.3e-06 apart" in text
    short = metrics(tmp_path / "short", lm_loss=[4.0], grad_norm=[1.0])
    code, text = compare("--metrics-a", a, "--metrics-b", short)
    assert code == 1 and "step 2, lm_loss 3.0 and None" in text


def test_long_tables_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    losses = [1.0] * 500
    a = metrics(tmp_path / "a", lm_loss=losses)
    b = metrics(tmp_path / "b", lm_loss=losses[:300] + [1.1] * 200)
    assert loss_compare.main(["--metrics-a", str(a), "--metrics-b", str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40 and lines[-2].startswith("first difference")
    assert any(line.startswith("   301 ") and "<" in line for line in lines)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "nothing to run"),
        (("--metrics-a", "x"), "give both, or neither"),
        (("--metrics-a", "no such", "--metrics-b", "x"), "no such: no such file"),
        (("--metrics-a", "Makefile", "--metrics-b", "Makefile"), "Makefile, line 1: not a line of a metrics file"),
        (("--common", "--x", "--commit-a", "no-such-commit"), "commit 'no-such-commit': git made no worktree of it"),
        (("--common", "--hidden-sise"), "--hidden-sise: unknown flag"),
        (("--common", "--x", "--script", "no.py"), "--script no.py: there is none in the tree of run a"),
    ],
)
def test_errors(words: tuple[str, ...], message: str) -> None:
    code, text = compare(*words)
    assert code == 2 and message in text and "Traceback" not in text


def layout_equals_one_process(corpus: Path) -> list[str]:
    """The tool's words for: a run on two tensor-parallel ranks is that of one process."""
    return ["--common", f"{RECIPE} {data(corpus)}", "--b", "--tensor-model-parallel-size 2", "--processes-b", "2"]


def assert_says_equal(code: int, text: str) -> None:
    assert code == 0, text
    assert "2 steps are equal within 1e-05" in text and "tensors are equal too: initial weights, and gradients" in text


def started_here(command: list[str], stdout: IO[str], **_: Any) -> subprocess.CompletedProcess:
    """In the place of subprocess.run: the script that the tool starts, by torchrun or without, on ranks that are forked."""
    launcher = command[1 : next(i for i, word in enumerate(command) if word.endswith(".py"))]
    assert command[0] == sys.executable and launcher[:-1] in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"])
    script, *words = command[1 + len(launcher) :]
    with Ranks(int(launcher[-1]) if launcher else 1, words, script) as ranks:
        result = joined(ranks.results())
    stdout.write(result.out + result.err)
    return subprocess.CompletedProcess(command, result.code)


def test_a_layout_equals_one_process(corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(loss_compare.subprocess, "run", started_here)
    assert_says_equal(loss_compare.main(layout_equals_one_process(corpus)), capsys.readouterr().out)


@pytest.mark.slow  # the same with the processes that the tool starts itself
def test_the_program_starts_processes(corpus: Path) -> None:
    assert_says_equal(*compare(*layout_equals_one_process(corpus)))


@pytest.mark.slow
def test_another_seed_is_another_training(corpus: Path) -> None:
    code, text = compare("--common", f"{RECIPE} {data(corpus)}", "--b", "--seed 8")
    assert code == 1 and "first difference beyond 1e-05: step 1, lm_loss" in text
    assert "first tensor that differs beyond 1e-05: weights before the first step: embedding.word_embeddings.weight: " in text


@pytest.mark.slow
def test_the_same_commit_is_equal_to_the_bit(corpus: Path) -> None:
    words = ("--common", f"{RECIPE} {data(corpus)}", "--commit-a", "HEAD", "--tolerance", "0")
    code, text = compare(*words)
    assert code == 0, text
    assert "tensors are equal too: all" in text
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True).stdout
    assert "loss_compare_" not in worktrees


def test_one_perturbed_weight_is_named(corpus: Path, tmp_path: Path) -> None:
    """And a gradient, and what is in one checkpoint alone; in the order in which a training computes them."""
    assert train(*on(corpus, "--exit-interval 1 --lr 0 --min-lr 0 --save", tmp_path)).code == 0
    tensors = loss_compare.load_tensors(tmp_path)
    assert tensors.keys() == load_plain_tensors(tmp_path / "iter_0000001").keys()
    names = list(loss_compare.weights(tensors))
    assert names[0] == ("embedding.word_embeddings.weight", None) and names[-1] == ("decoder.final_layernorm.weight", None)
    assert names[2:6] == [
        (f"decoder.layers.self_attention.linear_qkv.{part}", 0) for part in ("layer_norm_bias", "layer_norm_weight", "bias", "weight")
    ]
    assert [layer for _, layer in names[2:-2]] == [0] * 12 + [1] * 12
    assert loss_compare.gradient_means(tensors).keys() == set(names)

    def first(changed: dict[str, torch.Tensor]) -> str:
        pairs = [(loss_compare.weights, False), (loss_compare.gradient_means, True)]
        texts = [loss_compare.first_difference(pick(tensors), pick(tensors | changed), 1e-5, back) for pick, back in pairs]
        return next((text for text in texts if text), "")

    assert first({}) == ""
    weight = tensors["decoder.layers.mlp.linear_fc1.weight"].clone()
    weight[1, 5, 7] += 0.01
    norm = tensors["decoder.final_layernorm.weight"] + 1
    text = first({"decoder.layers.mlp.linear_fc1.weight": weight, "decoder.final_layernorm.weight": norm})
    assert re.match(r"decoder\.layers\.mlp\.linear_fc1\.weight, layer 1 \(counted from 0\): 1\.\de-01 apart .*element \[5, 7\]: ", text)
    gradient = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    assert first({gradient: tensors[gradient] * (1 + 1e-4)}).startswith("decoder.layers.mlp.linear_fc2.weight, layer 1 ")
    assert first({"output_layer.weight": norm}) == "output_layer.weight: only run b has it"
    key = "embedding.word_embeddings.weight"
    assert first({key: torch.cat([tensors[key], torch.zeros(64, 64)])}) == "", "rows of padding are no difference"
