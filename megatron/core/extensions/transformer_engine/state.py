"""The scales and amax histories of delayed scaling, in the bytes that Transformer Engine keeps them in.

They are a pickle, read here without running what it names. Other recipes have no state: their bytes are empty.
"""

import io
import pickle
from typing import Any

import torch

from megatron.core.dist_checkpointing.safe_pickle import AllowListUnpickler, load_torch
from megatron.core.extensions.transformer_engine.precision import fp8_recipe, is_delayed

# name in the bytes -> (name in a module's fp8_meta, attribute, dimension that counts tensors)
TENSORS = {
    "scale_fwd": ("scaling_fwd", "scale", 0),
    "amax_history_fwd": ("scaling_fwd", "amax_history", 1),
    "scale_bwd": ("scaling_bwd", "scale", 0),
    "amax_history_bwd": ("scaling_bwd", "amax_history", 1),
}


class _Unpickler(AllowListUnpickler):
    """Tensors inside of a plain pickle have their values as what torch.save writes."""

    def find_class(self, module: str, name: str) -> Any:
        return load_torch if (module, name) == ("torch.storage", "_load_from_bytes") else super().find_class(module, name)


def unpacked(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of TENSORS; {} where there are none. `state`: a uint8 tensor, or None."""
    if not isinstance(state, torch.Tensor) or not state.numel():
        return {}
    content = _Unpickler(io.BytesIO(bytes(state.cpu().numpy()))).load()
    found = {name: content[name] for name in TENSORS if name in content} if isinstance(content, dict) else {}
    return found if len(found) == len(TENSORS) else {}


def of_each_expert(state: torch.Tensor, experts: int) -> list[torch.Tensor]:
    """The state of a grouped linear as a state for each of its experts, whose tensors lie one after the other."""
    if not state.numel():
        return [state] * experts
    content = pickle.loads(bytes(state.numpy()))  # of this process
    parts = {name: content[name].chunk(experts, dim=dim) for name, (_, _, dim) in TENSORS.items()}
    each = [{**content, **{name: part[expert].clone() for name, part in parts.items()}} for expert in range(experts)]
    return [torch.frombuffer(bytearray(pickle.dumps(one)), dtype=torch.uint8) for one in each]


def restore_scales(module: Any, states: list[Any]) -> bool:
    """Take over the states of the module's experts (of a plain linear: its own); whether they were there and fit.

    A history of another length gives its newest part.
    """
    stored = [unpacked(state) for state in states]
    if not is_delayed(module.config) or not all(stored):
        return False
    joined = {name: torch.cat([one[name] for one in stored], dim=dim) for name, (_, _, dim) in TENSORS.items()}
    module.fp8_meta["num_gemms"] = len(stored)
    module.fp8_meta["recipe"] = recipe = fp8_recipe(module.config)
    module.init_fp8_meta_tensors(recipe)
    own = {name: getattr(module.fp8_meta[direction], attribute) for name, (direction, attribute, _) in TENSORS.items()}
    if any(own[name].shape[dim] != joined[name].shape[dim] for name, (_, _, dim) in TENSORS.items()):
        return False
    for name, tensor in own.items():
        rows = min(len(tensor), len(joined[name]))
        tensor[:rows].copy_(joined[name][:rows])
    return True
