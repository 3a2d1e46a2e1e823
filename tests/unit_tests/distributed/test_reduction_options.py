"""How much the reduction of a step's gradients moves, against formulas; sums in fp32."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.utils import get_pg_size
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.expert_toy import ExpertToy, batch, start_groups
from tests.unit_tests.distributed.toy import Toy

LARGE_SIDE = {"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_to_all_single": 0, "broadcast": 0}


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Elements that each kind of collective moves meanwhile: those of the whole tensor, once a call; single numbers left out."""
    counts: Counter = Counter()

    def counting(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args[LARGE_SIDE[name]].dim():
                counts[name] += args[LARGE_SIDE[name]].numel()
            else:
                counts["numbers"] += 1
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in LARGE_SIDE:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield counts


PLAIN: dict[str, Any] = {}
SPREAD = {"use_distributed_optimizer": True}
# (layout, settings, dense ranks and expert ranks within an optimizer instance, instances)
CASES: tuple[tuple[dict[str, int], dict[str, Any], int, int, int], ...] = (
    ({}, PLAIN, 4, 4, 1),
    ({"ep": 2}, PLAIN, 4, 2, 1),
    ({"ep": 4}, PLAIN, 4, 1, 1),
    ({"tp": 2, "etp": 1, "ep": 2}, PLAIN, 2, 2, 1),
    ({"ep": 2}, SPREAD, 4, 2, 1),
    ({"ep": 4}, {**SPREAD, "overlap_grad_reduce": True}, 4, 1, 1),
    ({"instances": 2}, SPREAD, 2, 2, 2),
    ({"ep": 2, "instances": 2}, {**SPREAD, "overlap_grad_reduce": True, "overlap_param_gather": True}, 2, 1, 2),
)


def _volumes() -> list[Any]:
    found = []
    for layout, settings, *_ in CASES:
        groups = start_groups(**layout)
        ddp_config = DistributedDataParallelConfig(
            bucket_size=150, num_distributed_optimizer_instances=layout.get("instances", 1), **settings
        )
        model = ExpertToy(True, groups)
        ddp = DistributedDataParallel(SimpleNamespace(calculate_per_token_loss=False), ddp_config, model, pg_collection=groups)
        spread = bool(settings)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=spread), [ddp], pg_collection=groups)
        tokens = batch(1)
        for _ in range(2):  # the first step does not overlap
            ddp.zero_grad_buffer()
            with ddp.no_sync():
                ddp(*tokens).sum().backward()
            loss = ddp(*tokens).sum()
            with counted() as counts:
                loss.backward()
                finalize_model_grads([ddp], pg_collection=groups)
                optimizer.step()
                ddp.finish_param_sync()
        sizes = [buffer.grad_data.numel() for buffer in ddp.grad_buffers]
        records = build_param_table(ddp).values()
        partial = sum(r.param.numel() for r in records if r.sharding.grad_partial) if get_pg_size(groups.tp) > 1 else 0
        found.append((dict(counts), sizes, partial, [buffer.num_ranks for buffer in ddp.grad_buffers]))
    return found


def test_volume_of_a_step() -> None:
    """The dense buffer over dense data-parallel ranks, the experts' over those that hold the same experts; state spread: reduce-scatter
    and all-gather instead; instances: the ranks' parts once more over them; of micro batches the last alone."""
    for rank in run_on_ranks(4, _volumes):
        for (layout, settings, dense_ranks, expert_ranks, instances), (counts, sizes, partial, num_ranks) in zip(CASES, rank, strict=True):
            what = f"{layout} {settings}"
            reduced = sum(size for size, ranks in zip(sizes, (dense_ranks, expert_ranks), strict=True) if ranks > 1)
            assert num_ranks == [dense_ranks * instances, expert_ranks * instances], what
            over = sum(size // ranks for size, ranks in zip(sizes, (dense_ranks, expert_ranks), strict=True)) if instances > 1 else 0
            moved = (reduced, 0) if not settings else (over, reduced)
            assert counts.get("all_reduce", 0) == moved[0] + partial, what
            assert counts.get("reduce_scatter_tensor", 0) == counts.get("all_gather_into_tensor", 0) == moved[1], what
            # the norm: a number for each kind of parameters and group that its parts are spread over
            tp, ep = layout.get("tp", 1), layout.get("ep", 1)
            spread_over = (dense_ranks > 1, expert_ranks > 1) if settings else (False, False)
            assert counts.get("numbers", 0) == sum(spread_over) + (tp > 1) + (layout.get("etp", tp) * ep > 1), what
    assert partial == 0 and any(rank[number][2] for number in range(len(CASES)))


def _sums(settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """(own part of the reduced gradients, all ranks' gradients before)."""
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, **settings)
    ddp = DistributedDataParallel(SimpleNamespace(calculate_per_token_loss=False), ddp_config, Toy(1).bfloat16(), pg_collection=groups)
    (buffer,) = ddp.grad_buffers
    ddp.zero_grad_buffer()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for param in ddp.parameters():
        param.main_grad.copy_(torch.randn(param.shape, generator=generator) * 4)  # type: ignore[attr-defined, operator]
        param.main_grad_filled = True  # type: ignore[attr-defined]
    every = [torch.empty_like(buffer.grad_data) for _ in range(4)]
    dist.all_gather(every, buffer.grad_data)
    ddp.finish_grad_sync()
    stacked = torch.stack(every)
    return buffer.own_part(buffer.grad_data).clone(), torch.stack([buffer.own_part(grads) for grads in stacked])


@pytest.mark.parametrize("overlap", [False, True])
def test_sixteen_bit_gradients_are_added_up_in_fp32(overlap: bool) -> None:
    settings = {"reduce_scatter_with_fp32_accumulation": True, "overlap_grad_reduce": overlap}
    for own, every in run_on_ranks(4, _sums, settings):
        assert torch.equal(own, (every / 4).sum(0, dtype=torch.float32).bfloat16())
    if not overlap:
        assert any(not torch.equal(own, (every / 4).sum(0, dtype=torch.float32).bfloat16()) for own, every in run_on_ranks(4, _sums, {}))
