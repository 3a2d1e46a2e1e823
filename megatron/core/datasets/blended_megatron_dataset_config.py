"""What to train on: corpora, how they are split and blended, and how long a sample is. Torch-free."""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.datasets.utils import Split, convert_split_vector_to_split_matrix, normalize, parse_and_normalize_split

Blend = tuple[list[str], list[float] | None]


@dataclass
class BlendedMegatronDatasetConfig:
    """Settings of every dataset that BlendedMegatronDatasetBuilder builds. Wrong ones raise one ValueError that lists all problems."""

    random_seed: int
    sequence_length: int
    """tokens of a sample"""
    blend: Blend | None = None
    """(prefixes, weights) divided by `split`; weights None: each corpus by its size"""
    blend_per_split: list[Blend | None] | None = None
    """a blend each for train, valid and test, used whole"""
    multiple_validation_sets: bool = False
    """keep the corpora of the validation split apart: `build` gives a list of datasets for it, each with the whole size"""
    split: str | None = None
    """relative weights of train, valid and test, over documents: "969,30,1\""""
    split_matrix: list[tuple[float, float] | None] | None = field(init=False, default=None)
    path_to_cache: str | None = None
    """folder of the index arrays; None: a folder `<prefix>/cache/GPTDataset_indices` for each corpus"""
    mmap_bin_files: bool = True
    mock: bool = False
    """made-up data, no files"""
    tokenizer: Any = None
    """needs `eod` and `unique_identifiers`"""
    mid_level_dataset_surplus: float = 0.005
    """fraction of samples built beyond each corpus's share of a blend"""

    data_order: dict[str, list[dict[str, Any]]] | None = None
    """where a run that is taken up again stands: for "train" and "valid" the plan of each of their datasets (SamplePlan.state_dict)"""
    object_storage_cache_path: str | None = None
    """local folder for corpora whose prefix is a URL such as s3://bucket/corpus"""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError("\n".join(problems))
        if self.split is not None:
            self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))
        elif self.mock:
            self.split_matrix = convert_split_vector_to_split_matrix(normalize([1.0] * len(Split)))

    def problems(self) -> list[str]:
        """What is wrong with these settings, one line each."""
        found = []
        if self.sequence_length < 1:
            found.append(f"sequence_length {self.sequence_length} must be at least 1")
        if self.mid_level_dataset_surplus < 0:
            found.append(f"mid_level_dataset_surplus {self.mid_level_dataset_surplus} must not be negative, 0.005 is usual")
        if sum((self.mock, self.blend is not None, self.blend_per_split is not None)) != 1:
            found.append("give exactly one of blend (--data-path), blend_per_split (--train-data-path ...) and mock (--mock-data)")
        if self.blend is not None and self.split is None:
            found.append("blend (--data-path) needs split (--split), for example 969,30,1")
        if self.blend_per_split is not None and self.split is not None:
            found.append(f"split {self.split!r} has no meaning with a blend for each split: leave it out")
        if self.blend_per_split is not None and len(self.blend_per_split) != len(Split):
            found.append(f"blend_per_split has {len(self.blend_per_split)} entries, it needs {len(Split)}: a blend or None for each split")
        for blend in [self.blend, *(self.blend_per_split or [])]:
            if blend is not None and blend[1] is not None and len(blend[0]) != len(blend[1]):
                found.append(f"a blend has {len(blend[0])} prefixes and {len(blend[1])} weights: give one weight for each prefix")
        if self.split is not None:
            try:
                parse_and_normalize_split(self.split)
            except ValueError as error:
                found.append(str(error))
        return found
