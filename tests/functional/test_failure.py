"""When a rank fails or hangs all ranks end within a minute, nobody saves, and the last line says who failed first, where and how."""

from pathlib import Path

import pytest

from tests.functional.forked import each_rank
from tests.functional.runner import ROOT, Processes, Result, checkpoints, finished, on, tracker

POISONED = str(Path(__file__).with_name("poisoned_gpt.py").relative_to(ROOT))
FAULT = "RuntimeError: a fault of ours"
slow = pytest.mark.slow


def fail(
    corpus: Path, folder: Path, poison: str, rank: int, launcher: bool = True, more: str = "", ranks: int = 4, on_gpu: bool = False
) -> list[Result]:
    """Of the ranks one fails in iteration 3; there is a checkpoint of iteration 2. The launcher's result, or each rank's."""
    flags = f"--micro-batch-size 1 --train-iters 6 --save {folder} --save-interval 2 --poison {poison} --poison-rank {rank} {more}"
    if not launcher and not on_gpu:
        return each_rank(ranks, *on(corpus, flags), script=POISONED)
    with Processes(on_gpu) as started:
        if launcher:
            children = [started.torchrun(ranks, *on(corpus, flags), script=POISONED)]
        else:
            children = started.ranks(ranks, *on(corpus, flags), script=POISONED)
        return [finished(child, timeout=200) for child in children]


def nobody_saved(folder: Path) -> None:
    assert checkpoints(folder) == ["iter_0000002"] and tracker(folder) == "2"


@pytest.mark.parametrize(
    ("poison", "rank", "phase"),
    [
        ("crash", 2, "forward and backward"),
        pytest.param("data", 2, "data loading", marks=slow),
        pytest.param("backward", 0, "forward and backward", marks=slow),
        pytest.param("optimizer", 2, "optimizer", marks=slow),
        pytest.param("optimizer", 0, "optimizer", marks=slow),
    ],
)
def test_the_first_failing_rank_is_named_last(corpus: Path, tmp_path: Path, poison: str, rank: int, phase: str) -> None:
    (result,) = fail(corpus, tmp_path, poison, rank)
    assert result.code != 0
    message = f"rank {rank}, phase {phase}, iteration 3: {FAULT}"
    assert result.errors == [f"ERROR: {message}"]
    table = result.err[result.err.index("Root Cause") :]
    assert f"rank      : {rank} " in table and message in table
    nobody_saved(tmp_path)


@slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_save(corpus: Path, tmp_path: Path, rank: int) -> None:
    """All ranks learn of it at the same time; one of them says so, and names the one that could not write."""
    (result,) = fail(corpus, tmp_path, "save", rank, more="--use-distributed-optimizer")
    assert result.code != 0
    assert len(result.errors) == 1
    assert result.errors[0].startswith(f"ERROR: rank {rank}, phase saving a checkpoint, iteration 4: ")
    assert "a fault of ours" in result.errors[0]
    nobody_saved(tmp_path)


@slow
def test_a_killed_rank(corpus: Path, tmp_path: Path) -> None:
    """It said nothing; the others find out that it is the one that is gone."""
    (result,) = fail(corpus, tmp_path, "kill", 2)
    assert result.code != 0
    (line,) = result.errors
    assert line.startswith("ERROR: rank 2, phase forward and backward, iteration 3: no sign of life since")
    assert "Signal 9 (SIGKILL)" in result.err[result.err.index("Root Cause") :]
    nobody_saved(tmp_path)


@slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_without_a_launcher(corpus: Path, tmp_path: Path, rank: int) -> None:
    """Also when it is the one through which the ranks met."""
    results = fail(corpus, tmp_path, "kill", rank, launcher=False)
    assert all(result.code != 0 for result in results)
    lines = {line for result in results for line in result.errors}
    if rank == 0:
        assert lines and all("rank 0, or the launcher that kept it, is gone" in line or "store of rank 0" in line for line in lines)
    else:
        (line,) = lines
        assert line.startswith(f"ERROR: rank {rank}, phase forward and backward, iteration 3: no sign of life since")
    nobody_saved(tmp_path)


@pytest.mark.parametrize("seconds", [6, pytest.param(30, marks=slow)])
def test_a_rank_that_sleeps(corpus: Path, tmp_path: Path, seconds: int) -> None:
    """After the timeout a table says where each rank is, and the last line which of them does not wait for the others."""
    results = fail(corpus, tmp_path, "sleep", 1, launcher=False, more=f"--distributed-timeout-seconds-after-init {seconds}")
    assert all(result.code != 0 for result in results)
    ((teller,),) = [[result for result in results if result.errors]]
    (line,) = teller.errors
    assert line.startswith("ERROR: rank 1, phase forward and backward, iteration 3: TimeoutError: no progress for")
    assert "poisoned_gpt.py:" in line and "3 ranks wait in collectives" in line
    rows = teller.err[teller.err.index("where every rank was:") :].splitlines()[2:6]
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3"]
    assert ["in all_reduce" in row for row in rows] == [True, False, True, True], rows
    nobody_saved(tmp_path)
