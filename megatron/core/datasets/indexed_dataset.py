"""Pairs of files that hold token sequences: `<prefix>.bin` (raw ids) and `<prefix>.idx` (where each sequence lies).

The .idx file, little endian, without padding:

    offset  size  content
    0       9     magic bytes "MMIDIDX" and two NULs
    9       8     u64  version, 1
    17      1     u8   dtype code: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16
    18      8     u64  S, number of sequences
    26      8     u64  D, number of document boundaries (documents + 1)
    34      4 S   int32 sequence lengths in tokens
    ..      8 S   int64 byte offsets of the sequences in the .bin
    ..      8 D   int64 document boundaries, as sequence numbers; the first is 0, the last is S
    ..      S     int8 mode of each sequence; multimodal pairs only

The .bin file holds the ids of all sequences back to back, without a header. Torch-free.
"""

import os
import shutil
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
UINT16_VOCABULARY = 65500


class DatasetFileError(ValueError):
    """A .bin/.idx file that is missing, damaged, or not what its partner says. The message names the file."""


def get_bin_path(path_prefix: str) -> str:
    return f"{path_prefix}.bin"


def get_idx_path(path_prefix: str) -> str:
    return f"{path_prefix}.idx"


def optimal_dtype(vocab_size: int | None) -> type[np.number]:
    """The dtype that a pair is written in: uint16 when the vocabulary is known and below 65,500, else int32."""
    return np.uint16 if vocab_size is not None and vocab_size < UINT16_VOCABULARY else np.int32


def sequence_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Byte offsets (int64 [S]) of sequences of `lengths` tokens that lie back to back."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


def index_size(sequences: int, boundaries: int, multimodal: bool) -> int:
    """Bytes of an .idx: the header; of each sequence its length and its place, and with `multimodal` its mode; each document's boundary."""
    return HEADER.size + 12 * sequences + 8 * boundaries + (sequences if multimodal else 0)


def write_index(
    write: Callable[[Any], Any],
    dtype: Any,
    sequences: int,
    documents: int,
    lengths: Callable[[], Iterable[np.ndarray]],
    boundaries: Iterable[np.ndarray],
    modes: Iterable[np.ndarray] = (),
) -> None:
    """Write a .idx file piece by piece, in constant memory.

    lengths     called twice: chunks of the `sequences` lengths, in tokens
    boundaries  chunks of document_indices[1:], `documents` numbers
    modes       chunks of the modes of a multimodal pair
    """
    itemsize = np.dtype(dtype).itemsize
    write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype(dtype)], sequences, documents + 1))
    for chunk in lengths():
        write(chunk.astype("<i4", copy=False).data)
    offset, seen = 0, 0
    for chunk in lengths():
        if len(chunk):
            pointers = sequence_pointers(chunk, itemsize) + offset
            write(pointers.astype("<i8", copy=False).data)
            offset = int(pointers[-1]) + int(chunk[-1]) * itemsize
            seen += len(chunk)
    assert seen == sequences
    write(np.zeros(1, dtype="<i8").data)
    last = 0
    for chunk in boundaries:
        write(chunk.astype("<i8", copy=False).data)
        last, documents = int(chunk[-1]) if len(chunk) else last, documents - len(chunk)
    assert documents == 0 and last == sequences
    for chunk in modes:
        write(chunk.astype("<i1", copy=False).data)


class IndexFile:
    """A .idx file, mapped into memory and checked against its own header.

    dtype            numpy dtype of the ids
    sequence_lengths int32 [S], sequence_pointers int64 [S] in bytes, document_indices int64 [D], sequence_modes int8 [S] or None
    """

    def __init__(self, path: str, multimodal: bool = False) -> None:
        if not os.path.isfile(path):
            raise DatasetFileError(f"{path}: no such file; give --data-path the common prefix of a .bin/.idx pair, without the suffix")
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
            raise DatasetFileError(f"{path}: bad magic {header[:9]!r}, the index of a token dataset starts with {MAGIC!r}")
        if len(header) < HEADER.size:
            raise DatasetFileError(f"{path}: truncated at byte {size}, inside the header of {HEADER.size} bytes")
        _, version, code, sequences, boundaries = HEADER.unpack(header)
        if version != VERSION:
            raise DatasetFileError(f"{path}: version {version}, only version {VERSION} is known")
        if code not in DTYPES:
            raise DatasetFileError(f"{path}: dtype code {code}, the known codes are 1 to {max(DTYPES)}")
        expected = index_size(sequences, boundaries, multimodal)
        if size < expected:
            content = f"{sequences} sequences and {boundaries} document boundaries"
            raise DatasetFileError(f"{path}: truncated at byte {size}, {content} take {expected}")
        self.path = path
        self.dtype = np.dtype(DTYPES[code])
        self._map = np.memmap(path, dtype=np.uint8, mode="r")
        self._offset = HEADER.size
        self.sequence_lengths = self._take("<i4", sequences)
        self.sequence_pointers = self._take("<i8", sequences)
        self.document_indices = self._take("<i8", boundaries)
        self.sequence_modes = self._take("<i1", sequences) if multimodal else None
        if boundaries == 0 or self.document_indices[0] != 0 or self.document_indices[-1] != sequences:
            ends = [int(self.document_indices[0]), int(self.document_indices[-1])] if boundaries else []
            raise DatasetFileError(f"{path}: the document boundaries begin and end with {ends}, it must be 0 and {sequences}")

    def _take(self, dtype: str, count: int) -> np.ndarray:
        start, self._offset = self._offset, self._offset + count * np.dtype(dtype).itemsize
        return np.asarray(self._map[start : self._offset]).view(dtype)

    @property
    def bin_size(self) -> int:
        """The size that the .bin file must have, in bytes."""
        if not len(self.sequence_lengths):
            return 0
        return int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.sequence_lengths)


