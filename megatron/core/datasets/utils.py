"""Splits, blends and weights: what a data command line means. Torch-free."""

import enum
import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


class Split(enum.Enum):
    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Nothing to compile here; kept because programs written for Megatron-LM call it before they build datasets."""


def log_single_rank(logger: logging.Logger, level: int, message: str, *args: Any, rank: int = 0) -> None:
    """Log on one rank only, or always where torch.distributed is not initialised."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == rank:
        logger.log(level, message, *args)


def normalize(weights: Sequence[float]) -> list[float]:
    """`weights` scaled to a sum of one. Raises ValueError for negative ones or a sum of zero."""
    values = np.array(weights, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).all() or values.sum() <= 0:
        raise ValueError(f"weights {list(weights)} must be finite, none of them negative, and not all zero, for example 0.7 0.3")
    return (values / values.sum()).tolist()


def parse_and_normalize_split(split: str) -> list[float]:
    """"969, 30, 1" as three fractions that sum to one; weights left out are 0. Raises ValueError for anything else."""
    rule = f"split {split!r} must be up to {len(Split)} non-negative weights for train, valid and test, for example 969,30,1"
    try:
        weights = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        raise ValueError(rule) from None
    if not 1 <= len(weights) <= len(Split) or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(rule)
    return normalize(weights + [0.0] * (len(Split) - len(weights)))


def convert_split_vector_to_split_matrix(fractions: Sequence[float]) -> list[tuple[float, float] | None]:
    """The interval (begin, end) of documents, as fractions, that each split takes; None for an empty one."""
    ends = [round(end, 10) for end in accumulate(fractions)]
    return [(begin, end) if fraction > 0 else None for fraction, begin, end in zip(fractions, [0.0, *ends], ends)]


def _as_weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def get_blend_from_list(blend: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    """What `--data-path` was given, as (prefixes, weights): `A B` has no weights, `0.7 A 0.3 B` has. None for nothing.

    Raises ValueError where weights and prefixes do not alternate.
    """
    if not blend:
        return None
    weights = [_as_weight(item) for item in blend]
    if all(weight is None for weight in weights):
        return list(blend), None
    pairs = list(zip(weights[::2], blend[1::2]))
    if len(blend) % 2 or any(weight is None for weight, _ in pairs) or any(weight is not None for weight in weights[1::2]):
        rule = "must be prefixes alone, or a weight before each prefix, for example: 0.7 books_text_document 0.3 code_text_document"
        raise ValueError(f"data paths {' '.join(blend)!r} {rule}")
    return [prefix.strip() for _, prefix in pairs], [weight for weight, _ in pairs if weight is not None]


def get_blend_sizes(weights: Sequence[float], size: int | None, surplus: float) -> tuple[list[int | None], int | None]:
    """Samples to ask of each corpus, and samples of the blend, when `size` are wanted (None: one epoch of each corpus, whole blend).

    `surplus` (a fraction) is on top, so that rounding in the order of the blend cannot run out of samples.
    """
    if size is None:
        return [None] * len(weights), None
    exact = [int(np.ceil(size * weight)) for weight in weights]
    return [int(np.ceil(count * (1 + surplus))) for count in exact], sum(exact)
