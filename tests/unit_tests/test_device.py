"""Which GPU a process gets; the machine's are made up."""

import pytest
import torch

from megatron.core import device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the GPUs that were chosen, of two."""
    numbers: list[int] = []
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", numbers.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: numbers[-1])
    return numbers


def test_a_gpu_a_process(chosen: list[int]) -> None:
    assert [device.set_device(rank) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match="local rank 2 has no GPU: this host shows 2; start at most 2 processes a host"):
        device.set_device(2)
    assert chosen == [0, 1]


def test_shared_gpus_are_given_in_turn(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    for rank in range(5):
        device.set_device(rank)
    assert chosen == [0, 1, 0, 1, 0]


def test_sharing_is_refused_where_it_is_not_asked_for(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with pytest.raises(ValueError, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
        device.set_device(2)
    assert chosen == []
