"""Small preparation jobs in this process, a tokenizer that shows its text in its ids, and what the outcome must be."""

import itertools
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preparation.prepare import Job, prepare
from megatron.core.datasets.preparation.records import TextRules
from megatron.core.tokenizers import MegatronTokenizer

EOD = 256
FILES = ("bin", "idx", "meta.json")


class ByteTokenizer(MegatronTokenizer):
    """UTF-8 bytes as ids, 256 ends a document. Refuses texts with an "@", breaks on those with a "~"."""

    def __init__(self, vocab_size: int = 257) -> None:
        super().__init__(vocab_size=vocab_size)
        self._size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._size

    def tokenize_batch(self, texts, threads: int = 1) -> list[list[int]]:
        if any("@" in text for text in texts):
            raise ValueError("no @ in this vocabulary")
        if any("~" in text for text in texts):
            raise RuntimeError("internal")
        return [list(text.encode()) for text in texts]

    def detokenize(self, ids) -> str:
        return bytes(token for token in ids if token < EOD).decode()

    def _token_names(self):
        return ((token, str(token)) for token in range(self._size))

    @property
    def eos(self) -> int:
        return EOD


def make_job(folder: Path, *files: Path, name: str = "out", keys: tuple[str, ...] = ("text",), eod: bool = True, **options) -> Job:
    """A job without worker processes, whose batches and shards are a few lines."""
    settings: dict[str, Any] = {
        "workers": 0,
        "batch_bytes": 40,
        "shard_bytes": 80,
        "say": lambda line: None,
        "tokenizer": ByteTokenizer(),
    } | options
    return Job(files=[str(file) for file in files], output_prefix=str(folder / name), rules=TextRules(keys, eod), **settings)


def run(folder: Path, *files: Path, **options) -> None:
    prepare(make_job(folder, *files, **options))


def documents(folder: Path, key: str = "text", name: str = "out") -> list[list[int]]:
    """The ids of each document of a pair of one sequence a document at most."""
    dataset = IndexedDataset(str(folder / f"{name}_{key}_document"))
    bounds = dataset.document_indices.tolist()
    return [[token for sequence in dataset[begin:end] for token in sequence.tolist()] for begin, end in itertools.pairwise(bounds)]


def content(folder: Path, name: str = "out") -> dict[str, bytes]:
    """Every file that a job left, by its name without the job's."""
    return {path.name.removeprefix(name): path.read_bytes() for path in sorted(folder.glob(f"{name}[._]*")) if path.is_file()}
