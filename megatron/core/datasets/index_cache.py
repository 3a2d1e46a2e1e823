"""Index arrays on disk: `<hash>-<class>-<split>-<name>.npy` beside a `-description.txt` that says what they were built for.

The hash is the md5 of the description, a JSON text. Each file is written under another name and renamed; the description
comes last, so where it is there the arrays are whole. Arrays are loaded as read-only maps. Torch-free.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

logger = logging.getLogger(__name__)
Arrays = tuple[np.ndarray, ...]


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


class IndexCache:
    """The cached arrays `names` of one dataset in `folder` (None: never cached)."""

    def __init__(self, folder: str | None, class_name: str, split_name: str, description: str, names: tuple[str, ...]) -> None:
        self.folder = None if folder is None else Path(folder)
        self.description = description
        self.names = names
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
            return found
        started = time.perf_counter()
        arrays = build()
        logger.info("built %s for %s in %.2f s", ", ".join(self.names), self.stem, time.perf_counter() - started)
        return self._store(arrays)

    def _load(self, problem: Callable[..., str | None]) -> Arrays | None:
        if self.folder is None or not self.path("description.txt").is_file():
            return None
        try:
            reason = None if self.path("description.txt").read_text("utf-8") == self.description else "another description"
            arrays = tuple(_map(self.path(f"{name}.npy")) for name in self.names)
            reason = reason or problem(*arrays)
        except (OSError, ValueError, EOFError) as error:
            reason = str(error)
        if reason is None:
            return arrays
        logger.warning("index cache %s: %s; building it again", self.path("*"), reason)
        return None

    def _store(self, arrays: Arrays) -> Arrays:
        if self.folder is None:
            return arrays
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path("description.txt").unlink(missing_ok=True)
            for name, array in zip(self.names, arrays):
                write_atomically(self.path(f"{name}.npy"), partial(np.save, arr=array, allow_pickle=False))
            write_atomically(self.path("description.txt"), lambda file: file.write(self.description.encode("utf-8")))
        except OSError as error:
            message = "the index cache cannot be written (%s): each process builds its own; set --data-cache-path to a writable folder"
            logger.warning(message, error)
            return arrays
        return tuple(_map(self.path(f"{name}.npy")) for name in self.names)


def _map(path: Path) -> np.ndarray:
    # as a plain ndarray: indexing a memmap object costs microseconds
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
