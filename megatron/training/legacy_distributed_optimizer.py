"""Writing a distributed optimizer's state in the legacy format: a file beside a model-parallel rank's model, whole over its data ranks."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import get_pg_size, unwrap_model
from megatron.training.optimizer_buckets import ALIGNMENT, STATES


def _registered(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """(chunk, this rank's part) of every trained parameter, in registration order: the same on all data-parallel ranks."""
    by_param = {id(entry.model_param): entry for entry in optimizer.params}
    for number, chunk in enumerate(optimizer.model_chunks):
        for param in unwrap_model(chunk).parameters():
            if id(param) in by_param:
                yield number, by_param[id(param)]


def _whole(optimizer: Any, entry: Any, state: str) -> torch.Tensor:
    """A parameter's state, flat, from all ranks' parts. A collective over the ranks that share the parameter."""
    part = entry.main_param.detach() if state == "param" else optimizer.state[entry.main_param][state]
    whole = torch.zeros(entry.model_param.numel(), dtype=torch.float32, device=part.device)
    whole[entry.start : entry.end] = part
    group = optimizer.shard_groups[int(is_expert(entry.model_param))]
    if get_pg_size(group) > 1:
        dist.all_reduce(whole, group=group)  # of each element one rank has the value and the others 0
    return whole


def _flat(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts, last registered first, each at a multiple of ALIGNMENT elements."""
    pieces: list[torch.Tensor] = []
    end = 0
    for part in reversed(parts):
        gap = -end % ALIGNMENT
        pieces += [part.new_zeros(gap), part]
        end += gap + part.numel()
    return torch.cat(pieces)


def whole_states(optimizer: Any, keep: bool) -> dict[str, Any] | list[dict[str, Any]] | None:
    """What `distrib_optim.pt` holds, on the CPU: buffer number -> (dtypes) -> state -> flat tensor; a list of two of these with experts.

    Every rank calls it; `keep`: whether this one wants the result (else None), which needs memory for all of its parameters' states.
    """
    # kind -> (chunk, dtypes) -> state -> parts
    found: dict[bool, dict[tuple[int, tuple[torch.dtype, torch.dtype]], dict[str, list[torch.Tensor]]]] = {}
    for chunk, entry in _registered(optimizer):
        param = entry.model_param
        buffer = (chunk, (param.dtype, entry.grad_shard.dtype))
        for state in STATES:
            whole = _whole(optimizer, entry, state)
            if keep:
                parts = found.setdefault(is_expert(param), {}).setdefault(buffer, {}).setdefault(state, [])
                # the names of the model's state: one for each expert
                parts += whole.cpu().chunk(len(param)) if param.sharding.expert_dims else [whole.cpu()]
    if not keep:
        return None
    kinds = []
    for _, buffers in sorted(found.items()):
        kind: dict[Any, Any] = {"buckets_coalesced": True}
        for number, ((_, dtypes), states) in enumerate(buffers.items()):
            flats: dict[str, Any] = {state: _flat(parts) for state, parts in states.items()}
            kind[number] = {dtypes: {**flats, "numel_unpadded": flats["param"].numel()}}
        kinds.append(kind)
    return kinds[0] if len(kinds) == 1 else kinds


def groups_without_params(optimizer: Any) -> dict[str, Any] | list[dict[str, Any]]:
    """What the model's file holds of the optimizer: parameter groups, and the loss scale; a list of two of these with experts."""
    common = optimizer.common_state_dict()
    limits = {"default_config": True, "max_lr": optimizer.config.lr, "min_lr": optimizer.config.min_lr}
    kinds: dict[bool, list[dict[str, Any]]] = {}
    for group in common["param_groups"]:
        own = {key: value for key, value in group.items() if key != "params"}
        kinds.setdefault(bool(group["is_expert_parallel"]), []).append({**limits, **own})
    scaler = {"grad_scaler": common["grad_scaler"]} if "grad_scaler" in common else {}
    states: list[dict[str, Any]] = [{"optimizer": {"param_groups": groups}, **scaler} for _, groups in sorted(kinds.items())]
    return states[0] if len(states) == 1 else states
