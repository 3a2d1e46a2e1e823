"""The bucket layout as a pure function."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.param_and_grad_buffer import compute_buffer_layout


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.one_of(st.none(), st.integers(1, 20_000)), st.integers(1, 12))
def test_layout_invariants(sizes, bucket_size, dp_size):
    params = [(f"p{index}", size) for index, size in enumerate(sizes)]
    layout = compute_buffer_layout(params, bucket_size, dp_size)
    assert [slot.name for slot in layout.params] == [name for name, _ in reversed(params)]
    assert {slot.name: slot.end - slot.start for slot in layout.params} == dict(params)
    assert all(slot.start % 64 == 0 for slot in layout.params)
    assert all(before.end <= after.start for before, after in zip(layout.params, layout.params[1:]))
    # buckets tile the buffer, hold their parameters, and split evenly over the ranks
    assert layout.buckets[0].start == 0 and layout.buckets[-1].end == layout.numel
    assert all(before.end == after.start for before, after in zip(layout.buckets, layout.buckets[1:]))
    assert [name for bucket in layout.buckets for name in bucket.names] == [slot.name for slot in layout.params]
    for index, bucket in enumerate(layout.buckets):
        mine = [slot for slot in layout.params if slot.bucket == index]
        assert tuple(slot.name for slot in mine) == bucket.names
        assert mine[0].start == bucket.start and mine[-1].end == bucket.start + bucket.numel_unpadded
        assert (bucket.end - bucket.start) % dp_size == 0 and (bucket.end - bucket.start) % 128 == 0
        assert 0 <= bucket.end - bucket.start - bucket.numel_unpadded < 128 * dp_size
        if bucket_size is not None and index + 1 < len(layout.buckets):
            assert bucket.numel_unpadded >= bucket_size  # closed only when full
            assert len(mine) == 1 or mine[-2].end - bucket.start < bucket_size  # and as soon as it was
    if bucket_size is None:
        assert len(layout.buckets) == 1


def test_layout_by_hand():
    layout = compute_buffer_layout([("a", 100), ("b", 10), ("c", 300)], bucket_size=301, dp_size=3)
    assert [(slot.name, slot.start, slot.end, slot.bucket) for slot in layout.params] == [
        ("c", 0, 300, 0),
        ("b", 320, 330, 0),
        ("a", 384, 484, 1),
    ]
    assert [(bucket.start, bucket.end, bucket.numel_unpadded) for bucket in layout.buckets] == [(0, 384, 330), (384, 768, 100)]
    assert compute_buffer_layout([("a", 100)], None, 1, high_bandwidth_padding=True).numel == 2**16


@pytest.mark.parametrize(("dp_size", "stored", "padded"), [(2, 315968, 316032)])
def test_size_that_megatron_wrote(dp_size, stored, padded):
    """Sizes of one bucket in a checkpoint of its distributed optimizer."""
    bucket = compute_buffer_layout([("all", stored)], None, dp_size).buckets[0]
    assert (bucket.numel_unpadded, bucket.end) == (stored, padded)


def test_a_parameter_alone_in_its_bucket():
    """First, in the middle, last: the others share buckets as before; two such parameters have two."""
    for place in range(3):
        params = [(f"p{index}", 100) for index in range(3)]
        layout = compute_buffer_layout(params, None, 2, alone={f"p{place}"})
        assert [bucket.names for bucket in layout.buckets if len(bucket.names) == 1 and bucket.names[0] == f"p{place}"]
        assert sorted(len(bucket.names) for bucket in layout.buckets) == ([1, 1, 1] if place == 1 else [1, 2])
    assert len(compute_buffer_layout([("a", 10), ("b", 10)], None, 2, alone={"a", "b"}).buckets) == 2
