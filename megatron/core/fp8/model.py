"""FP8 in a model: which linears, what happens at the end of a step, what a checkpoint holds of it."""

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from megatron.core import device
from megatron.core.fp8.block_experts import Fp8BlockExperts
from megatron.core.fp8.experts import Fp8Experts
from megatron.core.fp8.linear import Fp8Linear
from megatron.core.fp8.mx_check import mx_problem
from megatron.core.fp8.scaling import ROLES, DelayedScaling, joined
from megatron.core.fp8.settings import ALIGNMENT, fp8_settings
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.param_sharding import build_param_table, is_expert
from megatron.core.transformer.moe.experts import GroupedLinear
from megatron.core.utils import Group, get_pg_rank, unwrap_model

logger = logging.getLogger(__name__)
EXTRA_STATE = "_extra_state"


def use_fp8(layer: torch.nn.Module, config: Any, layer_number: int) -> None:
    """Give the linears of a decoder layer (numbered over the whole model from 1), of routed experts too, to FP8, as its config says.

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
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight is not None:
            module.fp8 = Fp8Linear(settings, module.weight)
        elif isinstance(module, GroupedLinear):
            module.fp8 = (Fp8Experts if settings.one_scale else Fp8BlockExperts)(settings, module.weight)
        if isinstance(getattr(module, "fp8", None), Fp8Linear) and any(size % ALIGNMENT for size in module.weight.shape[-2:]):
            odd.append(f"{name} {tuple(module.weight.shape)}")
    if odd:
        raise ValueError(f"FP8 products need sizes on each rank that are multiples of {ALIGNMENT}: {', '.join(odd)}")


def recipe_problem(recipe: str) -> str | None:
    """Why this device does not compute a recipe. Asked of mxfp8 for the first time it tries it out, which waits for the device."""
    if not device.has_accelerator():
        return None  # emulated
    capability = device.compute_capability()
    chip = f"{device.device_name()} has {capability[0]}.{capability[1]}"
    if capability < (8, 9):
        return f"fp8 needs a GPU of compute capability 8.9, and {chip}; leave fp8 out"
    if recipe != "mxfp8":
        return None
    if capability < (10, 0):
        return f"fp8_recipe mxfp8 needs a GPU of compute capability 10.0 (Blackwell), and {chip}; fp8_recipe blockwise works here"
    if problem := mx_problem():
        return f"fp8_recipe mxfp8 is not computed rightly here: {chip}, and {problem}; fp8_recipe tensorwise needs no blocks"
    return None


def fp8_linears(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the linears that compute in FP8."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "fp8", None), Fp8Linear):  # layers of Transformer Engine have a bool of that name
            yield name, part


class Fp8Steps:
    """The FP8 state of this rank's model chunks, which an optimizer moves on at the end of each step."""

    def __init__(self, chunks: Sequence[Any], groups: ProcessGroupCollection) -> None:
        config = unwrap_model(chunks[0]).config
        linears = [part.fp8 for chunk in chunks for _, part in fp8_linears(unwrap_model(chunk))]
        self.linears: list[Fp8Linear] = sorted(linears, key=_kind)
        # parameters arrive while the next forward runs: each weight is quantized at its first use. Under graphs they do not, and must not:
        # a graph would leave out what was not due when it was recorded.
        late = any(getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False) for chunk in chunks)
        self.quantizes_late = late and config.cuda_graph_impl == "none"
        self.scaling: DelayedScaling | None = None
        self.shared: list[tuple[slice, Group]] = []
        if linears[0].settings.delayed:
            self.scaling, parts = joined([state for linear in self.linears if (state := linear.scaling) is not None])
            for linear, part in zip(self.linears, parts, strict=True):
                linear.scaling = part
            self.shared = _shared_parts(self.linears, groups, config.tp_only_amax_red)

    @classmethod
    def of(cls, chunks: Sequence[Any], groups: ProcessGroupCollection) -> "Fp8Steps | None":
        """None for a model without FP8."""
        return cls(chunks, groups) if any(True for chunk in chunks for _ in fp8_linears(unwrap_model(chunk))) else None

    def end_step(self) -> None:
        """After the weights were updated: new scales, and the weights in FP8, all at once. Every rank calls it."""
        if self.scaling is not None:
            self.scaling.update(self.shared)
        for linear in self.linears:
            linear.outdated()
            if not self.quantizes_late:
                linear.quantize_weight()


