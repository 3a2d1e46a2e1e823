"""Whatever call to the file system is the last, the tracker names a checkpoint that is whole; failures leave no half-written one."""

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, integrity
from megatron.training import checkpoint_folders
from megatron.training.checkpoint_folders import KEEP_FILE, complete_iterations, remove_old
from megatron.training.checkpoint_names import TRACKER, get_checkpoint_name
from megatron.training.checkpointing import find_checkpoint


class Killed(BaseException):
    """The end of the process: nothing that handles errors sees it."""


CALLS: list[tuple[Any, str]] = [(os, name) for name in ("mkdir", "open", "fsync", "rename", "replace", "rmdir", "unlink")]
CALLS += [(integrity.ChecksummedFile, name) for name in ("_put", "sync")]


class StopAt:
    """The file-system call of this number, and all after it, raises `error` instead; or, once, after it was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, error: Callable[[], BaseException], once: bool = False) -> None:
        self.number, self.error, self.count, self.once = number, error, 0, once
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.number or (self.count > self.number and not self.once):
                raise self.error()
            return original(*args, **kwargs)

        return call


def save(folder: Path, iteration: int, value: float) -> None:
    final = Path(get_checkpoint_name(str(folder), iteration))
    unfinished = checkpoint_folders.start(final)
    try:
        dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value))}, unfinished)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    checkpoint_folders.publish(unfinished, final)


def loaded(folder: Path) -> float:
    """The value in the checkpoint that the tracker names."""
    found = find_checkpoint(str(folder))
    assert found is not None
    integrity.check_sizes(found)
    assert integrity.damaged_files(found) == []
    return dist_checkpointing.load_plain_tensors(found)["w"][0].item()


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
def test_killed_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """With two checkpoints of which the older is to be removed."""
    ends = set()
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        save(folder, 1, 1.0)
        save(folder, 2, 2.0)
        iteration = 2 if again else 3
        with monkeypatch.context() as patch:
            stop = StopAt(patch, number, Killed)
            try:
                save(folder, iteration, 3.0)
                remove_old(folder, iteration, 1, None)
            except (Killed, OSError, ValueError):  # torch turns what its file raises into an error of its own
                pass
        ends.add(loaded(folder))
        assert all(path.suffix or not integrity.damaged_files(path) for path in folder.glob("iter_*"))
        save(folder, 4, 4.0)  # the next run's save clears up
        assert loaded(folder) == 4.0
        assert not [path.name for path in folder.iterdir() if path.suffix in (".unfinished", ".replaced", ".removed")]
        shutil.rmtree(folder)
        if stop.count < number:
            break
    assert number > 20 and ends == {2.0, 3.0}


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
@pytest.mark.parametrize("once", [False, True], ids=["from then on", "once"])
def test_a_full_disk_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, once: bool) -> None:
    """An error, the old checkpoint is there and named, and a half-written folder is gone where removing works."""
    failed = 0
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        save(folder, 2, 2.0)
        with monkeypatch.context() as patch:
            stop = StopAt(patch, number, lambda: OSError(errno.ENOSPC, "No space left on device"), once)
            try:
                save(folder, 2 if again else 3, 3.0)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                failed += 1
        if stop.count < number:
            break
        named = loaded(folder)
        assert named in (2.0, 3.0)
        if once and named == 2.0:
            assert sorted(path.name for path in folder.iterdir()) == ["iter_0000002", TRACKER]
        shutil.rmtree(folder)
    assert failed > 15


def names(folder: Path) -> list[int]:
    return complete_iterations(folder)


@pytest.mark.parametrize(
    ("keep_last", "retain", "left"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (2, None, [5, 6]),
        (1, None, [6]),
        (9, None, [1, 2, 3, 4, 5, 6]),
        (None, 3, [3, 6]),
        (2, 2, [2, 4, 5, 6]),
    ],
)
def test_retention(tmp_path: Path, keep_last: int | None, retain: int | None, left: list[int]) -> None:
    for iteration in range(1, 7):
        save(tmp_path, iteration, float(iteration))
        assert remove_old(tmp_path, iteration, keep_last, retain) == []
        assert loaded(tmp_path) == iteration
    assert names(tmp_path) == left


def test_retention_keeps_what_is_marked_linked_later_or_not_ours(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "run"
    save(elsewhere, 1, 1.0)
    for iteration in (2, 3, 4, 9):
        save(folder, iteration, float(iteration))
    (folder / "iter_0000001").symlink_to(elsewhere / "iter_0000001")
    (folder / "iter_0000002" / KEEP_FILE).touch()
    (folder / "iter_0000003.backup").mkdir()
    (folder / "release").mkdir()
    save(folder, 5, 5.0)
    assert remove_old(folder, 5, 1, None) == []
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["iter_0000001", "iter_0000002", "iter_0000003.backup", "iter_0000005", "iter_0000009", "release", TRACKER]
    )
    assert names(elsewhere) == [1]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, float(iteration))
    data = tmp_path / "iter_0000002" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:9])
    remove_old(tmp_path, 3, 2, None)
    assert names(tmp_path) == [1, 3] and not data.exists()


def test_what_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(PermissionError("not allowed")))
    (problem,) = remove_old(tmp_path, 2, 1, None)
    assert "iter_0000001" in problem and "not allowed" in problem
