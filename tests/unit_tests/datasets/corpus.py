"""A small corpus on disk for the tests of datasets."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

EOD = 2
TOKENIZER = SimpleNamespace(eod=EOD, vocab_size=1000, unique_identifiers={"class": "tests.Tokenizer"})


def write_corpus(prefix: Any, documents: list[list[int]]) -> str:
    """Each document a sequence that ends with EOD."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for document in documents:
        builder.add_document(np.array([*document, EOD]), [len(document) + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(seed: int, count: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 1000, size=rng.integers(1, 30)).tolist() for _ in range(count)]


def make_config(**changes: Any) -> GPTDatasetConfig:
    settings: dict[str, Any] = {"random_seed": 1, "sequence_length": 16, "split": "90,10,0", "tokenizer": TOKENIZER}
    return GPTDatasetConfig(**(settings | {"create_attention_mask": False} | changes))
