"""Checksums of a checkpoint's files, and writes that are on the disk when they return. No torch.

On disk (ours, nothing else reads it): `checksums.json` =
{"algorithm": "crc32", "files": {name: {"bytes": size, "parts": [[start, crc], ...]}}, "own": crc of `files` as text}.
Parts follow each other without a gap, the first from 0, the last to the end, so that a reader of one tensor checks that tensor alone.
An item of three parts is a torch.save whose middle one is the tensor itself, row by row, in this byte order.
Names are relative to the checkpoint's folder, `metadata.json` among them. A checkpoint without it (Megatron-LM's) is read unchecked.
"""

import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DamagedCheckpointError

CHECKSUMS_FILE = "checksums.json"
CHUNK = 4 * 2**20  # bytes read at a time
IN_CACHE = 2**20  # bytes written at a time


@dataclass
class FileSum:
    """Size of a file and (start, CRC-32) of each of its parts."""

    size: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(start, length, CRC-32) of each part."""
        ends = [start for start, _ in self.parts[1:]] + [self.size]
        for (start, crc), end in zip(self.parts, ends):  # a rank may have nothing to write: no parts
            yield start, end - start, crc


class ChecksummedFile:
    """A file open for writing that keeps the checksums of what is written. `sync` before `close` puts it on the disk.

    `failure` is the OSError of a write that failed: torch, in whose hands the file is then, reports another exception.
    """

    def __init__(self, path: Path) -> None:
        self.sum = FileSum()
        self.failure: OSError | None = None
        self._crc = 0
        self._file = open(path, "wb", buffering=2**17)  # noqa: SIM115  (closed by close)

    def begin_part(self) -> int:
        """What follows is a part of its own. Returns where it begins."""
        self._end_part()
        self.sum.parts.append((self.sum.size, 0))
        return self.sum.size

    def _end_part(self) -> None:
        if self.sum.parts:
            self.sum.parts[-1] = (self.sum.parts[-1][0], self._crc)
        self._crc = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._crc = zlib.crc32(view, self._crc)
        try:
            self._put(view)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.sum.size += len(view)
        return len(view)

    def write_data(self, view: memoryview) -> int:
        """Write much at once, as a part of its own. Returns the CRC-32.

        In pieces that are still in the cache when they are written; a thread to add them up would be waited for at every tensor.
        """
        self.begin_part()
        try:
            for start in range(0, len(view), IN_CACHE):
                piece = view[start : start + IN_CACHE]
                self._crc = zlib.crc32(piece, self._crc)
                self._put(piece)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.sum.size += len(view)
        written = self._crc
        self.begin_part()
        return written

    def _put(self, view: memoryview) -> None:
        self._file.write(view)

    def flush(self) -> None:
        """torch calls it after each tensor; nobody reads before `sync`."""

    def sync(self) -> None:
        self._end_part()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Put the names in a folder on the disk: new files and renames survive a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """A new file that is on the disk when this returns (its name is after `sync_folder`)."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(path: Path, text: str, suffix: str) -> None:
    """Give `path` the contents `text`: at every moment, a power cut's too, it has the old ones or the new ones."""
    temporary = path.with_name(path.name + suffix)
    write_synced(temporary, text)
    os.replace(temporary, path)
    sync_folder(path.parent)


def _crc_of(path: Path, start: int = 0, length: int | None = None) -> tuple[int, int]:
    """(bytes read, CRC-32) of a stretch of a file, to its end by default."""
    crc, count = 0, 0
    with open(path, "rb") as file:
        file.seek(start)
        while chunk := file.read(CHUNK if length is None else min(CHUNK, length - count)):
            crc, count = zlib.crc32(chunk, crc), count + len(chunk)
    return count, crc


def sum_of_file(path: Path) -> FileSum:
    """Checksum of a file that somebody else wrote, as one part."""
    size, crc = _crc_of(path)
    return FileSum(size, [(0, crc)])


def sum_of_text(text: str) -> FileSum:
    data = text.encode()
    return FileSum(len(data), [(0, zlib.crc32(data))])


def write_checksums(folder: Path, sums: dict[str, FileSum]) -> None:
    """Write `checksums.json`, synced. Files below `folder` that `sums` lacks are read for theirs."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sums and name != CHECKSUMS_FILE:
            sums = {**sums, name: sum_of_file(path)}
    files = {name: {"bytes": value.size, "parts": value.parts} for name, value in sorted(sums.items())}
    own = zlib.crc32(json.dumps(files).encode())
    write_synced(folder / CHECKSUMS_FILE, json.dumps({"algorithm": "crc32", "files": files, "own": own}))


def read_checksums(folder: str | os.PathLike[str]) -> dict[str, FileSum] | None:
    """Name -> checksums, None where the checkpoint has none. Raises DamagedCheckpointError."""
    path = Path(folder) / CHECKSUMS_FILE
    try:
        stored = json.loads(path.read_bytes())
        if zlib.crc32(json.dumps(stored["files"]).encode()) != stored["own"] or stored["algorithm"] != "crc32":
            raise ValueError("its own checksum does not fit")
        return {name: FileSum(entry["bytes"], [(start, crc) for start, crc in entry["parts"]]) for name, entry in stored["files"].items()}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from None


def check_sizes(folder: str | os.PathLike[str]) -> None:
    """Raise DamagedCheckpointError that names the first file that is missing or has another size than was written."""
    for name, expected in (read_checksums(folder) or {}).items():
        path = Path(folder) / name
        if not path.is_file():
            raise DamagedCheckpointError(f"{path} is missing")
        if (size := path.stat().st_size) != expected.size:
            raise DamagedCheckpointError(f"{path} is damaged: it has {size} bytes, {expected.size} were written")


Parts = list[tuple[int, int, int]]  # (start, length, CRC-32) of each part of a file


def parts_within(parts: Parts, start: int, length: int) -> Parts:
    """The parts of a file that lie in a stretch of it."""
    return [part for part in parts[bisect_left(parts, (start,)) : bisect_left(parts, (start + length,))] if part[1]]


def check_parts(path: Path, start: int, data: Any, parts: Parts) -> None:
    """Raise DamagedCheckpointError unless `data`, read at `start`, are the parts that were written there."""
    for begin, length, crc in parts:
        check_part(path, begin, zlib.crc32(data[begin - start : begin - start + length]), (begin, length, crc))


def check_part(path: Path, start: int, found: int, part: tuple[int, int, int]) -> None:
    """Raise DamagedCheckpointError unless the checksum that was found is that of the part."""
    if found != part[2]:
        raise DamagedCheckpointError(f"{path} is damaged: its {part[1]} bytes at {start} are not those that were written")


def damaged_files(folder: str | os.PathLike[str]) -> list[str]:
    """A sentence for each file that is not as it was written; reads every byte. Raises DamagedCheckpointError for `checksums.json`."""
    found = []
    for name, expected in (read_checksums(folder) or {}).items():
        path = Path(folder) / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            found.append(f"{path} is missing")
        elif size != expected.size:
            found.append(f"{path} is damaged: it has {size} bytes, {expected.size} were written")
        else:
            wrong = [start for start, length, crc in expected.spans() if _crc_of(path, start, length) != (length, crc)]
            if wrong:
                found.append(f"{path} is damaged: the bytes from {wrong[0]} on are not those that were written")
    return found
