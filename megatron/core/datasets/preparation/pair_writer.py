"""A pair that grows batch by batch in files of its own, in constant memory, and can be gone on with after a kill."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron.core.datasets.indexed_dataset import get_bin_path, get_idx_path, write_index
from megatron.core.datasets.preparation.records import Encoded
from megatron.core.datasets.preparation.safe_files import HashedFile, WriteError

CHUNK = 1 << 20  # numbers
PARTS = ("ids", "lengths", "documents")


class PairWriter:
    """One key's ids (which become the .bin file as they are), sequence lengths and sequences per document (both int32), by file.

    path_prefix  of the files, in a working folder
    dtype        of the ids
    state        what `state()` gave to an earlier run: the files are cut back to it. DamagedFileError if they do not hold it
    """

    def __init__(self, path_prefix: str, dtype: Any, state: dict[str, Any] | None = None) -> None:
        self.path_prefix = path_prefix
        self.dtype = np.dtype(dtype)
        self.empty_documents: int = state["empty_documents"] if state else 0
        paths = (get_bin_path(path_prefix), f"{path_prefix}.lengths", f"{path_prefix}.documents")
        self._files: dict[str, HashedFile] = {}
        for name, path in zip(PARTS, paths):
            self._files[name] = HashedFile(path, state[name]["bytes"], state[name]["sha256"]) if state else HashedFile(path)

    @property
    def counts(self) -> dict[str, int]:
        """Documents, sequences and tokens so far, and how many documents have no token."""
        return {
            "documents": self._files["documents"].size // 4,
            "sequences": self._files["lengths"].size // 4,
            "tokens": self._files["ids"].size // self.dtype.itemsize,
            "empty_documents": self.empty_documents,
        }

    def add(self, encoded: Encoded) -> None:
        """Append a batch. Raises WriteError."""
        assert encoded.tokens.dtype == self.dtype and len(encoded.tokens) == encoded.lengths.sum()
        assert len(encoded.lengths) == encoded.sequences.sum()
        self._files["ids"].write(encoded.tokens)
        self._files["lengths"].write(encoded.lengths.astype("<i4", copy=False))
        self._files["documents"].write(encoded.sequences.astype("<i4", copy=False))
        self.empty_documents += int(np.count_nonzero(encoded.sequences == 0))

    def state(self) -> dict[str, Any]:
        """Put everything on the disk, and say what a later run needs to go on from here."""
        for file in self._files.values():
            file.sync()
        return {**{name: file.record() for name, file in self._files.items()}, "empty_documents": self.empty_documents}

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the index, give the numbers' files up. Bytes and sha256 of the .bin and of the .idx file. Raises WriteError."""
        index = HashedFile(get_idx_path(self.path_prefix))
        lengths, documents = self._files["lengths"].path, self._files["documents"].path
        try:
            counts = self.counts
            write_index(
                index.write, self.dtype, counts["sequences"], counts["documents"], lambda: _numbers(lengths), _boundaries(documents)
            )
            self._files["ids"].sync()
            index.sync()
            return self._files["ids"].record(), index.record()
        finally:
            index.close()
            self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _numbers(path: str) -> Iterator[np.ndarray]:
    with open(path, "rb") as file:
        while data := file.read(4 * CHUNK):
            yield np.frombuffer(data, dtype="<i4")


def _boundaries(path: str) -> Iterator[np.ndarray]:
    """From sequences per document to the number of the sequence behind each document (int64)."""
    total = 0
    for counts in _numbers(path):
        boundaries = np.cumsum(counts, dtype=np.int64) + total
        total = int(boundaries[-1])
        yield boundaries


def publish(path_prefix: str, final_prefix: str, suffixes: tuple[str, ...]) -> None:
    """Give finished files their final names, the index last. May be called again after a kill in between. Raises WriteError."""
    try:
        if not os.path.exists(path_prefix + suffixes[-1]):
            return  # done before
        if os.path.exists(path_prefix + suffixes[0]):
            for suffix in reversed(suffixes):  # an old index must never stand beside the new .bin
                if os.path.exists(final_prefix + suffix):
                    os.unlink(final_prefix + suffix)
        for suffix in suffixes:
            if os.path.exists(path_prefix + suffix):
                os.replace(path_prefix + suffix, final_prefix + suffix)
    except OSError as error:
        raise WriteError(f"{final_prefix}: cannot give the finished files this name: {error.strerror}") from None
