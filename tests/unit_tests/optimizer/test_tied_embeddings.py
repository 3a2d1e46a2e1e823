"""A tied embedding, which the first and the last stage hold each for themselves, never drifts apart: at every step, and after resuming."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.param_sharding import ParamSharding, declare
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.training.checkpoint_contents import optimizer_state
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.expert_toy import start_groups

TABLE = "embedding.word_embeddings.weight"


class Stage(nn.Module):
    """One end of a pipeline: the table under its own name, or as the head; and something else, so that buckets differ by stage."""

    def __init__(self, first: bool, dtype: torch.dtype) -> None:
        super().__init__()
        table = nn.Parameter(torch.empty(10, 6, dtype=dtype))
        torch.manual_seed(1)
        declare(table, ParamSharding((10, 6), shared_with=TABLE), init_method_normal(1.0))
        other = nn.Parameter(torch.empty(33 if first else 170, dtype=dtype))
        declare(other, ParamSharding(tuple(other.shape)), init_method_normal(1.0))
        if first:
            self.embedding: Any = nn.Module()
            self.embedding.word_embeddings = nn.Module()
            self.embedding.word_embeddings.weight = table
        else:
            self.output_layer: Any = nn.Module()
            self.output_layer.weight = table
        rest: Any = nn.Module()  # comes before the table in the buffer: 33 elements leave its bucket open, 170 do not
        rest.weight = other
        self.add_module("first_rest" if first else "last_rest", rest)
        self.table = [table]  # not a second name of it


def build(distributed: bool, dtype: torch.dtype, overlap: bool) -> tuple[Any, Any, Any]:
    groups = start_groups(pp=2)
    assert groups.pp is not None
    settings: dict[str, Any] = {
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and distributed,
        "grad_reduce_in_fp32": True,
    }
    ddp_config = DistributedDataParallelConfig(bucket_size=50, use_distributed_optimizer=distributed, **settings)
    model = Stage(groups.pp.rank() == 0, dtype)
    ddp = DistributedDataParallel(SimpleNamespace(calculate_per_token_loss=False), ddp_config, model, pg_collection=groups)
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=0.5, bf16=dtype == torch.bfloat16, use_distributed_optimizer=distributed)
    return ddp, get_megatron_optimizer(config, [ddp], pg_collection=groups), groups


def step(number: int, ddp: Any, optimizer: Any, groups: Any) -> torch.Tensor:
    """Each stage and replica has gradients of its own. Returns the table after the step."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ddp.zero_grad_buffer()
    sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in ddp.parameters()).backward()  # type: ignore[union-attr]
    finalize_model_grads([ddp], pg_collection=groups)
    optimizer.step()
    ddp.finish_param_sync()
    return ddp.module.table[0].detach().clone()


def contents(ddp: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": sharded_state_dict_default(ddp.module), "shards": optimizer_state(optimizer)}


def _tables(root: Path, settings: list[tuple[bool, torch.dtype, bool]], steps: int) -> list[list[torch.Tensor]]:
    found = []
    for number, setting in enumerate(settings):
        ddp, optimizer, groups = build(*setting)
        rows = [step(index, ddp, optimizer, groups) for index in range(steps)]
        folder = root / str(number)
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save(contents(ddp, optimizer), folder)
        common = optimizer.common_state_dict()
        straight = step(steps, ddp, optimizer, groups)
        ddp, optimizer, groups = build(*setting)
        dist_checkpointing.load(contents(ddp, optimizer), folder)
        optimizer.load_common_state_dict(common)
        rows += [ddp.module.table[0].detach().clone(), step(steps, ddp, optimizer, groups)]
        assert torch.equal(rows[-1], straight), "resuming goes on as if nothing had been"
        found.append(rows + [step(steps + 1, ddp, optimizer, groups)])
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_embedding_and_head_of_two_stages_stay_equal_to_the_bit(tmp_path: Path, replicas: int) -> None:
    settings = [(False, torch.float32, False), (True, torch.float32, False), (True, torch.float32, True), (True, torch.bfloat16, True)]
    results = run_on_ranks(2 * replicas, _tables, tmp_path, settings, 10)
    for rank in results[1:]:
        for setting, tables, expected in zip(settings, rank, results[0], strict=True):
            assert len(tables) == 13
            for number, (mine, theirs) in enumerate(zip(tables, expected, strict=True)):
                assert torch.equal(mine, theirs), f"{setting}, table {number}"
    plain, spread = results[0][0], results[0][1]
    assert not torch.equal(plain[0], plain[1])
    for mine, theirs in zip(plain, spread, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
