"""What modules keep beside parameters (`get_extra_state`: Transformer Engine's FP8 scales), in a checkpoint as Megatron-LM has it.

One object for each module, `<key>._extra_state`, in a grid of layers, and of experts for experts' linears, whichever module holds them.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.param_sharding import ParamRecord, state_records
from megatron.core.utils import get_pg_rank, unwrap_model


def extra_state_objects(model_chunk: Any) -> dict[str, Any]:
    """Name -> ShardedObject with data, of every module of a (wrapped) chunk that has such state; of a module of several experts one for
    each, the name followed by its number in the module. Data are uint8 tensors, empty where there is nothing to keep."""
    groups = default_pg_collection(getattr(unwrap_model(model_chunk), "pg_collection", None))
    found: dict[str, Any] = {}
    for name, module, records in _modules(model_chunk):
        parts = [module.get_extra_state()] if len(records) == 1 else module.get_expert_states()
        for number, (record, part) in enumerate(zip(records, parts, strict=True)):
            found[name if len(records) == 1 else f"{name}{number}"] = _sharded_object(record, part, groups)
    return found


def keeps_extra_state(model_chunk: Any) -> bool:
    """Whether any module takes such state back."""
    return any(getattr(module, "keeps_scales", False) for module in unwrap_model(model_chunk).modules())


def restore_extra_states(model_chunk: Any, loaded: dict[str, Any]) -> int:
    """Give modules back what was loaded of `extra_state_objects` (None where the checkpoint has none); how many took something."""
    taken = 0
    for name, module, records in _modules(model_chunk):
        if not hasattr(module, "restore_states"):
            continue
        names = [name] if len(records) == 1 else [f"{name}{number}" for number in range(len(records))]
        taken += module.restore_states([loaded.get(each) for each in names])
    return taken


def _modules(model_chunk: Any) -> Iterator[tuple[str, Any, list[ParamRecord]]]:
    modules = dict(unwrap_model(model_chunk).named_modules())
    for name, records in state_records(model_chunk).items():
        yield name, modules[name.removesuffix("_extra_state").rstrip(".")], records


def _sharded_object(record: ParamRecord, data: torch.Tensor, groups: ProcessGroupCollection) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    experts = record.sharding.experts
    shape = (*((record.num_layers,) if record.stacked else ()), *((experts.total,) if experts else ()))
    ranks = (groups.expt_tp, groups.expt_dp) if experts else (groups.tp, groups.dp_cp)
    replica = (0, *(get_pg_rank(group) for group in ranks))  # scales are equal on all of them
    return ShardedObject(record.key, data, shape or (1,), record.place or (0,), replica)
