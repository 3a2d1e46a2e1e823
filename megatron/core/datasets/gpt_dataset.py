"""Samples for language models: stretches of `sequence_length` tokens cut out of shuffled documents.

helpers.py says which tokens make up which sample; here they are read, and given labels, loss mask and positions.
"""

import logging
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.helpers import SEPARATE_EPOCH_THRESHOLD, build_gpt_indices
from megatron.core.datasets.index_cache import IndexCache, describe, description_hash, verifying
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage import is_remote, local_prefix
from megatron.core.datasets.utils import Split

logger = logging.getLogger(__name__)
INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of GPTDataset, beside those of every blended dataset."""

    reset_position_ids: bool | None = None
    """positions start again at 0 after each end-of-document token"""
    reset_attention_mask: bool | None = None
    """a token does not see documents before its own; part of the attention mask, so nothing without create_attention_mask"""
    eod_mask_loss: bool | None = None
    """no loss where the input is an end-of-document token: what follows is another document"""
    create_attention_mask: bool = True
    """add `attention_mask` to the samples; without it the attention is expected to be causal by itself"""
    drop_last_partial_validation_sequence: bool = True
    """leave out the last validation sample when there are not enough tokens to fill it, rather than pad it"""
    add_extra_token_to_sequence: bool = True
    """read one token more than sequence_length, the label of the last one; without it the last position has no loss"""
    separate_last_epoch_below: float = SEPARATE_EPOCH_THRESHOLD
    """a last epoch of which a smaller part is needed is shuffled apart from the others, after them"""
    vocab_size: int | None = None
    """number of ids that there are: samples with ids beyond it are refused. None: no check"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reset_attention_mask and not self.create_attention_mask:
            logger.warning("reset_attention_mask does nothing without create_attention_mask: tokens see the documents before their own")

    def problems(self) -> list[str]:
        found = super().problems()
        if self.tokenizer is None:
            found.append("tokenizer is None: GPTDataset needs one, for its end-of-document id")
        if not 0 <= self.separate_last_epoch_below <= 1:
            found.append(f"separate_last_epoch_below {self.separate_last_epoch_below} is a part of an epoch, from 0 to 1; 0.8 is usual")
        return found


