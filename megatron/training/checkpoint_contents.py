"""What is in a checkpoint of a run: model, optimizer, random states, position. Keys are Megatron-LM's: docs/checkpoints.md."""

import argparse
import random
import re
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import device, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.parts import sharded_tensors
from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import group_identity
from megatron.core.process_groups_config import default_pg_collection
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.tensor_parallel.random import EXPERT_RNG, get_cuda_rng_tracker
from megatron.core.transformer.extra_state import extra_state_objects
from megatron.core.transformer.utils import sharded_range_of, sharded_tensor_of
from megatron.core.utils import get_pg_rank, unwrap_model
from megatron.training.checkpoint_formats import StoredCheckpoint
from megatron.training.checkpoint_names import chunk_names
from megatron.training.data_order import DataOrder
from megatron.training.train_step import TrainState

CHECKPOINT_VERSION = 3.0
RNG_KEY = "rng_state"
DATA_ORDER = "data_order"  # ours: see data_order.py; a checkpoint without it (Megatron-LM's) takes its samples by the sizes of this run
# kind of optimizer state -> name of the main parameters in it
MAIN_PARAM = {"plain": "fp32_param", "fully_reshardable": "param"}



def rng_state() -> dict[str, Any]:
    """Every generator's state, as Megatron-LM names them."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": device.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any], own_tracker: bool = True, own_experts: bool = True) -> bool:
    """Restore every generator; False when the states are another kind of device's (a GPU's on a CPU) and were left as they are.

    own_tracker: also those that differ by rank; own_experts: also that of experts, which differs by expert-parallel rank too. Without them
    they stay as this rank was seeded.
    """
    version, internal, gauss = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"].numel() != device.get_rng_state().numel():
        return False
    device.set_rng_state(state["cuda_rng_state"])
    if own_tracker:
        tracker = get_cuda_rng_tracker()
        kept = {} if own_experts else {name: value for name, value in tracker.get_states().items() if name == EXPERT_RNG}
        tracker.set_states({**state["rng_tracker_states"], **kept})
    return True


def rng_object(data: Any) -> ShardedObject:
    """One entry per (pipeline, tensor) rank; data-parallel ranks have the same, unless they hold other experts: then one for each."""
    sizes = (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size())
    ranks = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        return ShardedObject(RNG_KEY, data, (*sizes, replicas), (*ranks, replica))
    return ShardedObject(RNG_KEY, data, sizes, ranks, replica_id=replica)


def stored_rng_object(checkpoint: StoredCheckpoint) -> tuple[ShardedObject | None, bool, bool]:
    """(the entry to read this rank's random states from, whether those that differ by tensor rank are in it, whether experts' are).

    A checkpoint of another layout has the states of its own ranks: a tensor rank that it lacks takes the states that its stage's ranks
    share from the first of them, a stage that it lacks takes none.
    """
    mine = rng_object(None)
    stored = {item.unique_key: item for item in checkpoint.objects(RNG_KEY)}
    if mine.unique_key in stored or not stored:
        return stored.get(mine.unique_key, mine), True, True  # the usual case, or an error that names what is missing
    by_rank: dict[tuple[int, ...], ShardedObject] = {}
    for item in stored.values():
        by_rank.setdefault(item.global_offset, item)
        by_rank.setdefault(item.global_offset[:2], item)
    stage, tensor = mine.global_offset[:2]
    own = by_rank.get(mine.global_offset) or by_rank.get((stage, tensor))
    experts_alike = all(len(item.global_shape) == len(mine.global_shape) == 2 for item in stored.values())
    return own or by_rank.get((stage, 0)), own is not None, own is not None and experts_alike


def model_state(model: list[torch.nn.Module]) -> dict[str, Any]:
    """The model's shards, under `model`, or `model0`, `model1`, ... for several chunks, as Megatron-LM has them."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()
    return {name: unwrap_model(chunk).sharded_state_dict() for name, chunk in zip(chunk_names(len(model)), model, strict=True)}


# modules of which Megatron-LM keeps an `_extra_state`: linears, and norms that are not part of one
_WITH_EXTRA_STATE = re.compile(r"(?P<module>.*\b(?:linear_\w+|(?P<norm>\w*layernorm))\.)weight")


def empty_extra_states(chunk: torch.nn.Module) -> dict[str, ShardedObject]:
    """The `_extra_state` entries that Megatron-LM's loader asks for and, without FP8, has nothing in: one for each layer (and expert)."""
    groups = default_pg_collection(None)
    found = {}
    for record in build_param_table(unwrap_model(chunk)).values():
        match = _WITH_EXTRA_STATE.fullmatch(record.key)
        if match is None:
            continue
        sharding = record.sharding
        sizes = record.whole_shape[: len(record.place)] or (1,)
        data = torch.empty(0, dtype=torch.uint8) if match["norm"] else None
        ranks = (groups.expt_tp, groups.expt_dp) if sharding.is_expert else (groups.tp, groups.dp_cp)
        replica = tuple(map(get_pg_rank, ranks))
        for number in range(record.param.shape[0] if sharding.expert_dims else 1):
            place = (*record.place[:-1], record.place[-1] + number) if record.place else (0,)
            item = ShardedObject(f"{match['module']}_extra_state", data, sizes, place, replica_id=replica)
            found[item.unique_key] = item
    return found


