"""Unpickling by an allow-list: a checkpoint is data, and reading one runs no code that it names.

A class that is not on the list becomes an inert stand-in that keeps what it was built from (enumerations and state classes that
Megatron-LM pickles beside its tensors).
"""

import argparse
import io
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import torch

_ALLOWED = {
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("_codecs", "encode"),
    ("pathlib", "PosixPath"),
    ("datetime", "timedelta"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("builtins", "bytearray"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ALLOWED_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_ALLOWED_STORAGES = {name for name in dir(torch) if name.endswith("Storage")}


class StandIn:
    """What an unlisted class unpickles to: its name and what it was given, without behaviour."""

    qualified_name = ""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments = arguments
        self.keywords = keywords
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"{self.qualified_name}{getattr(self, 'arguments', ())!r}"


class AllowListUnpickler(pickle.Unpickler):
    """pickle.Unpickler that resolves listed names only."""

    def find_class(self, module: str, name: str) -> Any:
        listed = (module, name) in _ALLOWED or (module == "torch" and name in _ALLOWED_DTYPES | _ALLOWED_STORAGES)
        if listed:
            return super().find_class(module, name)
        return type(name.rpartition(".")[2], (StandIn,), {"qualified_name": f"{module}.{name}"})


class _PickleModule:
    """The face of the `pickle` module that torch.load asks for."""

    Unpickler = AllowListUnpickler
    __name__ = "megatron.core.dist_checkpointing.safe_pickle"

    @staticmethod
    def load(file: Any, **keywords: Any) -> Any:
        return AllowListUnpickler(file, **keywords).load()


def load_pickle(file: Any) -> Any:
    """A plain pickle from an open binary file."""
    return AllowListUnpickler(file).load()


def load_torch(source: bytes | io.BytesIO | str, mmap: bool = False) -> Any:
    """What torch.save wrote, tensors on the CPU, by the allow-list. mmap: of a file, tensors' values are read when they are used."""
    if isinstance(source, bytes):
        source = io.BytesIO(source)
    return torch.load(source, map_location="cpu", pickle_module=_PickleModule, weights_only=False, mmap=mmap)


def plain_namespace(values: dict[str, Any]) -> argparse.Namespace:
    """A namespace of values that any reader can unpickle: enumerations and dtypes' owners stay, other objects become their repr."""
    plain = (bool, int, float, str, bytes, type(None), list, tuple, dict, torch.dtype)
    return argparse.Namespace(**{name: value if isinstance(value, plain) else repr(value) for name, value in values.items()})


_STORED_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _TensorUnpickler(AllowListUnpickler):
    """For the pickle inside a torch.save of one tensor: its storage is a stretch of memory that is there already."""

    def __init__(self, file: Any, storage_at: Callable[[str], memoryview]) -> None:
        super().__init__(file)
        self.storage_at = storage_at

    def persistent_load(self, pid: Any) -> Any:
        _, storage_type, key, _, count = pid
        dtype = _STORED_DTYPES[storage_type.__name__]
        stored = self.storage_at(key)
        data = torch.frombuffer(stored, dtype=torch.uint8) if len(stored) else torch.empty(0, dtype=torch.uint8)
        if data.numel() != count * dtype.itemsize:
            raise ValueError("another number of bytes than elements need")
        return torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=dtype, _internal=True)


class _Memory(io.RawIOBase):
    """A file over memory that zipfile reads without a copy of the whole."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.place = view, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: len(self.view)}[whence]
        if self.place < 0:
            raise OSError("before the beginning")
        return self.place

    def read(self, size: int | None = -1) -> bytes:
        end = len(self.view) if size is None or size < 0 else self.place + size
        data = bytes(self.view[self.place : end])
        self.place += len(data)
        return data


def tensor_within(view: memoryview) -> torch.Tensor:
    """The one tensor that torch.save wrote into `view`, writable memory, without a copy: it shares that memory.

    Raises whatever junk makes its parts raise.
    """
    with zipfile.ZipFile(_Memory(view)) as archive:  # type: ignore[arg-type]
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = archive.read(entries["data.pkl"])
        order = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else sys.byteorder
        if order != sys.byteorder or not any(name.encode() in pickled for name in _STORED_DTYPES):
            return torch.load(io.BytesIO(view), map_location="cpu", weights_only=True)  # newer dtypes are pickled another way

        def storage_at(key: str) -> memoryview:
            info = entries[f"data/{key}"]
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("a compressed storage")
            name, extra = struct.unpack_from("<HH", view, info.header_offset + 26)  # a local header is 30 bytes, a name and an extra field
            start = info.header_offset + 30 + name + extra
            return view[start : start + info.file_size]

        tensor = _TensorUnpickler(io.BytesIO(pickled), storage_at).load()
    if not isinstance(tensor, torch.Tensor):
        raise ValueError("no tensor")
    return tensor.detach()
