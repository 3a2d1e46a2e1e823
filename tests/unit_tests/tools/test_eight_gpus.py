"""The script for a host's GPUs: what it computes, that every line it would run is valid, and (slow) that it runs."""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.memory_estimate import memory_bytes
from tests.conftest import ROOT
from tests.parallel_equivalence import layouts
from tools.benchmark import eight_gpus
from tools.benchmark.eight_gpus import Budget, Row

sys.path.insert(0, str(ROOT / "tools" / "benchmark"))

import command_line
import step_trace
import train
from eight_gpus_results import add_efficiency
from results import Results

MEMORY = 139.0  # GiB of an H200
SIZES = (2, 4, 8)


def rows_of(gpus: int) -> list[Row]:
    return [row for rows in eight_gpus.ROWS.values() for row in rows(gpus, MEMORY)]


# --- the trace ---

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=8)


@given(spans, spans)
def test_intervals_as_if_counted(waiting: list[tuple[int, int]], working: list[tuple[int, int]]) -> None:
    def units(intervals: list[tuple[int, int]]) -> set[int]:
        return {unit for start, end in intervals for unit in range(start, end)}

    assert step_trace.covered(waiting) == len(units(waiting))
    assert step_trace.exposed(waiting, working) == len(units(waiting) - units(working))


def kernel(name: str, start: float, end: float, **more: Any) -> dict:
    """Times in ms."""
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3, **more}


def test_what_a_step_waits_for() -> None:
    events = [
        kernel("nvjet_gemm", 0, 10),
        kernel("ncclDevKernel_AllGather_RING_LL", 8, 14),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32", 12, 16),  # beside the other: both wait once
        {**kernel("Memcpy DtoD", 15, 17), "cat": "gpu_memcpy"},
        kernel("ncclDevKernel_SendRecv", 18, 20),
        kernel("elementwise", 30, 31),
        {**kernel("nccl:all_gather", 0, 100), "cat": "cpu_op"},
        {"ph": "M", "name": "process_name"},
    ]
    found = step_trace.waiting(events, steps=2)
    assert found == step_trace.Waiting(
        communication_ms=10 / 2, exposed_ms=(5 + 2) / 2, all_to_all_ms=2 / 2, idle_ms=(1 + 10) / 2, profiled_ms=31 / 2
    )
    assert step_trace.waiting(events[-2:], steps=2) is None, "a trace of a CPU"


def test_an_all_to_all_is_told_from_a_send_by_the_collectives_name() -> None:
    for name, yes in (("all_to_allv", True), ("all_to_all", True), ("send", False), ("coalesced", False)):
        event = kernel("ncclDevKernel_SendRecv", 0, 1, args={"Collective name": name})
        assert step_trace.is_all_to_all(event) == yes
    assert step_trace.is_all_to_all(kernel("ncclDevKernel_SendRecv", 0, 1))
    assert not step_trace.is_all_to_all(kernel("ncclDevKernel_AllReduce", 0, 1))


# --- what fits ---


def test_a_part_begins_only_what_it_has_time_for() -> None:
    now = [100.0]
    budget = Budget(480, clock=lambda: now[0])
    assert budget.left == 480 and not budget.refusal(480)
    now[0] += 400
    assert not budget.refusal(80) and budget.refusal(110) == "skipped: takes about 110 s, 80 s are left"
    now[0] += 200
    assert budget.refusal(1) == "skipped: takes about 1 s, 0 s are left"


def test_eight_minutes_hold_all_rows_of_the_most_gpus() -> None:
    """The order is by what says most; of two GPUs some rows need a second run, into the same file."""
    for part, rows in eight_gpus.ROWS.items():
        assert sum(row.seconds for row in rows(8, MEMORY) if part != "scaling" or row.gpus in (1, 8)) <= 480
    names = [row.name for row in eight_gpus.scaling_rows(8, MEMORY)]
    assert names[0] == eight_gpus.ALONE and "by copies 8" in names[3] and [name[-1] for name in names[-4:]] == ["4", "4", "2", "2"]
    assert all("by copies" in name for name in names[-4:])


@pytest.mark.parametrize("gpus", SIZES)
def test_every_line_is_valid(gpus: int) -> None:
    rows = rows_of(gpus)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        for flags in ("", eight_gpus.TINY):
            try:
                args = eight_gpus.resolved(row, flags)
            except ValueError as error:
                assert row.optional and "--fp8-format hybrid: is a Megatron-LM flag that" in str(error), f"{row.name}: {error}"
            else:
                assert args.world_size == row.gpus <= gpus


