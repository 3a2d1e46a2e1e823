"""Writing Megatron-LM's legacy `torch` format: the file of one model-parallel rank, as legacy_checkpoints.py describes it.

Names and order of parameters are Megatron-LM's own of its `local` layers, or of Transformer Engine's: a reader numbers the optimizer's
states by that order.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.integrity import sync_folder
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model
from megatron.training import legacy_distributed_optimizer
from megatron.training.checkpoint_names import chunk_names, rank_folder
from megatron.training.legacy_checkpoints import MODEL_FILE, OPTIMIZER_FILE


@dataclass(frozen=True)
class FileEntry:
    """One entry of a rank's model: a parameter's or stored buffer's tensor, or an `_extra_state`."""

    name: str
    owner: str | None  # name of the parameter or buffer in the model; None: an `_extra_state`
    value: torch.Tensor | None
    expert: int | None = None  # row of a parameter that holds several experts: each is an entry of its own


def file_entries(chunk: torch.nn.Module) -> Iterator[FileEntry]:
    """In registration order, with the empty `_extra_state` entries that Megatron-LM's modules have."""
    seen: set[int] = set()
    for path, module in unwrap_model(chunk).named_modules():
        prefix = f"{path}." if path else ""
        for name, param in module.named_parameters(recurse=False):
            described: Any = param
            if described.sharding.expert_dims:
                yield from (FileEntry(f"{prefix}{name}{row}", f"{prefix}{name}", one, row) for row, one in enumerate(param.detach()))
            elif id(param) not in seen:  # a tied weight of one stage is stored once
                yield FileEntry(f"{prefix}{name}", f"{prefix}{name}", param.detach())
            seen.add(id(param))
        for name, buffer in module.named_buffers(recurse=False):
            if hasattr(buffer, "sharding"):
                yield FileEntry(f"{prefix}{name}", f"{prefix}{name}", buffer.detach())
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            yield FileEntry(f"{prefix}_extra_state", None, None)
        elif type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield FileEntry(f"{prefix}_extra_state", None, module.get_extra_state())
        elif path == "decoder.final_layernorm":
            yield FileEntry(f"{prefix}_extra_state", None, torch.empty(0, dtype=torch.uint8))


def model_state_dict(chunk: torch.nn.Module) -> dict[str, Any]:
    """Name -> this rank's tensor."""
    return {entry.name: entry.value for entry in file_entries(chunk)}


def optimizer_state_dict(optimizer: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """State by parameter number, groups, and with fp32 copies `fp32_from_fp16_params` by group; with experts a list of two of these."""
    common = optimizer.common_state_dict()
    of_experts = [bool(group["is_expert_parallel"]) for group in common["param_groups"]]
    kinds = [_one_optimizer(optimizer, common, kind, of_experts) for kind in sorted(set(of_experts))]
    return kinds[0] if len(kinds) == 1 else kinds


def _one_optimizer(optimizer: Any, common: Mapping[str, Any], kind: bool, of_experts: list[bool]) -> dict[str, Any]:
    entries = iter(optimizer.params)
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups, copies = [], []
    for group, is_kind in zip(common["param_groups"], [value == kind for value in of_experts], strict=True):
        members = [next(entries) for _ in group["params"]]
        if not is_kind:
            continue
        first = len(state)
        main: list[torch.Tensor] = []
        for entry in members:
            tensors = {name: tensor.detach() for name, tensor in optimizer.state[entry.main_param].items()}
            rows = range(len(entry.main_param)) if entry.model_param.sharding.expert_dims else [None]
            for row in rows:  # the names of the model's state: one for each expert
                state[len(state)] = {name: tensor if row is None else tensor[row] for name, tensor in tensors.items()}
                if entry.has_copy:
                    main.append(entry.main_param.detach() if row is None else entry.main_param.detach()[row])
        limits = {"default_config": True, "max_lr": optimizer.config.lr, "min_lr": optimizer.config.min_lr}
        groups.append({**limits, **group, "params": list(range(first, len(state)))})
        copies.append(main)
    inner = {"state": state, "param_groups": groups}
    whole: dict[str, Any] = {"optimizer": inner, "fp32_from_fp16_params": copies} if any(copies) else inner
    if "grad_scaler" in common:
        whole["grad_scaler"] = common["grad_scaler"]
    return whole


def _compact(value: Any) -> Any:
    """CPU tensors that own just their elements: torch.save writes the whole storage of a view."""
    if torch.is_tensor(value):
        moved = value.detach().cpu()
        return moved.clone() if moved.untyped_storage().nbytes() != moved.numel() * moved.element_size() else moved
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    return [_compact(item) for item in value] if isinstance(value, list) else value


def write(folder: Path, contents: dict[str, Any], model: list[torch.nn.Module], optimizer: Any | None, rng_state: Any | None) -> None:
    """Write this rank's file into the checkpoint's (unfinished) folder; every rank calls it, the first of equal ones write.

    contents: as for torch_dist; what is sharded there is left out, it stands in the file as this rank sees it.
    Raises on every rank what failed on one (OSError as the file system does).
    """
    failure: Exception | None = None
    is_writer = parallel_state.get_expert_data_parallel_rank() == 0
    is_distributed = optimizer is not None and optimizer.state_kind != "plain"
    flats = legacy_distributed_optimizer.whole_states(optimizer, is_writer) if is_distributed else None
    if is_writer:
        contents = {key: value for key, value in contents.items() if not key.startswith("model") and key not in ("optimizer", "rng_state")}
        contents.update((name, model_state_dict(chunk)) for name, chunk in zip(chunk_names(len(model)), model, strict=True))
        if is_distributed:
            contents["optimizer"] = legacy_distributed_optimizer.groups_without_params(optimizer)
        elif optimizer is not None:
            contents["optimizer"] = optimizer_state_dict(optimizer)
        if rng_state is not None:
            contents["rng_state"] = [rng_state]
        try:
            _write_file(folder / own_folder() / MODEL_FILE, contents)
            if flats is not None:
                _write_file(folder / own_folder() / OPTIMIZER_FILE, flats)
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            failure = error if isinstance(error, OSError) else OSError(f"{folder / own_folder()} cannot be written: {error}")
    _agree_on(failure)


def own_folder() -> str:
    """The name of this rank's folder."""
    rank = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    stages, experts = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_expert_model_parallel_world_size()
    return rank_folder(rank, stages, experts)


def _write_file(path: Path, contents: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        torch.save(_compact(contents), file)
        file.flush()
        os.fsync(file.fileno())
    for folder in (path.parent, path.parent.parent):  # their entries too are on the disk before the checkpoint gets its name
        sync_folder(folder)


def _agree_on(failure: Exception | None) -> None:
    """Raise the lowest failing rank's exception on all, so that none waits for it."""
    failures = [failure]
    if dist.is_initialized() and dist.get_world_size() > 1:
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    for rank, found in enumerate(failures):
        if found is not None:
            setattr(found, "failed_rank", rank)  # noqa: B010
            raise found
