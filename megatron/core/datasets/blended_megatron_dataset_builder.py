"""Turns a config into the datasets of the three splits, on all ranks, building each index once."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import Blend, BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import Split, get_blend_sizes, normalize
from megatron.core.utils import get_world_rank, world_is_initialized

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

        Rank 0 builds (it fills the index cache), then the others, which find the cache. What fails on one rank raises ValueError on all.
        All ranks must call this together.
        """
        needed = self.is_built_on_rank()
        if not world_is_initialized():
            return self._build_splits() if needed else [None] * len(Split)
        first = get_world_rank() == 0
        result = self._build_together(first)
        rest = self._build_together(needed and not first)
        return (result or rest or [None] * len(Split)) if needed else [None] * len(Split)

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
            return [self._one_dataset(None, split, self._interval(split), self.sizes[split.value]) for split in Split]
        blends = config.blend_per_split or [config.blend] * len(Split)
        return [self._build_split(split, blend) for split, blend in zip(Split, blends)]

    def _interval(self, split: Split) -> tuple[float, float] | None:
        return WHOLE if self.config.split_matrix is None else self.config.split_matrix[split.value]

    def _build_split(self, split: Split, blend: Blend | None) -> Any:
        interval, size = self._interval(split), self.sizes[split.value]
        if blend is None or interval is None:
            return None
        prefixes, weights = blend
        if split is Split.valid and self.config.multiple_validation_sets:
            return [self._one_dataset(prefix, split, interval, size) for prefix in prefixes]
        if weights is None and len(prefixes) == 1:
            return self._one_dataset(prefixes[0], split, interval, size)
        if weights is None:
            return self._blend_by_size(prefixes, split, interval, size)
        weights = normalize(weights)
        asked, blend_size = get_blend_sizes(weights, size, self.config.mid_level_dataset_surplus)
        datasets = [self._one_dataset(prefix, split, interval, count) for prefix, count in zip(prefixes, asked)]
        blended = self._blended(datasets, weights, blend_size)
        if blended is not None and size:
            drawn = np.bincount(blended.dataset_index[:size], minlength=len(prefixes))
            for prefix, weight in (pair for pair, count in zip(zip(prefixes, weights), drawn) if count == 0):
                logger.warning("%s: weight %g draws none of the %d %s samples", prefix, weight, size, split.name)
        return blended

    def _blend_by_size(self, prefixes: list[str], split: Split, interval: tuple[float, float], size: int | None) -> Any:
        """One epoch of each corpus, blended in proportion to its samples."""
        datasets = [self._one_dataset(prefix, split, interval, None if size != 0 else 0) for prefix in prefixes]
        counts = [0 if dataset is None else len(dataset) for dataset in datasets]
        if size is not None and size > sum(counts):
            message = "%d %s samples are wanted, one epoch of all corpora has %d and ends there; give weights for more epochs"
            logger.warning(message, size, split.name, sum(counts))
            size = sum(counts)
        return self._blended(datasets, counts, size)

    def _blended(self, datasets: list[Any], weights: Sequence[float], size: int | None) -> Any:
        if any(dataset is None for dataset in datasets):  # only when no sample is wanted, see _one_dataset
            return None
        return BlendedDataset(datasets, weights, size, self.config)

    def _one_dataset(self, prefix: str | None, split: Split, interval: tuple[float, float] | None, size: int | None) -> Any:
        if interval is None:
            return None
        low_level = self.cls.build_low_level_dataset(prefix, self.config)
        count = self.cls.numel_low_level_dataset(low_level)
        begin, end = (round(fraction * float(count)) for fraction in interval)
        if begin == end:
            if size == 0:
                return None
            given = f"none of its {count} documents (split {self.config.split})"
            raise ValueError(f"{prefix}: the {split.name} split gets {given}; give it a larger share or other data")
        return self.cls(low_level, prefix, np.arange(begin, end, dtype=np.int32), size, split, self.config)
