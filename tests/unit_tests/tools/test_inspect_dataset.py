"""tools/inspect_dataset.py in this process: what it says about whole and damaged pairs, documents and training samples."""

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.preparation.statistics import Histogram, document_lengths
from tests.unit_tests.datasets.preparation.jobs import run as prepare

TOOL = Path(__file__).resolve().parents[3] / "tools" / "inspect_dataset.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]  # 257 ends a document


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))["main"]


@pytest.fixture
def inspect(tool, monkeypatch, capsys):
    """Runs the tool; (exit code, what it printed)."""
    from megatron.core.datasets.preparation import interruption

    monkeypatch.setattr(interruption.signal, "signal", lambda *_: None)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["inspect_dataset.py", *map(str, arguments)])
        code = tool()
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.fixture
def prefix(tmp_path):
    lines = "".join(f'{{"text": "{"ab" * i}"}}\n' for i in range(20))
    (tmp_path / "in.jsonl").write_text(lines)
    prepare(tmp_path, tmp_path / "in.jsonl")
    return tmp_path / "out_text_document"


def change(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


def test_a_whole_pair_is_good(inspect, prefix):
    code, out = inspect("verify", prefix)
    assert code == 0 and "good" in out and "structure: 20 documents, 19 sequences of uint16 ids" in out
    assert "within the vocabulary of 257" in out and "both files are those that" in out


DAMAGES = {
    "an id": (".bin", 6, b"\x05", "its checksum is not the one in"),
    "an id beyond the vocabulary": (".bin", 2 * 3, b"\xff\xff", "the first is 65535 in document 2"),
    "a length": (".idx", 34 + 4, b"\x07", "sequence 2 has 7 tokens at byte"),
    "an offset": (".idx", 34 + 4 * 19 + 8, b"\x01", "sequence 1 has"),
    "a boundary": (".idx", 34 + 12 * 19 + 8 * 3, b"\x11", "document 3 ends before it begins"),
    "a magic": (".idx", 0, b"X", "bad magic"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_file_named(inspect, prefix, damage):
    suffix, offset, data, message = DAMAGES[damage]
    path = Path(f"{prefix}{suffix}")
    change(path, offset, data)
    code, out = inspect("verify", prefix)
    assert code == 1 and "PROBLEM" in out and (str(path) in out or "document" in message) and message.split(" tokens")[0][:20] in out


def test_bytes_behind_the_end_are_found(inspect, prefix):
    with open(f"{prefix}.idx", "ab") as file:
        file.write(b"123")
    code, out = inspect("verify", prefix)
    assert code == 1 and f"{prefix}.idx: 3 bytes behind the end of its content" in out


def test_another_tokenizer_is_found(inspect, prefix, tmp_path):
    code, out = inspect("verify", prefix, *NULL)
    assert code == 1 and "another tokenizer" in out
    Path(f"{prefix}.meta.json").unlink()
    assert inspect("verify", prefix, *NULL)[0] == 0
    code, out = inspect("verify", prefix, "--vocab-size", "256")
    assert code == 1 and "ids 97 to 256, the vocabulary of 256 (--vocab-size) ends at 255; the first is 256 in document 1" in out


def test_missing_pairs_are_named_and_the_rest_is_checked(inspect, prefix):
    code, out = inspect("verify", "nowhere", prefix)
    assert code == 1 and "nowhere.idx: no such file" in out and f"{prefix}: good" in out


def test_statistics_and_their_picture(inspect, prefix, tmp_path):
    pytest.importorskip("matplotlib", reason="--histogram needs matplotlib")
    code, out = inspect("stats", prefix, "--histogram", tmp_path / "lengths.png")
    assert code == 0 and "documents  20 (1 of no token)" in out and "tokens     399 of uint16" in out and "#" in out
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_histograms_count_every_document_and_token():
    lengths = np.random.default_rng(0).geometric(0.01, 1000) - 1
    histogram = Histogram.of(lengths)
    assert histogram.documents.sum() == 1000 and histogram.tokens.sum() == lengths.sum()
    for low, high, count in zip(histogram.edges[:-1], histogram.edges[1:], histogram.documents):
        assert count == np.count_nonzero((lengths >= low) & (lengths < high))
    assert Histogram.of(np.array([], dtype=np.int64)).documents.sum() == 0 and Histogram.of(np.array([0, 0])).documents.tolist() == [2]


def test_lengths_of_documents_add_their_sequences(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"))
    for lengths in ([], [2, 3], [], [1]):
        builder.add_document(np.ones(sum(lengths)), lengths)
    builder.finalize(str(tmp_path / "a.idx"))
    assert document_lengths(IndexedDataset(str(tmp_path / "a"))).tolist() == [0, 5, 0, 1]


def test_a_document_is_printed_as_ids_and_as_text(inspect, prefix):
    code, out = inspect("document", prefix, 2)
    assert code == 0 and "document 2 of 20, 1 sequences, 5 tokens" in out and "ids 97 98 97 98 256" in out
    code, out = inspect("document", prefix, -1, *NULL)
    assert code == 0 and "document 19 of 20" in out and "text 97 98 97" in out
    code, out = inspect("document", prefix, 20)
    assert code == 1 and "document 20, there are 20, from 0 to 19" in out
    code, out = inspect("document", prefix, 2, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
    assert code == 1 and "ids 97 to 256, the tokenizer knows 0 to 100" in out


def test_a_training_sample_is_the_trainers_own(inspect, prefix):
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.preparation.training_sample import build_split, stretches
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import build_tokenizer

    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=257, null_tokenizer_eod_id=256)
    config = GPTDatasetConfig(
        random_seed=7, sequence_length=16, blend=([str(prefix)], None), split="90,10,0", tokenizer=tokenizer, create_attention_mask=False
    )
    dataset = build_split(config, Split.train, 30)
    documents = IndexedDataset(str(prefix))
    bounds = documents.document_indices
    for number in range(len(dataset)):
        sample = dataset[number]
        text = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
        parts = stretches(dataset, number)
        assert [part.begin for part in parts] + [17] == [0] + [part.end for part in parts]
        for part in parts:
            whole = np.concatenate(documents[int(bounds[part.document]) : int(bounds[part.document + 1])])
            assert text[part.begin : part.end] == whole[part.offset : part.offset + part.end - part.begin].tolist()
    arguments = ["--data-path", prefix, "--seq-length", 16, "--seed", 7, "--split", "90,10,0", "--num-samples", 30, "--eod-mask-loss"]
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--null-tokenizer-eod-id", "256"]
    code, out = inspect("sample", 3, *arguments, *null, "--rows", "0")
    assert code == 0, out
    rows = [line.split() for line in out.splitlines() if line[:6].strip().isdigit()]
    assert [int(row[1]) for row in rows] == dataset[3]["tokens"].tolist() and [int(row[2]) for row in rows] == dataset[3]["labels"].tolist()
    assert [float(row[3]) for row in rows] == [float(int(row[1]) != 256) for row in rows]
    assert inspect("sample", 1, "--rows", "2", *arguments, *null)[1].count("... 14 more positions (--rows 0 prints all)") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--data-path is required"),
        (["--data-path", "{prefix}"], "--seq-length None must be at least 1"),
        (["--data-path", "{prefix}", "--seq-length", "8"], "--tokenizer-type is required"),
        (["--data-path", "{prefix}", "--seq-length", "8", *NULL, "--num-samples", "5", "--split", "1"], "sample 1000: the train split has"),
        (["--data-path", "{prefix}", "--seq-length", "8", *NULL, "--split-name", "test", "--split", "1"], "the test split is empty"),
        (["--data-path", "{prefix}", "--seq-length", "8", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50"], "another tokenizer"),
    ],
)
def test_samples_that_cannot_be_shown(inspect, prefix, arguments, message):
    code, out = inspect("sample", 1000, *(argument.format(prefix=prefix) for argument in arguments))
    assert code == 1 and message in out


def test_only_samples_need_torch(tmp_path, prefix):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    for command in (["verify", prefix], ["stats", prefix], ["document", prefix, 1]):
        arguments = [sys.executable, str(TOOL), *map(str, command)]
        assert subprocess.run(arguments, env={"PYTHONPATH": str(tmp_path)}, check=False, stdout=subprocess.DEVNULL).returncode == 0
