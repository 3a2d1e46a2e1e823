"""The processes that all layouts share keep the layouts' failures apart."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool


def total(value: int) -> tuple[int, int]:
    """(the sum over ranks, this process)."""
    tensor = torch.tensor(value * 10 ** dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor), os.getpid()


def one_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("what went wrong")
    dist.barrier()  # waits for a rank that never comes


def one_rank_hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def one_rank_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_processes_stay_and_failures_do_not() -> None:
    pool = RankPool()
    try:
        (first, process), (_, other) = pool.run(2, total, 3)
        assert first == 33
        assert [pool.run(2, total, 2)[1], pool.run(1, total, 2)[0]] == [(22, other), (2, process)], "the same processes, other groups"
        with pytest.raises(AssertionError, match=r"^the layout: rank 1 of 2:[\s\S]*ValueError: what went wrong"):
            pool.run(2, one_rank_raises, name="the layout")
        assert pool.run(2, total, 1)[0][0] == 11
        with pytest.raises(AssertionError, match=r"^one_rank_hangs: ranks \[0, 1\] of 2 gave no answer within 1 s"):
            pool.run(2, one_rank_hangs, timeout=1)
        with pytest.raises(AssertionError, match=r"rank 1 of 2:\nthe process died"):
            pool.run(2, one_rank_dies)
    finally:
        pool.close()
