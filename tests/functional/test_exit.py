"""How a run ends before its time: signals, Ctrl-C, limits, and the death of a peer."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.training import training
from tests.functional.forked import Ranks
from tests.functional.runner import (
    ROOT,
    WAIT,
    Processes,
    argv,
    assert_equal_tensors,
    checkpoint_tensors,
    checkpoints,
    finished,
    on,
    tracker,
    train,
    wait_for_rows,
)

POISONED = str(Path(__file__).with_name("poisoned_gpt.py").relative_to(ROOT))
ENDLESS = "--train-iters 100000 --lr-decay-iters 100000 --poison slow --poison-rank -1"

KILL_AT_6 = "--train-iters 1000 --lr-decay-iters 1000 --poison kill --poison-rank 1 --poison-iteration 6"


def raise_signal_in_step(monkeypatch: pytest.MonkeyPatch, number: int, iteration: int) -> None:
    """Send this process a signal in the middle of a step."""
    original = training.train_step

    def step(run: Any, batches: Any) -> Any:
        if run.state.iteration == iteration - 1:
            signal.raise_signal(number)
        return original(run, batches)

    monkeypatch.setattr(training, "train_step", step)


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGTERM, "--exit-signal-handler"),
        (signal.SIGUSR1, "--exit-signal-handler --exit-signal SIGUSR1"),
        (signal.SIGINT, ""),
        (signal.SIGINT, "--exit-signal-handler"),
    ],
)
def test_a_signal_saves_and_ends_cleanly(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, flags: str
) -> None:
    raise_signal_in_step(monkeypatch, number, 3)
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    result = train(*on(corpus, flags), f"--train-iters 8 --eval-iters 1 --save {tmp_path}")
    assert result.code == 0, result.err
    assert result.column("iteration") == [1, 2, 3], "the step that was under way is finished, logged and saved"
    assert checkpoints(tmp_path) == ["iter_0000003"] and tracker(tmp_path) == "3"
    assert f"exiting program at iteration 3: signal {number.name}" in result.out
    assert result.evaluations == []
    assert {name: signal.getsignal(name) for name in handlers} == handlers
    monkeypatch.undo()
    straight = train(*on(corpus), f"--train-iters 8 --save {tmp_path}/straight")
    resumed = train(*on(corpus), f"--train-iters 8 --load {tmp_path} --save {tmp_path}")
    assert resumed.losses() == straight.losses()[3:]
    assert_equal_tensors(checkpoint_tensors(tmp_path / "straight", 8), checkpoint_tensors(tmp_path, 8))


def test_a_signal_between_log_lines_loses_no_number(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_signal_in_step(monkeypatch, signal.SIGINT, 5)
    result = train(*on(corpus), f"--train-iters 9 --log-interval 4 --save {tmp_path}")
    assert result.column("iteration") == [4, 5] and tracker(tmp_path) == "5"


def test_exit_interval(corpus: Path, tmp_path: Path) -> None:
    flags = f"--train-iters 9 --exit-interval 4 --save {tmp_path} --load {tmp_path}"
    ends = [train(*on(corpus, flags)).column("iteration") for _ in range(3)]
    assert ends == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert checkpoints(tmp_path) == ["iter_0000004", "iter_0000008", "iter_0000009"]
    again = train(*on(corpus, flags))
    assert again.code == 0 and again.steps == [] and "training already complete" in again.out


def test_time_limit(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by 40 s in every step: two minutes are over after the fourth."""
    clock = time.monotonic
    ahead = 0.0

    def step(run: Any, batches: Any) -> Any:
        nonlocal ahead
        ahead += 40.0
        return original(run, batches)

    original = training.train_step
    monkeypatch.setattr(training, "train_step", step)
    monkeypatch.setattr("megatron.training.callbacks.exit.time.monotonic", lambda: clock() + ahead)
    result = train(*on(corpus), f"--train-iters 9 --exit-duration-in-mins 2 --save {tmp_path}")
    assert result.code == 0
    assert result.column("iteration") in ([1, 2, 3], [1, 2, 3, 4]) and tracker(tmp_path) == str(len(result.steps))
    assert f"exiting program at iteration {len(result.steps)}: 2 minutes are over" in result.out


@pytest.mark.parametrize(("number", "to"), [(signal.SIGTERM, "one"), (signal.SIGINT, "all")])
def test_two_ranks_end_after_the_same_step(corpus: Path, tmp_path: Path, number: signal.Signals, to: str) -> None:
    """Also when only one of them got the signal."""
    metrics = tmp_path / "metrics.jsonl"
    flags = (f"{ENDLESS} --exit-signal-handler --metrics-file {metrics}", f"--save {tmp_path}/saved")
    with Ranks(2, argv(*on(corpus, *flags)), POISONED) as ranks:
        wait_for_rows(metrics, 2, ranks.is_alive)
        for process in ranks.processes if to == "all" else ranks.processes[:1]:
            os.kill(process.pid, number)
        first, last = ranks.results()
    assert (first.code, last.code) == (0, 0), first.err + last.err
    (name,) = checkpoints(tmp_path / "saved")
    assert int(tracker(tmp_path / "saved")) == int(name.removeprefix("iter_")) >= 2
    assert f"signal {number.name}" in first.out


