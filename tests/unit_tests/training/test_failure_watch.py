"""A rank that has come to its end is not taken for dead by one that still works; one that went silent is."""

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.training import failure, phase

FAST = {"BEAT": 0.05, "SILENT_IN_TRAINING": 0.5, "SILENT": 0.5}


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[failure.FailureWatch]]:
    """Of two ranks, in training, each with its thread. A rank that would end its process only ends its watch."""
    for name, seconds in FAST.items():
        monkeypatch.setattr(failure, name, seconds)
    monkeypatch.setattr(failure.FailureWatch, "leave", lambda self, code: self._ending.set())
    monkeypatch.setattr(failure.FailureWatch, "_tell", lambda self, message: None)
    store = dist.HashStore()
    with phase.phase("forward and backward", iteration=8):
        pair = [failure.FailureWatch(store, rank, 2) for rank in range(2)]
        for watch in pair:
            watch._write_sign()
        for watch in pair:
            watch._thread.start()
        yield pair
        for watch in pair:
            watch._ending.set()
            watch._thread.join()
    phase.reset()


def test_a_rank_that_ended_well_is_not_taken_for_dead(watches: list[failure.FailureWatch]) -> None:
    """As where one rank writes a profile for longer than SILENT_IN_TRAINING after the last iteration, and the others wait for it."""
    watches[1].expect_end()
    time.sleep(3 * FAST["SILENT_IN_TRAINING"])
    assert watches[0].on_record() is None and watches[0]._thread.is_alive()
    assert watches[0]._whose_fault() is None, "nor when something else failed"


def test_a_rank_that_went_silent_is(watches: list[failure.FailureWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches[1], "_write_sign", watches[1]._sign)  # which nobody sees
    time.sleep(3 * FAST["SILENT_IN_TRAINING"])
    found = watches[0].on_record()
    assert found is not None and found.startswith("rank 1, phase forward and backward, iteration 8: no sign of life since")
