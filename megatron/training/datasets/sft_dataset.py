"""Conversations to learn answers from (`--sft`): a file of JSON lines, several conversations packed into each sample, loss on what the
assistant says.

A line is {"messages": [{"role": "user", "content": "..."}, ...]}, or that list alone. The tokenizer's chat template makes one text of it. A
conversation of n tokens takes n - 1 places of a sample: each of its tokens but the last has the next as its label.
"""

import hashlib
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.index_cache import IndexCache, describe, description_hash
from megatron.core.datasets.utils import Split, log_single_rank
from megatron.core.tokenizers.base import Message

logger = logging.getLogger(__name__)
ARRAYS = ("tokens", "answer", "ends", "counts")


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):
    """Settings of SFTDataset, beside GPTDataset's."""

    multiple: int = 1
    """places of a conversation are filled up to a multiple of this: 2 x the context-parallel size, whose ranks divide each conversation"""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.multiple < 1 or self.sequence_length % self.multiple:
            found.append(
                f"sequence_length {self.sequence_length} must be a multiple of {self.multiple}, to which conversations are filled up"
            )
        return found


class ConversationFile:
    """The conversations of a file of JSON lines, read where they stand; blank lines are none. Raises ValueError that names path, line."""

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such file; --sft takes files of JSON lines, one conversation a line")
        self.path = path
        places, numbers, place = [], [], 0
        self._digest = hashlib.sha256()
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                self._digest.update(line)
                if line.strip():
                    places.append(place)
                    numbers.append(number)
                place += len(line)
        self.places, self.line_numbers = np.array(places, dtype=np.int64), np.array(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def fingerprint(self) -> str:
        """sha256 of the file's content."""
        return self._digest.hexdigest()

    def read(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[int, list[Message]]]:
        """(line number, messages) of each of `indices`."""
        with open(self.path, "rb") as file:
            for index in indices:
                file.seek(self.places[index])
                number = int(self.line_numbers[index])
                yield number, self._messages(file.readline(), number)

    def _messages(self, line: bytes, number: int) -> list[Message]:
        rule = 'one conversation a line: {"messages": [{"role": "user", "content": "Hi"}, ...]}, or that list alone'
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}:{number}: no JSON ({error}); {rule}") from None
        messages = content.get("messages") if isinstance(content, dict) else content
        if not isinstance(messages, list):
            raise ValueError(f"{self.path}:{number}: no conversation; {rule}")
        return messages