def optimizer_state(optimizer: Any, stored: Collection[str] | None = None) -> dict[str, Any]:
    """The optimizer's shards: `optimizer.state.<name>.<model key>` in the model's global shapes.

    `stored`: the keys of the checkpoint to read, which may be of the other kind of optimizer (MAIN_PARAM).
    """
    shards: dict[str, Any] = {}
    main = MAIN_PARAM[optimizer.state_kind]
    for record, tensors in optimizer.model_sharded_state(optimizer.state_kind):
        place = optimizer.shard_range(record.param)
        for name, tensor in tensors.items():
            stored_name = name
            if stored is not None and name == main:
                if tensor.dtype == record.param.dtype:  # the model's parameter itself
                    continue
                stored_name = next((n for n in MAIN_PARAM.values() if f"optimizer.state.{n}.{record.key}" in stored), main)
            prefix = f"optimizer.state.{stored_name}."
            where = ".".join([name, record.key, *map(str, record.place)])
            assert where not in shards, f"two parameters are stored as {record.key} at {record.place}"
            if place is None:
                shards[where] = sharded_tensor_of(record, tensor, prefix=prefix)
            else:
                replica = optimizer.shard_replica(record.param)
                shards[where] = sharded_range_of(record, tensor, place[0], prefix, replica)
    return shards


def is_rounded(args: Mapping[str, Any]) -> bool:
    """Whether a run's weights are rounded ones of its optimizer's main parameters."""
    return bool(args.get("bf16") or args.get("fp16"))


def main_params_of_weights(wanted: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Shards that fill a model in fp32 from the stored main parameters, which are not rounded as the stored weights are."""
    weights = sharded_tensors({key: value for key, value in wanted.items() if key.startswith("model")})
    keys = [[key for name in MAIN_PARAM.values() if (key := f"optimizer.state.{name}.{weight.key}") in stored] for weight in weights]
    return {str(number): replace(weight, key=keys[0]) for number, (weight, keys) in enumerate(zip(weights, keys, strict=True)) if keys}


def content_metadata(optimizer: Any | None) -> dict[str, Any]:
    found: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if optimizer is not None and optimizer.state_kind != "plain":
        found["distrib_optim_sharding_type"] = optimizer.state_kind
    return found


def _groups_of_pipeline(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with those that only other stages have: rank 0's are written."""
    group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is None or dist.get_world_size(group) == 1:
        return groups
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, groups, group=group)
    kinds: dict[tuple, dict[str, Any]] = {}
    for param_group in groups + [other for stage in stages for other in stage]:
        kinds.setdefault(group_identity(param_group), param_group)
    return list(kinds.values())


def optimizer_common(optimizer: Any) -> dict[Any, Any]:
    """What of the optimizer is not sharded, as Megatron-LM's has it: with expert parallelism a chain, {0: dense, 1: experts}.

    Its loader puts the numbers of its own parameters into the groups, and takes none from a checkpoint.
    """
    common = optimizer.common_state_dict()
    limits = {"default_config": True, "max_lr": optimizer.config.lr, "min_lr": optimizer.config.min_lr}
    dense: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in _groups_of_pipeline(common.pop("param_groups")):
        kept = {key: value for key, value in group.items() if key != "params"}
        (experts if group["is_expert_parallel"] else dense).append({**limits, **kept})
    if parallel_state.get_expert_model_parallel_world_size() > 1 and experts:
        return {0: _one_common(optimizer, common, dense), 1: _one_common(optimizer, common, experts)}
    # experts step with the others: without expert parallelism Megatron-LM has them in the others' groups
    kinds = {group_identity(group) for group in dense}
    alone = [group for group in experts if group_identity({**group, "is_expert_parallel": False}) not in kinds]
    return _one_common(optimizer, common, dense + alone)


def _one_common(optimizer: Any, common: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    inner = {"param_groups": groups}
    if optimizer.state_kind != "plain":
        return {"optimizer": inner, **common, "param_state_sharding_type": optimizer.state_kind}
    has_copies = any(entry.has_copy for entry in optimizer.params)
    return {"optimizer": inner, **common} if has_copies else {**inner, **common}


def contents_of(
    args: argparse.Namespace,
    state: TrainState,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    opt_param_scheduler: Any | None,
    *,
    save_rng: bool = True,
) -> dict[str, Any]:
    """All that a checkpoint holds, as this rank has it. Every rank calls it."""
    contents: dict[str, Any] = {
        "args": plain_namespace({**vars(args), **_position(state)}),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.num_floating_point_operations_so_far,
    }
    for (name, shards), chunk in zip(model_state(model).items(), model, strict=True):
        shards |= extra_state_objects(chunk)
        own = {item.unique_key for item in shards.values() if isinstance(item, ShardedObject)}
        contents[name] = shards | {key: item for key, item in empty_extra_states(chunk).items() if key not in own}
    if state.data_order is not None:
        contents[DATA_ORDER] = state.data_order.state_dict(state.consumed_train_samples, state.consumed_valid_samples)
    if optimizer is not None:
        contents["optimizer"] = {**optimizer_common(optimizer), "shards": optimizer_state(optimizer)}
    if opt_param_scheduler is not None:
        contents["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    if save_rng:
        contents[RNG_KEY] = rng_object([rng_state()])
    return contents


def _position(state: TrainState) -> dict[str, Any]:
    """The run's position under the names that Megatron-LM keeps in `args`."""
    elsewhere = {"num_floating_point_operations_so_far", "data_order"}
    return {item.name: getattr(state, item.name) for item in fields(state) if item.name not in elsewhere}


def state_from(common: dict[str, Any], iteration: int) -> TrainState:
    saved = vars(common["args"]) if "args" in common else {}
    return TrainState(
        iteration=iteration,
        consumed_train_samples=int(saved.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(saved.get("consumed_valid_samples", 0)),
        skipped_train_samples=int(saved.get("skipped_train_samples", 0)),
        num_floating_point_operations_so_far=float(common.get("num_floating_point_operations_so_far", 0.0)),
        data_order=DataOrder(common[DATA_ORDER]) if isinstance(common.get(DATA_ORDER), dict) else None,
    )

