"""Data-parallel collectives by copies: results in whatever order streams and ranks go, on GPUs that are simulated; and on real ones."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.peer_copies import PeerCopies
from tests.unit_tests.tensor_parallel.simulated_device import Host

PIECE = 24  # bytes that go in a turn: three numbers
Call = tuple[bool, int]  # whether it reduces, and numbers of a rank's part


def buckets(calls: list[Call], size: int) -> list[list[torch.Tensor]]:
    """Of each call, of each rank."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(-8, 9, (size * part,), generator=generator).double() for _ in range(size)] for _, part in calls]


def play(size: int, calls: list[Call], seed: int, scale: float) -> list[list[torch.Tensor]]:
    """What each call leaves in the bucket of each rank."""
    host = Host(size, shared_queue=False)
    given = buckets(calls, size)
    for rank, gpu in enumerate(host.ranks):
        copies = PeerCopies(host.allocate(rank, PIECE), gpu.copies, gpu.current)
        host.issuing = gpu
        with host:
            started = []
            for (reduces, _), of_ranks in zip(calls, given, strict=True):
                data = of_ranks[rank]
                data.mul_(2.0)  # as a backward or an optimizer writes it, just before
                started.append(copies.reduce_scatter(data, scale) if reduces else copies.all_gather(data))
            for each, of_ranks in zip(started, given, strict=True):
                each.wait()
                of_ranks[rank].mul_(0.5)  # read, and written, just after
    host.run(random.Random(seed))
    return given


programs = st.lists(st.tuples(st.booleans(), st.integers(1, 10)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(size=st.sampled_from([2, 3, 4]), calls=programs, seed=st.integers(0, 2**32), scale=st.sampled_from([1.0, 0.25]))
def test_any_order_gives_what_collectives_give(size: int, calls: list[Call], seed: int, scale: float) -> None:
    results = play(size, calls, seed, scale)
    for (reduces, part), before, after in zip(calls, buckets(calls, size), results, strict=True):
        parts = torch.stack(before).view(size, size, part)  # [rank, whose part, number]
        for rank, found in enumerate(after):
            found = found.view(size, part)
            if reduces:
                assert torch.equal(found[rank], parts[:, rank].sum(0) * scale)
            else:
                assert torch.equal(found, parts.diagonal().t())


def test_there_are_none_without_gpus() -> None:
    assert PeerCopies.of(None) is None


@pytest.mark.parametrize(
    ("others", "rule"),
    [({}, "nccl_ub needs use_distributed_optimizer"), ({"reduce_scatter_with_fp32_accumulation": True}, "adds up in the gradients' own")],
)
def test_what_it_does_not_go_with(others: dict, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        DistributedDataParallelConfig(nccl_ub=True, use_distributed_optimizer=bool(others), **others)
