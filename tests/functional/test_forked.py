"""Ranks that are forked are as good as processes of their own: fresh, with their own output and exit code, and gone afterwards."""

import os
import time
from pathlib import Path

import pytest

from tests.functional.forked import Ranks

FRESH = """
import os, sys, threading
print("megatron.training.training" in sys.modules, "torch.distributed.checkpoint" in sys.modules)
print([len(os.listdir(f"/proc/{pid}/task")) for pid in (os.getpid(), os.getppid())])
import torch
print(torch.distributed.is_initialized(), torch.cuda.is_initialized(), hasattr(sys.modules["pretrain_gpt"], "of_another_run"))
sys.modules["pretrain_gpt"].of_another_run = True
print(sys.argv, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["SET_BY_THE_TEST"], os.environ.get("TORCHELASTIC_RUN_ID"))
"""
ENDS = """
import os, signal, sys
rank = int(os.environ["RANK"])
print("said by", rank)
print("complained by", rank, file=sys.stderr)
if rank == 1:
    sys.exit(3)
if rank == 2:
    os._exit(4)
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 4:
    raise ValueError("what went wrong")
"""
HANGS = """
import os, time
print("rank", os.environ["RANK"], "is", os.getpid(), "here", flush=True)
time.sleep(1000 if os.environ["RANK"] == "1" else 0)
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc, which is Linux's")
def test_a_rank_is_fresh_and_has_everything_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither it nor the server has a thread beside the main one, and nothing of an earlier rank or of this process is in it."""
    script = write(tmp_path / "fresh.py", FRESH)
    for value in ("one", "two"):
        monkeypatch.setenv("SET_BY_THE_TEST", value)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launcher's")
        with Ranks(1, ["--flag", "word"], script) as ranks:
            (result,) = ranks.results()
        assert result.code == 0, result.err
        expected = ["True True", "[1, 1]", "False False False", f"{[script, '--flag', 'word']} 0 1 {value} None"]
        assert result.out.splitlines() == expected


def test_each_rank_has_its_own_end(tmp_path: Path) -> None:
    with Ranks(5, [], write(tmp_path / "ends.py", ENDS)) as ranks:
        results = ranks.results()
    assert [result.code for result in results] == [0, 3, 4, -9, 1]
    assert [result.out for result in results] == [f"said by {rank}\n" for rank in range(5)]
    assert all(result.err.startswith(f"complained by {rank}\n") for rank, result in enumerate(results))
    assert "ValueError: what went wrong" in results[4].err


def test_a_rank_that_hangs_is_told_and_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 did not end within 2 s[\s\S]*rank 0 is \d+ here[\s\S]*rank 1 is \d+ here"):
        with Ranks(2, [], write(tmp_path / "hangs.py", HANGS)) as ranks:
            pids = [process.pid for process in ranks.processes]
            ranks.results(timeout=2)
    assert time.monotonic() - began < 60
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