def test_the_estimate_of_memory_is_near_what_was_measured() -> None:
    """docs/performance.md: llama8L on one H200 and with the distributed optimizer on two."""
    for flags, gpus, measured in (("", 1, 57.6), (f"{eight_gpus.SHARDED} --global-batch-size 8", 2, 42.0)):
        estimated = memory_bytes(eight_gpus.resolved(Row("", "llama8L", gpus, flags, 1))) / 2**30
        assert measured <= estimated <= 1.1 * measured


def test_models_are_cut_by_name() -> None:
    whole, cut = ([row for row in rows_of(gpus) if "LLaMA-3 8B, DP" in row.name] for gpus in (8, 2))
    assert [row.name for row in whole] == ["LLaMA-3 8B, DP8, bf16", "LLaMA-3 8B, DP8, FP8"] and "--num-layers" not in whole[0].flags
    assert cut[0].name == "LLaMA-3 8B, DP2, 24 of 32 layers, bf16" and cut[0].flags.endswith("--num-layers 24")
    row = whole[0]
    fitting = [eight_gpus.layers_that_fit(row, memory)[0] for memory in (60, 80, 100, 139)]
    assert fitting == sorted(fitting) and fitting[0] < fitting[-1] == 32
    layers = fitting[1]
    assert memory_bytes(eight_gpus.resolved(row, f"--num-layers {layers}")) <= eight_gpus.USABLE * 80 * 2**30
    assert memory_bytes(eight_gpus.resolved(row, f"--num-layers {layers + 4}")) > eight_gpus.USABLE * 80 * 2**30


def test_the_layouts_are_in_the_table_with_their_ranks() -> None:
    ranks = {layout.name: layout.world_size for layout in layouts.LAYOUTS}
    for size, names in eight_gpus.LAYOUTS.items():
        assert [ranks[name] for name in names] == [size] * len(names)
    assert [size for _, size in eight_gpus.layout_names(8)] == [8] * len(eight_gpus.LAYOUTS[8]) + [4] * len(eight_gpus.LAYOUTS[4])
    assert {size for _, size in eight_gpus.layout_names(4)} == {4} and {size for _, size in eight_gpus.layout_names(2)} == {2}


# --- the whole, with trainings that are not done ---


def numbers(tflops: float) -> dict[str, Any]:
    return {"elapsed_ms": 100.0, "tflops": tflops, "mfu": tflops / 989, "tokens_per_second": 8000.0, "peak_memory_gib": 57.6}


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    file, seen = tmp_path / "rows.json", []

    def run(name: str, iterations: int, processes: int, extra: list[str], profile: Path, limit_s: float, last: int, log: Path) -> dict:
        seen.append([row["result"] for row in json.loads(file.read_text())["rows"]] if file.exists() else [])
        assert 0 < limit_s <= 480 and log.parent == tmp_path / "rows.json.logs"
        if "--tensor-model-parallel-size" in extra:
            raise eight_gpus.RunFailed("llama8L ended with code 1")
        (profile / "profile").mkdir()
        events = [kernel("nvjet_gemm", 0, 100), kernel("ncclDevKernel_AllReduce", 90, 110), kernel("add", 110, 200)]
        with gzip.open(profile / "profile" / "rank-0.json.gz", "wt") as written:
            json.dump({"traceEvents": events}, written)
        return numbers(500.0 if processes == 1 else 480.0)

    monkeypatch.setattr(eight_gpus, "run", run)
    for name in ("NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES"):  # put back afterwards
        monkeypatch.setenv(name, "")
    line = ["eight_gpus.py", "--dry", "--gpus", "2", "--part", "scaling", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(eight_gpus, "end_on_sigterm", lambda: None)
    assert eight_gpus.main() == 1, "rows failed"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    failed = "failed: llama8L ended with code 1"
    results = ["measured", "measured", failed, failed, "measured", "measured", "measured"]
    assert seen == [results[:done] for done in range(7)]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["row"], row["result"]) for row in rows] == list(
        zip(["llama8L, one GPU", *(f"llama8L, {axis}2" for axis in ("DP", "TP", "TP by copies ", "PP", "CP", "CP by copies "))], results)
    )
    assert (rows[1]["efficiency"], rows[1]["exposed_ms"], rows[1]["tokens_per_second_per_gpu"]) == (0.96, 5.0, 4000.0)
    shown = capsys.readouterr().out
    assert "DRY" in shown and next(text for text in shown.splitlines() if text.startswith("llama8L, DP2 ")).split()[2:] == (
        ["2", "100", "4,000", "480.0", "48.5%", "57.6", "10.0", "5.0", "0.0", "-", "0.960", "measured"]
    )
    monkeypatch.setattr(sys, "argv", [*line, "--only", "llama8L, DP16"])
    with pytest.raises(SystemExit, match="2"):
        eight_gpus.main()
    assert "not a row of scaling on 2 GPUs: llama8L, DP16" in capsys.readouterr().err


