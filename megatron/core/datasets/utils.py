"""Splits, blends and weights: what a data command line means. Torch-free."""

import enum
import logging
import math
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
    from megatron.core.utils import get_world_rank, world_is_initialized

    if not world_is_initialized() or get_world_rank() == rank:
        logger.log(level, message, *args)


def normalize(weights: Sequence[float]) -> list[float]:
    """`weights` scaled to a sum of one. Raises ValueError for negative ones or a sum of zero."""
    values = np.array(weights, dtype=np.float64)
    if (values < 0).any() or not np.isfinite(values).all() or values.sum() <= 0:
        raise ValueError(f"weights {list(weights)} must be finite, none of them negative, and not all zero, for example 0.7 0.3")
    return (values / values.sum()).tolist()


def parse_and_normalize_split(split: str) -> list[float]:
    """Three fractions that sum to one from "969, 30, 1", the weights of train, valid and test; those left out are 0.

    The one rule for `--split`: one to three numbers between commas (or slashes), finite, none negative, not all 0. Raises ValueError for
    anything else, an empty place such as that of a trailing comma too.
    """

    def wrong(why: str) -> ValueError:
        return ValueError(f"split {split!r}: {why}; give up to {len(Split)} weights, of train, valid and test, for example 969,30,1")

    parts = [part.strip() for part in split.replace("/", ",").split(",")]
    if len(parts) > len(Split):
        raise wrong(f"it has {len(parts)} weights")
    weights = []
    for part in parts:
        weight = _as_weight(part)
        if weight is None:
            raise wrong(f"{part!r} is not a number" if part else "a weight is missing")
        if not 0 <= weight < math.inf:
            raise wrong(f"{part} is negative or not finite")
        weights.append(weight)
    if not any(weights):
        raise wrong("all weights are 0")
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
