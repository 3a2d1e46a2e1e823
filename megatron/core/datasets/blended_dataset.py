"""One dataset out of several, each giving its share of any stretch of samples."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.index_cache import IndexCache, describe, description_hash
from megatron.core.datasets.utils import normalize

MAX_DATASETS = np.iinfo(np.int16).max + 1  # dataset_index is int16 on disk


class BlendedDataset(torch.utils.data.Dataset):
    """`size` samples of `datasets` in the proportion `weights`; sample i is from the corpus that is furthest behind its weight.

    size  None: as many samples as the datasets have together

    A sample is that of its dataset and `dataset_id`, the corpus's number in the blend. Raises ValueError when a corpus has too few samples.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], size: int | None, config: BlendedMegatronDatasetConfig) -> None:
        if not 0 < len(datasets) <= MAX_DATASETS or len(datasets) != len(weights):
            given = f"{len(datasets)} datasets with {len(weights)} weights"
            raise ValueError(f"a blend of {given}: give one weight each for 1 to {MAX_DATASETS} datasets")
        self.datasets = list(datasets)
        self.split = self.datasets[0].index_split
        self.weights = normalize(weights)
        self.size = sum(len(dataset) for dataset in self.datasets) if size is None else size
        self.config = config
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["datasets"] = [dataset.unique_identifiers for dataset in self.datasets]
        self.unique_identifiers["split"] = self.split.name
        self.unique_identifiers["weights"] = self.weights
        self.unique_identifiers["size"] = size
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = description_hash(self.unique_description)
        names = ("dataset_index", "dataset_sample_index")
        cache = IndexCache(config.path_to_cache, type(self).__name__, self.split.name, self.unique_description, names)
        self.dataset_index, self.dataset_sample_index = cache.load_or_build(
            lambda: build_blending_indices(np.array(self.weights), self.size),
            self._index_problem,
        )
        self._check_drawn()

    def _index_problem(self, *arrays: np.ndarray) -> str | None:
        return None if all(array.shape == (self.size,) for array in arrays) else f"the index arrays are not of {self.size} samples"

    def _check_drawn(self) -> None:
        drawn = np.bincount(self.dataset_index, minlength=len(self.datasets))
        for dataset, count in zip(self.datasets, drawn):
            if count > len(dataset):
                available = f"which has {len(dataset)}"
                raise ValueError(f"{dataset.dataset_path}: the blend draws {count} samples of its {self.split.name} split, {available}")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> dict[str, Any]:
        if not 0 <= idx < self.size:
            raise IndexError(f"sample {idx} of a blend of {self.size}")
        dataset_id = int(self.dataset_index[idx])
        return {"dataset_id": dataset_id, **self.datasets[dataset_id][int(self.dataset_sample_index[idx])]}
