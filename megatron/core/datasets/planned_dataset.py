"""Training data of a run that asks for more, or for another blend, than at its first start: sample_plan.py over corpora on disk."""

import copy
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.index_cache import IndexCache, describe
from megatron.core.datasets.sample_plan import Member, SamplePlan, Segment, place_in_stream
from megatron.core.datasets.utils import Split

LOOKED_AT = 4096  # document lengths, and tokens, from each end of a corpus that its identity is made of


def corpus_identity(low_level: Any, prefix: str | None) -> str:
    """What tells this corpus from others wherever it lies: how many sequences and tokens it has, and what is at its ends.

    A low-level dataset that has no lengths or no `get` is known by its prefix.
    """
    lengths = getattr(low_level, "sequence_lengths", None)
    if lengths is None or not len(lengths) or not hasattr(low_level, "get"):
        return str(prefix)
    ends = np.concatenate([lengths[:LOOKED_AT], lengths[-LOOKED_AT:]])
    crc = zlib.crc32(np.ascontiguousarray(ends, dtype="<i8").tobytes())
    for document in (0, len(lengths) - 1):
        tokens = low_level.get(document, 0, min(LOOKED_AT, int(lengths[document])))
        crc = zlib.crc32(np.ascontiguousarray(tokens, dtype="<i8").tobytes(), crc)
    index = getattr(low_level, "index", None)
    size = f"{index.bin_size} bytes, " if index is not None else ""
    return f"{len(lengths)} sequences, {size}{crc:08x}"


class Stream:
    """All samples of one corpus in the order in which a run takes them: those of its first epochs, then further epochs without end.

    make   (samples asked or None for one epoch, epoch) -> a dataset; epoch 0 is the run's first stretch, each has a shuffle of its own
    asked  samples asked of it at first
    """

    def __init__(self, make: Callable[[int | None, int], Any], asked: int | None) -> None:
        self.first = make(asked, 0)
        # one sample of an epoch is the whole epoch (of a corpus shorter than a sample: as many as give one)
        self._epoch = lru_cache(maxsize=2)(lambda epoch: make(1, epoch))

    def prepare(self, count: int) -> None:
        """Build, in the index cache, what the first `count` samples need."""
        beyond = count - len(self.first)
        if beyond > 0:
            for epoch in range(1, 1 + -(-beyond // len(self._epoch(1)))):
                self._epoch(epoch)

    def __getitem__(self, number: int) -> Any:
        if number < len(self.first):
            return self.first[number]
        epoch, index = place_in_stream(number, len(self.first), len(self._epoch(1)))
        return self._epoch(epoch)[index]


class PlannedDataset(torch.utils.data.Dataset):
    """The first `size` global samples of a plan. Every sample is that of its corpus and `dataset_id`, its number in its segment's blend.

    streams  corpora of the current segment, by their number in the plan
    """

    def __init__(self, plan: SamplePlan, size: int, streams: dict[int, Stream], split: Split, config: BlendedMegatronDatasetConfig) -> None:
        self.sample_plan = plan
        self.size = size
        self.streams = streams
        self.split = self.index_split = split
        self.config = config
        self.dataset_index, self.dataset_sample_index = self._draws(plan.current, max(0, size - plan.current.start))
        drawn = np.bincount(self.dataset_index, minlength=len(plan.current.members))
        for member, count in zip(plan.current.members, drawn.tolist()):
            streams[member].prepare(plan.current.consumed[member] + count)

    @property
    def datasets(self) -> list[Any]:
        """The first stretch of each corpus of the current blend."""
        return [self.streams[member].first for member in self.sample_plan.current.members]

    @property
    def weights(self) -> tuple[float, ...]:
        return self.sample_plan.current.weights

    def _draws(self, segment: Segment, count: int) -> tuple[np.ndarray, ...]:
        """SamplePlan.draws by the index cache."""
        if len(segment.members) == 1 or count == 0:
            return self.sample_plan.draws(segment, count)
        identifiers: OrderedDict[str, Any] = OrderedDict([("class", type(self).__name__), ("weights", segment.weights), ("size", count)])
        names = ("dataset_index", "dataset_sample_index")
        cache = IndexCache(self.config.path_to_cache, type(self).__name__, self.split.name, describe(identifiers), names)

        def problem(*arrays: np.ndarray) -> str | None:
            return None if all(array.shape == (count,) for array in arrays) else f"the index arrays are not of {count} samples"

        return cache.load_or_build(lambda: build_blending_indices(np.array(segment.weights), count), problem)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        segment = self.sample_plan.current
        if not segment.start <= idx < self.size:
            raise IndexError(f"sample {idx}: the run goes on from {segment.start} and has {self.size} samples")
        pick = int(self.dataset_index[idx - segment.start])
        member = segment.members[pick]
        number = segment.consumed[member] + int(self.dataset_sample_index[idx - segment.start])
        return {"dataset_id": pick, **self.streams[member][number]}


def members_of(low_levels: Sequence[Any], prefixes: Sequence[str | None], asked: Sequence[int | None]) -> list[Member]:
    """The corpora of a blend for a plan; one that is in the blend twice is told apart by its turn."""
    found: list[Member] = []
    seen: dict[str, int] = {}
    for low_level, prefix, count in zip(low_levels, prefixes, asked):
        identity = corpus_identity(low_level, prefix)
        seen[identity] = turn = seen.get(identity, 0) + 1
        found.append(
            Member("made-up data" if prefix is None else prefix, identity if turn == 1 else f"{identity}, for the {turn}. time", count)
        )
    return found


def reseeded(config: BlendedMegatronDatasetConfig, epoch: int) -> BlendedMegatronDatasetConfig:
    """The config of a further epoch, which is shuffled by the run's seed + its number."""
    if epoch == 0:
        return config
    changed = copy.copy(config)
    changed.random_seed = (config.random_seed + epoch) % 2**32
    return changed
