"""One sample as training sees it, in letters. The one file of this folder that imports torch, by the datasets that it looks into."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

PIECE = 24  # letters of a token's text in the table


@dataclass(frozen=True)
class Stretch:
    """The tokens of a sample that come from one sequence: [begin, end) in the sample, token `offset` of the sequence onwards.

    `document` is the one that the sequence belongs to; most pairs have one sequence a document.
    """

    document: int
    offset: int
    begin: int
    end: int


def build_split(config: GPTDatasetConfig, split: Split, num_samples: int | None) -> Any:
    """The dataset (or blend) of one split as the trainers build it. Raises ValueError where it has no documents."""
    sizes = [num_samples if other is split else 0 for other in Split]
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[split.value]
    if dataset is None:
        raise ValueError(f"the {split.name} split is empty: --split {config.split} gives it no documents")
    return dataset


def stretches(dataset: GPTDataset, sample: int) -> list[Stretch]:
    """Which documents sample `sample` is cut out of, its last label included, in order."""
    place = int(dataset.shuffle_index[sample])
    (first, offset), (last, end_offset) = dataset.sample_index[place].tolist(), dataset.sample_index[place + 1].tolist()
    found, begin = [], 0
    for position in range(first, last + 1):
        sequence = int(dataset.document_index[position])  # so called, but it numbers sequences
        start = offset if position == first else 0
        stop = end_offset + dataset.extra if position == last else int(dataset.dataset.sequence_lengths[sequence])
        if stop > start:
            document = int(np.searchsorted(dataset.dataset.document_indices, sequence, side="right")) - 1
            found.append(Stretch(document, start, begin, begin + stop - start))
            begin += stop - start
    return found


def sample_lines(config: GPTDatasetConfig, split: Split, num_samples: int | None, number: int, rows: int) -> Iterator[str]:
    """Where sample `number` comes from, a table of its first `rows` positions (0: all), and its text by document."""
    whole = build_split(config, split, num_samples)
    if not 0 <= number < len(whole):
        raise ValueError(f"sample {number}: the {split.name} split has {len(whole)} samples, from 0 to {len(whole) - 1}")
    dataset, own = whole, number
    if isinstance(whole, BlendedDataset):
        dataset, own = whole.datasets[int(whole.dataset_index[number])], int(whole.dataset_sample_index[number])
    item = whole[number]
    sample = {name: item[name].numpy() for name in ("tokens", "labels", "loss_mask", "position_ids")}
    parts = stretches(dataset, own)
    where = f", its sample {own}" if dataset is not whole else ""
    yield f"sample {number} of the {len(whole)} of the {split.name} split: from {dataset.dataset_path}{where}"
    masked = int((sample["loss_mask"] == 0).sum())
    yield f"{len(sample['tokens'])} tokens of {len(parts)} documents, {masked} of them without loss"
    for part in parts:
        yield f"  positions {part.begin} to {part.end - 1}: document {part.document} from its token {part.offset} on"
    tokenizer = config.tokenizer
    yield from _table(sample, parts, tokenizer, rows)
    ids = [*sample["tokens"].tolist(), int(sample["labels"][-1])]
    for part in parts:
        yield f"text of document {part.document}, its tokens {part.offset} to {part.offset + part.end - part.begin - 1}:"
        yield tokenizer.detokenize(ids[part.begin : part.end])


def _table(sample: dict[str, np.ndarray], parts: list[Stretch], tokenizer: Any, rows: int) -> Iterator[str]:
    length = len(sample["tokens"])
    shown = length if rows == 0 else min(rows, length)
    starts = {part.begin: part for part in parts}
    yield f"{'place':>6} {'token':>7} {'label':>7} {'loss':>4} {'position':>8}  text"
    for place in range(shown):
        if place in starts and place:
            yield f"{'-' * 37} document {starts[place].document}"
        token, label = int(sample["tokens"][place]), int(sample["labels"][place])
        loss, position = sample["loss_mask"][place], int(sample["position_ids"][place])
        yield f"{place:>6} {token:>7} {label:>7} {loss:>4g} {position:>8}  {_piece(tokenizer, token)}"
    if shown < length:
        yield f"... {length - shown} more positions (--rows 0 prints all)"


def _piece(tokenizer: Any, token: int) -> str:
    text = ascii(tokenizer.detokenize([token]))[1:-1] if token < tokenizer.vocab_size else "(beyond the vocabulary)"
    return text if len(text) <= PIECE else text[: PIECE - 3] + "..."
