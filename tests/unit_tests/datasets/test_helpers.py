"""Index builders against their plain twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import helpers

weights_strategy = st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any)


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    repeats=st.integers(1, 3),
    sequence_length=st.integers(1, 12),
    extra=st.sampled_from([0, 1]),
    drop=st.booleans(),
    chunk=st.integers(1, 5),
    wide=st.booleans(),
)
def test_sample_index_equals_the_plain_one(lengths, repeats, sequence_length, extra, drop, chunk, wide):
    sizes = np.array(lengths, dtype=np.int32)
    order = np.random.RandomState(len(lengths)).permutation(np.tile(np.arange(len(sizes), dtype=np.int32), repeats))
    before, helpers.CHUNK = helpers.CHUNK, chunk
    try:
        dtype = np.int64 if wide else np.int32
        index = helpers.build_sample_index(sizes, order, sequence_length, int(sizes[order].sum()), extra, drop, dtype=dtype)
    finally:
        helpers.CHUNK = before
    assert index.dtype == dtype
    expected = helpers.plain_build_sample_index(sizes, order, sequence_length, extra, drop)
    assert index.tolist() == expected.tolist()


def test_wide_indices_are_chosen_where_positions_or_offsets_need_them():
    assert helpers.sample_index_dtype(2**31 - 1, 10) is np.int32
    assert helpers.sample_index_dtype(2**31 + 8, 10) is np.int64
    assert helpers.sample_index_dtype(10, 2**31) is np.int64


@settings(deadline=None, max_examples=60)
@given(weights=weights_strategy, size=st.integers(0, 200), lane=st.integers(1, 60), settle=st.integers(0, 20))
def test_blending_indices_equal_the_plain_ones(weights, size, lane, settle):
    shares = np.array(weights) / np.sum(weights)
    before = helpers.LANE, helpers.SETTLE
    helpers.LANE, helpers.SETTLE = lane, settle
    try:
        result = helpers.build_blending_indices(shares, size)
    finally:
        helpers.LANE, helpers.SETTLE = before
    for got, expected in zip(result, helpers.plain_build_blending_indices(shares, size)):
        assert got.dtype == expected.dtype and np.array_equal(got, expected)


def test_blending_indices_of_several_lanes():
    shares = np.random.default_rng(0).dirichlet([0.3] * 20)
    for got, expected in zip(helpers.build_blending_indices(shares, 5000), helpers.plain_build_blending_indices(shares, 5000)):
        assert np.array_equal(got, expected)


def test_blend_counts_follow_weights():
    dataset_index, sample_index = helpers.build_blending_indices(np.array([0.7, 0.3]), 1000)
    assert np.bincount(dataset_index).tolist() == [700, 300]
    assert sample_index[dataset_index == 1].tolist() == list(range(300))


def test_plan_epochs():
    assert helpers.plan_epochs(101, 10, 10) == helpers.EpochPlan(1, False, 0)
    assert helpers.plan_epochs(101, 10, None) == helpers.EpochPlan(1, False, 0)
    # 20 samples are in two epochs of 101 tokens; 80 % of an epoch's 10 is the limit for mixing
    assert helpers.plan_epochs(101, 10, 17) == helpers.EpochPlan(2, True, 10)
    assert helpers.plan_epochs(101, 10, 18) == helpers.EpochPlan(2, False, 10)
    with pytest.raises(ValueError, match="not one token"):
        helpers.plan_epochs(0, 10, 3)


@pytest.mark.parametrize("separate", [True, False])
def test_each_epoch_holds_each_document_once(separate):
    index = helpers.build_document_index(np.arange(5, 15), 3, np.random.RandomState(1), separate)
    assert index.dtype == np.int32 and np.bincount(index)[5:].tolist() == [3] * 10
    assert (sorted(index[20:]) == list(range(5, 15))) == separate


def test_shuffle_index_keeps_the_parts_apart():
    index = helpers.build_shuffle_index(6, 10, np.random.RandomState(1))
    assert index.dtype == np.uint32 and sorted(index[:6]) == list(range(6)) and sorted(index[6:]) == [6, 7, 8, 9]


def test_the_seed_decides():
    lengths, documents = np.full(50, 30, dtype=np.int32), np.arange(50, dtype=np.int32)
    first, again, other = (helpers.build_gpt_indices(lengths, documents, 100, 16, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not np.array_equal(first[0], other[0]) and not np.array_equal(first[2], other[2])


def test_the_flags_threshold_of_a_last_epoch_is_the_librarys() -> None:
    from megatron.core.datasets import helpers
    from megatron.training.config import DataFlags

    assert DataFlags.separate_last_epoch_below == helpers.SEPARATE_EPOCH_THRESHOLD
