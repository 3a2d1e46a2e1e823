"""From files of JSON lines to batches of whole lines: plain, .gz, .zst, or standard input; from the start or from a position on."""

import glob
import gzip
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from megatron.core.optional_imports import require

STDIN = "-"
SUFFIXES = (".jsonl", ".json", ".ndjson")
COMPRESSIONS = (".gz", ".zst")
BATCH_BYTES = 1 << 19  # several batches a worker even of a small corpus: at the end none waits long for another
LONGEST_LINE = 256 << 20  # a file without line ends must not fill the memory
HEAD_BYTES = 1 << 16
ZSTD_BYTES = 1 << 12  # compressed bytes a step: zstd packs at most 32,768 to 1, so a step gives 128 MiB at the very worst


class InputError(ValueError):
    """Input that cannot be prepared; the message names path:line."""


@dataclass(frozen=True)
class Position:
    """The beginning of a line: number of the file in the list, bytes (uncompressed) and lines of that file before it."""

    file: int = 0
    offset: int = 0
    lines: int = 0


@dataclass(frozen=True)
class Batch:
    """Consecutive whole lines of one file, from line number `first_line` (counted from 1) on."""

    path: str
    first_line: int
    text: bytes
    after: Position  # of the first line behind it
    bytes_read: int  # of all input so far, as it lies on disk


def find_files(patterns: list[str]) -> list[str]:
    """The files that `patterns` name, in this order, those of a pattern sorted. `-` is standard input. Raises InputError."""
    files: list[str] = []
    for pattern in patterns:
        if pattern == STDIN:
            files.append(STDIN)
            continue
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise InputError(f"--input {pattern}: no such file")
        files += found
    for path in files:
        if os.path.isdir(path):
            raise InputError(f"--input {path}: is a folder; give a pattern of files, such as '{os.path.join(path, '*.jsonl')}'")
        if path != STDIN and not _without_compression(path).endswith(SUFFIXES):
            endings = f"{', '.join(SUFFIXES)}, each also with {' or '.join(COMPRESSIONS)}"
            raise InputError(f"--input {path}: must be JSON lines, named {endings}; or - for standard input")
    if files.count(STDIN) > 1:
        raise InputError("--input -: standard input can be read only once")
    return files


def _without_compression(path: str) -> str:
    for suffix in COMPRESSIONS:
        path = path.removesuffix(suffix)
    return path


def is_stream(path: str) -> bool:
    """Whether `path` can be read only once: standard input, a pipe."""
    return path == STDIN or not stat.S_ISREG(os.stat(path).st_mode)


def size_on_disk(path: str) -> int:
    """Bytes of a file; 0 for a stream, whose size nobody knows."""
    return 0 if is_stream(path) else os.path.getsize(path)


@dataclass(frozen=True)
class InputFile:
    """What tells whether an input file is still the one that it was."""

    path: str
    size: int
    mtime_ns: int
    head_sha256: str  # of its first 64 KiB

    @classmethod
    def look_at(cls, path: str) -> "InputFile":
        status = os.stat(path)
        with open(path, "rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
        return cls(os.path.abspath(path), status.st_size, status.st_mtime_ns, head)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_batches(files: list[str], start: Position = Position(), batch_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
    """All lines of all files from `start` on, in order, about `batch_bytes` a batch; never two files in one. Raises InputError."""
    read_before = sum(size_on_disk(path) for path in files[: start.file])
    for number in range(start.file, len(files)):
        path = files[number]
        begin = start if number == start.file else Position(number)
        with ExitStack() as stack:
            raw, stream = _open(path, stack)
            line = begin.lines + 1
            try:
                _skip(raw, stream, begin.offset)
                offset = begin.offset
                for text in _whole_lines(stream, batch_bytes):
                    offset += len(text)
                    lines = text.count(b"\n") + (not text.endswith(b"\n"))
                    after = Position(number, offset, line - 1 + lines)
                    yield Batch(path, line, text, after, read_before + _tell(raw))
                    line += lines
            except _TooLong:
                rule = f"a line of more than {LONGEST_LINE >> 20} MiB: not JSON lines, or one document that must be cut"
                raise InputError(f"{_shown(path)}:{line}: cannot be read on from about here: {rule}") from None
            except (OSError, EOFError, _zstd_error()) as error:
                raise InputError(f"{_shown(path)}:{line}: cannot be read on from about here: {error}") from None
        read_before += size_on_disk(path)


class _TooLong(Exception):
    pass


def _shown(path: str) -> str:
    return "<stdin>" if path == STDIN else path


def _open(path: str, stack: ExitStack) -> tuple[BinaryIO, Any]:
    """The file, and the stream of its uncompressed bytes."""
    if path == STDIN:
        return sys.stdin.buffer, sys.stdin.buffer
    try:
        raw = stack.enter_context(open(path, "rb"))  # noqa: SIM115
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror}") from None
    if path.endswith(".gz"):
        return raw, gzip.GzipFile(fileobj=raw)
    return raw, _ZstdStream(raw, path) if path.endswith(".zst") else raw


def _tell(raw: BinaryIO) -> int:
    return raw.tell() if raw.seekable() else 0


def _skip(raw: BinaryIO, stream: Any, offset: int) -> None:
    if stream is raw and offset:
        raw.seek(offset)
        return
    while offset > 0:  # decompressing is many times faster than tokenizing
        skipped = len(stream.read(min(offset, BATCH_BYTES)))
        if not skipped:
            raise EOFError("the file is shorter than it was")
        offset -= skipped


def _whole_lines(stream: Any, batch_bytes: int) -> Iterator[bytes]:
    """The stream in pieces that end with a line's end (but for the last)."""
    read = getattr(stream, "read1", stream.read)  # a pipe gives what it has, at once
    kept: list[bytes] = []
    held = 0
    while block := read(batch_bytes):
        end = block.rfind(b"\n") + 1
        if end and held + end >= batch_bytes:
            yield b"".join([*kept, block[:end]])
            block = block[end:]
            kept, held = [], 0
        if block:
            kept.append(block)
            held += len(block)
        if held > LONGEST_LINE:
            raise _TooLong
    if held:
        yield b"".join(kept)


def _zstd_error() -> type[Exception]:
    zstandard = sys.modules.get("zstandard")  # not imported: no such error can come
    return EOFError if zstandard is None else zstandard.ZstdError


class _ZstdStream:
    """Reads frames one behind the other. The package's own reader takes a cut file for a whole one; this one raises EOFError."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        self._package = require("zstandard", f"--input {path}")
        self._raw = raw
        self._frame: Any = None
        self._rest = b""  # compressed, behind the end of a frame
        self._ready = b""

    def read(self, size: int) -> bytes:
        parts = [self._ready]
        held = len(self._ready)
        while held < size:
            data = self._rest or self._raw.read(ZSTD_BYTES)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame: it is truncated")
                break
            if self._frame is None:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            parts.append(self._frame.decompress(data))
            held += len(parts[-1])
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        whole = b"".join(parts)
        self._ready = whole[size:]
        return whole[:size]
