"""Exchanges through shared memory: results in whatever order streams and ranks go, on GPUs that are simulated."""

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import symmetric_memory
from megatron.core.symmetric_memory import _obstacle
from megatron.core.tensor_parallel.exchange import Exchange
from tests.distributed import ranks
from tests.simulated_device import Host

METHODS = ("gather_matmul", "gather_matmul, kept", "start_gather", "matmul_reduce_scatter", "start_reduce_scatter", "column backward")
Call = tuple[str, int]  # a method, and rows of a rank
WIDTH = 3


def operands(call: Call, size: int, number: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """For each rank: its own rows [rows, 1, 3], rows of all [size * rows, 1, 3], a matrix [3, 3]."""
    generator = torch.Generator().manual_seed(number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).to(dtype) / (1 if dtype is torch.float64 else 7)

    rows = call[1]
    return tuple([draw(*shape) for _ in range(size)] for shape in ((rows, 1, WIDTH), (size * rows, 1, WIDTH), (WIDTH, WIDTH)))  # type: ignore[return-value]


def expected(call: Call, rank: int, xs: list[torch.Tensor], wholes: list[torch.Tensor], matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """By whole tensors."""
    gathered = torch.cat(xs)
    scattered = torch.stack([whole.chunk(len(xs))[rank] for whole in wholes]).sum(0)
    products = torch.stack([(whole @ matrix).chunk(len(xs))[rank] for whole, matrix in zip(wholes, matrices, strict=True)]).sum(0)
    return {
        "gather_matmul": [gathered @ matrices[rank]],
        "gather_matmul, kept": [gathered @ matrices[rank], gathered],
        "start_gather": [gathered],
        "matmul_reduce_scatter": [products],
        "start_reduce_scatter": [scattered],
        "column backward": [gathered, scattered],
    }[call[0]]


def issue(exchange: Exchange, method: str, x: torch.Tensor, whole: torch.Tensor, matrix: torch.Tensor) -> list[torch.Tensor]:
    if method == "column backward":  # two at once
        gathered, gathering = exchange.start_gather(x)
        scattered, summed = exchange.start_reduce_scatter(whole)
        gathering()
        summed()
        return [gathered, scattered]
    if method.startswith("gather_matmul"):
        return [found for found in exchange.gather_matmul(x, matrix, keep=method.endswith("kept")) if found is not None]
    found, wait = {
        "start_gather": lambda: exchange.start_gather(x),
        "matmul_reduce_scatter": lambda: exchange.matmul_reduce_scatter(whole, matrix),
        "start_reduce_scatter": lambda: exchange.start_reduce_scatter(whole),
    }[method]()
    wait()
    return [found]


def play(size: int, calls: list[Call], seed: int, shared_queue: bool, dtype: torch.dtype = torch.float64) -> list[list[list[torch.Tensor]]]:
    """What each call gave each rank, where the memory of its operands and of all that it made is used again right after it."""
    host = Host(size, shared_queue)
    results: list[list[list[torch.Tensor]]] = []
    given = [operands(call, size, number, dtype) for number, call in enumerate(calls)]
    for rank, device in enumerate(host.ranks):
        first = calls[0][1] * WIDTH * dtype.itemsize
        exchange = Exchange(lambda capacity, rank=rank: host.allocate(rank, capacity, size), first, device.stream, device.current)  # type: ignore[misc]
        results.append([])
        for (method, _), tensors in zip(calls, given, strict=True):
            x, whole, matrix = (each[rank].clone() for each in tensors)
            host.issuing, host.allocated = device, []
            with host:
                found = issue(exchange, method, x, whole, matrix)
                kept = [torch.empty_like(each) for each in found]
                for place, each in zip(kept, found, strict=True):
                    place.copy_(each)
                keeping = {place.data_ptr() for place in kept}
                for tensor in (x, whole, *host.allocated):
                    if tensor.data_ptr() not in keeping:
                        tensor.fill_(float("nan"))
            results[-1].append(kept)
    host.run(random.Random(seed))
    return results


programs = st.lists(st.tuples(st.sampled_from(METHODS), st.integers(1, 3)), min_size=1, max_size=8)


@settings(deadline=None, max_examples=150)
@given(size=st.sampled_from([2, 3, 4]), calls=programs, seed=st.integers(0, 2**32), shared_queue=st.booleans())
def test_any_order_gives_what_whole_tensors_give(size: int, calls: list[Call], seed: int, shared_queue: bool) -> None:
    calls = [("start_gather", 3), *calls]  # memory for the largest piece: it does not grow here
    for rank, results in enumerate(play(size, calls, seed, shared_queue)):
        for number, (call, got) in enumerate(zip(calls, results, strict=True)):
            wanted = expected(call, rank, *operands(call, size, number, torch.float64))
            for each, want in zip(got, wanted, strict=True):
                assert torch.equal(each, want), f"rank {rank} of {size}, call {number}: {call}"


@pytest.mark.parametrize("size", [2, 4])
def test_sums_do_not_depend_on_timing(size: int) -> None:
    calls = [(method, 3) for method in ("matmul_reduce_scatter", "start_reduce_scatter")] * 2
    runs = [play(size, calls, seed, False, torch.bfloat16) for seed in range(5)]
    for rank in range(size):
        for number, call in enumerate(calls):
            (want,) = expected(call, rank, *operands(call, size, number, torch.bfloat16))
            assert all(torch.equal(run[rank][number][0], want) for run in runs)


def test_memory_grows() -> None:
    calls = [("gather_matmul, kept", 2), ("start_reduce_scatter", 700), ("gather_matmul, kept", 3)]
    for rank, results in enumerate(play(2, calls, 0, False)):
        for number, (call, got) in enumerate(zip(calls, results, strict=True)):
            for each, want in zip(got, expected(call, rank, *operands(call, 2, number, torch.float64)), strict=True):
                assert torch.equal(each, want)


def test_a_sum_that_was_not_waited_for() -> None:
    host = Host(2, False)
    exchange = Exchange(lambda capacity: host.allocate(0, capacity, 2), 8, host.ranks[0].stream, host.ranks[0].current)
    with host:
        exchange.start_reduce_scatter(torch.empty(2, 1))
        with pytest.raises(AssertionError, match="before the sum of the last"):
            exchange.start_gather(torch.empty(1, 1))


ALL = frozenset(range(4))


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([("a", 0, ALL - {0}, "x"), ("a", 1, ALL - {1}, "y")], None),
        ([("a", 0, frozenset({1}), "x"), ("a", 1, frozenset({0}), "y")], None),
        ([("a", 0, ALL, "x"), ("b", 1, ALL, "y")], "2 hosts"),
        ([("a", 0, ALL, "x"), ("a", 0, ALL, "y")], "by the same number"),
        ([("a", 0, ALL, "x"), ("a", 1, frozenset({2}), "y")], "device 1 reaches only devices"),
        ([("a", 0, frozenset(), "x"), ("a", 0, frozenset(), "x")], None),  # they share a GPU
        ([("a", 0, frozenset({1}), "x"), ("a", 1, frozenset({0}), "y"), ("a", 0, frozenset({1}), "x")], None),
    ],
)
def test_who_can_share_memory(ranks: list[Any], problem: str | None) -> None:
    found = _obstacle(ranks)
    assert found is None if problem is None else found is not None and problem in found