class SFTDataset(torch.utils.data.Dataset):
    """Samples of `sequence_length` tokens, each some whole conversations and padding behind them.

    indexed_dataset  a ConversationFile; indexed_indices: which of its conversations
    num_samples      samples wanted; the conversations are gone through as often as that takes, each time in another order. None: once

    `ds[i]`: tokens, labels, position_ids int64 [s]; loss_mask fp32 [s], 1 where the label is the assistant's; document_begins bool [s],
    True at the first token of each conversation, and of the padding at the end. Positions begin at 0 with each.
    Conversations of more than s + 1 tokens are cut there; those without anything to learn are left out; a warning says how many.
    Raises ValueError, naming path and line, for what is no conversation.
    """

    def __init__(
        self,
        indexed_dataset: ConversationFile,
        dataset_path: str,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: SFTDatasetConfig,
    ) -> None:
        self.dataset, self.dataset_path, self.indices = indexed_dataset, dataset_path, indexed_indices
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        tokenizer = config.tokenizer
        self.padding = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
        template = hashlib.sha256((tokenizer.chat_template or "").encode()).hexdigest()
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers |= {"class": type(self).__name__, "dataset_path": dataset_path, "content": indexed_dataset.fingerprint}
        self.unique_identifiers |= {"conversations": [int(indexed_indices[0]), int(indexed_indices[-1])], "index_split": index_split.name}
        self.unique_identifiers |= {"sequence_length": config.sequence_length, "tokenizer": tokenizer.fingerprint, "template": template}
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        cache = IndexCache(self._cache_folder(), type(self).__name__, index_split.name, self.unique_description, ARRAYS)
        self.tokens, self.answer, self.ends, counts = cache.load_or_build(self._tokenize, _problem)
        self._report(*counts.tolist())
        lengths = self._places(np.diff(self.ends, prepend=0) - 1)
        wanted = num_samples if num_samples else None
        self.order, self.sample_starts = pack(lengths, config.sequence_length, wanted, config.random_seed)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> ConversationFile:
        return ConversationFile(dataset_path)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: ConversationFile) -> int:
        """Number of conversations, which splits divide."""
        return len(low_level_dataset)

    def _places(self, length: Any) -> Any:
        """Places of a sample that `length` pairs of token and label take."""
        return -(-length // self.config.multiple) * self.config.multiple

    def _cache_folder(self) -> str:
        return self.config.path_to_cache or os.path.join(os.path.dirname(os.path.abspath(self.dataset_path)), "cache", "SFTDataset_indices")

    def _tokenize(self) -> tuple[np.ndarray, ...]:
        """tokens int32 and answer bool, conversation behind conversation; where each ends; counts: read, cut, without an answer."""
        room, vocab_size = self.config.sequence_length + 1, self.config.vocab_size
        tokens, answers, lengths, cut, empty = [], [], [], 0, 0
        for number, messages in self.dataset.read(self.indices):
            try:
                ids, answer = self.config.tokenizer.tokenize_conversation(messages)
            except ValueError as error:
                raise ValueError(f"{self.dataset_path}:{number}: {error}") from None
            if vocab_size is not None and ids and max(ids) >= vocab_size:
                raise ValueError(f"{self.dataset_path}:{number}: id {max(ids)} is beyond the vocabulary of {vocab_size}")
            cut += len(ids) > room
            if not any(answer[1:room]):
                empty += 1
                continue
            tokens.append(np.array(ids[:room], dtype=np.int32))
            answers.append(np.array(answer[:room], dtype=bool))
            lengths.append(len(tokens[-1]))
        if not lengths:
            none = f"none of its {len(self.indices)} conversations of the {self.index_split.name} split has an answer"
            length = f"within --seq-length {self.config.sequence_length}"
            raise ValueError(f"{self.dataset_path}: {none} {length}; give others, or a longer --seq-length")
        counts = np.array([len(self.indices), cut, empty], dtype=np.int64)
        return np.concatenate(tokens), np.concatenate(answers), np.cumsum(lengths, dtype=np.int64), counts

    def _report(self, read: int, cut: int, empty: int) -> None:
        length, where = self.config.sequence_length, f"{self.dataset_path}, {self.index_split.name}"
        if cut:
            text = "%s: %d of %d conversations are longer than --seq-length %d, and are cut there"
            log_single_rank(logger, logging.WARNING, text, where, cut, read, length)
        if empty:
            text = "%s: %d of %d conversations have no answer within --seq-length %d, and are left out"
            log_single_rank(logger, logging.WARNING, text, where, empty, read, length)

    def __len__(self) -> int:
        return len(self.sample_starts) - 1

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        if not 0 <= idx < len(self):
            raise IndexError(f"{self.dataset_path}: sample {idx} of {len(self)}")
        length = self.config.sequence_length
        tokens, labels = (np.full(length, self.padding, dtype=np.int64) for _ in range(2))
        loss_mask, positions, begins = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.int64), np.zeros(length, dtype=bool)
        place = 0
        for conversation in self.order[self.sample_starts[idx] : self.sample_starts[idx + 1]]:
            first, end = int(self.ends[conversation - 1]) if conversation else 0, int(self.ends[conversation])
            here = slice(place, place + end - first - 1)
            tokens[here], labels[here] = self.tokens[first : end - 1], self.tokens[first + 1 : end]
            loss_mask[here] = self.answer[first + 1 : end]  # of the label: the answer's first token bears loss, whoever spoke before
            begins[place] = True
            filled = place + self._places(end - first - 1)
            positions[place:filled] = np.arange(filled - place)
            place = filled
        positions[place:] = np.arange(length - place)
        begins[place : place + 1] = True
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(positions),
            "document_begins": torch.from_numpy(begins),
        }


def _problem(tokens: np.ndarray, answer: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> str | None:
    if len(tokens) != len(answer) or not len(ends) or ends[-1] != len(tokens) or len(counts) != 3:
        return f"{len(tokens)} tokens, {len(answer)} marks, {len(ends)} conversations"
    return None


def pack(lengths: np.ndarray, capacity: int, num_samples: int | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which conversations make up which sample: (order int32, starts int64 [samples + 1]); sample i is order[starts[i] : starts[i + 1]].

    lengths: places that each conversation takes, `capacity` at most. They are taken in a random order, each epoch another (seeded by seed
    and epoch), and a sample ends where the next one does not fit. As many epochs as give num_samples samples, at least one whole one.
    """
    orders: list[np.ndarray] = []
    starts = [0]
    line = np.empty(0, dtype=np.int32)  # conversations behind the last start
    while num_samples is None or len(starts) <= num_samples:
        orders.append(np.random.RandomState([seed % 2**32, len(orders)]).permutation(len(lengths)).astype(np.int32))
        line = np.concatenate([line, orders[-1]])
        ends = np.concatenate([[0], np.cumsum(lengths[line], dtype=np.int64)])
        first, begun = 0, starts[-1]
        while (stop := int(np.searchsorted(ends, ends[first] + capacity, side="right")) - 1) < len(line):
            starts.append(begun + stop)
            first = stop
        line = line[first:]  # the next epoch may have more that fits
        if num_samples is None:
            break
    return np.concatenate(orders), np.array([*starts, starts[-1] + len(line)], dtype=np.int64)
