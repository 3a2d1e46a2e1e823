"""The .bin/.idx format: a stored pair, round trips, and files that are not what they should be."""

import pickle
import struct

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import (
    DatasetFileError,
    IndexedDataset,
    IndexedDatasetBuilder,
    optimal_dtype,
    sequence_pointers,
)

# two documents, [1, 2, 3] and [4, 65499], uint16
STORED_BIN = bytes.fromhex("0100 0200 0300 0400 dbff")
STORED_IDX = bytes.fromhex(
    "4d4d49444944580000"  # magic
    "0100000000000000"  # version
    "08"  # uint16
    "0200000000000000 0300000000000000"  # sequences, document boundaries
    "03000000 02000000"  # lengths
    "0000000000000000 0600000000000000"  # byte offsets
    "0000000000000000 0100000000000000 0200000000000000"  # boundaries
)


@pytest.fixture
def prefix(tmp_path):
    (tmp_path / "pair.bin").write_bytes(STORED_BIN)
    (tmp_path / "pair.idx").write_bytes(STORED_IDX)
    return str(tmp_path / "pair")


def write(prefix, documents, dtype=np.int32, **kwargs):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **kwargs)
    for document in documents:
        builder.add_document(np.array([token for sequence in document for token in sequence]), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("mmap", [True, False])
def test_stored_pair_is_read(prefix, mmap):
    dataset = IndexedDataset(prefix, mmap=mmap)
    assert len(dataset) == 2 and dataset.dtype == np.uint16
    assert dataset[0].tolist() == [1, 2, 3] and dataset[-1].tolist() == [4, 65499]
    assert [sequence.tolist() for sequence in dataset[0:2]] == [[1, 2, 3], [4, 65499]]
    assert dataset.get(0, 1).tolist() == [2, 3] and dataset.get(0, 1, 1).tolist() == [2] and dataset.get(1, 2).tolist() == []
    assert dataset.sequence_lengths.tolist() == [3, 2] and dataset.document_indices.tolist() == [0, 1, 2]
    assert IndexedDataset.exists(prefix) and not IndexedDataset.exists(prefix + "x")
    assert pickle.loads(pickle.dumps(dataset))[1].tolist() == [4, 65499]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(IndexError):
        dataset.get(0, 2, 2)


def test_the_writer_gives_the_stored_bytes(tmp_path, prefix):
    write(tmp_path / "new", [[[1, 2, 3]], [[4, 65499]]], dtype=np.uint16)
    assert (tmp_path / "new.bin").read_bytes() == STORED_BIN
    assert (tmp_path / "new.idx").read_bytes() == STORED_IDX


def test_batches_give_the_same_bytes_as_documents(tmp_path):
    documents = [[[1, 2], [3]], [], [[4]]]
    write(tmp_path / "one", documents)
    builder = IndexedDatasetBuilder(str(tmp_path / "many.bin"))
    builder.add_documents(np.array([1, 2, 3, 4]), [2, 1, 1], [2, 0, 1])
    builder.finalize(str(tmp_path / "many.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"many{suffix}").read_bytes()
    assert IndexedDataset(str(tmp_path / "one")).document_indices.tolist() == [0, 2, 2, 3]


def test_items_and_modes(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), multimodal=True)
    builder.add_item([5, 6])
    builder.add_item([7], mode=1)
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(str(tmp_path / "m"), multimodal=True)
    tokens, mode = dataset[1]
    assert tokens.tolist() == [7] and mode == 1 and len(dataset.document_indices) == 2


@pytest.mark.parametrize("vocab_size", [255, 65499, 65500, 65535, 65536, 65537, 200000])
def test_the_largest_id_comes_back(tmp_path, vocab_size):
    write(tmp_path / "v", [[[vocab_size - 1]]], dtype=optimal_dtype(vocab_size))
    dataset = IndexedDataset(str(tmp_path / "v"))
    assert dataset[0].tolist() == [vocab_size - 1]
    assert (dataset.dtype == np.uint16) == (vocab_size < 65500)


def test_an_id_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="65536 do not fit uint16"), IndexedDatasetBuilder(str(tmp_path / "w.bin"), np.uint16) as builder:
        builder.add_item(np.array([1, 65536]))
    assert list(tmp_path.iterdir()) == []


def test_merge(tmp_path):
    write(tmp_path / "a", [[[1]], [[2, 3], [4]], []])
    write(tmp_path / "empty", [])
    write(tmp_path / "b", [[[5]], [[6]]])
    write(tmp_path / "short", [[[1]]], dtype=np.uint16)
    builder = IndexedDatasetBuilder(str(tmp_path / "all.bin"))
    for name in ("a", "empty", "b"):
        builder.add_index(str(tmp_path / name))
    with pytest.raises(ValueError, match="short holds uint16"):
        builder.add_index(str(tmp_path / "short"))
    builder.finalize(str(tmp_path / "all.idx"))
    merged = IndexedDataset(str(tmp_path / "all"))
    assert merged.document_indices.tolist() == [0, 1, 3, 3, 4, 5]
    assert [sequence.tolist() for sequence in merged[:]] == [[1], [2, 3], [4], [5], [6]]


def test_nothing_under_the_final_names_before_the_end(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"))
    builder.add_document([1, 2], [2])
    assert not (tmp_path / "x.bin").exists()
    builder.abort()
    assert list(tmp_path.iterdir()) == []


def test_pointers_do_not_overflow():
    assert sequence_pointers(np.array([700_000_000] * 3, dtype=np.int32), 4).tolist() == [0, 2_800_000_000, 5_600_000_000]


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda bin_, idx: (bin_, b"hello, I am text\n" * 9), r"pair\.idx: bad magic"),
        (lambda bin_, idx: (bin_, b""), r"pair\.idx: bad magic"),
        (lambda bin_, idx: (bin_, idx[:20]), r"pair\.idx: truncated at byte 20, inside the header"),
        (lambda bin_, idx: (bin_, idx[:-1]), rf"pair\.idx: truncated at byte {len(STORED_IDX) - 1}"),
        (lambda bin_, idx: (bin_, idx[:9] + struct.pack("<Q", 2) + idx[17:]), r"pair\.idx: version 2"),
        (lambda bin_, idx: (bin_, idx[:17] + b"\x09" + idx[18:]), r"pair\.idx: dtype code 9"),
        (lambda bin_, idx: (bin_, idx[:-8] + struct.pack("<Q", 1)), r"pair\.idx: the document boundaries begin and end with \[0, 1\]"),
        (lambda bin_, idx: (bin_[:-3], idx), r"pair\.bin: 3 bytes shorter than its index says"),
        (lambda bin_, idx: (bin_ + b"12", idx), r"pair\.bin: 2 bytes longer than its index says"),
    ],
)
def test_damaged_files_are_named(prefix, tmp_path, damage, message):
    bin_bytes, idx_bytes = damage(STORED_BIN, STORED_IDX)
    (tmp_path / "pair.bin").write_bytes(bin_bytes)
    (tmp_path / "pair.idx").write_bytes(idx_bytes)
    with pytest.raises(DatasetFileError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("pointer", [-2, 1 << 40])
def test_a_sequence_outside_of_the_file_is_refused(prefix, tmp_path, pointer, mmap):
    """A slice of a map would only come out shorter, and training pads what is short."""
    count = struct.unpack_from("<Q", STORED_IDX, 18)[0]
    at = 34 + 4 * count
    (tmp_path / "pair.idx").write_bytes(STORED_IDX[:at] + struct.pack("<q", pointer) + STORED_IDX[at + 8 :])
    dataset = IndexedDataset(prefix, mmap=mmap)
    with pytest.raises(DatasetFileError, match=r"pair\.idx: is damaged: it has a sequence of tokens"):
        dataset.get(0)
    with pytest.raises(DatasetFileError, match=r"pair\.idx: sequence 0 has .* the file is damaged"):
        dataset.check_structure()


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_files_are_named(prefix, tmp_path, suffix):
    (tmp_path / f"pair{suffix}").unlink()
    with pytest.raises(DatasetFileError, match=rf"pair\{suffix}: no such file"):
        IndexedDataset(prefix)
