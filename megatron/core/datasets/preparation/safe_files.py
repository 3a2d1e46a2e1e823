"""Files that are whole or not there: appended ones with a running checksum, small ones replaced at once."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

CHUNK_BYTES = 8 << 20


class WriteError(OSError):
    """A file that cannot be written, a full disk for example. The message names it."""


class DamagedFileError(ValueError):
    """A file that does not hold what was written to it. The message names it."""


class HashedFile:
    """A file that is appended to: `size` in bytes and `sha256()` of all that was written are known at any time.

    path      created, or cut to `size` bytes, what an earlier run is known to have written
    sha256    of these `size` bytes; DamagedFileError if they are not there or have another checksum
    """

    def __init__(self, path: str, size: int = 0, sha256: str | None = None) -> None:
        self.path = path
        self.size = size
        self._hash = hashlib.sha256()
        if size == 0:
            self._file = _opened(path, "wb")
            return
        for chunk in read_chunks(path, size):
            self._hash.update(chunk)
        if self.sha256() != sha256:
            raise DamagedFileError(f"{path}: its first {size} bytes are not those that were written")
        self._file = _opened(path, "r+b")
        self._file.truncate(size)
        self._file.seek(size)

    def write(self, data: Any) -> None:
        """Append all of `data` (bytes, or an array). Raises WriteError."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        self._hash.update(view)
        self.size += len(view)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise WriteError(f"{self.path}: cannot write: {error.strerror}") from None

    def sha256(self) -> str:
        return self._hash.copy().hexdigest()

    def record(self) -> dict[str, Any]:
        """What a later run, or whoever checks the file, needs to know."""
        return {"bytes": self.size, "sha256": self.sha256()}

    def sync(self) -> None:
        """What was written is on the disk when this returns."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise WriteError(f"{self.path}: cannot write: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()


def _opened(path: str, mode: str) -> Any:
    try:
        return open(path, mode, buffering=0)
    except OSError as error:
        raise WriteError(f"{path}: cannot write: {error.strerror}") from None


def read_chunks(path: str, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file. Raises DamagedFileError when there are fewer."""
    left = size
    try:
        with open(path, "rb") as file:
            while left:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise DamagedFileError(f"{path}: has {size - left} bytes, {size} were written")
                left -= len(chunk)
                yield chunk
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: no such file, {size} bytes were written to it") from None


def sha256_of(path: str) -> str:
    """Checksum of a whole file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_file(path: str, content: bytes) -> None:
    """Give `path` this content, at once and for good. Raises WriteError."""
    temporary = f"{path}.tmp"
    file = HashedFile(temporary)
    try:
        file.write(content)
        file.sync()
    finally:
        file.close()
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Renames in this folder are on the disk when this returns."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # not every file system can
        pass
    finally:
        os.close(descriptor)
