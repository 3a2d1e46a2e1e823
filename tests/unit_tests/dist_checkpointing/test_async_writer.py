"""A file that the worker wrote from shared memory is, byte by byte, the one that this process writes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, async_writer
from megatron.core.dist_checkpointing.async_writer import AsyncWriter
from megatron.core.dist_checkpointing.integrity import damaged_files
from megatron.core.dist_checkpointing.saving import PendingSave


def state(size: int, fill: float) -> dict:
    flat = torch.full((4 * size,), fill)
    tensors = {
        "piece": flat[size : 2 * size],  # of a larger storage, as parameters in buffers are
        "turned": torch.arange(float(6 * size)).view(6, size).t() + fill,
        "half": torch.full((3, 5), fill).bfloat16(),
        "scalar": torch.tensor(fill),
        "none": torch.empty(0, 3),
    }
    found: dict = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in tensors.items()}
    stacked = ShardedTensor.from_rank_offsets("stacked", torch.full((size,), fill), (0, 0, 1), prepend_axis_num=1)
    return {**found, "stacked": stacked, "object": ShardedObject("object", [fill, "text"], (1,), (0,)), "iteration": 5}


@pytest.fixture(scope="module")
def writer() -> Iterator[AsyncWriter]:
    started = AsyncWriter()
    yield started
    started.close()


def begin(folder: Path, contents: dict) -> PendingSave:
    folder.mkdir()
    return dist_checkpointing.begin_save(contents, folder)


def test_the_same_bytes_in_every_save(tmp_path: Path, writer: AsyncWriter) -> None:
    """Of a state that grows and shrinks; what training does to it after the copy is not in the file."""
    for number, size in enumerate((3, 300, 300, 7)):
        plain, beside = tmp_path / f"plain{number}", tmp_path / f"beside{number}"
        plain.mkdir()
        contents = state(size, float(number))
        dist_checkpointing.save(contents, plain)
        pending = begin(beside, contents)
        writer.start(pending)
        for value in contents.values():
            if isinstance(value, ShardedTensor) and value.data is not None:
                value.data.fill_(-1.0)
        pending.commit(writer.result)
        for name in ("__0_0.distcp", "metadata.json"):
            assert (beside / name).read_bytes() == (plain / name).read_bytes(), name
        assert damaged_files(beside) == []
        assert dist_checkpointing.load_plain_tensors(beside)["piece"].tolist() == [float(number)] * size


def test_one_copy_in_host_memory(tmp_path: Path, writer: AsyncWriter) -> None:
    contents = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000, 1000))}
    for number in range(3):
        pending = begin(tmp_path / str(number), contents)
        writer.start(pending)
        pending.commit(writer.result)
    assert writer._size == 4_000_000


def test_a_failure_of_the_worker_is_raised_here(tmp_path: Path, writer: AsyncWriter) -> None:
    pending = begin(tmp_path / "gone", state(3, 1.0))
    (tmp_path / "gone").rmdir()
    writer.start(pending)
    with pytest.raises(FileNotFoundError, match="gone"):
        pending.commit(writer.result)
    pending = begin(tmp_path / "next", state(3, 1.0))
    writer.start(pending)
    pending.commit(writer.result)
    assert damaged_files(tmp_path / "next") == []


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_killed_worker_is_an_error_with_its_reason(tmp_path: Path, when: str) -> None:
    writer = AsyncWriter()
    pending = begin(tmp_path / "a", state(3, 1.0))
    if when == "before":
        writer.process.kill()
        writer.process.wait()
        writer.start(pending)
    else:
        os.kill(writer.process.pid, signal.SIGSTOP)
        writer.start(pending)
        assert not writer.has_ended()
        writer.process.kill()
    with pytest.raises(ChildProcessError, match="was killed by SIGKILL"):
        pending.commit(writer.result)
    assert writer.has_failed() and not (tmp_path / "a" / "metadata.json").exists()
    writer.close()


def test_a_worker_that_hangs_is_an_error_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped before it wrote anything; what it is waited for by is `result`, and `has_failed` between steps."""
    monkeypatch.setattr(async_writer, "STALL", 0.3)
    monkeypatch.setattr(async_writer, "LOOK", 0.05)
    writer = AsyncWriter()
    pending = begin(tmp_path / "a", state(3, 1.0))
    os.kill(writer.process.pid, signal.SIGSTOP)
    writer.start(pending)
    assert not writer.has_ended(), "it may take its time"
    with pytest.raises(TimeoutError, match=r"hangs: .*__0_0\.distcp has had 0 bytes for 0 s"):
        pending.commit(writer.result)
    assert writer.has_failed() and not (tmp_path / "a" / "metadata.json").exists()
    writer.close()
    assert writer.process.poll() is not None


def test_the_worker_ends_with_its_connection() -> None:
    writer = AsyncWriter()
    writer._connection.close()
    assert writer.process.wait(60) == 1
    writer.close()
