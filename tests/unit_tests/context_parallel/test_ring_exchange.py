"""The ring by copies: on simulated GPUs, whatever the order of streams and ranks, and as attention between processes that share a file."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import parallel_state
from megatron.core.context_parallel import communication
from megatron.core.context_parallel.ring_exchange import RingExchange
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import ranks
from tests.file_memory import FileMemory, Queue
from tests.simulated_device import Host

WIDTH = 3


def own(rank: int, number: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def forward(exchange: RingExchange, x: torch.Tensor) -> list[torch.Tensor]:
    """As ring attention sends keys: what comes goes on before it is used. Returns what came, from the nearest rank first."""
    held, found = x, []
    for step in range(exchange.memory.size):
        going = exchange.start(held) if step + 1 < exchange.memory.size else None
        if step:
            found.append(use(held))
        if going is not None:
            held = going()
    return found


def backward(exchange: RingExchange, x: torch.Tensor) -> list[torch.Tensor]:
    """As ring attention sends gradients, keys on their way at the same time. Returns the keys that came, and the sum of all ranks' x."""
    held, found, going = x, [], None
    for step in range(1, exchange.memory.size):
        arriving = exchange.start(held) if step + 1 < exchange.memory.size else None
        part = torch.empty_like(x)
        torch.add(x, x if going is None else going(), out=part)
        going = exchange.start(part)
        if arriving is not None:
            held = arriving()
            found.append(use(held))
    assert going is not None
    total = torch.empty_like(x)
    torch.add(x, going(), out=total)
    return [*found, total]


def use(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor).copy_(tensor)


def expected(kind: str, size: int, rank: int, number: int, rows: int) -> list[torch.Tensor]:
    def of(step: int) -> torch.Tensor:
        return own((rank - step) % size, number, rows)

    if kind == "forward":
        return [of(step) for step in range(1, size)]
    total = 2 * of(size - 1)  # the first to send adds its own twice
    for step in range(size - 2, -1, -1):
        total = of(step) + total
    return [*[of(step) for step in range(1, size - 1)], total]


def play(size: int, calls: list[tuple[str, int]], seed: int, shared_queue: bool) -> list[list[list[torch.Tensor]]]:
    """What each call gave each rank, where all memory is used again right after it."""
    host, results = Host(size, shared_queue), list[list[list[torch.Tensor]]]()
    given = [[own(rank, number, rows) for number, (_, rows) in enumerate(calls)] for rank in range(size)]
    for rank, device in enumerate(host.ranks):
        first = calls[0][1] * WIDTH * 8
        exchange = RingExchange(lambda capacity, rank=rank: host.allocate(rank, capacity, 1), first, device.stream, device.current)  # type: ignore[misc]
        results.append([])
        for (kind, _), x in zip(calls, given[rank], strict=True):
            host.issuing, host.allocated = device, []
            with host:
                found = forward(exchange, x) if kind == "forward" else backward(exchange, x)
                keeping = {each.data_ptr() for each in found}
                for tensor in (x, *host.allocated):
                    if tensor.data_ptr() not in keeping:
                        tensor.fill_(float("nan"))
            results[-1].append(found)
    host.run(random.Random(seed))
    return results


def check(size: int, calls: list[tuple[str, int]], seed: int, shared_queue: bool) -> None:
    for rank, results in enumerate(play(size, calls, seed, shared_queue)):
        for number, ((kind, rows), got) in enumerate(zip(calls, results, strict=True)):
            for each, want in zip(got, expected(kind, size, rank, number, rows), strict=True):
                assert torch.equal(each, want), f"rank {rank} of {size}, call {number}: {kind}"


programs = st.lists(st.tuples(st.sampled_from(["forward", "backward"]), st.integers(1, 3)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(size=st.sampled_from([2, 3, 4]), calls=programs, seed=st.integers(0, 2**32), shared_queue=st.booleans())
def test_any_order_gives_what_was_sent(size: int, calls: list[tuple[str, int]], seed: int, shared_queue: bool) -> None:
    check(size, [("forward", 3), *calls], seed, shared_queue)  # memory for the largest: it does not grow here


def test_memory_grows() -> None:
    check(3, [("forward", 2), ("backward", 700), ("forward", 3)], 0, False)


def test_turns_are_waited_for_in_order() -> None:
    host = Host(2, False)
    exchange = RingExchange(lambda capacity: host.allocate(0, capacity, 1), 8, host.ranks[0].stream, host.ranks[0].current)
    with host:
        exchange.start(torch.empty(1, 1))
        second = exchange.start(torch.empty(1, 1))
        with pytest.raises(AssertionError, match="in the order of their starts"):
            second()


# --- attention ---


def attention(cp: int, comm_type: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of this rank's tokens, of three batches."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, context_parallel_size=cp,
        cp_comm_type=comm_type, hierarchical_context_parallel_sizes=[2, cp // 2] if comm_type == "a2a+p2p" else None, cp_comm_overlap=True,
    )  # fmt: skip
    core = DotProductAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=ProcessGroupCollection.use_mpu_process_groups(), cp_comm_type=comm_type
    )
    found = []
    for batch, rows in enumerate((32, 128, 64)):  # memory grows once
        generator = torch.Generator().manual_seed(10 * batch + parallel_state.get_context_parallel_rank())
        shapes = [(rows, 1, heads, 8) for heads in (4, 2, 2)]
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]
        out = core(*leaves, None)
        (out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)).sum().backward()
        found += [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]
    return found


def with_and_without(cp: int, folder: Path) -> list[Any]:
    """(kind, how many turns, results by torch.distributed, results by copies)."""
    parallel_state.destroy_model_parallel()  # another test's, in a process that stays
    results: list[Any] = []
    for comm_type in ("p2p", "a2a+p2p") if cp > 2 else ("p2p",):
        sizes = [2, cp // 2] if comm_type == "a2a+p2p" else None
        parallel_state.initialize_model_parallel(context_parallel_size=cp, hierarchical_context_parallel_sizes=sizes)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            plain = attention(cp, comm_type, dtype)
            made: dict[Any, RingExchange] = {}

            def exchange_of(kind: Any, group: Any, tensor: torch.Tensor, nbytes: int) -> RingExchange:
                if group not in made:  # noqa: B023
                    file = folder / f"{comm_type}{dtype}{torch.distributed.get_process_group_ranks(group)}"  # noqa: B023
                    made[group] = kind(lambda capacity: FileMemory(file, capacity, 1, group), nbytes, Queue, Queue)  # noqa: B023
                return made[group]  # noqa: B023

            with mock.patch.object(communication, "exchange_of", exchange_of):
                copied = attention(cp, comm_type, dtype)
            results.append((comm_type, sum(exchange._number for exchange in made.values()), plain, copied))
        parallel_state.destroy_model_parallel()
    return results


@pytest.mark.parametrize("cp", [2, 4])
def test_attention_is_equal_to_the_bit(cp: int, tmp_path: Path) -> None:
    # of two batches, since memory grew: forward n - 1, backward n - 2 and n - 1
    turns = {"p2p": 2 * (3 * cp - 4), "a2a+p2p": 2 * (3 * (cp // 2) - 4)}
    for results in ranks().run(cp, with_and_without, cp, tmp_path):
        for comm_type, number, plain, copied in results:
            assert number == turns[comm_type], comm_type
            for each, want in zip(copied, plain, strict=True):
                assert torch.equal(each, want), comm_type