class GPTDataset(torch.utils.data.Dataset):
    """`sequence_length` tokens a sample, out of the documents `indexed_indices` of `indexed_dataset`.

    indexed_dataset  anything with `sequence_lengths` (int [documents]) and `get(document, offset, length)`
    dataset_path     its prefix: part of the cache key, and of error messages; None for made-up data
    indexed_indices  int32 array of document ids
    num_samples      samples wanted (whole epochs are built, so there are as many or more); None for one epoch
    index_split      which split this is

    `ds[i]`: tokens, labels int64 [s]; loss_mask fp32 [s]; position_ids int64 [s]; and with create_attention_mask attention_mask
    bool [1, s, s], True where query (row) must not see key (column). All of them are new tensors.
    Raises ValueError when the documents do not give one sample, or a token is not in the model's vocabulary.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset = indexed_dataset
        self.dataset_path = dataset_path
        self.indices = indexed_indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.extra = 1 if config.add_extra_token_to_sequence else 0
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["dataset_path"] = dataset_path
        self.unique_identifiers["num_samples"] = num_samples
        self.unique_identifiers["index_split"] = index_split.name
        for name in self._key_config_attributes():
            self.unique_identifiers[name] = getattr(config, name)
        if config.separate_last_epoch_below != SEPARATE_EPOCH_THRESHOLD:  # else the description is Megatron-LM's
            self.unique_identifiers["separate_last_epoch_below"] = config.separate_last_epoch_below
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        lengths = indexed_dataset.sequence_lengths
        cache = IndexCache(self._cache_folder(), type(self).__name__, index_split.name, self.unique_description, INDEX_NAMES, lengths)
        self.document_index, self.sample_index, self.shuffle_index = cache.load_or_build(self._build_indices, self._index_problem)
        if len(self) == 0 and num_samples != 0:
            raise ValueError(self._too_small())
        self._check_first_sample()

    def _check_first_sample(self) -> None:
        """Data of another tokenizer shows at start-up, not in a loader's worker."""
        if self.config.vocab_size is not None and len(self):
            self[0]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        """What the documents are read from."""
        if is_remote(dataset_path):
            dataset_path = local_prefix(dataset_path, config.object_storage_cache_path)
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Number of documents (sequences) in it, which splits divide."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """The settings that decide the order of samples."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _cache_folder(self) -> str | None:
        if self.config.path_to_cache is not None:
            return self.config.path_to_cache
        base = self.dataset_path
        if is_remote(base):  # its local copy's prefix
            base = getattr(self.dataset, "path_prefix", None)
        return None if base is None else os.path.join(base, "cache", f"{type(self).__name__}_indices")

    def _build_indices(self) -> tuple[np.ndarray, ...]:
        drop = self.config.drop_last_partial_validation_sequence if self.index_split is Split.valid else True
        if isinstance(self.dataset, IndexedDataset):
            self.dataset.check_structure()
        lengths, length, seed = self.dataset.sequence_lengths, self.config.sequence_length, self.config.random_seed
        try:
            below = self.config.separate_last_epoch_below
            return build_gpt_indices(lengths, self.indices, self.num_samples, length, seed, self.extra, drop, below)
        except ValueError as error:
            raise ValueError(f"{self._too_small()}: {error}") from None

    def _too_small(self) -> str:
        return (
            f"{self.dataset_path}: the {len(self.indices)} documents of the {self.index_split.name} split do not give one sample of "
            f"{self.config.sequence_length + self.extra} tokens; use more data, another --split or a shorter --seq-length"
        )

    def _index_problem(self, document_index: np.ndarray, sample_index: np.ndarray, shuffle_index: np.ndarray) -> str | None:
        if document_index.ndim != 1 or len(document_index) % len(self.indices):
            return f"document_index of shape {document_index.shape} for {len(self.indices)} documents"
        if sample_index.shape != (len(shuffle_index) + 1, 2):
            return f"sample_index of shape {sample_index.shape} for {len(shuffle_index)} samples"
        if sample_index[-1, 0] >= len(document_index):
            return f"sample_index ends at document {sample_index[-1, 0]} of {len(document_index)}"
        return self._source_problem(document_index, sample_index) if verifying() and len(shuffle_index) else None

    def _source_problem(self, document_index: np.ndarray, sample_index: np.ndarray) -> str | None:
        """Whether these documents give the place where the last sample begins. (It may itself be a short one.)"""
        lengths, place = self.dataset.sequence_lengths, int(sample_index[-2, 0])
        if document_index.max() >= len(lengths):
            return f"document_index names document {document_index.max()} of {len(lengths)}"
        begin = int(lengths[document_index[:place]].sum(dtype=np.int64)) + int(sample_index[-2, 1])
        if begin != (len(sample_index) - 2) * self.config.sequence_length:
            return f"the last sample begins at token {begin} of these documents: it was built for others"
        return None

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        if not 0 <= idx < len(self):
            raise IndexError(f"{self.dataset_path}: sample {idx} of {len(self)}")
        raw = self._read(int(self.shuffle_index[idx]))
        length = self.config.sequence_length
        text = np.zeros(length + 1, dtype=np.int64)  # padding is 0, an id that every embedding has
        text[: len(raw)] = raw
        vocab_size = self.config.vocab_size
        if vocab_size is not None and (text.max() >= vocab_size or text.min() < 0):
            raise ValueError(
                f"{self.dataset_path}: sample {idx} holds ids from {text.min()} to {text.max()}, "
                f"beyond the vocabulary of {vocab_size}: the data was prepared with another tokenizer"
            )
        tokens = text[:-1]
        loss_mask = np.ones(length, dtype=np.float32)
        loss_mask[max(len(raw) - 1, 0) :] = 0.0  # no label there: padding is told by its position, its value may be a real token
        if self.config.eod_mask_loss:
            loss_mask[tokens == self.config.tokenizer.eod] = 0.0
        one_document = np.zeros(length, dtype=np.int64)
        resets = self.config.reset_position_ids or self.config.reset_attention_mask
        starts = document_starts(tokens, self.config.tokenizer.eod) if resets else one_document
        positions = np.arange(length, dtype=np.int64) - (starts if self.config.reset_position_ids else one_document)
        sample = {
            "tokens": torch.from_numpy(tokens.copy()),
            "labels": torch.from_numpy(text[1:].copy()),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(positions),
        }
        if self.config.create_attention_mask:
            sample["attention_mask"] = square_mask(starts if self.config.reset_attention_mask else one_document)
        return sample

    def _read(self, sample: int) -> np.ndarray:
        """The tokens of a sample in order, `sequence_length` + `extra` of them, fewer only at the end of a split that keeps its rest."""
        (begin, offset), (end, end_offset) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        documents = self.document_index[begin : end + 1].tolist()
        if begin == end:
            return self.dataset.get(documents[0], offset, end_offset + self.extra - offset)
        parts = [self.dataset.get(documents[0], offset)]
        parts += [self.dataset.get(document) for document in documents[1:-1]]
        parts.append(self.dataset.get(documents[-1], 0, end_offset + self.extra))
        return np.concatenate(parts)


def document_starts(tokens: np.ndarray, eod: int) -> np.ndarray:
    """For each position of `tokens` [s], where its document begins (int64 [s]): just behind the end-of-document token before it, or 0."""
    starts = np.zeros(len(tokens), dtype=np.int64)
    first = np.flatnonzero(tokens[:-1] == eod) + 1
    starts[first] = first
    return np.maximum.accumulate(starts)


def square_mask(starts: np.ndarray) -> torch.Tensor:
    """The attention mask (bool [1, s, s], True = hidden) that hides what comes later, and what comes before starts[query] (int64 [s])."""
    key = torch.arange(len(starts))
    query = key[:, None]
    return ((key > query) | (key < torch.from_numpy(starts)[:, None]))[None]


class MockDocuments:
    """Made-up documents: each counts up from its own number, modulo the vocabulary (4096 at most), and ends with `eod`."""

    def __init__(self, eod: int, vocab_size: int, num_documents: int = 100_000, longest: int = 4096) -> None:
        self.eod = eod
        self.modulus = min(vocab_size, 4096)
        self.sequence_lengths = np.random.RandomState(0).randint(1, longest + 1, size=num_documents).astype(np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        total = int(self.sequence_lengths[idx])
        end = total if length is None else offset + length
        tokens = (np.arange(offset, end, dtype=np.int64) + idx) % self.modulus
        if end == total:
            tokens[-1:] = self.eod
        return tokens


class MockGPTDataset(GPTDataset):
    """GPTDataset over made-up documents, for trying things out without files (`--mock-data`)."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockDocuments:
        return MockDocuments(config.tokenizer.eod, config.tokenizer.vocab_size)