DENSE, ALL_EXPERTS, ONE_EXPERT = range(3)  # kinds of linears, by who shares their tensors


def _kind(linear: Fp8Linear) -> int:
    # experts with scales of blocks share no scale: whichever they count as
    return ALL_EXPERTS if isinstance(linear, Fp8Experts) else ONE_EXPERT if is_expert(linear.weight) else DENSE


def _shared_parts(linears: Sequence[Fp8Linear], groups: ProcessGroupCollection, tp_only: bool) -> list[tuple[slice, Group]]:
    """(which amaxes, over which group their largest is taken) of linears sorted by kind.

    Over all that compute the same tensor, or parts of it: a stage's ranks, of linears that all of them have a part of; of an expert's those
    that hold it. tp_only: those that share a micro batch.
    """
    whole = {DENSE: (groups.tp,), ALL_EXPERTS: (groups.tp_ep,)} if tp_only else dict.fromkeys((DENSE, ALL_EXPERTS), (groups.tp_dp_cp,))
    sharing: dict[int, tuple[Group, ...]] = whole | {ONE_EXPERT: (groups.expt_tp,) if tp_only else (groups.expt_tp, groups.expt_dp)}
    found, first = [], 0
    for over, part in groupby(linears, key=lambda linear: sharing[_kind(linear)]):
        last = first + len(list(part)) * ROLES
        found += [(slice(first, last), group) for group in over]
        first = last
    return found


# --- checkpoints ---


def extra_states(module: torch.nn.Module, prefix: str, groups: ProcessGroupCollection) -> dict[str, Any]:
    """prefix + a name of `_state_names` -> ShardedObject of the history and scale of each linear with delayed scaling.

    Under the key of the linear's weight with the layer's number: `decoder.layers.mlp.linear_fc1._extra_state/shard_<layer>_<layers>`; an
    expert's has its number too. A linear of several experts writes its state for each, as do linears of one: either loads the other's.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    stateful = [(name, part.fp8) for name, part in fp8_linears(module) if part.fp8.scaling is not None]
    table = build_param_table(module) if stateful else {}
    found: dict[str, Any] = {}
    for name, linear in stateful:
        record, state = table[f"{name}.weight"], linear.scaling.state()
        ranks = (groups.expt_tp, groups.expt_dp) if record.sharding.is_expert else (groups.tp, groups.dp_cp)
        replica = (0, *map(get_pg_rank, ranks))
        key = prefix + record.key.removesuffix("weight") + EXTRA_STATE
        sizes, place = record.whole_shape[: len(record.place)] or (1,), record.place or (0,)
        for number, state_name in enumerate(_state_names(name, linear)):
            here = (*place[:-1], place[-1] + number)
            found[prefix + state_name] = ShardedObject(key, state, sizes, here, replica)
    return found


def _state_names(name: str, linear: Fp8Linear) -> list[str]:
    """Of a linear, or of each expert of one."""
    if isinstance(linear, Fp8Experts):
        return [f"{name}.{expert}.{EXTRA_STATE}" for expert in range(linear.weight.shape[0])]
    return [f"{name}.{EXTRA_STATE}"]


def load_extra_states(module: torch.nn.Module, states: dict[str, Any]) -> int:
    """Give each linear what a checkpoint has for it, under the names of `extra_states`. Returns for how many there was nothing of use:
    these begin as in a new run."""
    fresh = 0
    for name, part in fp8_linears(module):
        if part.fp8.scaling is None:
            continue
        found = [states.get(state_name) for state_name in _state_names(name, part.fp8)]
        useful = [state for state in found if isinstance(state, dict) and state.keys() >= {"amax_history", "scale"}]
        if useful:
            part.fp8.scaling.load(_of_all(useful))
        else:
            fresh += 1
    return fresh


def _of_all(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One state for experts that may each have had their own."""
    return {
        "amax_history": torch.stack([state["amax_history"] for state in states]).amax(dim=0),
        "scale": torch.stack([state["scale"] for state in states]).amin(dim=0),
    }
