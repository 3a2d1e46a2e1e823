"""--async-save: the same checkpoints as without, complete or not there at every moment, and a failure of the writer is the run's."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.integrity import damaged_files
from megatron.training.async_save import AsyncSaver
from tests.functional.forked import Ranks, on_ranks
from tests.functional.runner import argv, assert_equal_tensors, checkpoint_tensors, checkpoints, on, tracker, train

START, POLL = AsyncSaver.start, AsyncSaver.poll


def after_start(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[AsyncSaver, Path], Any]) -> None:
    """When the save of this iteration has begun: `act`, before the worker gets to write it."""

    def start(self: AsyncSaver, save: str, iteration: int, *rest: Any) -> None:
        if iteration == number:
            os.kill(self.writer.process.pid, signal.SIGSTOP)
        START(self, save, iteration, *rest)
        if iteration == number:
            act(self, Path(save))

    monkeypatch.setattr(AsyncSaver, "start", start)


def test_the_same_checkpoints(corpus: Path, tmp_path: Path) -> None:
    plain = train(*on(corpus), f"--save {tmp_path}/plain --save-interval 2 --train-iters 5")
    beside = train(*on(corpus), f"--save {tmp_path}/beside --save-interval 2 --train-iters 5 --async-save --use-persistent-ckpt-worker")
    assert beside.code == plain.code == 0, beside.err
    assert beside.losses() == plain.losses()
    assert checkpoints(tmp_path / "beside") == checkpoints(tmp_path / "plain") == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert tracker(tmp_path / "beside") == "5"
    for iteration in (2, 4, 5):
        assert_equal_tensors(*(checkpoint_tensors(tmp_path / name, iteration) for name in ("plain", "beside")))
        assert damaged_files(tmp_path / "beside" / f"iter_{iteration:07d}") == []
    longer = f"--train-iters 7 --lr-decay-iters 5 --async-save --save {tmp_path}/beside"
    resumed = train(*on(corpus), longer, f"--load {tmp_path}/beside --ckpt-step 4")
    whole = train(*on(corpus), "--train-iters 7 --lr-decay-iters 5")
    assert resumed.code == 0 and resumed.losses() == whole.losses()[4:]


def test_the_tracker_names_what_was_saved_and_the_last_one_stays(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer slower than the interval, --keep-last 1: at every step the tracker's checkpoint is whole, and of a saved iteration."""
    seen = []

    def poll(self: AsyncSaver) -> int | None:
        done = POLL(self)
        if (tmp_path / "latest_checkpointed_iteration.txt").exists():
            seen.append(int(tracker(tmp_path)))
            assert damaged_files(tmp_path / f"iter_{seen[-1]:07d}") == []
        return done

    monkeypatch.setattr(AsyncSaver, "poll", poll)
    after_start(monkeypatch, 6, lambda saver, _: None)
    resumed = []

    def wait(self: AsyncSaver, original: Callable = AsyncSaver.wait) -> int | None:
        if self._under_way is not None and self._under_way.iteration == 6:
            resumed.append(tracker(tmp_path))
            os.kill(self.writer.process.pid, signal.SIGCONT)
        return original(self)

    monkeypatch.setattr(AsyncSaver, "wait", wait)
    result = train(*on(corpus), f"--train-iters 11 --save-interval 3 --async-save --keep-last 1 --save {tmp_path}")
    assert result.code == 0, result.err
    assert set(seen) <= {3, 6, 9} and resumed == ["3"], "until 6 was written, 3 was the last"
    assert tracker(tmp_path) == "11" and checkpoints(tmp_path) == ["iter_0000011"]


