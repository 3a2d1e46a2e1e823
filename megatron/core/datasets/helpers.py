"""Builds the document, sample, shuffle and blending indices: which tokens make up which sample. Numpy alone, nothing to compile.

Three arrays describe a dataset that runs over its documents for some epochs, in the order that training asks for:

    document_index  int32 or int64 [epochs * documents]   documents in the order in which their tokens are read
    sample_index    int32 or int64 [samples + 1, 2]   where sample i starts: (position in document_index, token inside that document)
    shuffle_index   uint32 or int64 [samples]    training sample j is sample shuffle_index[j]

Sample i takes the tokens i * sequence_length up to (i + 1) * sequence_length (inclusive with `extra` = 1: its last one is only a label).
The functions that have a `plain_` twin are compared with it by the tests.
"""

import logging
from dataclasses import dataclass
from typing import Literal

import numpy as np

logger = logging.getLogger(__name__)
CHUNK = 1 << 18  # documents handled at a time: the working set stays in the cache
SEPARATE_EPOCH_THRESHOLD = 0.80
INT32_MAX = np.iinfo(np.int32).max


@dataclass(frozen=True)
class EpochPlan:
    """How often a dataset is read. `separate`: the last epoch is shuffled apart, after `samples_before` samples of the others."""

    num_epochs: int
    separate: bool
    samples_before: int


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    extra: int = 1,
    separate_below: float = SEPARATE_EPOCH_THRESHOLD,
) -> EpochPlan:
    """The fewest epochs (at least one) whose tokens give `num_samples` samples; one epoch when that is None.

    A last epoch of which less than `separate_below` (Megatron-LM's 0.80) is needed would mix rarely used documents into all of training:
    it is shuffled on its own. Raises ValueError when there is no token at all.
    """
    if tokens_per_epoch < 1:
        raise ValueError("there is not one token in its documents")
    if num_samples is None:
        return EpochPlan(1, False, 0)
    num_epochs = max(1, -(-(num_samples * sequence_length + extra) // tokens_per_epoch))
    if num_epochs == 1:
        return EpochPlan(1, False, 0)
    samples_before = ((num_epochs - 1) * tokens_per_epoch - extra) // sequence_length
    samples_per_epoch = (tokens_per_epoch - extra) // sequence_length
    separate = num_samples - samples_before < int(separate_below * samples_per_epoch)
    return EpochPlan(num_epochs, separate, samples_before)


def build_document_index(documents: np.ndarray, num_epochs: int, random: np.random.RandomState, separate_last_epoch: bool) -> np.ndarray:
    """`documents` (ids) repeated `num_epochs` times and shuffled together, the last epoch apart if asked: [epochs * documents], int32.

    Ids beyond int32 make it int64.
    """
    dtype = np.int64 if documents.max(initial=0) > INT32_MAX else np.int32
    index = np.tile(documents.astype(dtype, copy=False), num_epochs)
    split = len(index) - len(documents) if separate_last_epoch and num_epochs > 1 else len(index)
    random.shuffle(index[:split])
    if split < len(index):
        random.shuffle(index[split:])
    return index


def document_ids(begin: int, end: int) -> np.ndarray:
    """Ids of the documents from `begin` to `end`: int32, int64 where they do not fit."""
    return np.arange(begin, end, dtype=np.int64 if end > INT32_MAX else np.int32)


def count_samples(num_tokens: int, sequence_length: int, extra: int = 1, drop_last_partial: bool = True) -> int:
    """Samples that `num_tokens` tokens give."""
    usable = max(num_tokens - extra, 0)
    return usable // sequence_length if drop_last_partial else -(-usable // sequence_length)


def sample_index_dtype(num_documents: int, longest: int) -> type[np.signedinteger]:
    """int32, or int64 when a position among `num_documents` or an offset up to `longest` does not fit."""
    return np.int64 if max(num_documents, longest) > INT32_MAX else np.int32


def build_sample_index(
    lengths: np.ndarray,
    document_index: np.ndarray,
    sequence_length: int,
    num_tokens: int,
    extra: int = 1,
    drop_last_partial: bool = True,
    dtype: type[np.signedinteger] | None = None,
) -> np.ndarray:
    """Where each sample starts, and after them where the last one ends: [samples + 1, 2].

    lengths         tokens of each document, by document id
    document_index  documents in reading order; empty ones are allowed
    num_tokens      sum of the lengths over document_index (its callers know it; summing again would take a third of the time)
    extra           tokens that a sample has beyond sequence_length: the 1 that it shares with the next sample, or 0
    """
    samples = count_samples(num_tokens, sequence_length, extra, drop_last_partial)
    index = np.zeros((samples + 1, 2), dtype=dtype or sample_index_dtype(len(document_index), int(lengths.max(initial=0))))
    whole = count_samples(num_tokens, sequence_length, extra)
    side: Literal["left", "right"] = "right" if extra else "left"  # without a shared token, a sample may end where its document does
    row, passed = 1, 0  # the next boundary to place; tokens before the chunk
    for start in range(0, len(document_index), CHUNK):
        chunk_lengths = lengths[document_index[start : start + CHUNK]]
        ends = np.cumsum(chunk_lengths, dtype=np.int64)
        stop = min(whole, (passed + int(ends[-1]) - extra) // sequence_length) + 1
        if stop > row:
            boundaries = np.arange(row, stop, dtype=np.int64) * sequence_length - passed
            position = np.searchsorted(ends, boundaries, side=side)
            index[row:stop, 0] = position + start
            index[row:stop, 1] = boundaries - (ends[position] - chunk_lengths[position])
            row = stop
        passed += int(ends[-1])
    if samples > whole:  # a last sample that is not full ends with the last document
        index[-1] = len(document_index) - 1, int(lengths[document_index[-1]]) - extra
    return index


def plain_build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, sequence_length: int, extra: int = 1, drop_last_partial: bool = True
) -> np.ndarray:
    """`build_sample_index`, token by token."""
    places = [(position, offset) for position, document in enumerate(document_index) for offset in range(int(lengths[document]))]
    rows = [(0, 0)]
    for start in range(0, len(places), sequence_length):
        end = start + sequence_length
        if end + extra <= len(places):
            last = places[end] if extra else (places[end - 1][0], places[end - 1][1] + 1)
        elif start + extra < len(places) and not drop_last_partial:
            last = (len(document_index) - 1, int(lengths[document_index[-1]]) - extra)
        else:
            break
        rows.append(last)
    return np.array(rows)


def build_shuffle_index(num_samples: int, total_samples: int, random: np.random.RandomState) -> np.ndarray:
    """A random order of the first `num_samples` samples, followed by one of those up to `total_samples`. uint32, int64 beyond its range."""
    dtype = np.int64 if total_samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(total_samples, dtype=dtype)
    random.shuffle(index[:num_samples])
    if num_samples < total_samples:
        random.shuffle(index[num_samples:])
    return index


def build_gpt_indices(
    lengths: np.ndarray,
    documents: np.ndarray,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    extra: int = 1,
    drop_last_partial: bool = True,
    separate_below: float = SEPARATE_EPOCH_THRESHOLD,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """document_index, sample_index, shuffle_index for at least `num_samples` samples (None: one epoch) out of `documents`.

    One RandomState(seed) orders first the documents, then the samples. All samples of the whole epochs are kept, also beyond num_samples.
    """
    tokens_per_epoch = int(lengths[documents].sum(dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, sequence_length, num_samples, extra, separate_below)
    if plan.separate:
        needed = (num_samples or 0) - plan.samples_before
        logger.info("the last of %d epochs, of which %d samples are needed, is shuffled apart from the others", plan.num_epochs, needed)
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, plan.num_epochs, random, plan.separate)
    num_tokens = tokens_per_epoch * plan.num_epochs
    sample_index = build_sample_index(lengths, document_index, sequence_length, num_tokens, extra, drop_last_partial)
    samples = len(sample_index) - 1
    shuffle_index = build_shuffle_index(plan.samples_before if plan.separate else samples, samples, random)
    return document_index, sample_index, shuffle_index


LANE = 2048  # samples that one lane of the blending order covers
LANE_NUMBERS = 20_480  # float64 of a matrix [corpora, lanes] that is worked on at once: 160 KB, a core's cache holds a few
FEW = 24  # corpora up to which it is faster to work on whole matrices than on what was drawn
NUMBERED_TOGETHER = 1 << 16  # samples, likewise
SETTLE = 128  # samples by which a lane, started from rounded counts, has nearly always fallen into the true order


def build_blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which corpus gives sample i of a blend, and which of its samples: int16 [size], int64 [size].

    Sample i comes from the corpus with the largest `weights[d] * max(i, 1) - drawn[d]`, the first of equals; weights sum to 1.

    The rule is a loop over samples. Here stretches of it, `LANE` samples each, run side by side as vectors. A lane needs the counts
    drawn before it: they are guessed by rounding and run in over the `SETTLE` samples before. Then each lane's start is compared
    with the end of the one before it, and lanes that guessed wrongly run again, so the result is always that of the loop.
    """
    weights = np.asarray(weights, dtype=np.float64)
    lanes = max(1, -(-size // LANE))
    steps = min(LANE, size)
    first = np.arange(lanes, dtype=np.int64) * LANE
    early = np.maximum(first - SETTLE, 0)
    start = _rounded_counts(weights, early)
    _run_lanes(weights, early[1:], start[:, 1:], SETTLE, None)
    drawn = start.copy()
    picks = np.zeros((steps, lanes), dtype=_smallest_dtype(weights))
    _run_lanes(weights, first, drawn, steps, picks)
    while True:
        wrong = 1 + np.flatnonzero((drawn[:, :-1] != start[:, 1:]).any(axis=0))
        if not len(wrong):
            break
        start[:, wrong] = drawn[:, wrong - 1]
        counts, again = start[:, wrong], picks[:, wrong]
        _run_lanes(weights, first[wrong], counts, steps, again)
        drawn[:, wrong], picks[:, wrong] = counts, again
    dataset_index = np.ascontiguousarray(picks.T).reshape(-1)[:size].astype(np.int16)
    return dataset_index, _number_draws(dataset_index, len(weights))


def _number_draws(dataset_index: np.ndarray, num_datasets: int) -> np.ndarray:
    """For each draw of a blend how often its corpus was drawn before: int64 [size]."""
    numbers = np.empty(len(dataset_index), dtype=np.int64)
    drawn = np.zeros(num_datasets, dtype=np.int64)
    for start in range(0, len(dataset_index), NUMBERED_TOGETHER):
        picks, part = dataset_index[start : start + NUMBERED_TOGETHER], numbers[start : start + NUMBERED_TOGETHER]
        for corpus in np.unique(picks) if num_datasets > 32 else range(num_datasets):
            places = np.flatnonzero(picks == corpus)
            part[places] = np.arange(drawn[corpus], drawn[corpus] + len(places))
            drawn[corpus] += len(places)
    return numbers


def _rounded_counts(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Whole numbers near weights[d] * samples[k] whose sum over d is samples[k]: float64 [D, K] (largest remainders first)."""
    ideal = weights[:, None] * samples
    counts = np.floor(ideal)
    missing = samples - counts.sum(axis=0)
    rank = np.argsort(np.argsort(counts - ideal, axis=0, kind="stable"), axis=0)
    return counts + (rank < missing)


def _smallest_dtype(weights: np.ndarray) -> type[np.integer]:
    return np.uint8 if len(weights) <= 256 else np.int16


def _run_lanes(weights: np.ndarray, first: np.ndarray, drawn: np.ndarray, steps: int, picks: np.ndarray | None) -> None:
    """Draw `steps` samples in each lane k, from sample number first[k] on: adds to `drawn` [D, K], fills `picks` [steps, K]."""
    width = max(64, LANE_NUMBERS // len(weights))
    for begin in range(0, len(first), width):
        block = slice(begin, begin + width)
        counts = np.ascontiguousarray(drawn[:, block])
        _run_block(weights, first[block], counts, steps, None if picks is None else picks[:, block])
        drawn[:, block] = counts


def _run_block(weights: np.ndarray, first: np.ndarray, drawn: np.ndarray, steps: int, picks: np.ndarray | None) -> None:
    """`_run_lanes` for as many lanes as the cache of a core holds."""
    shape = len(weights), len(first)
    behind, largest, is_pick = np.empty(shape), np.empty(shape[1]), np.empty(shape, dtype=bool)
    kind, is_few = _smallest_dtype(weights), shape[0] <= FEW
    ids, chosen, picked = np.arange(shape[0], dtype=kind)[:, None], np.empty(shape, dtype=kind), np.empty(shape[1], dtype=kind)
    number, column, lanes = first.astype(np.float64), weights[:, None], np.arange(shape[1])
    for step in range(steps):
        np.multiply(column, np.maximum(number, 1.0), out=behind)
        np.subtract(behind, drawn, out=behind)
        np.maximum.reduce(behind, axis=0, out=largest)
        np.equal(behind, largest, out=is_pick)
        if np.count_nonzero(is_pick) != shape[1]:  # equals: the first one is drawn
            pick = is_pick.argmax(axis=0)
            is_pick[:] = False
            is_pick[pick, lanes] = True
        if is_few:
            np.add(drawn, is_pick, out=drawn)
            np.add.reduce(np.multiply(is_pick, ids, out=chosen), axis=0, dtype=kind, out=picked)
        else:
            corpus, lane = np.divmod(np.flatnonzero(is_pick), shape[1])
            picked[lane] = corpus
            drawn[corpus, lane] += 1
        if picks is not None:
            picks[step] = picked
        number += 1


def plain_build_blending_indices(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """`build_blending_indices`, sample by sample."""
    drawn = np.zeros(len(weights))
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    for i in range(size):
        corpus = int(np.argmax(weights * max(i, 1) - drawn))
        dataset_index[i], sample_index[i] = corpus, drawn[corpus]
        drawn[corpus] += 1
    return dataset_index, sample_index
