"""Folders of safetensors files, read and written a tensor at a time.

A file is 8 bytes (little endian) with the length of its header, the header, JSON of {name: {dtype, shape, data_offsets}}, and the tensors'
bytes one behind the other. The header comes first, so that a writer which knows all shapes needs no more than one tensor in memory.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from megatron.core.export.hf_configs import ConversionError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Entry:
    """Where a tensor stands in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


class SafetensorsFolder:
    """The tensors of a folder, by name. Read when they are asked for, into memory of their own: a mapped file's would stay."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._headers: dict[str, dict[str, _Entry]] = {}
        self.file_of = self._index()

    def _index(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConversionError(f"{index} is damaged: {type(error).__name__}: {error}") from None
        if (self.folder / WEIGHTS).is_file():
            return dict.fromkeys(self._header(WEIGHTS), WEIGHTS)
        other = sorted(path.name for path in self.folder.glob("*.bin"))
        hint = f"; it has {other[0]}: load it in transformers and save_pretrained() writes safetensors" if other else ""
        raise ConversionError(f"{self.folder} has neither {WEIGHTS} nor {INDEX}{hint}")

    def _header(self, name: str) -> dict[str, _Entry]:
        if name not in self._headers:
            path = self.folder / name
            if not path.is_file():
                raise ConversionError(f"{path} is not there, but {INDEX} names it")
            try:
                self._headers[name] = _read_header(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
                raise ConversionError(f"{path} is damaged: {error}") from None
        return self._headers[name]

    def _entry(self, name: str) -> _Entry:
        file = self.file_of[name]
        if name not in self._header(file):
            raise ConversionError(f"{self.folder / file} lacks {name}, which {INDEX} says it has")
        return self._header(file)[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Raises ConversionError for a type that weights do not have (of a quantized model)."""
        found = self._entry(name).dtype
        if found not in DTYPES:
            rule = f"weights are of {', '.join(DTYPES)}: save the model without quantization"
            raise ConversionError(f"{self.folder}: {name} is of type {found}; {rule}")
        return DTYPES[found]

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        with open(self.folder / self.file_of[name], "rb") as file:
            file.seek(self._entry(name).begin)
            if file.readinto(data) != len(data):
                raise ConversionError(f"{file.name} is damaged: it ends within {name}")
        return tensor


def _read_header(path: Path) -> dict[str, _Entry]:
    """Raises ValueError and its kin for what is no header, or one of more bytes than the file has."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{name} lies beyond its end")
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {end - begin} bytes, {list(shape)} of {dtype} are others")
        found[name] = _Entry(dtype, shape, 8 + length + begin)
    return found


class SafetensorsWriter:
    """Writes tensors in the order in which they were announced, into files of at most `largest` bytes each (one tensor at least).

    announced: name -> (shape, dtype). Use as a context; a tensor that is left out is an AssertionError at its end.
    """

    def __init__(self, folder: Path, announced: Mapping[str, tuple[tuple[int, ...], torch.dtype]], largest: int) -> None:
        self.folder, self.announced = folder, dict(announced)
        self.files = self._divide(largest)
        self._due = [(file, name) for file, names in self.files.items() for name in names]
        self._next = 0
        self._file: IO[bytes] | None = None

    def _bytes(self, name: str) -> int:
        shape, dtype = self.announced[name]
        return math.prod(shape) * dtype.itemsize

    def dtype_of(self, name: str) -> torch.dtype:
        return self.announced[name][1]

    def _divide(self, largest: int) -> dict[str, list[str]]:
        groups: list[list[str]] = [[]]
        held = 0
        for name in self.announced:
            if groups[-1] and held + self._bytes(name) > largest:
                groups.append([])
                held = 0
            groups[-1].append(name)
            held += self._bytes(name)
        if len(groups) == 1:
            return {WEIGHTS: groups[0]}
        return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        file, due = self._due[self._next]
        assert name == due and (tuple(tensor.shape), tensor.dtype) == self.announced[name], (name, due, tensor.shape)
        if name == self.files[file][0]:
            self._start(file)
        assert self._file is not None
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)
        self._next += 1

    def _start(self, file: str) -> None:
        self._finish_file()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in self.files[file]:
            end = offset + self._bytes(name)
            shape, dtype = self.announced[name]
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
        self._file = open(self.folder / file, "wb")  # noqa: SIM115  (closed by _finish_file)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _finish_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._finish_file()
        if kind is not None:
            return
        assert self._next == len(self._due), f"{self._due[self._next][1]} was announced and not written"
        if len(self.files) > 1:
            total = sum(map(self._bytes, self.announced))
            weight_map = {name: file for file, names in self.files.items() for name in names}
            (self.folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def one_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type of most precision among them."""
    return max(set(dtypes), key=lambda dtype: (dtype.itemsize, dtype == torch.bfloat16))