def test_a_training_is_ended_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(eight_gpus.RunFailed, match="tiny was ended after 1 s"):
        eight_gpus.run("tiny", 1000, 1, [], limit_s=1)
    assert time.monotonic() - started < 70


def test_a_training_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    """It would hold GPUs. A request to end and a kill, of whoever measures."""
    for number, wanted in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        file = tmp_path / f"{number}"
        launcher = [
            sys.executable,
            "-c",
            f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(99)",
        ]
        program = f"import train; from pathlib import Path; train.end_on_sigterm(); train._train('', {launcher}, Path('none'), 99, None)"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT / "tools" / "benchmark")
        wait_for(lambda path: path.exists() and path.read_text() != "", file)
        process.send_signal(number)
        assert process.wait(60) == wanted
        wait_for(has_ended, Path("/proc") / file.read_text() / "stat")


def test_a_training_ends_though_its_lock_stayed_taken() -> None:
    """As a signal's handler leaves it that raises while somebody asks whether the training has ended."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    ending = threading.Thread(target=train._end, args=(process,), daemon=True)
    ending.start()
    ending.join(50)
    assert not ending.is_alive() and has_ended(Path("/proc") / str(process.pid) / "stat")


def has_ended(stat: Path) -> bool:
    try:
        return ") Z " in stat.read_text()  # nobody may wait for it where init does not
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[Path], bool], path: Path) -> None:
    end = time.monotonic() + 60
    while not condition(path):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_failed_training_says_why(tmp_path: Path) -> None:
    log, error = tmp_path / "log", "ERROR: rank 3, phase forward, iteration 2: OutOfMemoryError: CUDA out of memory"
    launcher = [sys.executable, "-c", f"import sys; print('a warning'); sys.exit({error!r})"]
    with pytest.raises(eight_gpus.RunFailed, match=f"tiny ended with code 1: {error}"):
        train._train("tiny", launcher, tmp_path / "none", 60, log)
    assert train.reason("a\nRuntimeError: NCCL\n  exitcode  : 1\nChildFailedError:\n=====\n") == "RuntimeError: NCCL"
    assert train.reason("a\n\n") == "a" and train.reason("") == "no output"


def test_a_row_that_raises_or_hangs_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.parallel_equivalence import comparison

    limits: list[float] = []

    def trained(*_: Any, timeout: float, **__: Any) -> None:
        limits.append(timeout)
        raise KeyError("first loss")

    def run(*_: Any, limit_s: float, **__: Any) -> dict:
        limits.append(limit_s)
        raise KeyError("memory")

    monkeypatch.setattr(comparison, "trained", trained)
    monkeypatch.setattr(eight_gpus, "run", run)
    options = argparse.Namespace(gpus=2, minutes=8, only=None, dry=False, memory_gib=MEMORY)
    results = Results(None, {})
    for part in ("layouts", "mixtral"):
        eight_gpus.run_part(part, options, tmp_path, results.keep)
    assert len(results.rows) == len(eight_gpus.LAYOUTS[2]) + 4 and set(results.failed()) == {row["row"] for row in results.rows}
    assert results.rows[0]["result"] == "failed: KeyError: 'first loss'"
    assert set(limits) == {eight_gpus.LAYOUT_SECONDS + eight_gpus.LATE, 110 + eight_gpus.LATE}
    assert eight_gpus.table(results.rows, dry=False).count("failed: KeyError") == len(results.rows)


def test_a_trace_that_is_wrong_costs_the_row_nothing_else(tmp_path: Path) -> None:
    trace = tmp_path / "rank-0.json.gz"
    assert eight_gpus.waiting_of(trace)[0] == {} and "without its trace: FileNotFoundError" in eight_gpus.waiting_of(trace)[1]
    for events, share in (([], None), ([kernel("gemm", 0, 30), kernel("ncclDevKernel_SendRecv", 30, 40)], 0.25)):
        with gzip.open(trace, "wt") as file:
            json.dump({"traceEvents": events}, file)
        found, lack = eight_gpus.waiting_of(trace)
        assert (found.get("all_to_all_share"), lack) == (share, "")


def test_the_layouts_need_no_pytest() -> None:
    """A GPU's host has torch; `layouts` failed at its first import."""
    program = "import sys; sys.modules['pytest'] = None; from tests.parallel_equivalence import comparison"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


# --- the file ---


