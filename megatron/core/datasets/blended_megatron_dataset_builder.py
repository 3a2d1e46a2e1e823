"""Turns a config into the datasets of the three splits, on all ranks, building each index once."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.cache_builder import builds_here
from megatron.core.datasets.helpers import document_ids
from megatron.core.datasets.index_cache import trusted
from megatron.core.datasets.object_storage import is_remote
from megatron.core.datasets.planned_dataset import PlannedDataset, Stream, members_of, reseeded
from megatron.core.datasets.sample_plan import SamplePlan
from megatron.core.datasets.utils import Split, get_blend_sizes, log_single_rank, normalize
from megatron.core.utils import world_is_initialized

logger = logging.getLogger(__name__)
WHOLE = (0.0, 1.0)


class BlendedMegatronDatasetBuilder:
    """Builds `cls` datasets (and blends of them) for train, valid and test.

    cls               GPTDataset, or a class with its constructor and its two static methods
    sizes             samples wanted of train, valid, test; None: one epoch
    is_built_on_rank  () -> whether this rank needs the datasets
    """

    def __init__(
        self, cls: Any, sizes: Sequence[int | None], is_built_on_rank: Callable[[], bool], config: BlendedMegatronDatasetConfig
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(f"sizes {list(sizes)} must be those of train, valid and test")
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config

    def build(self) -> list[Any]:
        """[train, valid, test]: a dataset, None for a split without documents or on a rank that needs none, and for valid a list with
        `multiple_validation_sets`.

        One rank for each index cache builds (cache_builder.py finds out which), then the others, which find the cache. What fails on one
        rank raises ValueError on all. All ranks must call this together.

        A dataset of training or validation has `sample_plan` (SamplePlan) where its size is known: what to save for a later restart.
        """
        needed = self.is_built_on_rank()
        if not world_is_initialized():
            return self._build_splits() if needed else [None] * len(Split)
        first = builds_here(self._cache_folders(), needed)
        result = self._build_together(first)
        with trusted():
            rest = self._build_together(needed and not first)
        return (result or rest or [None] * len(Split)) if needed else [None] * len(Split)

    def _cache_folders(self) -> list[str]:
        """Folders that this rank's caches lie in, or below."""
        config = self.config
        prefixes = [prefix for blend in [config.blend, *(config.blend_per_split or [])] if blend is not None for prefix in blend[0]]
        beside = [] if config.path_to_cache else [os.path.dirname(prefix) or "." for prefix in prefixes if not is_remote(prefix)]
        return sorted({folder for folder in (config.path_to_cache, config.object_storage_cache_path, *beside) if folder})

    def _build_together(self, mine: bool) -> list[Any] | None:
        """Build here if `mine`, and tell all ranks how that went: nobody goes on to wait for a rank that has failed."""
        result, error = None, None
        if mine:
            try:
                result = self._build_splits()
            except Exception as caught:
                error = caught
        reports: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                raise ValueError(f"rank {rank} could not build the datasets: {report}")
        return result

    def _build_splits(self) -> list[Any]:
        config = self.config
        if config.mock:
            return [self._build_split(split, ([None], None)) for split in Split]
        blends = config.blend_per_split or [config.blend] * len(Split)
        return [self._build_split(split, blend) for split, blend in zip(Split, blends)]

    def _build_split(self, split: Split, blend: Any) -> Any:
        if blend is None or self._interval(split) is None:
            return None
        prefixes, weights = blend
        plans = (self.config.data_order or {}).get(split.name, [])
        if split is Split.valid and self.config.multiple_validation_sets:
            states = plans if len(plans) == len(prefixes) else [None] * len(prefixes)
            return [self._build_blend(split, [prefix], None, state) for prefix, state in zip(prefixes, states)]
        return self._build_blend(split, prefixes, weights, plans[0] if len(plans) == 1 else None)

    def _build_blend(self, split: Split, prefixes: list[str | None], weights: list[float] | None, state: Any) -> Any:
        """The dataset of a blend, or of one corpus: for a first start, or going on from the plan `state` of an earlier one."""
        size = self.sizes[split.value]
        opened = [self._open(prefix, split) for prefix in prefixes]
        corpora = [corpus for corpus in opened if corpus is not None]
        if len(corpora) < len(opened):  # only when no sample is wanted
            return None
        shares = None if weights is None else normalize(weights)
        if state is None or size is None:
            return self._first_start(split, corpora, shares, size)
        return self._going_on(split, corpora, shares, size, state)

    def _first_start(
        self, split: Split, corpora: list["_Corpus"], weights: list[float] | None, size: int | None, frozen: list[int | None] | None = None
    ) -> Any:
        """Megatron-LM's dataset for `size` samples. `frozen`: samples to ask of each corpus, as an earlier start did."""
        asked, total = self._asked(len(corpora), weights, size)
        asked = asked if frozen is None else frozen
        datasets = [corpus.dataset(count) for corpus, count in zip(corpora, asked)]
        by_size = len(corpora) > 1 and weights is None
        if len(corpora) == 1 and weights is None:
            dataset, shares = datasets[0], [1.0]
        else:
            dataset = self._blended(split, corpora, datasets, None if size is None else weights, size if by_size else total)
            shares, size = dataset.weights, dataset.size if by_size else size
        if size is not None and split is not Split.test:
            members = members_of([c.low_level for c in corpora], [c.prefix for c in corpora], asked)
            dataset.sample_plan = SamplePlan.first(size, members, shares, by_size)
        return dataset

    def _asked(self, num_corpora: int, weights: list[float] | None, size: int | None) -> tuple[list[int | None], int | None]:
        """(samples to ask of each corpus, None for one epoch; samples of the whole)."""
        if weights is not None:
            return get_blend_sizes(weights, size, self.config.mid_level_dataset_surplus)
        return [size] if num_corpora == 1 else [None] * num_corpora, size

    def _blended(self, split: Split, corpora: list["_Corpus"], datasets: list[Any], weights: list[float] | None, size: int | None) -> Any:
        """Without weights one epoch of each corpus, in proportion to its samples. Weights without a size mean the same."""
        counts = [len(dataset) for dataset in datasets]
        if weights is None and size is not None and size > sum(counts):
            message = "%d %s samples are wanted, one epoch of all corpora has %d and ends there; give weights for more epochs"
            log_single_rank(logger, logging.WARNING, message, size, split.name, sum(counts))
            size = sum(counts)
        blended = BlendedDataset(datasets, counts if weights is None else weights, size, self.config)
        asked = self.sizes[split.value]
        if weights is not None and asked:
            drawn = np.bincount(blended.dataset_index[:asked], minlength=len(corpora))
            for corpus, weight, count in zip(corpora, weights, drawn):
                if count == 0:
                    message = "%s: weight %g draws none of the %d %s samples"
                    log_single_rank(logger, logging.WARNING, message, corpus.prefix, weight, asked, split.name)
        return blended

    def _going_on(self, split: Split, corpora: list["_Corpus"], weights: list[float] | None, size: int, state: dict[str, Any]) -> Any:
        """What a run that was saved with the plan `state` reads, when it now asks for `size` samples of these corpora."""
        plan, position, consumed = SamplePlan.from_state(state), int(state["position"]), list(state["consumed"])
        remaining, _ = self._asked(len(corpora), weights, max(0, size - position))
        members = members_of([corpus.low_level for corpus in corpora], [corpus.prefix for corpus in corpora], remaining)
        if plan.has_blend([member.identity for member in members], weights):
            if len(plan.segments) == 1:
                dataset = self._first_start(split, corpora, weights, plan.size, [member.asked for member in plan.members])
                if size <= len(dataset):
                    return dataset
        else:
            by_size = weights is None and len(corpora) > 1
            shares = [float(len(corpus.dataset(None))) for corpus in corpora] if by_size else weights or [1.0]
            before, plan = plan, plan.continued(position, consumed, members, shares, by_size)
            log_single_rank(logger, logging.WARNING, "%s", describe_change(split, before, plan))
        current = plan.current.members
        streams = {member: Stream(corpus.dataset, plan.members[member].asked) for member, corpus in zip(current, corpora)}
        return PlannedDataset(plan, size, streams, split, self.config)

    def _interval(self, split: Split) -> tuple[float, float] | None:
        return WHOLE if self.config.split_matrix is None else self.config.split_matrix[split.value]

    def _open(self, prefix: str | None, split: Split) -> "_Corpus | None":
        """None: it has no documents for this split, of which no sample is wanted."""
        low_level = self.cls.build_low_level_dataset(prefix, self.config)
        count = self.cls.numel_low_level_dataset(low_level)
        begin, end = (round(fraction * float(count)) for fraction in self._interval(split) or WHOLE)
        if begin == end:
            if self.sizes[split.value] == 0:
                return None
            given = f"none of its {count} documents (split {self.config.split})"
            raise ValueError(f"{prefix}: the {split.name} split gets {given}; give it a larger share or other data")
        return _Corpus(self.cls, low_level, prefix, document_ids(begin, end), split, self.config)


@dataclass(frozen=True)
class _Corpus:
    """The documents of one corpus that a split takes."""

    cls: Any
    low_level: Any
    prefix: str | None
    documents: np.ndarray
    split: Split
    config: BlendedMegatronDatasetConfig

    def dataset(self, num_samples: int | None, epoch: int = 0) -> Any:
        """Its dataset for so many samples (None: one epoch); `epoch` above 0: in an order of its own."""
        return self.cls(self.low_level, self.prefix, self.documents, num_samples, self.split, reseeded(self.config, epoch))


def describe_change(split: Split, before: SamplePlan, after: SamplePlan) -> str:
    """What a new blend means for each of its corpora, in one line."""
    known = {member.identity for member in before.members}
    names = {member.name for member in before.members}
    parts = []
    for place, weight in zip(after.current.members, after.current.weights):
        member = after.members[place]
        if member.identity in known:
            note = f"goes on after {after.current.consumed[place]} samples"
        elif member.name in names:
            note = "begins at its first sample: its content is not what it was"
        else:
            note = "is new"
        parts.append(f"{member.name} (weight {weight:g}) {note}")
    return f"another {split.name} blend from sample {after.current.start} on: {'; '.join(parts)}"
