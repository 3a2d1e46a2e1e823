"""Exchanges between two GPUs against collectives: many turns without a wait of the host, while chance holds up one rank or the other."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import device, parallel_state, symmetric_memory
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.symmetric_memory import exchange_of
from megatron.core.tensor_parallel.exchange import Exchange
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from tests.distributed import ranks
from tests.gpus import needs_two_gpus

pytestmark = [pytest.mark.gpu, needs_two_gpus]
WIDTH = 512


def hold_up(chance: random.Random) -> None:
    if chance.random() < 0.3:
        torch.cuda._sleep(int(chance.random() * 2e6))  # up to 1 ms


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device.current_device())


def exchange_for(tensor: torch.Tensor) -> Exchange:
    found = exchange_of(Exchange, dist.group.WORLD, tensor, tensor.nbytes)
    assert found is not None, "these GPUs share no memory"
    return found


def transfers(turns: int, sizes: tuple[int, ...]) -> int:
    """Rows that are gathered or summed, to the bit; returns how many bytes the memory takes for a piece."""
    torch.manual_seed(dist.get_rank())
    chance = random.Random(dist.get_rank())
    given, found = [], []
    for turn in range(turns):
        rows = sizes[turn % len(sizes)]
        x, whole = draw(rows, 1, WIDTH), draw(2 * rows, 1, WIDTH)
        given.append((x.clone(), whole.clone()))
        exchange = exchange_for(x)
        hold_up(chance)
        gathered, gathering = exchange.start_gather(x)
        hold_up(chance)
        summed, summing = exchange.start_reduce_scatter(whole)
        gathering()
        x.fill_(torch.nan)
        hold_up(chance)
        summing()
        whole.fill_(torch.nan)
        found.append((gathered, summed))
    for (x, whole), (gathered, summed) in zip(given, found, strict=True):
        all_x, all_whole = (torch.cat([torch.empty_like(each)] * 2) for each in (x, whole))
        dist.all_gather_into_tensor(all_x, x)
        dist.all_gather_into_tensor(all_whole, whole)
        parts = all_whole.view(2, 2, -1, 1, WIDTH)[:, dist.get_rank()]
        assert torch.equal(gathered, all_x)
        assert torch.equal(summed, parts[0] + parts[1])
    return exchange.memory.capacity


def blocks(turns: int, **settings: Any) -> list[torch.Tensor]:
    """Column, then row, forward and backward, over and over: outputs, gradients."""
    config = ModelParallelConfig(
        params_dtype=torch.bfloat16, tensor_model_parallel_size=2, sequence_parallel=True, gradient_accumulation_fusion=True, **settings
    )
    torch.manual_seed(0)
    init = init_method_normal(WIDTH**-0.5)
    column = ColumnParallelLinear(WIDTH, 4 * WIDTH, config=config, init_method=init, bias=False)
    row = RowParallelLinear(4 * WIDTH, WIDTH, config=config, init_method=init, bias=False, input_is_parallel=True, skip_bias_add=False)
    layers: tuple[Any, Any] = (column, row)
    for layer in layers:
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device=device.current_device())
        layer.weight.main_grad_filled = True
    torch.manual_seed(1 + dist.get_rank())
    chance = random.Random(dist.get_rank())
    found = []
    for _ in range(turns):
        x = draw(1024, 1, WIDTH).requires_grad_()
        hold_up(chance)
        out = row(column(x)[0])[0]
        hold_up(chance)
        out.backward(draw(*out.shape))
        assert x.grad is not None
        found += [out.detach(), x.grad]
    return found + [layer.weight.main_grad for layer in layers]


def compare_blocks(turns: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with symmetric_memory.disabled():
        plain = blocks(turns)
    for halves in (False, True):
        got = blocks(turns, tp_comm_overlap=True, tp_comm_overlap_rs_dgrad=halves)
        for expected, each in zip(plain, got, strict=True):
            # two numbers, rounded to bf16 each, are summed: off by their size, not by the sum's
            size = expected.float().square().mean().sqrt().item()
            torch.testing.assert_close(each, expected, rtol=2**-7, atol=0.04 * size)
    assert exchange_of(Exchange, parallel_state.get_tensor_model_parallel_group(), draw(1), 1) is not None
    parallel_state.destroy_model_parallel()


def test_rows_are_equal_to_the_bit() -> None:
    ranks("nccl").run(2, transfers, 200, (512, 256))


def test_memory_grows() -> None:
    capacities = ranks("nccl").run(2, transfers, 12, (64, 512, 128, 2048))
    assert capacities == [2048 * WIDTH * 2] * 2


def test_linears() -> None:
    ranks("nccl").run(2, compare_blocks, 50)