def test_parts_come_together_in_one_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    first, second = (Results(file, {"gpus": 8}, add_efficiency) for _ in range(2))  # side by side
    first.keep(part="scaling", row=eight_gpus.ALONE, result="measured", tflops=500.0)
    second.keep(part="layouts", row="tp8 sp", result="passed", dtype="float32")
    second.keep(part="layouts", row="tp8 sp", result="passed", dtype="bfloat16")
    first.keep(part="scaling", row="llama8L, DP8", result="failed: code 1", goal=("efficiency", 0.95))
    again = Results(file, {"gpus": 8}, add_efficiency)
    again.keep(part="scaling", row="llama8L, DP8", result="measured", tflops=450.0)  # takes the earlier row's place, and its yardstick
    again.keep(part="scaling", row=eight_gpus.ALONE, result="skipped: takes about 36 s, 3 s are left")  # has nothing better
    stored = json.loads(file.read_text())["rows"]
    assert [(row["row"], row["result"]) for row in stored] == [
        ("tp8 sp", "passed"),
        ("tp8 sp", "passed"),
        (eight_gpus.ALONE, "measured"),
        ("llama8L, DP8", "measured"),
    ]
    assert stored[-1]["efficiency"] == 0.9 and again.rows == stored
    assert first.failed() == ["llama8L, DP8"] and again.failed() == [] and again.skipped() == [eight_gpus.ALONE]


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in ("", "[1]", '{"a": 1}', '{"machine": {"gpus": 2}, "rows": []}'):
        file.write_text(text)
        with pytest.raises(ValueError, match="give another file"):
            Results(file, {"gpus": 8})
        assert file.read_text() == text


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "a.json", "there is no folder"),
        (Path("/proc/a.json"), "/proc cannot"),
    ):
        with pytest.raises(SystemExit):
            command_line.check_can_be_written(parser, path)
        assert said in capsys.readouterr().err
    command_line.check_can_be_written(parser, tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_nothing_are_refused(capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=command_line.count)
    parser.add_argument("--minutes", type=command_line.positive)
    for line in (["--rounds", "0"], ["--rounds", "two"], ["--minutes", "nan"], ["--minutes", "-1"], ["--minutes", "inf"]):
        with pytest.raises(SystemExit):
            parser.parse_args(line)
        assert line[0] in capsys.readouterr().err
    assert parser.parse_args(["--rounds", "1", "--minutes", "0.5"]) == argparse.Namespace(rounds=1, minutes=0.5)


def test_why_a_row_has_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_gpus, "run", lambda *arguments, **named: pytest.fail("was run"))
    row = Row("", "tiny", 1, "", seconds=60, optional="--a-flag-that-nobody-has")
    assert eight_gpus.measure(row, Budget(480), dry=True, logs=tmp_path) == {"result": "not built"}
    row = Row("", "tiny", 1, "--hidden-size 65", seconds=60)
    assert eight_gpus.measure(row, Budget(480), dry=False, logs=tmp_path)["result"].startswith("refused: ")
    row = Row("", "tiny", 1, "", seconds=60)
    assert eight_gpus.measure(row, Budget(59), dry=False, logs=tmp_path)["result"].startswith("skipped: takes about 60 s, 5")


def test_the_table_says_what_was_reached() -> None:
    common = {"part": "scaling", "gpus": 8, "result": "measured", "goal": ("efficiency", 0.95)}
    rows = [{"row": f"row {i}", **common, **more} for i, more in enumerate(({"efficiency": 0.951}, {"efficiency": 0.949}, {}))]
    rows.append({"row": "ep8", "part": "layouts", "gpus": 8, "dtype": "bfloat16", "differences": {"first loss": 1e-4}, "result": "passed"})
    rows.append({"row": "cp8", "part": "layouts", "gpus": 8, "result": "skipped: takes about 40 s, 3 s are left"})
    text = eight_gpus.table(rows, dry=False)
    for name, end in (
        ("row 0", "0.951  measured; efficiency >= 0.95: reached"),
        ("row 1", "0.949  measured; efficiency >= 0.95: missed, 0.949"),
        ("row 2", "-  measured; efficiency >= 0.95: not measured"),
        ("ep8", "1.0e-04           -           -           -  passed"),
        ("cp8", "skipped: takes about 40 s, 3 s are left"),
    ):
        assert next(line for line in text.splitlines() if line.startswith(name)).endswith(end)
    assert "DRY" not in text and "efficiency >=" not in eight_gpus.table(rows, dry=True)


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    """A row of each part, on two processes of the CPU."""
    names = ["tp2 sp", "LLaMA-3 8B, DP2, 24 of 32 layers, bf16", "Mixtral 8x7B, EP2, 8 of 32 layers, bf16", "llama8L, one GPU"]
    line = [
        sys.executable,
        "tools/benchmark/eight_gpus.py",
        "--dry",
        "--gpus",
        "2",
        "--json",
        str(tmp_path / "rows.json"),
        "--only",
        *names,
    ]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["row"], row["result"]) for row in rows] == [(names[0], "passed")] * 2 + [(name, "measured") for name in names[1:]]
    assert [row["dtype"] for row in rows[:2]] == ["float32", "bfloat16"]
    assert all(row["tokens_per_second_per_gpu"] > 0 for row in rows[2:])
