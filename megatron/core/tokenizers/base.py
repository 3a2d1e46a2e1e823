"""What every tokenizer offers."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class TokenizerFileError(ValueError):
    """A tokenizer's file is missing or is not what it should be. The message names it."""


class MegatronTokenizer(ABC):
    """Maps text to ids 0 .. vocab_size - 1 and back.

    paths    the files (or one folder) it is made of
    options  whatever else decides which ids come out; part of the identity

    `unique_identifiers` (ordered: class, tokenizer_path, then the options as text) goes into the key of index caches.
    """

    def __init__(self, *paths: str, **options: Any) -> None:
        self.paths = [str(path) for path in paths]
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = f"{type(self).__module__}.{type(self).__qualname__}"
        self.unique_identifiers["tokenizer_path"] = self.paths[0] if len(self.paths) == 1 else self.paths
        for name, value in options.items():
            self.unique_identifiers[name] = str(value)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included, before padding for the model."""

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The ids of each text. Backends that can do so use `threads` threads."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.tokenize_batch([text])[0]

    @property
    def bos(self) -> int | None:
        """Id that begins a text, None where there is none."""
        return None

    @property
    def eos(self) -> int | None:
        """Id that ends a text, None where there is none."""
        return None

    @property
    def pad(self) -> int | None:
        """Id of padding, None where there is none."""
        return None

    @property
    def eod(self) -> int:
        """Id that ends a document: the one that ends a text. Raises ValueError where there is none."""
        if self.eos is None:
            name = f"{type(self).__name__} {self.unique_identifiers['tokenizer_path']}"
            raise ValueError(f"{name} has no token that ends a document (EOS): train or choose one that has")
        return self.eos

    @property
    def fingerprint(self) -> str:
        """sha256 over class name, options, special ids and the contents of the files: the same on every machine that gives the same ids."""
        digest = hashlib.sha256(type(self).__name__.encode())
        for name, value in self.unique_identifiers.items():
            if name not in ("class", "tokenizer_path"):
                digest.update(f"\0{name}={value}".encode())
        digest.update(f"\0{self.vocab_size} {self.bos} {self.eos} {self.pad}".encode())
        for path in self.paths:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def need_file(path: str, flag: str) -> str:
    """`path` where it is a file; else TokenizerFileError that names the flag."""
    if not os.path.isfile(path):
        raise TokenizerFileError(f"{flag} {path}: no such file")
    return path
