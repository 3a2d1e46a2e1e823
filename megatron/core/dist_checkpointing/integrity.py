"""Checksums of a checkpoint's files, and writes that are on the disk when they return. No torch.

On disk (ours, nothing else reads it): `checksums.json` =
{"algorithm": one of checksum.py's, "files": {name: {"bytes": size, "parts": [[start, checksum], ...]}}, "own": CRC-32 of `files` as text}.
Parts follow each other without a gap, the first from 0, the last to the end, so that a reader of one tensor checks that tensor alone.
An item of three parts is a torch.save whose middle one is the tensor itself, row by row, in this byte order.
Names are relative to the checkpoint's folder, `metadata.json` among them. A checkpoint without it (Megatron-LM's) is read unchecked.
"""

import json
import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .checksum import ALGORITHMS, BLOCK, WRITTEN, Algorithm
from .errors import DamagedCheckpointError

CHECKSUMS_FILE = "checksums.json"
SYNC_BYTES = 2**26  # the disk gets to work when so many are written, and so on


class Part(NamedTuple):
    """A stretch of a file with a checksum of its own."""

    start: int
    length: int
    checksum: int
    algorithm: str

    @property
    def add(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]


@dataclass
class FileSum:
    """Size of a file and (start, checksum) of each of its parts."""

    size: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    algorithm: str = WRITTEN

    def spans(self) -> Iterator[Part]:
        ends = [start for start, _ in self.parts[1:]] + [self.size]
        for (start, checksum), end in zip(self.parts, ends):  # a rank may have nothing to write: no parts
            yield Part(start, end - start, checksum, self.algorithm)


class ChecksummedFile:
    """A file open for writing that keeps the checksums of what is written. `sync` before `close` puts it on the disk.

    The disk works while more is written: a thread syncs what there is, again and again.
    `failure` is the OSError of a write that failed: torch, in whose hands the file is then, reports another exception.
    """

    def __init__(self, path: Path) -> None:
        self.sum = FileSum()
        self.failure: OSError | None = None
        self._part = bytearray()  # what was written of the present one
        self._file = open(path, "wb", buffering=2**17)  # noqa: SIM115  (closed by close)
        self._syncer = ThreadPoolExecutor(1)
        self._synced: Future[None] | None = None
        self._sync_at = SYNC_BYTES

    def begin_part(self) -> int:
        """What follows is a part of its own. Returns where it begins."""
        self._end_part()
        self.sum.parts.append((self.sum.size, 0))
        return self.sum.size

    def _end_part(self) -> None:
        if self._part:
            self.sum.parts[-1] = (self.sum.parts[-1][0], ALGORITHMS[WRITTEN](self._part, 0))
            self._part = bytearray()

    def write(self, data: Any) -> int:
        """Write what may be little; a copy waits for the end of the part."""
        self._part += data
        self._try_to_put(memoryview(data).cast("B"))
        return len(data)

    def write_data(self, view: memoryview) -> None:
        """Write much at once, as a part of its own, in pieces that are still in the cache when they are written."""
        start, checksum = self.begin_part(), 0
        for place in range(0, len(view), BLOCK):
            piece = view[place : place + BLOCK]
            checksum = ALGORITHMS[WRITTEN](piece, checksum)
            self._try_to_put(piece)
        self.sum.parts[-1] = (start, checksum)
        self.begin_part()

    def _try_to_put(self, view: memoryview) -> None:
        try:
            self._put(view)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.sum.size += len(view)

    def _put(self, view: memoryview) -> None:
        self._file.write(view)
        if self.sum.size >= self._sync_at and (self._synced is None or self._synced.done()):
            self._wait_for_syncer()
            self._synced = self._syncer.submit(os.fdatasync, self._file.fileno())
            self._sync_at = self.sum.size + SYNC_BYTES

    def _wait_for_syncer(self) -> None:
        if self._synced is not None:
            self._synced.result()  # the system reports a failed write to the first who asks

    def flush(self) -> None:
        """torch calls it after each tensor; nobody reads before `sync`."""

    def sync(self) -> None:
        self._end_part()
        self._file.flush()
        self._wait_for_syncer()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._syncer.shutdown()
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


def _checksum_of(path: Path, start: int, length: int, add: Algorithm) -> int:
    """Checksum of a stretch of a file."""
    found = 0
    with open(path, "rb") as file:
        file.seek(start)
        for place in range(0, length, BLOCK):
            found = add(file.read(min(BLOCK, length - place)), found)
    return found


def sum_of_file(path: Path) -> FileSum:
    """Checksum of a file that somebody else wrote, as one part."""
    size = path.stat().st_size
    return FileSum(size, [(0, _checksum_of(path, 0, size, ALGORITHMS[WRITTEN]))])


def sum_of_text(text: str) -> FileSum:
    data = text.encode()
    return FileSum(len(data), [(0, ALGORITHMS[WRITTEN](data, 0))])


def write_checksums(folder: Path, sums: dict[str, FileSum]) -> None:
    """Write `checksums.json`, synced. Files below `folder` that `sums` lacks are read for theirs."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sums and name != CHECKSUMS_FILE:
            sums = {**sums, name: sum_of_file(path)}
    files = {name: {"bytes": value.size, "parts": value.parts} for name, value in sorted(sums.items())}
    own = zlib.crc32(json.dumps(files).encode())
    write_synced(folder / CHECKSUMS_FILE, json.dumps({"algorithm": WRITTEN, "files": files, "own": own}))


def read_checksums(folder: str | os.PathLike[str]) -> dict[str, FileSum] | None:
    """Name -> checksums, None where the checkpoint has none. Raises DamagedCheckpointError."""
    path = Path(folder) / CHECKSUMS_FILE
    try:
        stored = json.loads(path.read_bytes())
        if zlib.crc32(json.dumps(stored["files"]).encode()) != stored["own"] or stored["algorithm"] not in ALGORITHMS:
            raise ValueError("its own checksum does not fit")
        return {
            name: FileSum(entry["bytes"], [(start, checksum) for start, checksum in entry["parts"]], stored["algorithm"])
            for name, entry in stored["files"].items()
        }
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


def parts_within(parts: list[Part], start: int, length: int) -> list[Part]:
    """The parts of a file that lie in a stretch of it."""
    return [part for part in parts[bisect_left(parts, (start,)) : bisect_left(parts, (start + length,))] if part.length]


def check_parts(path: Path, start: int, data: Any, parts: list[Part]) -> None:
    """Raise DamagedCheckpointError unless `data`, read at `start`, are the parts that were written there."""
    for part in parts:
        check_part(path, part, part.add(data[part.start - start : part.start - start + part.length], 0))


def check_part(path: Path, part: Part, found: int) -> None:
    """Raise DamagedCheckpointError unless the checksum that was found is that of the part."""
    if found != part.checksum:
        raise DamagedCheckpointError(f"{path} is damaged: its {part.length} bytes at {part.start} are not those that were written")


def check_file(folder: Path, name: str) -> None:
    """Raise DamagedCheckpointError unless a file of `folder`, of which checksums were written, has every byte as it was written."""
    path, expected = folder / name, (read_checksums(folder) or {}).get(name)
    for part in expected.spans() if expected is not None else ():
        check_part(path, part, _checksum_of(path, part.start, part.length, part.add))


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
            wrong = [part for part in expected.spans() if _checksum_of(path, part.start, part.length, part.add) != part.checksum]
            if wrong:
                found.append(f"{path} is damaged: the bytes from {wrong[0].start} on are not those that were written")
    return found
