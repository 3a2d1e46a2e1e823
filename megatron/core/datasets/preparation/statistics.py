"""How long the documents of a pair are, in numbers, in letters and as a picture."""

from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.optional_imports import require

BAR = 40  # letters of the longest bar
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document (int64 [documents])."""
    ends = np.zeros(len(dataset) + 1, dtype=np.int64)
    np.cumsum(dataset.sequence_lengths, dtype=np.int64, out=ends[1:])
    return np.diff(ends[dataset.document_indices])


@dataclass(frozen=True)
class Histogram:
    """Documents and tokens by length: bucket b holds the lengths edges[b] to edges[b + 1] - 1; edges are 0, 1, 2, 4, 8 ...,
    from the first bucket that holds any."""

    edges: np.ndarray
    documents: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> "Histogram":
        longest = int(lengths.max()) if len(lengths) else 0
        edges = np.array([0] + [1 << power for power in range(longest.bit_length() + 1)], dtype=np.int64)
        places = np.searchsorted(edges, lengths, side="right") - 1
        documents = np.bincount(places, minlength=len(edges) - 1)
        tokens = np.zeros(len(edges) - 1, dtype=np.int64)
        np.add.at(tokens, places, lengths)
        first = int(np.argmax(documents > 0)) if len(lengths) else 0
        return cls(edges[first:], documents[first:], tokens[first:])

    def labels(self) -> list[str]:
        return [str(low) if high == low + 1 else f"{low}-{high - 1}" for low, high in zip(self.edges[:-1], self.edges[1:])]

    def lines(self) -> list[str]:
        """A table with bars: share of the documents and of the tokens that each bucket holds."""
        documents, tokens = max(int(self.documents.sum()), 1), max(int(self.tokens.sum()), 1)
        most = max(int(self.documents.max()), 1)
        rows = [f"{'tokens':>17} {'documents':>11} {'of docs':>8} {'of tokens':>9}"]
        for label, count, held in zip(self.labels(), self.documents, self.tokens):
            bar = "#" * round(BAR * int(count) / most)
            rows.append(f"{label:>17} {count:>11} {count / documents:>8.1%} {held / tokens:>9.1%}  {bar}".rstrip())
        return rows


def summary_lines(dataset: IndexedDataset, lengths: np.ndarray) -> list[str]:
    """Counts and quantiles of a pair."""
    tokens = int(lengths.sum())
    lines = [
        f"documents  {len(lengths):,} ({int(np.count_nonzero(lengths == 0)):,} of no token)",
        f"sequences  {len(dataset):,}",
        f"tokens     {tokens:,} of {dataset.dtype}, {tokens * dataset.dtype.itemsize / 1e6:,.1f} MB",
    ]
    if len(lengths):
        values = np.quantile(lengths, QUANTILES, method="inverted_cdf")
        named = [f"{'least' if q == 0 else 'most' if q == 1 else f'{q:.0%}'} {int(value):,}" for q, value in zip(QUANTILES, values)]
        lines.append(f"tokens of a document: mean {lengths.mean():,.1f}; {', '.join(named)}")
    return lines


def draw_histogram(histogram: Histogram, title: str, path: str) -> None:
    """A PNG with two panels of bars by document length: documents above, tokens below. Needs matplotlib."""
    require("matplotlib", "--histogram").use("Agg")
    pyplot = require("matplotlib.pyplot", "--histogram")
    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
    places = np.arange(len(histogram.documents))
    for axis, values, what, color in zip(axes, (histogram.documents, histogram.tokens), ("documents", "tokens"), ("#3b6fb6", "#c7752d")):
        axis.bar(places, 100 * values / max(values.sum(), 1), width=0.9, color=color)
        axis.set_ylabel(f"% of the {values.sum():,} {what}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[1].set_xticks(places, histogram.labels(), rotation=45, ha="right", fontsize=8)
    axes[1].set_xlabel("tokens of a document")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
