"""Is a pair whole, the one that was written, and made for this vocabulary? Reads everything once, in constant memory."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path, index_size
from megatron.core.datasets.preparation.interruption import check_stopped
from megatron.core.datasets.preparation.pair_metadata import PairMetadata, get_meta_path, read_metadata
from megatron.core.datasets.preparation.safe_files import CHUNK_BYTES, read_chunks, sha256_of

CHUNK = 1 << 20  # numbers


@dataclass
class Report:
    """What was found: lines that say what holds, and problems, each naming a file."""

    facts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Expected:
    """What the ids must fit. `source` says who demands `vocab_size` and `fingerprint`; None: not checked."""

    source: str = ""
    vocab_size: int | None = None
    fingerprint: str | None = None


def verify(prefix: str, expected: Expected, multimodal: bool = False) -> Report:
    """Check structure, checksums and ids of a pair."""
    report = Report()
    try:
        dataset = IndexedDataset(prefix, multimodal=multimodal)
        metadata = read_metadata(prefix)
    except ValueError as error:
        report.problems.append(str(error))
        return report
    _check_structure(dataset, report)
    lowest, highest, digest = _read_ids(prefix, dataset)
    _check_ids(prefix, dataset, lowest, highest, metadata, expected, report)
    if metadata is None:
        report.facts.append(f"no {get_meta_path(prefix)}: checksums and tokenizer are not checked")
    else:
        _check_metadata(prefix, dataset, metadata, digest, expected, report)
    return report


def _check_structure(dataset: IndexedDataset, report: Report) -> None:
    path, index = get_idx_path(dataset.path_prefix), dataset.index
    problems = len(report.problems)
    size = index_size(len(index), len(index.document_indices), index.sequence_modes is not None)
    if os.path.getsize(path) > size:
        report.problems.append(f"{path}: {os.path.getsize(path) - size} bytes behind the end of its content")
    end = 0
    for start in range(0, len(index), CHUNK):
        lengths = np.asarray(index.sequence_lengths[start : start + CHUNK], dtype=np.int64)
        pointers = np.asarray(index.sequence_pointers[start : start + CHUNK])
        wanted = np.cumsum(lengths) * index.dtype.itemsize + end - lengths * index.dtype.itemsize
        wrong = (pointers != wanted) | (lengths < 0)
        if wrong.any():
            first = int(np.argmax(wrong))
            given = f"{lengths[first]} tokens at byte {pointers[first]}, the sequences before it end at {wanted[first]}"
            report.problems.append(f"{path}: sequence {start + first} has {given}")
            break
        end = int(pointers[-1]) + int(lengths[-1]) * index.dtype.itemsize
    for start in range(0, len(index.document_indices) - 1, CHUNK):
        falls = np.diff(index.document_indices[start : start + CHUNK + 1]) < 0
        if falls.any():
            report.problems.append(f"{path}: document {start + int(np.argmax(falls))} ends before it begins")
            break
    if len(report.problems) == problems:
        report.facts.append(f"structure: {len(index.document_indices) - 1} documents, {len(index)} sequences of {index.dtype} ids")


def _read_ids(prefix: str, dataset: IndexedDataset) -> tuple[int, int, str]:
    """The lowest and the highest id (0 and -1 where there is none), and the checksum of the .bin file."""
    lowest, highest, digest = np.iinfo(np.int64).max, -1, hashlib.sha256()
    for chunk in _chunks(prefix, dataset):
        digest.update(chunk)
        ids = np.frombuffer(chunk, dtype=dataset.dtype)
        lowest, highest = min(lowest, int(ids.min())), max(highest, int(ids.max()))
        check_stopped()
    return (0 if highest < lowest else lowest), highest, digest.hexdigest()


def _chunks(prefix: str, dataset: IndexedDataset) -> Iterator[bytes]:
    assert CHUNK_BYTES % 8 == 0  # so that no id is cut
    return read_chunks(get_bin_path(prefix), dataset.index.bin_size)


def _check_ids(
    prefix: str, dataset: IndexedDataset, lowest: int, highest: int, metadata: PairMetadata | None, expected: Expected, report: Report
) -> None:
    limits = [(expected.vocab_size, expected.source)] if expected.vocab_size is not None else []
    if metadata is not None and "vocab_size" in metadata.tokenizer:
        limits.append((int(metadata.tokenizer["vocab_size"]), get_meta_path(prefix)))
    if highest < 0:
        report.facts.append("ids: none, the pair is empty")
        return
    good = True
    for vocab_size, source in limits:
        if highest >= vocab_size or lowest < 0:
            good = False
            where = _find_beyond(dataset, vocab_size)
            rule = f"the vocabulary of {vocab_size} ({source}) ends at {vocab_size - 1}"
            report.problems.append(f"{get_bin_path(prefix)}: ids {lowest} to {highest}, {rule}; {where}")
    if good:
        within = f", within the vocabulary of {min(size for size, _ in limits)}" if limits else ""
        report.facts.append(f"ids: {lowest} to {highest}{within}")


def _find_beyond(dataset: IndexedDataset, vocab_size: int) -> str:
    for number in range(len(dataset)):
        ids = dataset.get(number)
        ids = ids[0] if isinstance(ids, tuple) else ids
        wrong = (ids >= vocab_size) | (ids < 0)
        if wrong.any():
            document = int(np.searchsorted(dataset.document_indices, number, side="right")) - 1
            return f"the first is {ids[np.argmax(wrong)]} in document {document}"
    return "no sequence holds them"


def _check_metadata(prefix: str, dataset: IndexedDataset, metadata: PairMetadata, digest: str, expected: Expected, report: Report) -> None:
    meta, problems = get_meta_path(prefix), len(report.problems)
    for path, record, found in (
        (get_bin_path(prefix), metadata.bin, digest),
        (get_idx_path(prefix), metadata.idx, sha256_of(get_idx_path(prefix))),
    ):
        if record["sha256"] != found:
            size = os.path.getsize(path)
            what = "the same number of bytes, but others" if size == record["bytes"] else f"{size} bytes instead of {record['bytes']}"
            report.problems.append(f"{path}: its checksum is not the one in {meta} ({what}): it has changed since it was made")
    counts = {"documents": len(dataset.document_indices) - 1, "sequences": len(dataset)}
    counts["tokens"] = dataset.index.bin_size // dataset.dtype.itemsize
    for name, number in counts.items():
        if metadata.counts.get(name) != number:
            report.problems.append(f"{meta}: says {metadata.counts.get(name)} {name}, the pair has {number}")
    if metadata.dtype != str(dataset.dtype):
        report.problems.append(f"{meta}: says {metadata.dtype} ids, the pair has {dataset.dtype}")
    if len(report.problems) == problems:
        report.facts.append(f"checksums: both files are those that {meta} describes")
    if expected.fingerprint is not None:
        if metadata.tokenizer.get("fingerprint") == expected.fingerprint:
            report.facts.append(f"tokenizer: the one that made the ids ({metadata.tokenizer.get('type')})")
        else:
            made = f"{metadata.tokenizer.get('type')}, fingerprint {str(metadata.tokenizer.get('fingerprint'))[:12]}"
            report.problems.append(
                f"{prefix}: made by {made}; {expected.source} has fingerprint {expected.fingerprint[:12]}: another tokenizer"
            )
