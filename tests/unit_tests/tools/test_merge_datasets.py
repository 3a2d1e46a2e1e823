"""tools/merge_datasets.py as a program: what it merges, what it refuses, and that its result is whole or not there."""

import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.preparation import interruption
from megatron.core.datasets.preparation.pair_metadata import read_metadata
from megatron.core.datasets.preparation.verification import Expected, verify
from tests.unit_tests.datasets.preparation.jobs import ByteTokenizer, run

TOOL = Path(__file__).resolve().parents[3] / "tools" / "merge_datasets.py"


def write(prefix, documents, dtype=np.int32, multimodal=False):
    """Documents as lists of sequences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for number, document in enumerate(documents):
        modes = [number % 2] * len(document) if multimodal else None
        builder.add_document(np.array([token for ids in document for token in ids]), [len(ids) for ids in document], modes)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read(prefix, multimodal=False):
    dataset = IndexedDataset(str(prefix), multimodal=multimodal)
    bounds = dataset.document_indices.tolist()
    sequences = [item[0] if multimodal else item for item in dataset[:]]
    return [[ids.tolist() for ids in sequences[begin:end]] for begin, end in itertools.pairwise(bounds)]


@pytest.fixture
def merge(monkeypatch, capsys):
    """Runs the tool in this process: its exit code and what it said."""
    monkeypatch.setattr(interruption.signal, "signal", lambda *_: None)
    main = runpy.run_path(str(TOOL))["main"]

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["merge_datasets.py", *map(str, arguments)])
        capsys.readouterr()
        try:
            code = main()
        except SystemExit as exit:
            code = exit.code
        return SimpleNamespace(returncode=code, stderr=capsys.readouterr().err)

    return call


@pytest.fixture
def refused(merge, tmp_path):
    """Runs the tool, which must leave everything as it was; what it said."""

    def call(*arguments):
        before = sorted(path.name for path in tmp_path.rglob("*"))
        result = merge(*arguments)
        assert result.returncode == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        return result.stderr

    return call


def prepared(folder, name, texts, **options):
    """A pair with metadata; its prefix."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(folder, folder / f"{name}.jsonl", name=name, **options)
    return folder / f"{name}_text_document"


A = [[[1, 2], [3]], [], [[4, 5, 6]]]
B = [[[7]], [[8, 9], [10]]]