class IndexedDataset:
    """Read access to a `<path_prefix>.bin` / `.idx` pair: a sequence of numpy arrays of token ids.

    mmap        map the .bin file (default), or read from it with plain file reads (`--no-mmap-bin-files`)
    multimodal  the pair stores a mode per sequence: items are (ids, mode)

    `ds[i]` is the whole sequence i, `ds[a:b]` a list of sequences, `ds.get(i, offset, length)` a part of one. With mmap the arrays
    are views into the file. Raises DatasetFileError (a ValueError) for a missing or damaged pair.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        self.path_prefix = path_prefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.index = IndexFile(get_idx_path(path_prefix), multimodal)
        self._itemsize = self.index.dtype.itemsize
        self._check_bin()
        self._bin: np.ndarray | None = None
        self._file: Any = None
        self._file_owner = -1
        if mmap and self.index.bin_size:
            self._bin = np.memmap(get_bin_path(path_prefix), dtype=self.index.dtype, mode="r").view(np.ndarray)

    def _check_bin(self) -> None:
        path, expected = get_bin_path(self.path_prefix), self.index.bin_size
        if not os.path.isfile(path):
            raise DatasetFileError(f"{path}: no such file, but its index {self.index.path} is there")
        size = os.path.getsize(path)
        if size != expected:
            difference = f"{expected - size} bytes shorter" if size < expected else f"{size - expected} bytes longer"
            reason = f"{'truncated, or ' if size < expected else ''}not the partner of {self.index.path}"
            raise DatasetFileError(f"{path}: {difference} than its index says ({size} instead of {expected}): {reason}")

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of the pair are there."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(get_bin_path(path_prefix))

    @property
    def dtype(self) -> np.dtype:
        return self.index.dtype

    @property
    def sequence_lengths(self) -> np.ndarray:
        """int32 [sequences], in tokens."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> np.ndarray:
        """int64 [documents + 1]: document d holds the sequences document_indices[d] to document_indices[d + 1] - 1."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> np.ndarray | None:
        return self.index.sequence_modes

    def __len__(self) -> int:
        return len(self.index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` ids (default: all that are left) of sequence `idx`, beginning at its token `offset`."""
        total = int(self.index.sequence_lengths[idx])
        count = total - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > total:
            raise IndexError(f"{self.path_prefix}: tokens {offset} to {offset + count} of sequence {idx}, which has {total}")
        tokens = self._read(int(self.index.sequence_pointers[idx]) // self._itemsize + offset, count)
        return (tokens, self.index.sequence_modes[idx]) if self.index.sequence_modes is not None else tokens

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):
            return [self.get(i) for i in range(*idx.indices(len(self)))]
        if not -len(self) <= idx < len(self):
            raise IndexError(f"{self.path_prefix}: sequence {idx} of {len(self)}")
        return self.get(idx % len(self))

    def _read(self, position: int, count: int) -> np.ndarray:
        if self._bin is not None:
            return self._bin[position : position + count]
        if self._file_owner != os.getpid():  # a forked worker must not share the file's position with its parent
            self._file = open(get_bin_path(self.path_prefix), "rb", buffering=0)  # noqa: SIM115 (kept open)
            self._file_owner = os.getpid()
        self._file.seek(position * self._itemsize)
        data = self._file.read(count * self._itemsize) if count else b""
        if len(data) != count * self._itemsize:
            end = position * self._itemsize + len(data)
            raise DatasetFileError(f"{get_bin_path(self.path_prefix)}: ends at byte {end}, it was truncated after it was opened")
        return np.frombuffer(data, dtype=self.index.dtype)

    def __reduce__(self) -> tuple:
        return IndexedDataset, (self.path_prefix, self.multimodal, self.mmap)


