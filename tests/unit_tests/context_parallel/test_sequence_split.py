"""Which tokens a rank holds: each token has one owner, batches are cut accordingly, packed labels stay within their sequence."""

import itertools

import pytest
import torch

from megatron.core.context_parallel.sequence_split import (
    join_from_context_parallel,
    packed_positions_of_rank,
    positions_in_documents,
    positions_of_rank,
    shift_packed_labels,
    split_for_context_parallel,
    split_packed,
)
from megatron.core.packed_seq_params import PackedSeqParams, packed_documents
from megatron.core.utils import get_batch_on_this_cp_rank


def packed(real: list[int], padded: list[int] | None = None) -> PackedSeqParams:
    counts = [torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (real, padded or real)]
    return PackedSeqParams("thd", counts[0], counts[0], counts[1], counts[1])


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_a_rank_holds_a_chunk_from_each_end(cp):
    chunks = torch.arange(6 * cp).chunk(2 * cp)
    for rank in range(cp):
        expected = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
        assert torch.equal(positions_of_rank(6 * cp, rank, cp), expected)
        assert torch.equal(split_for_context_parallel(torch.arange(6 * cp), 0, rank, cp), expected)
    whole = torch.randn(2, 6 * cp, 3)
    assert torch.equal(join_from_context_parallel([split_for_context_parallel(whole, 1, rank, cp) for rank in range(cp)], 1), whole)


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"a sequence of 10 tokens .* 2 context-parallel ranks: it must be a multiple of 2 x 2; 12 works"):
        positions_of_rank(10, 0, 2)


def test_a_batch_alone_is_left_alone():
    batch = {"tokens": torch.zeros(1, 7), "attention_mask": None}
    assert get_batch_on_this_cp_rank(batch) is batch
    with pytest.raises(ValueError, match="not built yet"):
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=True)


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_tokens_have_one_owner_each(cp):
    documents = packed_documents(packed([3, 4, 0], [4, 8, 4]))
    owned = torch.cat([packed_positions_of_rank(documents, rank, cp) for rank in range(cp)])
    assert owned.sort().values.tolist() == list(range(16))
    inside = torch.cat([positions_in_documents(documents, rank, cp) for rank in range(cp)])
    assert inside[owned.argsort()].tolist() == [*range(4), *range(8), *range(4)]


@pytest.mark.parametrize("cp", [1, 2])
def test_packed_labels_are_shifted_within_their_sequence(cp):
    """Lengths 1, 3 and 5 with padding: a label of the next sequence leaked into the one before where padding was not counted."""
    real, padded = [1, 3, 5], [4, 4, 8]
    params = packed(real, padded)
    tokens = torch.full((1, 16), 99)
    labels, counts = torch.zeros(16, dtype=torch.int64), torch.zeros(16)
    start = 0
    for number, (length, room) in enumerate(zip(real, padded), 1):
        tokens[0, start : start + length] = 10 * number + torch.arange(length)
        labels[start : start + length - 1] = 10 * number + torch.arange(1, length)
        counts[start : start + length - 1] = 1.0
        start += room
    got, weights = shift_packed_labels(tokens, params)
    assert got.shape == weights.shape == (1, 16)
    for rank in range(cp):
        place = packed_positions_of_rank(packed_documents(params), rank, cp)
        assert torch.equal(split_packed(got, 1, params, rank, cp)[0], labels[place])
        assert torch.equal(split_packed(weights, 1, params, rank, cp)[0], counts[place])


def test_counts_that_say_nothing_possible_are_refused():
    for params in (packed([5], [4]), PackedSeqParams("thd"), PackedSeqParams("bshd", torch.tensor([0, 3]))):
        with pytest.raises(ValueError, match="packed sequences"):
            packed_documents(params)
    other = packed([4])
    other.cu_seqlens_kv = torch.tensor([0, 5])
    with pytest.raises(ValueError, match="cu_seqlens_kv differs"):
        packed_documents(other)
