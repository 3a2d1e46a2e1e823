"""Files as torch.save writes them, their tensors' numbers put in afterwards: a tensor at a time, in any order.

On disk (torch's contract): a zip file without compression; `archive/data.pkl` is the pickle, in which tensors name storages by number;
`archive/data/N` holds the bytes of storage N, the N-th tensor that the pickle comes to.
"""

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import skip_data

_LOCAL_HEADER = 30  # bytes before the name; at 26 stand the lengths of the name and of an extra field
_DIRECTORY_ENTRY = 46  # the same in the directory at the end, where they stand at 28; the CRC-32 at 16
_DESCRIBED = b"PK\x07\x08"  # behind the bytes of an entry: this, then their CRC-32


class TorchFile:
    """A new file that holds `contents` and under the key `tensors_key` the tensors `announced`: name -> (shape, dtype), or None for an
    entry that is None.

    The file has its full size at once. Write every tensor, then call `finish`. Raises OSError as the file system does.
    """

    def __init__(
        self, path: Path, contents: Mapping[str, Any], tensors_key: str, announced: Mapping[str, tuple[tuple[int, ...], torch.dtype] | None]
    ) -> None:
        self.path = path
        # Memory that nobody touches takes none: these are there for their sizes.
        tensors = {name: None if entry is None else torch.empty(entry[0], dtype=entry[1]) for name, entry in announced.items()}
        with open(path, "wb") as file, skip_data():
            torch.save({**contents, tensors_key: tensors}, file)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
        self._due = {name: tensor.shape for name, tensor in tensors.items() if tensor is not None and tensor.numel()}
        self._places: dict[str, tuple[int, int]] = {}  # name -> first byte, number of the storage
        self._crcs = [0] * len(self.dtypes)
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            self._directory = archive.start_dir
            for number, name in enumerate(self.dtypes):
                info = entries[f"data/{number}"]
                assert info.file_size == tensors[name].nbytes, f"{name} is not storage {number} of {path}"  # type: ignore[union-attr]
                self._places[name] = (_begin(file, info), number)
        assert f"data/{len(self._places)}" not in entries, f"`contents` of {path} holds tensors"

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """The whole of one tensor, of the announced shape and dtype."""
        begin, number = self._places[name]
        assert tensor.dtype == self.dtypes[name] and tensor.shape == self._due.pop(name), (name, tensor.dtype, tensor.shape)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._crcs[number] = zlib.crc32(data)
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(begin)
            _write_all(file, data)
            if file.read(len(_DESCRIBED)) == _DESCRIBED:  # an entry without bytes has no descriptor
                file.write(struct.pack("<I", self._crcs[number]))

    def finish(self) -> None:
        """Checksums into the directory, where torch, which did not know the bytes, left 0; then all is on the disk."""
        assert not self._due, f"{self.path} lacks {', '.join(self._due)}"
        with open(self.path, "r+b") as file:
            place = self._directory
            while True:
                file.seek(place)
                entry = file.read(_DIRECTORY_ENTRY)
                if entry[:4] != b"PK\x01\x02":
                    break
                name, extra, comment = struct.unpack_from("<HHH", entry, 28)
                number = file.read(name).decode().rpartition("/data/")[2]
                if number.isdigit():
                    file.seek(place + 16)
                    file.write(struct.pack("<I", self._crcs[int(number)]))
                place += _DIRECTORY_ENTRY + name + extra + comment
            file.flush()
            os.fsync(file.fileno())


def _begin(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin."""
    file.seek(info.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return info.header_offset + _LOCAL_HEADER + name + extra


def _write_all(file: io.FileIO, data: memoryview) -> None:
    """A single write is cut off at 2 GiB."""
    done = 0
    while done < len(data):
        done += file.write(data[done:]) or 0
