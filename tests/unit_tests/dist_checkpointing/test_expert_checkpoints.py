"""Checkpoints of experts: any layout, kind of optimizer and form of the experts reads what any other wrote, to the bit."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table, initialize_parameters
from megatron.core.transformer.utils import sharded_state_dict_default
from megatron.training.checkpointing import optimizer_state
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.expert_toy import EXPERTS, FFN, HIDDEN, ExpertToy, start_groups

# (layout, experts of a rank in one parameter, distributed optimizer): each reads the first one's checkpoint
READERS: tuple[tuple[dict[str, int], bool, bool], ...] = (
    ({"ep": 2, "etp": 2}, False, False),
    ({}, True, False),
    ({"ep": 4}, True, True),
    ({"etp": 2, "ep": 2}, True, True),
    ({"tp": 2, "etp": 1, "ep": 2}, False, True),
    ({"pp": 2, "ep": 2}, False, True),
    ({"pp": 2, "etp": 2}, True, False),
    ({"ep": 2, "instances": 2}, True, True),
)  # fmt: skip


def build(layout: dict[str, int], grouped: bool, distributed: bool, dtype: torch.dtype, frequency: Any, seed: int) -> tuple[Any, Any]:
    groups = start_groups(**layout)
    model = ExpertToy(grouped, groups, num_layers=4, frequency=frequency)
    initialize_parameters(model, seed)
    ddp_config = DistributedDataParallelConfig(
        bucket_size=150,
        use_distributed_optimizer=distributed,
        num_distributed_optimizer_instances=layout.get("instances", 1),
        grad_reduce_in_fp32=True,
    )
    config = SimpleNamespace(calculate_per_token_loss=False)
    ddp = DistributedDataParallel(config, ddp_config, model.to(dtype), pg_collection=groups)
    optimizer_config = OptimizerConfig(lr=1e-2, bf16=dtype == torch.bfloat16, use_distributed_optimizer=distributed)
    return ddp, get_megatron_optimizer(optimizer_config, [ddp], pg_collection=groups)


def contents(ddp: Any, optimizer: Any, stored: Any = None) -> dict[str, Any]:
    ddp.finish_param_sync()
    return {"model": sharded_state_dict_default(ddp.module), "shards": optimizer_state(optimizer, stored)}


def write(folder: Path, ddp: Any, optimizer: Any) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(contents(ddp, optimizer), folder)


def _read_and_write_again(root: Path, dtype: torch.dtype, frequency: Any) -> list[tuple[int, ...]]:
    ddp, optimizer = build(*READERS[0], dtype, frequency, seed=11)
    for step in range(2):
        ddp.zero_grad_buffer()
        for record in build_param_table(ddp).values():  # every element a moment of its own
            grad: torch.Tensor = record.param.main_grad  # type: ignore[attr-defined]
            start = 10 * record.sharding.experts.first if record.sharding.experts else 0
            grad.copy_((torch.arange(grad.numel()).view_as(grad) + start + step).sin())
            record.param.main_grad_filled = True  # type: ignore[attr-defined]
        ddp.finish_grad_sync()
        optimizer.step()
    write(root / "0", ddp, optimizer)
    stored = dist_checkpointing.load_tensors_metadata(root / "0").keys()
    steps = []
    for number, reader in enumerate(READERS):
        ddp, optimizer = build(*reader, dtype, frequency, seed=12)
        dist_checkpointing.load(contents(ddp, optimizer, stored), root / "0")
        common = {"param_groups": [{"step": 2, "wd_mult": wd_mult} for wd_mult in (0.0, 1.0)]}  # of a run that knew no groups of experts
        optimizer.load_common_state_dict(common)
        steps.append(tuple(int(group["step"]) for group in optimizer.param_groups))
        write(root / f"{number}-again", ddp, optimizer)
    return steps


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_any_layout_reads_any_other(tmp_path: Path, dtype: torch.dtype) -> None:
    frequency = 1 if dtype == torch.float64 else [1, 1, 1, 1]
    for steps in run_on_ranks(4, _read_and_write_again, tmp_path, dtype, frequency):
        assert set(sum(steps, ())) == {2}
    first = dist_checkpointing.load_plain_tensors(tmp_path / "0")
    weights = "optimizer.state.fp32_param." if dtype == torch.bfloat16 else ""
    for number, (_, _, distributed) in enumerate(READERS):
        again = dist_checkpointing.load_plain_tensors(tmp_path / f"{number}-again")
        if distributed:
            main = {key.removeprefix("optimizer.state.param."): key for key in again if key.startswith("optimizer.state.param.")}
            assert main
            for key, stored in main.items():
                torch.testing.assert_close(again.pop(stored), first[weights + key], rtol=0, atol=0, msg=f"{READERS[number]}: {stored}")
        assert again.keys() == {key for key in first if not (distributed and weights and key.startswith(weights))}
        for key, value in again.items():
            assert torch.equal(value, first[key]), f"{READERS[number]}: {key}"


def test_keys_and_shapes() -> None:
    """One key for all experts of all layers, whether an expert is alone or not; without the layers' dimension where layers differ."""
    for grouped in (False, True):
        stacked = sharded_state_dict_default(ExpertToy(grouped, ProcessGroupCollection(), 2))
        shapes = {value.key: value.global_shape for value in stacked.values()}
        assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (2, EXPERTS, FFN, HIDDEN)
        assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.bias"] == (2, EXPERTS, FFN)
        assert shapes["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == (2, EXPERTS, HIDDEN, FFN)
        assert shapes["decoder.layers.mlp.router.weight"] == (2, EXPERTS, HIDDEN)
        each = sharded_state_dict_default(ExpertToy(grouped, ProcessGroupCollection(), 2, frequency=[0, 1]))
        shapes = {value.key: value.global_shape for value in each.values()}
        assert shapes["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"] == (EXPERTS, FFN, HIDDEN)
        assert shapes["decoder.layers.0.mlp.router.weight"] == (EXPERTS, HIDDEN)