def test_ranks_that_are_told_to_end_say_so(corpus: Path, tmp_path: Path) -> None:
    """Without --exit-signal-handler nothing is saved, and one line says why: a log that just ends could mean anything."""
    metrics = tmp_path / "metrics.jsonl"
    with Ranks(2, argv(*on(corpus, f"{ENDLESS} --metrics-file {metrics}", f"--save {tmp_path}/saved")), POISONED) as ranks:
        wait_for_rows(metrics, 2, ranks.is_alive)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGTERM)
        results = ranks.results()
    (line,) = [line for result in results for line in result.err.splitlines() if "ERROR" in line]
    assert "ended by SIGTERM, and no rank had failed; with --exit-signal-handler a run saves first" in line
    # 143, or 1 of a rank whose peer was the first to go
    assert {result.code for result in results} <= {1, 128 + signal.SIGTERM} and checkpoints(tmp_path / "saved") == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc, which is Linux's")
def test_no_thread_of_a_process_group_outlives_training(corpus: Path, tmp_path: Path) -> None:
    """Python ends such a thread when it is done itself; amid a C++ destructor that is "terminate called without an active exception"."""
    with Processes() as started:
        flags = ("--train-iters 2 --use-distributed-optimizer --num-workers 0", f"--save {tmp_path}")
        results = [finished(child) for child in started.ranks(2, *on(corpus, *flags), script=POISONED)]
    for result in results:
        assert result.code == 0, result.err
        assert "threads at the end: python\n" in result.out


def test_torchrun_passes_sigterm_on(corpus: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with Processes() as started:
        flags = (f"{ENDLESS} --exit-signal-handler --metrics-file {metrics}", f"--save {tmp_path}/saved")
        launcher = started.torchrun(2, *on(corpus, *flags), script=POISONED)
        wait_for_rows(metrics, 2, lambda: launcher.poll() is None)
        launcher.send_signal(signal.SIGTERM)
        result = finished(launcher)
    assert "exiting program at iteration" in result.out and "ERROR" not in result.err
    assert len(checkpoints(tmp_path / "saved")) == 1 and tracker(tmp_path / "saved")


def test_nothing_is_saved_after_a_peer_was_killed(corpus: Path, tmp_path: Path) -> None:
    """No launcher tells the survivor: it finds out by itself, ends, and keeps the last checkpoint as the last."""
    flags = f"{KILL_AT_6} --save-interval 4 --save {tmp_path}"
    with Ranks(2, argv(*on(corpus, flags, "--exit-signal-handler")), POISONED) as ranks:
        ranks.processes[1].join(WAIT)
        died_at = time.monotonic()
        result, victim = ranks.results(timeout=60)
    assert victim.code == -signal.SIGKILL and result.code != 0, result.out
    assert time.monotonic() - died_at < 60
    assert checkpoints(tmp_path) == ["iter_0000004"] and tracker(tmp_path) == "4"
    assert result.errors and "rank 1" in result.errors[0], result.err


@pytest.mark.slow  # a torchrun of its own for what the test above shows without one
def test_nothing_is_saved_when_the_launcher_ends_the_survivors(corpus: Path, tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the others when one dies: no reason to save."""
    with Processes() as started:
        flags = f"{KILL_AT_6} --save-interval 4 --save {tmp_path}"
        result = finished(started.torchrun(2, *on(corpus, flags, "--exit-signal-handler"), script=POISONED))
    assert result.code != 0
    assert checkpoints(tmp_path) == ["iter_0000004"] and tracker(tmp_path) == "4"


def test_a_fault_of_ours_shows_where(corpus: Path, tmp_path: Path) -> None:
    """A traceback for the developer, then one line with rank, phase and iteration; nothing is saved."""
    result = train(*on(corpus, f"--poison crash --save {tmp_path}"), script="tests.functional.poisoned_gpt")
    assert result.code == 1 and "Traceback" in result.err
    assert result.errors == ["ERROR: rank 0, phase forward and backward, iteration 3: RuntimeError: a fault of ours"]
    assert checkpoints(tmp_path) == []


def test_a_process_group_of_one_run_is_gone_for_the_next(corpus: Path) -> None:
    first, second = train(*on(corpus)), train(*on(corpus))
    assert first.losses() == second.losses()
    assert "RANK" not in os.environ