@pytest.mark.parametrize("what", ["killed", "failed"])
def test_a_writer_that_fails_fails_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def act(saver: AsyncSaver, save: Path) -> None:
        if what == "failed":
            (save / "iter_0000004.unfinished").rmdir()
        os.kill(saver.writer.process.pid, signal.SIGCONT if what == "failed" else signal.SIGKILL)

    after_start(monkeypatch, 4, act)
    began = time.monotonic()
    result = train(*on(corpus), f"--train-iters 500 --save-interval 2 --async-save --save {tmp_path}")
    assert result.code == 1 and time.monotonic() - began < 60
    (line,) = result.errors
    assert ("was killed by SIGKILL" if what == "killed" else "iter_0000004.unfinished") in line
    assert tracker(tmp_path) == "2" and checkpoints(tmp_path) == ["iter_0000002"]
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


def test_a_signal_to_the_whole_job_loses_no_checkpoint(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As schedulers send it: the writer gets it too, while it writes."""

    def act(saver: AsyncSaver, _: Path) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
            os.kill(saver.writer.process.pid, number)
        os.kill(os.getpid(), signal.SIGTERM)

    after_start(monkeypatch, 2, act)
    flags = f"--train-iters 500 --save-interval 2 --async-save --exit-signal-handler --save {tmp_path}"
    result = train(*on(corpus), flags)
    assert result.code == 0, result.err
    assert checkpoints(tmp_path) == ["iter_0000002", "iter_0000003"] and tracker(tmp_path) == "3"


def test_two_ranks(corpus: Path, tmp_path: Path) -> None:
    flags = "--train-iters 4 --save-interval 2 --use-distributed-optimizer"
    plain = on_ranks(2, *on(corpus), f"{flags} --save {tmp_path}/plain")
    beside = on_ranks(2, *on(corpus), f"{flags} --save {tmp_path}/beside --async-save")
    assert plain.code == beside.code == 0, beside.err
    assert tracker(tmp_path / "beside") == "4" and checkpoints(tmp_path / "beside") == ["iter_0000002", "iter_0000004"]
    for iteration in (2, 4):
        assert_equal_tensors(*(checkpoint_tensors(tmp_path / name, iteration) for name in ("plain", "beside")))


def kill_and_go_on(corpus: Path, folder: Path, flags: str, trials: int, keep: int = 2) -> None:
    """Trainings that save at every step, each killed at a random moment after its first save; each goes on from the one before."""
    random.seed(1234)
    reached = 0
    for _ in range(trials):
        length = f"--train-iters 100000 --save-interval 1 --keep-last {keep}"
        with Ranks(1, argv(*on(corpus), f"{length} --save {folder} --load {folder} {flags}")) as ranks:
            end = time.monotonic() + 60
            while not (folder / "latest_checkpointed_iteration.txt").exists() or int(tracker(folder)) <= reached:
                assert ranks.is_alive() and time.monotonic() < end, ranks.written()
                time.sleep(0.002)
            time.sleep(random.random() * 0.3)
            ranks.processes[0].kill()
            ranks.processes[0].join()
        iteration = int(tracker(folder))
        assert iteration > reached and damaged_files(folder / f"iter_{iteration:07d}") == []
        assert checkpoint_tensors(folder, iteration)
        reached = iteration


@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["sync", "async"])
def test_killed_at_random(corpus: Path, tmp_path: Path, flags: str) -> None:
    kill_and_go_on(corpus, tmp_path, flags, 2)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save"], ids=["sync", "async"])
def test_killed_at_thirty_random_points(corpus: Path, tmp_path: Path, flags: str) -> None:
    kill_and_go_on(corpus, tmp_path, flags, 30)


SLOW_WRITER = """
import os, sys, time
if any(word.endswith("async_worker") for word in sys.orig_argv):
    sync = os.fsync
    os.fsync = lambda file: (time.sleep(0.15), sync(file))[1]
"""


@pytest.mark.slow
def test_killed_while_a_slow_writer_has_the_only_one(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--keep-last 1 and a writer that takes longer than the interval: the last complete one goes when the next one is complete."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_WRITER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    kill_and_go_on(corpus, tmp_path / "saved", "--async-save", 50, keep=1)
