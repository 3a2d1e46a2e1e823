"""Index arrays on disk: `<hash>-<class>-<split>-<name>.npy` beside a `-description.txt` that says what they were built for.

The hash is the md5 of the description, a JSON text. Each file is written under another name and renamed; the description
comes last, so where it is there the arrays are whole. Beside them lies `-checksums.json`, {file: [bytes, CRC-32]}, which Megatron-LM does
not know: without it (its caches) the arrays are judged by what the dataset can see in them. Its entry `source` is of the data that the
arrays were computed from: the description names only its path, under which other data may lie by now. Arrays are loaded as read-only
maps. Torch-free.
"""

import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

logger = logging.getLogger(__name__)
Arrays = tuple[np.ndarray, ...]
CHECKSUMS = "checksums.json"
SOURCE = "source"
BLOCK = 16 << 20  # bytes


@dataclass
class CacheUse:
    """What this process did with index caches since it began: sets of arrays that were found, built, and built but not stored."""

    found: int = 0
    built: int = 0
    unsaved: int = 0


use = CacheUse()
_verify = True


@contextmanager
def trusted() -> Iterator[None]:
    """Within it checksums are not computed: another process has just done so. Sizes are compared all the same."""
    global _verify
    before, _verify = _verify, False
    try:
        yield
    finally:
        _verify = before


def verifying() -> bool:
    """False within `trusted()`."""
    return _verify


def describe(identifiers: Mapping[str, Any]) -> str:
    """The description of a dataset; objects that JSON does not know are described by their `unique_identifiers`."""
    return json.dumps(identifiers, indent=4, default=lambda value: value.unique_identifiers)


def description_hash(description: str) -> str:
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file under a temporary name in the same folder, then give it its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    total, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            total, crc = total + len(block), zlib.crc32(block, crc)
    return [total, crc]


def checksum_of(array: np.ndarray) -> list[int]:
    """[bytes, CRC-32] of an array's content."""
    return [array.nbytes, zlib.crc32(np.ascontiguousarray(array).data) if array.size else 0]


class IndexCache:
    """The cached arrays `names` of one dataset in `folder` (None: never cached).

    source  what they are computed from, beside the description; arrays of another source are built again
    """

    def __init__(
        self,
        folder: str | None,
        class_name: str,
        split_name: str,
        description: str,
        names: tuple[str, ...],
        source: np.ndarray | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.description = description
        self.names = names
        self.source = source
        self.stem = f"{description_hash(description)}-{class_name}-{split_name}"

    def path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.stem}-{name}"

    def load_or_build(self, build: Callable[[], Arrays], problem: Callable[..., str | None]) -> Arrays:
        """The arrays of an earlier run where `problem(*arrays)` finds none in them (it says what is wrong, or None); else build and store.

        A folder that cannot be written costs a warning: the arrays stay in memory.
        """
        found = self._load(problem)
        if found is not None:
            use.found += 1
            logger.info("index cache hit: %s", self.stem)
            return found
        use.built += 1
        started = time.perf_counter()
        arrays = build()
        logger.info("built %s for %s in %.2f s", ", ".join(self.names), self.stem, time.perf_counter() - started)
        return self._store(arrays)

    def _load(self, problem: Callable[..., str | None]) -> Arrays | None:
        if self.folder is None or not self.path("description.txt").is_file():
            return None
        try:
            reason = self._damage()
            if reason is None:
                arrays = tuple(_map(self.path(f"{name}.npy")) for name in self.names)
                reason = problem(*arrays)
        except (OSError, ValueError, EOFError) as error:
            reason = str(error)
        if reason is None:
            return arrays
        logger.warning("index cache %s: %s; building it again", self.path("*"), reason)
        return None

    def _damage(self) -> str | None:
        """What the checksums have against the files, or None."""
        path = self.path("description.txt")
        if path.read_text("utf-8") != self.description:
            return f"{path.name} holds another description"
        try:
            sums = json.loads(self.path(CHECKSUMS).read_text("utf-8"))
            expected = [sums[self.path(f"{name}.npy").name][:2] for name in self.names]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return f"{self.path(CHECKSUMS).name} is damaged"
        for name, wanted in zip(self.names, expected):
            path = self.path(f"{name}.npy")
            if path.stat().st_size != wanted[0] or (_verify and checksum(path) != wanted):
                return f"{path.name} is damaged: it is not what was written (by its size or checksum)"
        if _verify and self.source is not None and sums.get(SOURCE) not in (None, checksum_of(self.source)):
            return "it was built for other data, which lay under this path before"
        return None

    def _store(self, arrays: Arrays) -> Arrays:
        if self.folder is None:
            use.unsaved += 1
            return arrays
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)
            self.path(CHECKSUMS).unlink(missing_ok=True)
            sums = {} if self.source is None else {SOURCE: checksum_of(self.source)}
            for name, array in zip(self.names, arrays):
                path = self.path(f"{name}.npy")
                write_atomically(path, partial(np.save, arr=array, allow_pickle=False))
                sums[path.name] = checksum(path)
            write_atomically(self.path(CHECKSUMS), lambda file: file.write(json.dumps(sums, indent=4).encode("utf-8")))
            write_atomically(self.path("description.txt"), lambda file: file.write(self.description.encode("utf-8")))
        except OSError as error:
            message = "the index cache cannot be written (%s): each process builds its own; set --data-cache-path to a writable folder"
            logger.warning(message, error)
            use.unsaved += 1
            return arrays
        return tuple(_map(self.path(f"{name}.npy")) for name in self.names)


def _map(path: Path) -> np.ndarray:
    try:
        # as a plain ndarray: indexing a memmap object costs microseconds
        return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None
