"""The table of what is held against the peer: its rows' command lines, its words, and what it keeps when rows fail or come one by one."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.training.arguments import parse_args, validate_args
from tests.conftest import ROOT
from tools.benchmark import peer_table
from tools.benchmark.peer_table import ROWS, Row

sys.path.insert(0, str(ROOT / "tools" / "benchmark"))

import train


def numbers(ms: float, gib: float = 50.0) -> dict[str, Any]:
    return {"elapsed_ms": ms, "tflops": 500.0, "mfu": 0.5, "peak_memory_gib": gib, "seconds_to_first_iteration": 12.0}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_line_is_valid(row: Row) -> None:
    script, flags = train.CONFIGURATIONS[row.configuration]
    line = f"{train.COMMON} {flags} {row.flags} --train-iters 10 --check-config --check-config-world-size {row.gpus}"
    defaults: dict[str, Any] = {}
    if script == "pretrain_llama.py":
        from pretrain_llama import LLAMA_DEFAULTS as defaults  # type: ignore[no-redef]
    assert validate_args(parse_args(argv=shlex.split(line), defaults=defaults), defaults).world_size == row.gpus


def test_names_are_unique_and_rows_of_two_gpus_ask_for_a_tenth_more() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        if row.gpus == 2:
            assert row.limits == (pytest.approx(row.peer_ms / 1.1), row.peer_gib) if row.peer_ms else (None, None)


@pytest.mark.parametrize(
    ("row", "found", "words"),
    [
        (Row("", "llama8L", 1, "", 934, 66.8, 850, 56), numbers(851, 55.9), "850 ms: missed by 0.1 %, 56.0 GiB: reached"),
        (Row("", "llama8L", 1, "", 934, 66.8, 850, 56), numbers(850, 56.1), "850 ms: reached, 56.0 GiB: missed by 0.2 %"),
        (Row("", "llama8L", 2, "", 1100, 33.5), numbers(999, 33.5), "1000 ms: reached, 33.5 GiB: reached"),
        (Row("", "llama8L", 2, "", 1100, 33.5), numbers(1001, 33.5), "1000 ms: missed by 0.1 %, 33.5 GiB: reached"),
        (Row("", "moe8x-fp8-delayed", 1, "", None), numbers(326), ""),
    ],
)
def test_a_target_is_reached_or_missed_by_so_much(row: Row, found: dict[str, Any], words: str) -> None:
    assert peer_table.verdict(row, found) == words


def test_the_table() -> None:
    rows = [{"row": "moe8x", "result": "failed: no memory"}, {"row": "llama8L, FP8 delayed", "result": "measured", **numbers(642.04)}]
    _, _, first, second = peer_table.table(rows).splitlines()
    assert [cell.strip() for cell in first.strip("|").split("|")] == (
        ["llama8L, FP8 delayed", "1", "642.0", "500.0", "", "50.0 GiB", "12.0 s", "564 ms", "731 ms, 68.9 GiB", "0.878"]
        + ["640 ms: missed by 0.3 %"]
    )
    assert second.startswith("| moe8x | 1 | failed: no memory |")
    assert first.count("|") == second.count("|")


def run_it(monkeypatch: pytest.MonkeyPatch, gpus: int, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["peer_table.py", *words])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(peer_table, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(peer_table.metadata, "version", lambda _: "3.6.0")
    return peer_table.main()


def test_rows_come_one_by_one_into_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    file, ran = tmp_path / "rows.json", list[str]()

    def run(name: str, iterations: int, processes: int, extra: list[str], log: Path) -> dict[str, Any]:
        assert (iterations, processes, log.parent) == (20, 1, tmp_path / "rows.json.logs")
        ran.append(name)
        if name == "gpt345m":
            raise peer_table.RunFailed("gpt345m ended with code 1: ERROR: no")
        return numbers(800.0)

    monkeypatch.setattr(peer_table, "run", run)
    assert run_it(monkeypatch, 1, "--only", "gpt345m", "llama8L", "--json", str(file)) == 1
    assert run_it(monkeypatch, 1, "--only", "moe8x", "--json", str(file)) == 0
    assert ran == ["llama8L", "gpt345m", "moe8x"]
    shown = capsys.readouterr().out.rpartition("| run |")[2]
    assert "| llama8L | 1 | 800.0 |" in shown and "| gpt345m | 1 | failed: gpt345m ended with code 1: ERROR: no |" in shown
    assert "| moe8x | 1 | 800.0 |" in shown and "for two GPUs, left out: llama8L DP2" in shown
    assert [row["row"] for row in json.loads(file.read_text())["rows"]] == ["llama8L", "gpt345m", "moe8x"]
    with pytest.raises(SystemExit, match="give another file"):
        run_it(monkeypatch, 1, "--iterations", "12", "--json", str(file))


@pytest.mark.parametrize(
    ("gpus", "words", "says"),
    [
        (0, [], "this host has 0 GPUs, and 1 are needed"),
        (1, ["--only", "llama8L PP2"], "this host has 1 GPUs, and 2 are needed"),
        (2, ["--gpus", "2", "--only", "llama8L"], "none of --only is a row of 2 GPUs"),
        (2, ["--only", "llama9L"], "invalid choice: 'llama9L'"),
        (2, ["--json", "none/rows.json"], "there is no folder"),
    ],
)
def test_a_wrong_line_ends_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, gpus: int, words: list[str], says: str
) -> None:
    monkeypatch.setattr(peer_table, "run", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(SystemExit, match="2"):
        run_it(monkeypatch, gpus, *words)
    assert says in capsys.readouterr().err


def test_the_list_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert run_it(monkeypatch, 0, "--list") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS)
