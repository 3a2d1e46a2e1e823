"""The table of corpora that a run prints when its datasets are built."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_ROWS = 40  # of a split: a blend of hundreds is cut
HEADER = ("split", "corpus", "weight", "samples", "samples an epoch", "epochs")


def table_of_datasets(train: Any, valid: Any, test: Any) -> str:
    """For each corpus of each split: its weight, samples that the run takes of it, samples of one epoch, epochs."""
    rows: list[tuple[str, ...]] = [HEADER]
    for split, datasets in (("train", [train]), ("valid", valid if isinstance(valid, list | tuple) else [valid]), ("test", [test])):
        found = [row for dataset in datasets if dataset is not None for row in _rows(split, dataset)]
        rows += found[:MOST_ROWS]
        if len(found) > MOST_ROWS:
            rows.append(("", f"... and {len(found) - MOST_ROWS} more", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    text = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return "\n".join(f"   {line.rstrip()}" for line in text)


def _rows(split: str, dataset: Any) -> list[tuple[str, ...]]:
    corpora = getattr(dataset, "datasets", None) or [dataset]
    weights = getattr(dataset, "weights", None) or [1.0]
    samples = _samples(dataset, len(corpora))
    names = short_names([_path(corpus) for corpus in corpora])
    rows: list[tuple[str, ...]] = []
    for name, corpus, weight, count in zip(names, corpora, weights, samples):
        an_epoch = _samples_an_epoch(corpus)
        epochs = f"{count / an_epoch:.2f}" if an_epoch else "?"
        rows.append((split, name, f"{100 * weight:.2f} %", f"{count:,}", f"{an_epoch:,}" if an_epoch else "?", epochs))
    return rows


def _samples(dataset: Any, num_corpora: int) -> list[int]:
    """Samples that the run takes of each corpus, with those of its earlier starts."""
    picks = getattr(dataset, "dataset_index", None)
    if picks is None:
        asked = getattr(dataset, "num_samples", None)
        return [len(dataset) if asked is None else min(asked, len(dataset))]
    drawn = np.bincount(picks, minlength=num_corpora).tolist()
    plan = getattr(dataset, "sample_plan", None)
    if plan is not None:
        drawn = [count + plan.current.consumed[member] for member, count in zip(plan.current.members, drawn)]
    return drawn


def _samples_an_epoch(corpus: Any) -> int | None:
    index, documents = getattr(corpus, "document_index", None), getattr(corpus, "indices", None)
    if index is None or documents is None or not len(index):
        return None
    return max(1, round(len(corpus) * len(documents) / len(index)))


def _path(corpus: Any) -> str:
    path = getattr(corpus, "dataset_path", None)
    return str(path) if path else type(corpus).__name__


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of paths, as few as tell them apart."""
    split = [path.rstrip("/").split("/") for path in paths]
    parts = 1
    while parts < max(map(len, split)) and len({tuple(p[-parts:]) for p in split}) < len(set(map(tuple, split))):
        parts += 1
    return [os.path.join(*p[-parts:]) if p[-parts:] != [""] else path for p, path in zip(split, paths)]