@pytest.mark.parametrize("by_folder", [True, False])
def test_documents_follow_each_other_and_keep_their_boundaries(merge, tmp_path, by_folder):
    (tmp_path / "in").mkdir()
    prefixes = [write(tmp_path / "in" / name, part) for name, part in (("a", A), ("b_empty", []), ("c", B))]
    (tmp_path / "in" / "notes.txt").touch()
    result = merge("--input", *([tmp_path / "in"] if by_folder else prefixes), "--output-prefix", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert read(tmp_path / "out") == A + B and "5 documents, 6 sequences, 10 tokens" in result.stderr
    assert verify(str(tmp_path / "out"), Expected()).problems == []
    whole = write(tmp_path / "whole", A + B)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == Path(whole + suffix).read_bytes()
    assert not (tmp_path / "out.meta.json").exists() and sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


def test_one_pair_and_the_order_given(merge, tmp_path):
    a, b = write(tmp_path / "a", A), write(tmp_path / "b", B)
    assert merge("--input", a, "--output-prefix", tmp_path / "one").returncode == 0
    assert merge("--input", b, a, "--output-prefix", tmp_path / "two").returncode == 0
    assert read(tmp_path / "one") == A and read(tmp_path / "two") == B + A


def test_modes_of_multimodal_pairs(merge, tmp_path):
    a, b = write(tmp_path / "a", A, multimodal=True), write(tmp_path / "b", B, multimodal=True)
    assert merge("--input", a, b, "--output-prefix", tmp_path / "out", "--multimodal").returncode == 0
    modes = IndexedDataset(str(tmp_path / "out"), multimodal=True).sequence_modes
    assert read(tmp_path / "out", multimodal=True) == A + B and modes is not None and modes.tolist() == [0, 0, 0, 0, 1, 1]


def test_metadata_is_merged(merge, tmp_path):
    parts = [prepared(tmp_path, name, texts) for name, texts in (("a", ["x", ""]), ("b", ["yz"]))]
    result = merge("--input", *parts, "--output-prefix", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    metadata = read_metadata(str(tmp_path / "out"))
    assert metadata is not None and metadata.tokenizer["fingerprint"] == ByteTokenizer().fingerprint
    assert metadata.counts == {"documents": 3, "sequences": 2, "tokens": 5, "empty_documents": 1}
    assert metadata.source == {"merged": ["a_text_document", "b_text_document"]} and metadata.flags["append_eod"] is True
    report = verify(str(tmp_path / "out"), Expected("test", None, ByteTokenizer().fingerprint))
    assert report.problems == [] and any("both files are those" in line for line in report.facts)


def test_flags_that_differ_and_metadata_that_lacks_are_said(merge, tmp_path):
    a, b = prepared(tmp_path, "a", ["x"]), prepared(tmp_path, "b", ["y"], eod=False)
    result = merge("--input", a, b, "--output-prefix", tmp_path / "out")
    metadata = read_metadata(str(tmp_path / "out"))
    assert "b_text_document was prepared with append_eod False" in result.stderr
    assert metadata is not None and "append_eod" not in metadata.flags
    Path(f"{b}.meta.json").unlink()
    result = merge("--input", a, b, "--output-prefix", tmp_path / "out")
    assert "b_text_document has no .meta.json" in result.stderr and not (tmp_path / "out.meta.json").exists()


def test_other_types_of_ids_are_refused(refused, tmp_path):
    a, b = write(tmp_path / "a", A), write(tmp_path / "b", B, np.uint16)
    assert "a holds int32 ids, " in refused("--input", a, b, "--output-prefix", tmp_path / "out")


def test_other_tokenizers_are_refused(refused, tmp_path):
    a = prepared(tmp_path, "a", ["x"])
    b = prepared(tmp_path, "b", ["x"], tokenizer=ByteTokenizer(300))
    assert "prepared with different tokenizers" in refused("--input", a, b, "--output-prefix", tmp_path / "out")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_refused(refused, tmp_path, suffix):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a", A)
    (tmp_path / "in" / f"a{suffix}").unlink()
    assert f"a{suffix}: no such file; " in refused("--input", tmp_path / "in", "--output-prefix", tmp_path / "out")


def test_empty_folders_and_wrong_names_are_refused(merge, refused, tmp_path):
    (tmp_path / "in").mkdir()
    assert "there is no .bin/.idx pair" in refused("--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    assert "no.bin: no such file" in refused("--input", tmp_path / "no", "--output-prefix", tmp_path / "out")
    assert merge("--input", tmp_path / "in", "--output-prefix", tmp_path / "no" / "out").returncode == 2


def test_an_output_that_is_an_input_is_refused(refused, tmp_path):
    a = write(tmp_path / "a", A)
    (tmp_path / "link").symlink_to(tmp_path)
    message = "is one of the inputs; write to another name"
    assert message in refused("--input", tmp_path, "--output-prefix", tmp_path / "a")
    assert message in refused("--input", a, "--output-prefix", tmp_path / "link" / "a")
    assert read(a) == A


@pytest.mark.parametrize("damage", ["short", "other bytes", "metadata"])
def test_damaged_parts_are_named_and_nothing_is_written(refused, tmp_path, damage):
    a, b = prepared(tmp_path, "a", ["abc"]), prepared(tmp_path, "b", ["def"])
    path = Path(f"{b}.bin")
    data = path.read_bytes()
    if damage == "metadata":
        Path(f"{b}.meta.json").write_text("{")
    else:
        path.write_bytes(data[:-2] if damage == "short" else b"\1" + data[1:])
    message = refused("--input", a, b, "--output-prefix", tmp_path / "out")
    expected = {
        "short": "b_text_document.bin: 2 bytes shorter",
        "other bytes": "its checksum is not the one in",
        "metadata": "meta.json: not",
    }
    assert expected[damage] in message


def test_a_merge_replaces_the_old_result(merge, tmp_path):
    a, b = prepared(tmp_path, "a", ["x"]), prepared(tmp_path, "b", ["y"])
    for parts in ([a, b], [b]):
        assert merge("--input", *parts, "--output-prefix", tmp_path / "out").returncode == 0
    assert read(tmp_path / "out") == read(b) and verify(str(tmp_path / "out"), Expected()).problems == []


def test_torch_is_never_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    a = write(tmp_path / "a", A)
    command = [sys.executable, str(TOOL), "--input", a, "--output-prefix", str(tmp_path / "out")]
    assert subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, check=False).returncode == 0
