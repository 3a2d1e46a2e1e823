"""The plan of blocks against the definition of the masks, by brute force; the work of ranks is balanced."""

import itertools

import pytest
import torch

from megatron.core.context_parallel import block_plan
from megatron.core.context_parallel.block_plan import Mask, make_mask, plan_for_ranks
from megatron.core.context_parallel.partial_attention import hidden_by_position
from megatron.core.context_parallel.sequence_split import packed_positions_of_rank
from megatron.core.packed_seq_params import Document

MASKS = [make_mask(causal, window) for causal in (True, False) for window in (None, (3, 2), (0, 0), (-1, 4), (5, -1), (100, 100))]
PACKS = [(Document(0, 24, 24),), (Document(0, 10, 12), Document(12, 12, 12), Document(24, 0, 12))]


def visible(documents, queries, keys, mask):
    """bool [queries, keys] of places in the packed batch, by definition."""
    seen = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for row, query in enumerate(queries.tolist()):
        for column, key in enumerate(keys.tolist()):
            (own,) = (d for d in documents if d.start <= query < d.start + d.padded)
            same = own.start <= key < own.start + own.padded
            real = mask.right == 0 or key < own.start + own.length
            near = (mask.left is None or key >= query - mask.left) and (mask.right is None or key <= query + mask.right)
            seen[row, column] = same and real and near
    return seen


def seen_by(blocks, mask, queries, keys, alone):
    """The same from a plan; no pair may be in two blocks, and no block may see nothing."""
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for block in blocks:
        rows, columns = slice(*block.queries), slice(*block.keys)
        shape = seen[rows, columns].shape
        part = torch.ones(shape, dtype=torch.int64)
        if block.kind == "causal":
            assert shape[0] == shape[1]
            part = part.tril()
        elif block.kind == "masked":
            part = (~hidden_by_position(block, mask, torch.device("cpu"))).long()
        assert part.sum() > 0
        seen[rows, columns] += part
    if alone:
        assert all(first.queries[1] <= second.queries[0] for first, second in itertools.pairwise(blocks))
    assert seen.max() <= 1
    return seen.bool()


@pytest.mark.parametrize("documents", PACKS, ids=["one", "packed"])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_blocks_cover_what_is_seen_once(documents, cp, monkeypatch):
    monkeypatch.setattr(block_plan, "TILE", 4)
    plan_for_ranks.cache_clear()
    for mask, by_position in itertools.product(MASKS, (False, True)):
        for query_rank, key_rank in itertools.product(range(cp), [*range(cp), None]):
            queries = packed_positions_of_rank(documents, query_rank, cp)
            keys = packed_positions_of_rank(documents, key_rank or 0, 1 if key_rank is None else cp)
            blocks = plan_for_ranks(documents, cp, query_rank, key_rank, mask, by_position)
            found = seen_by(blocks, mask, len(queries), len(keys), alone=cp == 1)
            assert torch.equal(found, visible(documents, queries, keys, mask)), (mask, query_rank, key_rank)
            if by_position and len(documents) == 1:
                for block in blocks:
                    place = keys[slice(*block.keys)]
                    assert torch.equal(place, torch.arange(len(place)) + block.key_start)
    plan_for_ranks.cache_clear()


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_balanced_and_each_step_of_the_ring_is_one_call(cp):
    seq = 64 * cp
    for rank in range(cp):
        for step in range(cp):
            (block,) = plan_for_ranks((Document(0, seq, seq),), cp, rank, (rank - step) % cp, Mask(None, 0), False)
            area = (block.queries[1] - block.queries[0]) * (block.keys[1] - block.keys[0])
            # 64 tokens a rank: half of them see all keys, or all see half
            assert (block.kind, area) == (("causal", 64 * 64) if step == 0 else ("full", 64 * 64 // 2))


def test_a_window_costs_its_width_and_not_the_sequence():
    seq = 1 << 16
    blocks = plan_for_ranks((Document(0, seq, seq),), 1, 0, 0, make_mask(True, (128, 0)), False)
    area = sum((b.queries[1] - b.queries[0]) * (b.keys[1] - b.keys[0]) for b in blocks)
    assert area <= seq * (block_plan.TILE + 129)
    assert plan_for_ranks((Document(0, seq, seq),), 4, 2, 0, make_mask(True, (128, 0)), False) == (), "ranks out of reach compute nothing"
