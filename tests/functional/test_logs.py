"""What a run says: console lines, metrics file, TensorBoard, picture. All tell the same numbers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.functional.forked import each_rank
from tests.functional.runner import Result, on, train

REQUIRED = [
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration {iteration:8d}/{total:8d} \|",
    r" consumed samples: {consumed:12d} \|",
    r" elapsed time per iteration \(ms\): (?P<ms>\d+\.\d) \|",
    r"{throughput}",
    r" learning rate: {lr:.6E} \|",
    r" global batch size: {batch:5d} \|",
    r" lm loss: {loss:.6E} \|",
    r" loss scale: {scale:.1f} \|",
    r" grad norm: {norm:.3f} \|",
    r"{zeros}",
    r"{params}",
    r" number of skipped iterations: {skipped:3d} \|",
    r" number of nan iterations: {nan:3d} \|",
]


def training_lines(result: Result) -> list[str]:
    return [text for text in result.out.splitlines() if "elapsed time per iteration" in text]


def expected_line(row: dict[str, Any], total: int, extra: bool) -> str:
    """A pattern of the whole line, made from a row of the metrics file."""
    values = {
        "iteration": f"{row['iteration']:8d}",
        "total": f"{total:8d}",
        "consumed": f"{row['consumed_samples']:12d}",
        "throughput": r" throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|" if extra else "",
        "lr": re.escape(f"{row['lr']:.6E}"),
        "batch": "    4",
        "loss": re.escape(f"{row['lm_loss']:.6E}"),
        "scale": re.escape(f"{row['loss_scale']:.1f}"),
        "norm": re.escape(f"{row['grad_norm']:.3f}"),
        "zeros": r" num zeros: \d+ \|" if extra else "",
        "params": r" params norm: \d+\.\d{3} \|" if extra else "",
        "skipped": f"{row['skipped_iterations']:3d}",
        "nan": f"{row['nan_iterations']:3d}",
    }
    return "".join(re.sub(r"\{(\w+)(?::[^}]*)?\}", lambda found: values.get(found[1], found[0]), part) for part in REQUIRED)


@pytest.mark.parametrize("extra", [False, True], ids=["plain", "all fields"])
@pytest.mark.parametrize("precision", ["", "--fp16 --initial-loss-scale 2048"], ids=["fp32", "fp16"])
def test_the_console_line_field_for_field(corpus: Path, extra: bool, precision: str) -> None:
    flags = "--log-throughput --log-num-zeros-in-grad --log-params-norm" if extra else ""
    result = train(*on(corpus, flags, precision))
    lines = training_lines(result)
    assert len(lines) == len(result.steps) == 4
    for line, row in zip(lines, result.steps, strict=True):
        assert re.fullmatch(expected_line(row, 4, extra), line.rstrip("\n")), line
        milliseconds = float(line.partition("(ms): ")[2].split()[0])
        assert milliseconds == pytest.approx(row["elapsed_ms"], abs=0.051)


def test_the_metrics_file(corpus: Path, tmp_path: Path) -> None:
    """Full precision, fields by name, throughput that fits the time, and appended to on resume."""
    metrics = tmp_path / "more" / "metrics.jsonl"
    result = train(*on(corpus), "--eval-iters 1 --eval-interval 2")
    fields = {"iteration", "consumed_samples", "lm_loss", "grad_norm", "lr", "elapsed_ms", "tokens_per_second", "tflops", "mfu", "memory"}
    for number, row in enumerate(result.steps, 1):
        assert fields <= row.keys()
        assert row["iteration"] == number and row["consumed_samples"] == 4 * number
        assert row["tokens_per_second"] == pytest.approx(4 * 64 / row["elapsed_ms"] * 1000, rel=1e-6)
        assert row["tflops"] > 0 and row["memory"] > 2**20 and row["mfu"] is None
        assert row["lm_loss"] == float(np.float32(row["lm_loss"])) or row["lm_loss"] != round(row["lm_loss"], 6)
    for step in (2, 4):
        stored = train(*on(corpus), f"--exit-interval 2 --save {tmp_path}/s --load {tmp_path}/s", metrics=metrics)
        assert stored.code == 0 and stored.column("iteration") == list(range(1, step + 1))


def test_a_log_interval_is_the_mean_of_its_steps(corpus: Path) -> None:
    every, third = train(*on(corpus, "--train-iters 9")), train(*on(corpus, "--train-iters 9 --log-interval 3"))
    assert third.column("iteration") == [3, 6, 9]
    means = [np.mean(every.losses()[start : start + 3]) for start in (0, 3, 6)]
    assert third.losses() == pytest.approx(means, rel=1e-12)
    for name in ("lr", "grad_norm", "consumed_samples"):
        assert third.column(name) == every.column(name)[2::3], "these are the last step's"
    odd = train(*on(corpus, "--train-iters 7 --log-interval 3"))
    assert odd.column("iteration") == [3, 6, 7], "the rest is logged too"


def test_logging_seldom_does_not_change_training(corpus: Path, tmp_path: Path) -> None:
    often, seldom = (train(*on(corpus, f"--train-iters 6 --log-interval {n} --eval-iters 1")) for n in (1, 100))
    assert often.evaluations[-1] == seldom.evaluations[-1]


def test_evaluation_lines(corpus: Path) -> None:
    result = train(*on(corpus, "--eval-iters 2 --eval-interval 2"))
    lines = result.out.splitlines()
    at = [number for number, text in enumerate(lines) if text.startswith(" validation loss at ")]
    titles = ["iteration 2", "iteration 4", "iteration 4 on validation set", "iteration 4 on test set"]
    assert len(at) == len(result.evaluations) == 4
    for place, title, row in zip(at, titles, result.evaluations, strict=True):
        text = f" validation loss at {title} | lm loss value: {row['lm_loss']:.6E} | lm loss PPL: {math.exp(row['lm_loss']):.6E} | "
        assert lines[place] == text
        assert set(lines[place - 1]) == set(lines[place + 1]) == {"-"} and len(lines[place - 1]) >= len(text)
    assert [row["iteration"] for row in result.evaluations] == [2, 4, 4, 4]


def test_evaluation_alone(corpus: Path, tmp_path: Path) -> None:
    """--skip-train: the loss of a checkpoint on held-out data, and nothing else happens to it."""
    trained = train(*on(corpus, f"--eval-iters 2 --save {tmp_path}"))
    alone = train(*on(corpus, f"--eval-iters 2 --load {tmp_path} --skip-train"))
    assert alone.code == 0 and alone.steps == [], alone.err
    assert len(alone.evaluations) == len(trained.evaluations) == 2
    assert alone.evaluations[1]["lm_loss"] == trained.evaluations[1]["lm_loss"], "the test set starts anew in each run"
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_tags_and_the_same_values(corpus: Path, tmp_path: Path) -> None:
    flags = "--eval-iters 1 --eval-interval 2 --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard"
    result = train(*on(corpus, flags, f"--log-world-size-to-tensorboard --tensorboard-dir {tmp_path} --split 80,20,0"))
    found = scalars(tmp_path)
    own = {
        "learning-rate",
        "batch-size",
        "loss-scale",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "world-size",
        "iteration-time",
        "throughput",
    }
    tags = own | {"lm loss", "lm loss validation", "lm loss validation ppl"}
    assert tags | {f"{tag} vs samples" for tag in tags} <= found.keys()
    for tag, column in (("lm loss", "lm_loss"), ("learning-rate", "lr"), ("grad-norm", "grad_norm"), ("loss-scale", "loss_scale")):
        assert [step for step, _ in found[tag]] == [1, 2, 3, 4], "once a step"
        assert [value for _, value in found[tag]] == pytest.approx(result.column(column), rel=1e-6)
        assert [step for step, _ in found[f"{tag} vs samples"]] == [4, 8, 12, 16]
    assert [value for _, value in found["iteration-time"]] == pytest.approx([ms / 1000 for ms in result.column("elapsed_ms")], rel=1e-6)
    assert found["batch-size"] == [(step, 4.0) for step in range(1, 5)]
    held_out = result.evaluations[0]["lm_loss"]
    assert found["lm loss validation"][0] == (2, pytest.approx(held_out, rel=1e-6))
    assert found["lm loss validation ppl"][0] == (2, pytest.approx(math.exp(held_out), rel=1e-5))


def test_tensorboard_gets_every_step_of_a_longer_interval(corpus: Path, tmp_path: Path) -> None:
    every = train(*on(corpus, "--train-iters 6"))
    train(*on(corpus, f"--train-iters 6 --log-interval 3 --tensorboard-dir {tmp_path}/1"))
    train(*on(corpus, f"--train-iters 6 --log-interval 3 --tensorboard-log-interval 2 --tensorboard-dir {tmp_path}/2"))
    assert scalars(tmp_path / "1")["lm loss"] == [(n, pytest.approx(loss, rel=1e-6)) for n, loss in enumerate(every.losses(), 1)]
    assert [step for step, _ in scalars(tmp_path / "2")["lm loss"]] == [2, 4, 6]


def test_the_curves_are_drawn(corpus: Path, tmp_path: Path, drawn: None) -> None:
    pytest.importorskip("matplotlib")
    result = train(*on(corpus, f"--eval-iters 1 --eval-interval 2 --save {tmp_path}"))
    picture = tmp_path / "training_curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert str(picture) in result.out
    assert not list(tmp_path.glob("*.tmp*"))


def test_the_last_rank_prints(corpus: Path, tmp_path: Path) -> None:
    """Lines, metrics, TensorBoard and picture come from one rank, the last; what rank 0 says it says once."""
    flags = f"--eval-iters 1 --eval-interval 2 --tensorboard-dir {tmp_path}/tb --save {tmp_path}/s"
    first, last = each_rank(2, *on(corpus, flags))
    assert first.code == last.code == 0, first.err + last.err
    assert training_lines(first) == [] and len(training_lines(last)) == 4
    assert "validation loss" not in first.out and last.out.count(" validation loss at ") == 4
    assert "number of parameters" in first.out and "number of parameters" not in last.out
    assert [row["iteration"] for row in last.steps] == [1, 2, 3, 4]
    assert [step for step, _ in scalars(tmp_path / "tb")["lm loss"]] == [1, 2, 3, 4]
    assert len(list((tmp_path / "tb").glob("events*"))) == 1
    alone = train(*on(corpus, "--eval-iters 1 --eval-interval 2"))
    for name in ("lm_loss", "iteration"):
        ours, single = ([row[name] for row in result.evaluations] for result in (last, alone))
        assert ours == pytest.approx(single, rel=1e-6)


def test_a_profile_of_some_steps(corpus: Path, tmp_path: Path) -> None:
    """The trace, and what each kernel (here: operator) took a step; the training is not changed by it."""
    flags = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3"
    result = train(*on(corpus, flags, f"--tensorboard-dir {tmp_path}"))
    assert result.losses() == train(*on(corpus)).losses()
    kernels = json.loads((tmp_path / "profile" / "kernels-rank-0.json").read_text())
    assert kernels["aten::mm"]["ms"] > 0 and kernels["aten::mm"]["calls"] == int(kernels["aten::mm"]["calls"])
    assert [entry["ms"] for entry in kernels.values()] == sorted((entry["ms"] for entry in kernels.values()), reverse=True)
    assert (tmp_path / "profile" / "rank-0.json.gz").stat().st_size > 0
    assert "profile of iterations 2 to 3" in result.out


def test_losses_of_tokens_further_ahead_are_logged(corpus: Path) -> None:
    """By depth, behind the model's own, which they do not enter; an evaluation has none."""
    result = train(*on(corpus, "--mtp-num-layers 2 --eval-iters 1 --eval-interval 2"))
    assert result.code == 0, result.err
    lines = training_lines(result)
    assert len(lines) == 4 and all(
        re.search(r"\| lm loss: \S+ \| mtp_1 loss: \S+ \| mtp_2 loss: \S+ \| loss scale", line) for line in lines
    )
    assert "mtp" not in "".join(line for line in result.out.splitlines() if "validation" in line)
    first = result.steps[0]
    assert first["mtp_1_loss"] == pytest.approx(first["lm_loss"], rel=0.2), "all predict nothing at first"
