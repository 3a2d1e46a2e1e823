"""Batches are whole lines, whatever the files are packed in and wherever reading begins."""

import gzip
import io
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.preparation import text_input
from megatron.core.datasets.preparation.text_input import InputError, Position, find_files, read_batches

zstandard = pytest.importorskip("zstandard", reason=".zst needs zstandard")


def pack_zst(data, frame_bytes=50):
    frames = [data[start : start + frame_bytes] for start in range(0, len(data), frame_bytes)] or [b""]
    return b"".join(zstandard.compress(frame) for frame in frames)


PACKERS: dict = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": pack_zst}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet="ab\r é", max_size=12).map(str.encode), max_size=12),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from(list(PACKERS)),
)
def test_batches_are_the_lines_and_any_batch_can_be_the_last(tmp_path_factory, lines, ends_with_newline, batch_bytes, suffix):
    folder = tmp_path_factory.mktemp("lines")
    data = b"\n".join(lines) + (b"\n" if ends_with_newline and lines else b"")
    files = [str(folder / f"{name}.{suffix}") for name in ("a", "b")]
    for path in files:
        with open(path, "wb") as file:
            file.write(PACKERS[suffix](data))
    batches = list(read_batches(files, batch_bytes=batch_bytes))
    for path in files:
        assert b"".join(batch.text for batch in batches if batch.path == path) == data
    for batch in batches:
        assert batch.text.endswith(b"\n") or batch.after.offset == len(data)
        assert batch.first_line == batch.after.lines - batch.text.count(b"\n") - (not batch.text.endswith(b"\n")) + 1
        assert data[: batch.after.offset].endswith(batch.text)
    for number, batch in enumerate(batches):
        rest = list(read_batches(files, batch.after, batch_bytes))
        assert b"".join(other.text for other in rest) == b"".join(other.text for other in batches[number + 1 :])
        if rest and rest[0].path == batch.path:
            assert rest[0].first_line == batch.after.lines + 1


def test_a_line_longer_than_a_batch_stays_whole(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 100 + b"\n" + b"y\n" * 20)
    first, *_ = read_batches([str(tmp_path / "a.jsonl")], batch_bytes=10)
    assert first.text.startswith(b"x" * 100 + b"\n") and len(first.text) <= 111


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "cut at the start", "other bytes", "not packed"])
def test_a_damaged_archive_is_named_not_taken_for_a_short_one(tmp_path, suffix, damage):
    packed = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[suffix](b'{"text": "1"}\n' * 5000)
    broken = {
        "cut": packed[:-3],
        "cut at the start": packed[:7],
        "other bytes": packed[:-8] + b"\xff" * 8,
        "not packed": b'{"text": "1"}\n',
    }[damage]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(broken)
    with pytest.raises(InputError, match=rf"a\.{suffix}:\d+: cannot be read on from about here"):
        list(read_batches([str(path)]))


def test_a_zst_frame_that_unpacks_to_much_is_read_in_pieces(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b"\n" * (40 << 20)))
    assert max(len(batch.text) for batch in read_batches([str(path)])) <= text_input.BATCH_BYTES


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_input, "LONGEST_LINE", 1000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n' + b"[" * 5000)
    with pytest.raises(InputError, match=r"a\.jsonl:2: .* a line of more than 0 MiB"):
        list(read_batches([str(tmp_path / "a.jsonl")], batch_bytes=10))


def test_a_file_that_became_shorter_cannot_be_gone_on_with(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"1\n2\n"))
    with pytest.raises(InputError, match="shorter than it was"):
        list(read_batches([str(path)], Position(0, 100, 50)))


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1\n2\n")))
    assert [(batch.path, batch.text) for batch in read_batches(["-"])] == [("-", b"1\n2\n")]


def test_patterns_are_sorted_and_the_order_of_arguments_is_kept(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.jsonl", "c.json.gz", "d.ndjson.zst", "odd [1].jsonl"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert find_files(["d.*", "[ab].jsonl", "-", "c.json.gz", "odd [1].jsonl"]) == [
        "d.ndjson.zst",
        "a.jsonl",
        "b.jsonl",
        "-",
        "c.json.gz",
        "odd [1].jsonl",
    ]


@pytest.mark.parametrize(
    "patterns, message",
    [
        (["none*.jsonl"], r"--input none\*.jsonl: no such file"),
        (["a.parquet"], r"--input a.parquet: must be JSON lines, named .jsonl"),
        (["a.gz"], "must be JSON lines"),
        (["folder"], r"--input folder: is a folder; give a pattern"),
        (["-", "-"], "standard input can be read only once"),
    ],
)
def test_unusable_input_is_refused(tmp_path, monkeypatch, patterns, message):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    for name in ("a.parquet", "a.gz"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=message):
        find_files(patterns)
