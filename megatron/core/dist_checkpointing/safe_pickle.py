"""Unpickling by an allow-list: a checkpoint is data, and reading one runs no code that it names.

A class that is not on the list becomes an inert stand-in that keeps what it was built from (enumerations and state classes that
Megatron-LM pickles beside its tensors).
"""

import argparse
import io
import pickle
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