def find(fails: bool) -> tuple[bool, list[str]]:
    """Whether two ranks have an exchange, with devices that reach each other, and what the log says; rank 1's memory may fail."""
    rank = dist.get_rank()

    def allocate(group: object, capacity: int, places: int) -> Any:
        if fails and rank == 1:
            raise RuntimeError("no peer mapping\nat a place")
        return SimpleNamespace(rank=rank, size=2, capacity=capacity)

    with (
        mock.patch.object(symmetric_memory, "PeerMemory", allocate),
        mock.patch.object(symmetric_memory, "logger") as logger,
        mock.patch.multiple(
            symmetric_memory.device,
            on_accelerator=lambda _: True,
            current_device=lambda: torch.device("cuda", rank),
            reachable_devices=lambda: frozenset({1 - rank}),
            card=lambda: str(rank),
            copy_stream=object,
        ),
    ):
        twice = [symmetric_memory.exchange_of(Exchange, dist.group.WORLD, torch.empty(1), 8) for _ in range(2)]
        with symmetric_memory.disabled():
            assert symmetric_memory.exchange_of(Exchange, dist.group.WORLD, torch.empty(1), 8) is None
    assert twice[0] is twice[1]
    return twice[0] is not None, [call.args[0] % call.args[1:] for call in logger.info.call_args_list]


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_agree_and_say_so_once(fails: bool) -> None:
    (first, said), (second, nothing) = ranks().run(2, find, fails)
    assert first is second is not fails
    assert nothing == []
    (line,) = said
    assert line.endswith("not symmetric memory: no peer mapping" if fails else "copy engines and symmetric memory")


def memory_that_one_rank_lacks() -> str:
    def allocate(nbytes: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory\nand a trace")
        return torch.zeros(nbytes, dtype=torch.uint8)

    with mock.patch.object(symmetric_memory, "_allocate", allocate), pytest.raises(RuntimeError) as raised:
        symmetric_memory.PeerMemory(dist.group.WORLD, 4096, 2)
    return str(raised.value)


def test_no_rank_waits_for_one_without_memory() -> None:
    assert ranks().run(2, memory_that_one_rank_lacks) == ["out of memory"] * 2


def none_on_a_cpu() -> bool:
    return symmetric_memory.exchange_of(Exchange, dist.group.WORLD, torch.empty(1), 8) is None


def test_no_exchange_on_a_cpu() -> None:
    assert ranks().run(2, none_on_a_cpu) == [True, True]
