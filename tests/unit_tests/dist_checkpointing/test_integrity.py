"""Damage of any kind to any file is one error that names the file; all else reads back."""

import errno
import io
import json
import os
import re
import zipfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, DamagedCheckpointError, ShardedObject, ShardedTensor, integrity, saving
from megatron.core.dist_checkpointing.checksum import BLOCK, ROW, crc32_of_sums
from megatron.core.dist_checkpointing.integrity import CHECKSUMS_FILE, ChecksummedFile, check_sizes, damaged_files, read_checksums
from megatron.core.dist_checkpointing.safe_pickle import tensor_within

FILES = (".metadata", "__0_0.distcp", "metadata.json", CHECKSUMS_FILE)


def state(fill: float = 1.0) -> dict:
    whole = torch.full((5, 3), fill)
    return {
        "w": ShardedTensor.from_rank_offsets("w", whole),
        "b": ShardedTensor.from_rank_offsets("b", torch.full((7,), fill).bfloat16()),
        "o": ShardedObject("o", {"a": fill}, (1,), (0,)),
        "iteration": 3,
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    dist_checkpointing.save(state(), folder)
    return folder


def read_all(folder: Path) -> None:
    check_sizes(folder)
    loaded = dist_checkpointing.load(state(0.0), folder)
    assert torch.equal(loaded["w"], torch.ones(5, 3)) and loaded["o"] == {"a": 1.0} and loaded["iteration"] == 3


def test_every_file_has_its_size_and_sums(written: Path) -> None:
    read_all(written)
    sums = read_checksums(written)
    assert sums is not None and set(sums) == set(FILES) - {CHECKSUMS_FILE}
    for name, value in sums.items():
        assert value.size == (written / name).stat().st_size
        assert sum(part.length for part in value.spans()) == value.size
    assert damaged_files(written) == []


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_names_its_file(written: Path, name: str, place: float, bit: int) -> None:
    path = written / name
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        if name == CHECKSUMS_FILE and json.loads(whole) == _as_json(bytes(damaged)):
            return  # white space
        try:
            found = damaged_files(written)
        except DamagedCheckpointError as error:
            found = [str(error)]
        assert len(found) == 1 and str(path) in found[0]
        if name in (".metadata", "__0_0.distcp"):
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                read_all(written)
    finally:
        path.write_bytes(whole)


def _as_json(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize("cut", ["missing", "empty", "half", "longer"])
def test_another_size_names_the_file(written: Path, name: str, cut: str) -> None:
    path = written / name
    whole = path.read_bytes()
    try:
        if cut == "missing":
            path.unlink()
        else:
            path.write_bytes({"empty": b"", "half": whole[: len(whole) // 2], "longer": whole + b"\0"}[cut])
        with pytest.raises(DamagedCheckpointError) as caught:
            check_sizes(written)
        assert str(path) in str(caught.value) and damaged_files(written)
    finally:
        path.write_bytes(whole)


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    dist_checkpointing.save(state(), tmp_path)
    (tmp_path / CHECKSUMS_FILE).unlink()
    read_all(tmp_path)
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        dist_checkpointing.load(state(0.0), tmp_path)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]),
    turned=st.booleans(),
)
def test_tensors_are_read_in_place(shape: list[int], dtype: torch.dtype, turned: bool) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    tensor = tensor.permute(tuple(reversed(range(len(shape))))) if turned else tensor
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    memory = memoryview(bytearray(buffer.getvalue()))
    found = tensor_within(memory)
    assert found.dtype == dtype and torch.equal(found, tensor)
    if dtype == torch.float32 and tensor.numel():
        found.fill_(7.5)
        assert torch.equal(tensor_within(memory), torch.full_like(tensor, 7.5)), "the memory is shared"


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]),
)
def test_large_tensors_are_written_as_torch_writes_them(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dtype: torch.dtype
) -> None:
    folder = tmp_path_factory.mktemp("large")
    tensor = (torch.randn(shape) * 3).to(dtype)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    stream = ChecksummedFile(folder / "ours")
    stream.begin_part()
    with mock.patch.object(saving, "IN_PLACE_BYTES", 0):
        saving._save_tensor(tensor, stream)
    stream.sync()
    stream.close()
    with zipfile.ZipFile(folder / "ours") as ours, zipfile.ZipFile(buffer) as plain:
        for left, right in zip(ours.infolist(), plain.infolist(), strict=True):
            assert left.filename.partition("/")[2] == right.filename.partition("/")[2]
            assert (left.header_offset, left.file_size) == (right.header_offset, right.file_size)
            if not re.search("serialization_id|data/0", left.filename):  # a hash of CRC-32s, and what has none here
                assert left.CRC == right.CRC and ours.read(left) == plain.read(right)
    loaded = torch.load(folder / "ours", weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    assert len(stream.sum.parts) == 3 and sum(part.length for part in stream.sum.spans()) == len(buffer.getvalue())


@settings(max_examples=20, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), part=st.booleans())
def test_damage_in_a_large_tensor_is_found_however_it_is_read(tmp_path_factory: pytest.TempPathFactory, place: float, part: bool) -> None:
    folder = tmp_path_factory.mktemp("large")
    whole = torch.randn(64, 300)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", whole)}, folder)

    def load() -> torch.Tensor:
        count = 2 if part else 1
        wanted = {str(i): ShardedTensor.from_rank_offsets("w", torch.zeros(64 // count, 300), (0, i, count)) for i in range(count)}
        loaded = dist_checkpointing.load(dict(wanted), folder)
        return torch.cat([loaded[name] for name in wanted])

    assert torch.equal(load(), whole)
    sums = read_checksums(folder)
    assert sums is not None
    start, length, *_ = max(sums["__0_0.distcp"].spans(), key=lambda part: part.length)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[start + int(place * length)] ^= 64
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is damaged"):
        load()


def plain_sums(data: bytes) -> int:
    """The twin of crc32_of_sums, a word at a time."""
    text = b""
    for start in range(0, len(data), BLOCK):
        block = data[start : start + BLOCK]
        words = [int.from_bytes(block[place : place + 8], "little") for place in range(0, len(block), 8)]
        words += [0] * (-len(words) % (ROW // 8))
        rows = [words[place : place + ROW // 8] for place in range(0, len(words), ROW // 8)]
        for line in [*rows, *zip(*rows, strict=True)]:
            text += (sum(line) % 2**64).to_bytes(8, "little")
    return zlib.crc32(text)


@pytest.mark.parametrize("size", [0, 1, 8, ROW - 1, ROW, 3 * ROW + 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + ROW + 3])
def test_sums_are_those_of_the_plain_twin(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    assert crc32_of_sums(data) == plain_sums(data)
    assert crc32_of_sums(data[BLOCK:], crc32_of_sums(data[:BLOCK])) == crc32_of_sums(data), "piece by piece"


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 3))
def test_up_to_three_changed_words_are_seen(data: st.DataObject, count: int) -> None:
    """Also where one gains what another loses."""
    words = torch.randint(-(2**62), 2**62, (4 * ROW // 8,))
    before = crc32_of_sums(words.numpy())
    places = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=count, max_size=count, unique=True))
    delta = data.draw(st.integers(1, 2**61))
    for place, change in zip(places, {1: [delta], 2: [delta, -delta], 3: [delta, delta, -2 * delta]}[count], strict=True):
        words[place] += change
    assert crc32_of_sums(words.numpy()) != before


def test_checkpoints_with_crc32_are_still_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were written before there were sums."""
    monkeypatch.setattr(integrity, "WRITTEN", "crc32")
    whole = torch.randn(64, 300)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", whole)}, tmp_path)
    monkeypatch.undo()
    stored = json.loads((tmp_path / CHECKSUMS_FILE).read_text())
    data = (tmp_path / "__0_0.distcp").read_bytes()
    parts = stored["files"]["__0_0.distcp"]["parts"]
    ends = [start for start, _ in parts[1:]] + [len(data)]
    assert stored["algorithm"] == "crc32" and all(zlib.crc32(data[start:end]) == crc for (start, crc), end in zip(parts, ends, strict=True))
    assert damaged_files(tmp_path) == [] and torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"], whole)
    (tmp_path / "__0_0.distcp").write_bytes(data.replace(data[parts[-2][0] :][:64], bytes(64)))
    assert len(damaged_files(tmp_path)) == 1
    with pytest.raises(DamagedCheckpointError, match="not those that were written"):
        dist_checkpointing.load_plain_tensors(tmp_path)


def test_a_disk_that_fails_while_more_is_written_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system tells a failed write to the first who asks: that is the thread that syncs early, and the last sync sees nothing of it."""
    monkeypatch.setattr(integrity, "SYNC_BYTES", 2**16)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    state = {str(i): ShardedTensor.from_rank_offsets(f"w{i}", torch.ones(2**15)) for i in range(3)}
    folder = tmp_path / "whole"
    folder.mkdir()
    dist_checkpointing.save(dict(state), folder)
    assert damaged_files(folder) == []
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        dist_checkpointing.save(dict(state), tmp_path)


def test_newer_dtypes_are_read(tmp_path: Path) -> None:
    whole = torch.randn(4, 4).to(torch.float8_e4m3fn)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", whole)}, tmp_path)
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"].float(), whole.float())
