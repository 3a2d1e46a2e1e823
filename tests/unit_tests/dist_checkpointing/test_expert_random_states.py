"""Random states of experts differ by expert-parallel rank: each rank gets its own back."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.random import EXPERT_RNG, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.training.checkpoint_contents import RNG_KEY, rng_object, rng_state, set_rng_state, stored_rng_object
from megatron.training.checkpoint_formats import TorchDist
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.expert_toy import start_groups


def draws() -> list[float]:
    """A number of each kind of state: of the default, of tensor ranks, of experts."""
    found = [torch.rand(1).item()]
    for name in ("model-parallel-rng", EXPERT_RNG):
        with get_cuda_rng_tracker().fork(name):
            found.append(torch.rand(1).item())
    return found


def _states(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    start_groups(ep=2)
    model_parallel_cuda_manual_seed(5)
    draws()
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save({RNG_KEY: rng_object([rng_state()])}, folder)
    found["next"] = draws()
    for name, layout in (("same", {"ep": 2}), ("other", {})):
        start_groups(**layout)
        model_parallel_cuda_manual_seed(6)
        fresh = get_cuda_rng_tracker().get_states()[EXPERT_RNG].clone()
        entry, *own = stored_rng_object(TorchDist(folder))
        loaded = dist_checkpointing.load({RNG_KEY: entry}, folder)
        assert set_rng_state(loaded[RNG_KEY][0], *own)
        found[f"{name} is fresh"] = torch.equal(get_cuda_rng_tracker().get_states()[EXPERT_RNG], fresh)
        found[name] = draws()
    return found


def test_each_rank_goes_on_with_its_experts_states(tmp_path: Path) -> None:
    ranks = run_on_ranks(2, _states, tmp_path / "states")
    assert ranks[0]["next"][:2] == ranks[1]["next"][:2] and ranks[0]["next"][2] != ranks[1]["next"][2]
    for found in ranks:
        assert found["same"] == found["next"] and not found["same is fresh"]
        assert found["other"][:2] == found["next"][:2] and found["other is fresh"], "another layout has other experts on a rank"
