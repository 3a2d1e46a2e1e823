"""FP8 in a model: which linears, what happens at the end of a step, what a checkpoint holds of it."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core import device
from megatron.core.fp8.linear import Fp8Linear
from megatron.core.fp8.scaling import joined
from megatron.core.fp8.settings import ALIGNMENT, fp8_settings
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.param_sharding import build_param_table, is_expert
from megatron.core.utils import get_pg_rank, unwrap_model

logger = logging.getLogger(__name__)
EXTRA_STATE = "_extra_state"


def use_fp8(layer: torch.nn.Module, config: Any, layer_number: int) -> None:
    """Give the linears of a decoder layer (numbered over the whole model from 1) to FP8, as its config says; not those of routed experts.

    Another backend's linears are its own matter. Raises ValueError for a linear whose sizes on this rank FP8 products do not take, and for
    a recipe that this device has not.
    """
    settings = fp8_settings(config, layer_number - 1)
    if settings is None:
        return
    if problem := recipe_problem(settings.recipe):
        raise ValueError(problem)
    odd = []
    for name, module in layer.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None and not is_expert(module.weight):
            module.fp8 = Fp8Linear(settings, module.weight)
            if any(size % ALIGNMENT for size in module.weight.shape):
                odd.append(f"{name} {tuple(module.weight.shape)}")
    if odd:
        raise ValueError(f"FP8 products need sizes on each rank that are multiples of {ALIGNMENT}: {', '.join(odd)}")


def recipe_problem(recipe: str) -> str | None:
    """Why this device does not compute a recipe."""
    if not device.has_accelerator():
        return None  # emulated
    capability = device.compute_capability()
    chip = f"{device.device_name()} has {capability[0]}.{capability[1]}"
    if recipe == "mxfp8":
        return f"fp8_recipe mxfp8 needs a GPU of compute capability 10.0 and is not built for it yet; {chip}; fp8_recipe blockwise works"
    if capability < (8, 9):
        return f"fp8 needs a GPU of compute capability 8.9, and {chip}; leave fp8 out"
    return None


def fp8_linears(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the linears that compute in FP8."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "fp8", None), Fp8Linear):  # layers of Transformer Engine have a bool of that name
            yield name, part


class Fp8Steps:
    """The FP8 state of this rank's model chunks, which an optimizer moves on at the end of each step."""

    def __init__(self, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
        self.linears = [part.fp8 for chunk in chunks for _, part in fp8_linears(unwrap_model(chunk))]
        config = unwrap_model(chunks[0]).config
        # amax is the largest over all that compute the same tensor, or parts of it
        self.groups = (groups.tp,) if config.tp_only_amax_red else (groups.tp_dp_cp,)
        # parameters arrive while the next forward runs: each weight is quantized at its first use
        self.quantizes_late = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
        self.scaling = None
        if self.linears[0].settings.delayed:
            self.scaling, parts = joined([linear.scaling for linear in self.linears])
            for linear, part in zip(self.linears, parts, strict=True):
                linear.scaling = part

    @classmethod
    def of(cls, chunks: Sequence[Any], groups: ProcessGroupCollection) -> "Fp8Steps | None":
        """None for a model without FP8."""
        return cls(chunks, groups) if any(True for chunk in chunks for _ in fp8_linears(unwrap_model(chunk))) else None

    def end_step(self) -> None:
        """After the weights were updated: new scales, and the weights in FP8, all at once. Every rank calls it."""
        if self.scaling is not None:
            self.scaling.update(self.groups)
        for linear in self.linears:
            linear.outdated()
            if not self.quantizes_late:
                linear.weight_operands()


# --- checkpoints ---


def extra_states(module: torch.nn.Module, prefix: str, groups: ProcessGroupCollection) -> dict[str, Any]:
    """prefix + linear's name + `._extra_state` -> ShardedObject of the history and scale of each linear with delayed scaling.

    Under the key of the linear's weight with the layer's number: `decoder.layers.mlp.linear_fc1._extra_state/shard_<layer>_<layers>`.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    stateful = [(name, part.fp8.scaling) for name, part in fp8_linears(module) if part.fp8.scaling is not None]
    table = build_param_table(module) if stateful else {}
    replica = (0, get_pg_rank(groups.tp), get_pg_rank(groups.dp_cp))
    found: dict[str, Any] = {}
    for name, scaling in stateful:
        record = table[f"{name}.weight"]
        count, place = (record.num_layers, record.layer) if record.stacked else (1, 0)
        key = prefix + record.key.removesuffix("weight") + EXTRA_STATE
        found[f"{prefix}{name}.{EXTRA_STATE}"] = ShardedObject(key, scaling.state(), (count,), (place or 0,), replica)
    return found


def load_extra_states(module: torch.nn.Module, states: dict[str, Any]) -> int:
    """Give each linear what a checkpoint has for it, under the names of `extra_states`. Returns for how many there was nothing of use:
    these begin as in a new run."""
    fresh = 0
    for name, part in fp8_linears(module):
        if part.fp8.scaling is None:
            continue
        state = states.get(f"{name}.{EXTRA_STATE}")
        if isinstance(state, dict) and state.keys() >= {"amax_history", "scale"}:
            part.fp8.scaling.load(state)
        else:
            fresh += 1
    return fresh
