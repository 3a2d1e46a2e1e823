"""Which blocks of queries and keys attention has to compute, and under which mask. Pure functions of numbers.

A rank's tokens are Runs: stretches that stand side by side both in its tensor and in their sequence. Two runs of one sequence see each
other fully, along a diagonal, through a mask, or not at all; what sees nothing is no block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.core.context_parallel.sequence_split import runs_of_rank
from megatron.core.packed_seq_params import Document

TILE = 256  # queries of a block under a sliding window, at least: smaller ones compute less that is hidden, but are more calls


@dataclass(frozen=True)
class Mask:
    """Query i sees key j where i - left <= j <= i + right (None: no bound); right is 0 under a causal mask."""

    left: int | None = None
    right: int | None = None

    @property
    def is_window(self) -> bool:
        return self.left is not None or (self.right or 0) > 0


def make_mask(causal: bool, window: tuple[int, int] | None) -> Mask:
    """`window`: keys before and after a query that it sees beside its own (-1: all)."""
    left, right = (None, None) if window is None else (None if side < 0 else side for side in window)
    return Mask(left, 0 if causal else right)


@dataclass(frozen=True)
class Run:
    """`length` tokens from `place` in a rank's tensor and from `start` in the sequence `document`; the first `keys` may be seen."""

    place: int
    start: int
    length: int
    keys: int
    document: int = 0


@dataclass(frozen=True)
class Block:
    """Queries and keys [first, end) by their places in the tensors.

    kind: "full"; "causal": as many queries as keys, the lower triangle; "masked": by the Mask, the first query standing `offset` behind
    the first key. key_start: the first key's position in its sequence, of a block that is one run of keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: str
    offset: int = 0
    key_start: int = 0


def runs_of_documents(documents: Sequence[Document], cp_rank: int, cp_size: int) -> list[Run]:
    """The rank's tokens of each sequence, in the order of its tensor."""
    runs, place = [], 0
    for number, document in enumerate(documents):
        for first, end in runs_of_rank(document.padded, cp_rank, cp_size):
            length = end - first
            if length:
                runs.append(Run(place, first, length, min(max(document.length - first, 0), length), number))
            place += length
    return runs


def _tiles(run: Run, mask: Mask) -> list[Run]:
    if not mask.is_window:
        return [run]
    size = max(TILE, mask.left or 0, mask.right or 0)
    return [
        replace(run, place=run.place + at, start=run.start + at, length=min(size, run.length - at)) for at in range(0, run.length, size)
    ]


def _blocks_of_pair(query: Run, key: Run, mask: Mask, whole: bool) -> list[Block]:
    """Keys are cut to those that some query of the run sees. `whole`: in one block, also where two would need no mask."""
    last = query.start + query.length
    # padding is behind its sequence: under a causal mask it is hidden from all that counts
    first, end = key.start, key.start + (key.length if mask.right == 0 else key.keys)
    if mask.left is not None:
        first = max(first, query.start - mask.left)
    if mask.right is not None:
        end = min(end, last + mask.right)
    if first >= end:
        return []

    def block(first: int, end: int) -> Block:
        queries, place = (query.place, query.place + query.length), key.place - key.start
        full = (mask.right is None or end - 1 <= query.start + mask.right) and (mask.left is None or first >= last - 1 - mask.left)
        square = first == query.start and end == last
        triangle = square and mask.right == 0 and (mask.left is None or mask.left >= query.length - 1)
        kind = "full" if full else "causal" if triangle else "masked"
        return Block(queries, (place + first, place + end), kind, query.start - first, first)

    if mask.right == 0 and mask.left is None and first < query.start < end and not whole:
        return [block(first, query.start), block(query.start, end)]
    return [block(first, end)]


def _joined(blocks: list[Block]) -> list[Block]:
    """Full blocks that lie side by side made one."""
    out: list[Block] = []
    for block in blocks:
        last = out[-1] if out else None
        if last and last.kind == block.kind == "full" and last.queries == block.queries and last.keys[1] == block.keys[0]:
            out[-1] = replace(last, keys=(last.keys[0], block.keys[1]))
        elif last and last.kind == block.kind == "full" and last.keys == block.keys and last.queries[1] == block.queries[0]:
            out[-1] = replace(last, queries=(last.queries[0], block.queries[1]))
        else:
            out.append(block)
    return out


def plan_blocks(queries: Sequence[Run], keys: Sequence[Run], mask: Mask, *, by_position: bool = False) -> list[Block]:
    """The blocks that queries and keys need.

    `by_position`: each block is one run of keys, for who looks keys up in a mask tensor; otherwise as few blocks as there can be.
    """
    if not by_position and mask == Mask(None, 0) and list(queries) == list(keys):
        # A rank's own tokens stand in order: all of a sequence are one triangle.
        triangles = []
        for document in sorted({run.document for run in queries}):
            own = [run for run in queries if run.document == document]
            place = (own[0].place, own[-1].place + own[-1].length)
            triangles.append(Block(place, place, "causal"))
        return triangles
    by_document: dict[int, list[Run]] = {}
    for key in keys:
        by_document.setdefault(key.document, []).append(key)
    found = []
    for run in queries:
        for query in _tiles(run, mask):
            pairs = [_blocks_of_pair(query, key, mask, by_position) for key in by_document.get(run.document, [])]
            blocks = [block for pair in pairs for block in pair]
            found += blocks if by_position else _joined(blocks)
    return found if by_position else _joined(found)


@lru_cache(maxsize=256)
def plan_for_ranks(
    documents: tuple[Document, ...], cp_size: int, query_rank: int, key_rank: int | None, mask: Mask, by_position: bool
) -> tuple[Block, ...]:
    """The blocks between one rank's queries and another's keys; key_rank None: all keys, in the order of the sequence."""
    queries = runs_of_documents(documents, query_rank, cp_size)
    keys = runs_of_documents(documents, 0, 1) if key_rank is None else runs_of_documents(documents, key_rank, cp_size)
    return tuple(plan_blocks(queries, keys, mask, by_position=by_position))
