"""Several pairs to one, document after document, in constant memory; refused where they do not fit together."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path, write_index
from megatron.core.datasets.preparation.interruption import check_stopped
from megatron.core.datasets.preparation.pair_metadata import PairMetadata, get_meta_path, read_metadata
from megatron.core.datasets.preparation.pair_writer import publish
from megatron.core.datasets.preparation.safe_files import DamagedFileError, HashedFile, read_chunks
from megatron.core.tokenizers.fingerprint import META_SUFFIX

CHUNK = 1 << 20  # numbers


class MergeError(ValueError):
    """Pairs that cannot be merged. The message names them."""


@dataclass
class Part:
    """One of the pairs that are merged."""

    prefix: str
    dataset: IndexedDataset
    metadata: PairMetadata | None


def find_pairs(inputs: list[str]) -> list[str]:
    """The prefixes that `inputs` name: a folder is all pairs in it, sorted by name; anything else a prefix. Raises MergeError."""
    prefixes: list[str] = []
    for given in inputs:
        if not os.path.isdir(given):
            prefixes.append(given.removesuffix(".idx").removesuffix(".bin"))
            continue
        names = os.listdir(given)
        stems = sorted({name[:-4] for name in names if name.endswith((".bin", ".idx"))})
        if not stems:
            raise MergeError(f"--input {given}: there is no .bin/.idx pair in this folder")
        prefixes += [os.path.join(given, stem) for stem in stems]
    for prefix in prefixes:
        for path, partner in ((get_bin_path(prefix), get_idx_path(prefix)), (get_idx_path(prefix), get_bin_path(prefix))):
            if not os.path.isfile(path):
                there = f"; {partner} is there without it: restore it, or move its partner away" if os.path.isfile(partner) else ""
                raise MergeError(f"--input {path}: no such file{there}")
    return prefixes


def merge(prefixes: list[str], output_prefix: str, multimodal: bool, say: Callable[[str], None]) -> dict[str, int]:
    """Write the pair `output_prefix` of all documents in order; documents, sequences and tokens of it. Raises MergeError, WriteError."""
    parts = [Part(prefix, IndexedDataset(prefix, multimodal=multimodal), read_metadata(prefix)) for prefix in prefixes]
    _check_fit(parts, output_prefix)
    with_metadata = _has_metadata(parts, say)
    folder = Path(f"{output_prefix}.{os.getpid()}.merging")  # not resumable: copying is quick
    folder.mkdir()
    temporary = str(folder / "pair")
    try:
        bin_file = HashedFile(get_bin_path(temporary))
        for part in parts:
            _copy_ids(part, bin_file)
            say(f"{part.prefix}: {len(part.dataset.document_indices) - 1} documents, {len(part.dataset)} sequences")
        bin_file.sync()
        bin_file.close()
        counts, idx_record = _write_index(parts, temporary, bin_file.size)
        suffixes = (".bin", ".idx")
        if with_metadata:
            _merged_metadata(parts, counts, bin_file.record(), idx_record, say).write(get_meta_path(temporary))
            suffixes = (".bin", META_SUFFIX, ".idx")  # type: ignore[assignment]
        else:
            Path(get_meta_path(output_prefix)).unlink(missing_ok=True)  # of a pair that is replaced
        check_stopped()
        publish(temporary, output_prefix, suffixes)
        return counts
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def _check_fit(parts: list[Part], output_prefix: str) -> None:
    first = parts[0]
    for part in parts:
        if os.path.realpath(get_bin_path(part.prefix)) == os.path.realpath(get_bin_path(output_prefix)):
            raise MergeError(f"--output-prefix {output_prefix} is one of the inputs; write to another name, best in another folder")
        if part.dataset.dtype != first.dataset.dtype:
            pair = f"{first.prefix} holds {first.dataset.dtype} ids, {part.prefix} {part.dataset.dtype}"
            raise MergeError(f"{pair}: prepare both with the same tokenizer")
    known = [part for part in parts if part.metadata is not None]
    for part in known[1:]:
        a, b = _tokenizer(known[0]), _tokenizer(part)
        if a["fingerprint"] != b["fingerprint"]:
            pair = (
                f"{known[0].prefix} by {a['type']} {str(a['fingerprint'])[:12]}, {part.prefix} by {b['type']} {str(b['fingerprint'])[:12]}"
            )
            raise MergeError(f"prepared with different tokenizers ({pair}): ids mean different text, prepare both with one")


def _tokenizer(part: Part) -> dict[str, Any]:
    assert part.metadata is not None
    return {"type": "?", "fingerprint": "", **part.metadata.tokenizer}


def _has_metadata(parts: list[Part], say: Callable[[str], None]) -> bool:
    without = [part.prefix for part in parts if part.metadata is None]
    if without and len(without) < len(parts):
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        say(f"warning: {without[0]}{more} has no .meta.json, so the merged pair gets none: one tokenizer may not have made all of it")
    return not without


def _copy_ids(part: Part, output: HashedFile) -> None:
    path = get_bin_path(part.prefix)
    digest = hashlib.sha256()
    for chunk in read_chunks(path, part.dataset.index.bin_size):
        output.write(chunk)
        if part.metadata is not None:
            digest.update(chunk)
        check_stopped()
    if part.metadata is not None and digest.hexdigest() != part.metadata.bin["sha256"]:
        raise DamagedFileError(
            f"{path}: its checksum is not the one in {get_meta_path(part.prefix)}: the file has changed since it was made"
        )


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(array), CHUNK):
        yield array[start : start + CHUNK]


def _write_index(parts: list[Part], temporary: str, bin_bytes: int) -> tuple[dict[str, int], dict[str, Any]]:
    datasets = [part.dataset for part in parts]

    def lengths() -> Iterator[np.ndarray]:
        for dataset in datasets:
            yield from _chunks(dataset.sequence_lengths)

    def boundaries() -> Iterator[np.ndarray]:
        before = 0
        for dataset in datasets:
            for chunk in _chunks(dataset.document_indices[1:]):
                yield chunk + before
            before += len(dataset)

    def modes() -> Iterator[np.ndarray]:
        for dataset in datasets:
            if dataset.sequence_modes is not None:
                yield from _chunks(dataset.sequence_modes)

    dtype = datasets[0].dtype
    counts = {
        "documents": sum(len(dataset.document_indices) - 1 for dataset in datasets),
        "sequences": sum(map(len, datasets)),
        "tokens": bin_bytes // dtype.itemsize,
    }
    index = HashedFile(get_idx_path(temporary))
    try:
        write_index(index.write, dtype, counts["sequences"], counts["documents"], lengths, boundaries(), modes())
        index.sync()
        return counts, index.record()
    finally:
        index.close()


def _merged_metadata(
    parts: list[Part], counts: dict[str, int], bin_record: dict[str, Any], idx_record: dict[str, Any], say: Callable[[str], None]
) -> PairMetadata:
    all_metadata = [part.metadata for part in parts if part.metadata is not None]
    first = all_metadata[0].flags
    differing: set[str] = set()
    for part, metadata in zip(parts, all_metadata):
        for name in sorted((set(first) | set(metadata.flags)) - differing):
            if first.get(name) != metadata.flags.get(name):
                say(f"warning: {part.prefix} was prepared with {name} {metadata.flags.get(name)}, those before it with {first.get(name)}")
                differing.add(name)
    flags = {name: value for name, value in first.items() if name not in differing}
    counts = {**counts, "empty_documents": sum(metadata.counts.get("empty_documents", 0) for metadata in all_metadata)}
    source = {"merged": [os.path.basename(part.prefix) for part in parts]}
    return PairMetadata(str(parts[0].dataset.dtype), counts, all_metadata[0].tokenizer, flags, source, bin_record, idx_record)