class IndexedDatasetBuilder:
    """Writes a pair. Everything goes to temporary names; `finalize` renames them, so a final name is always a whole file.

    bin_path  the final name of the .bin file
    dtype     of the ids; an id that does not fit raises ValueError

    A `with` block removes the temporary files when it is left by an exception. Holds 4 bytes a sequence and 8 a document in memory.
    """

    def __init__(self, bin_path: str, dtype: Any = np.int32, multimodal: bool = False) -> None:
        if np.dtype(dtype) not in CODES:
            raise ValueError(f"dtype {np.dtype(dtype)} has no code in the format; use one of {', '.join(str(d) for d in CODES)}")
        self.bin_path = bin_path
        self.dtype = np.dtype(dtype)
        self.multimodal = multimodal
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._modes = array("b")
        self._temporary_bin = f"{bin_path}.{os.getpid()}.tmp"
        self._file = open(self._temporary_bin, "wb")  # noqa: SIM115 (open until finalize or abort)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.abort()

    def _write(self, tokens: Any) -> int:
        values = np.asarray(tokens)
        if values.dtype != self.dtype:
            if values.size and self.dtype.kind in "iu":
                low, high = values.min(), values.max()
                limits = np.iinfo(self.dtype)
                if low < limits.min or high > limits.max:
                    raise ValueError(f"{self.bin_path}: ids {low} to {high} do not fit {self.dtype} ({limits.min} to {limits.max})")
            values = values.astype(self.dtype)
        self._file.write(np.ascontiguousarray(values).data)
        return values.size

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence (a 1-D tensor, array or list of ids) to the open document."""
        self._lengths.append(self._write(tensor))
        if self.multimodal:
            self._modes.append(mode)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document: its ids back to back, and the length of each of its sequences. Closes the document."""
        written = self._write(tensor)
        if written != sum(lengths):
            raise ValueError(f"{self.bin_path}: a document of {written} ids cannot have sequences of {list(lengths)} tokens")
        self._lengths.extend(lengths)
        if self.multimodal:
            self._modes.extend(modes if modes is not None else [0] * len(lengths))
        self.end_document()

    def add_documents(self, tokens: np.ndarray, lengths: Iterable[int], sequences: Iterable[int]) -> None:
        """Append many documents at once: ids back to back, the length of each sequence, the number of sequences of each document."""
        assert not self.multimodal
        before = len(self._lengths)
        written = self._write(tokens)
        self._lengths.extend(lengths)
        assert written == sum(self._lengths[before:])
        for count in sequences:
            before += count
            self._boundaries.append(before)
        assert before == len(self._lengths)

    def end_document(self) -> None:
        self._boundaries.append(len(self._lengths))

    def add_index(self, path_prefix: str) -> None:
        """Append all documents of another pair, which must have the same dtype."""
        other = IndexedDataset(path_prefix, multimodal=self.multimodal)
        if other.dtype != self.dtype:
            rule = f"cannot be merged into {self.bin_path} of {self.dtype}: prepare both with the same tokenizer"
            raise ValueError(f"{path_prefix} holds {other.dtype} ids and {rule}")
        offset = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.intc).tobytes())
        self._boundaries.frombytes((other.document_indices[1:] + offset).astype(np.int64).tobytes())
        if other.sequence_modes is not None:
            self._modes.frombytes(other.sequence_modes.tobytes())
        with open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, self._file, 16 << 20)

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their final names."""
        self._file.close()
        temporary_idx = f"{idx_path}.{os.getpid()}.tmp"
        try:
            with open(temporary_idx, "wb") as file:
                lengths = np.frombuffer(self._lengths, dtype=np.intc)
                boundaries = np.frombuffer(self._boundaries, dtype=np.int64)[1:]
                modes = np.frombuffer(self._modes, dtype=np.int8)
                write_index(file.write, self.dtype, len(lengths), len(boundaries), lambda: [lengths], [boundaries], [modes])
            Path(idx_path).unlink(missing_ok=True)  # an old index must never stand beside the new .bin
            os.replace(self._temporary_bin, self.bin_path)
            os.replace(temporary_idx, idx_path)
        except BaseException:
            Path(temporary_idx).unlink(missing_ok=True)
            self.abort()
            raise

    def abort(self) -> None:
        """Throw away what was written."""
        self._file.close()
        Path(self._temporary_bin).unlink(missing_ok=True)
