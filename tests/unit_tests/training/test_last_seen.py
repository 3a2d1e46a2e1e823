"""What a report says about collectives, and that torch.distributed is its own again afterwards."""

import torch
import torch.distributed as dist

from megatron.training import last_seen
from megatron.training.failure import table
from tests.distributed import run_on_ranks


def notes():
    original = dist.all_reduce
    last_seen.record()
    try:
        dist.all_reduce(torch.zeros(3, 2), group=dist.group.WORLD)
        assert last_seen.collective() == "after all_reduce [3, 2] of 1 ranks (call 1)"
        dist.all_gather_object([None], "text")  # made of others, which do not count
        assert last_seen.collective() == "after all_gather_object (call 2)"
        assert not last_seen.is_waiting() and last_seen.line().startswith("test_last_seen.py:")
        try:
            dist.broadcast(torch.zeros(1), src=9)
        except RuntimeError:
            assert last_seen.collective().startswith("in broadcast") and last_seen.is_waiting()
    finally:
        last_seen.stop()
    return dist.all_reduce is original and last_seen.collective() == "after none yet (call 0)"


def test_collectives_are_noted_until_stopped():
    assert run_on_ranks(1, notes) == [True]


def test_a_table():
    sign = {"iteration": 3, "phase": "optimizer", "still": 4.2, "collective": "in barrier (call 7)", "line": "a.py:1"}
    _, names, row = table([sign]).splitlines()
    assert names.split() == ["rank", "iteration", "phase", "no", "progress", "last", "collective", "at"]
    assert row.split("  ") and row.startswith("0") and row.endswith("in barrier (call 7)  a.py:1")
