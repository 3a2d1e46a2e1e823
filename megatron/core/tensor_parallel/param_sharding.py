"""The one record of how each parameter is split, stored and reduced. Everything that needs to know reads it here.

A layer declares the record of each parameter it makes; `build_param_table` collects a chunk's records and checks that none is missing.
Read by initialization, gradient reduction, gradient norm, optimizer sharding and checkpoints.

Checkpoint keys, a contract with Megatron-LM's files: a layer's parameters are stacked over layers under one key
(decoder.layers.self_attention.linear_proj.weight) where all layers are alike, else stored under each layer's number (decoder.layers.3.…);
experts' under mlp.experts.experts.linear_fc1.weight, with a dimension of experts after that of layers, whichever module holds them.
"""

import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core import device
from megatron.core.tensor_parallel.init import Initializer, is_deferred, value_seed
from megatron.core.utils import divide, unwrap_model


@dataclass(frozen=True)
class Segment:
    """A run of rows of the split dimension that is split by itself, such as the gate of a SwiGLU's fc1."""

    name: str
    size: int  # rows in the whole tensor
    axis: str | None  # "tp": split over it; None: every rank has all rows


@dataclass(frozen=True)
class Experts:
    """Which experts of a layer a parameter holds."""

    first: int  # index, over all ranks, of the first of them
    total: int  # experts of the layer
    count: int | None = None  # size of the parameter's leading dimension; None: one expert and no such dimension

    @property
    def held(self) -> range:
        return range(self.first, self.first + (1 if self.count is None else self.count))


@dataclass(frozen=True)
class ParamSharding:
    """Of an expert's parameter (`is_expert`, `experts`) global_shape and split_dim are those of one expert's tensor, without a dimension of
    experts, and the axis "tp" is the tensor axis of experts (the group `expt_tp`)."""

    global_shape: tuple[int, ...]  # of the whole tensor, with padding, without a layer dimension
    split_dim: int | None = None
    segments: tuple[Segment, ...] = ()  # of split_dim, in the whole tensor's order
    logical_size: int | None = None  # rows of dim 0 that are not padding; None: all
    grad_partial: tuple[str, ...] = ()  # axes over which the gradients of the copies must be summed
    shared_with: str | None = None  # checkpoint key of the tied parameter that another stage holds
    is_expert: bool = False
    experts: Experts | None = None

    def __post_init__(self) -> None:
        assert self.experts is None or self.is_expert, "a parameter that names its experts is an expert's"

    @property
    def is_split(self) -> bool:
        return any(segment.axis for segment in self.segments)

    @property
    def expert_dims(self) -> int:
        """1 where the parameter has a leading dimension of experts that global_shape leaves out, else 0."""
        return int(self.experts is not None and self.experts.count is not None)


@dataclass(frozen=True)
class ParamRecord:
    name: str  # as in named_parameters of the unwrapped chunk
    param: torch.nn.Parameter
    sharding: ParamSharding
    layer: int | None  # counted over the whole model, from 0; None outside of the layers
    key: str  # in a checkpoint
    stacked: bool  # stored with a leading layer dimension
    num_layers: int  # size of that dimension
    family: str = ""  # the key with the layer's number left out, also where it is not stacked

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor in a checkpoint: (layers where stacked, experts of an expert's parameter, the tensor's own dimensions)."""
        experts = self.sharding.experts
        return (*((self.num_layers,) if self.stacked else ()), *((experts.total,) if experts else ()), *self.sharding.global_shape)

    @property
    def place(self) -> tuple[int, ...]:
        """Where this parameter begins on the leading dimensions (layer, expert) of `whole_shape`."""
        experts = self.sharding.experts
        return (*((self.layer,) if self.stacked else ()), *((experts.first,) if experts else ()))  # type: ignore[return-value]

    @property
    def prepended(self) -> int:
        """Leading dimensions that `whole_shape` has and the parameter has not."""
        return len(self.place) - self.sharding.expert_dims


def is_expert(param: torch.Tensor) -> bool:
    """Whether a parameter's sharding record says that it is an expert's; a parameter without a record is none."""
    return bool(getattr(getattr(param, "sharding", None), "is_expert", False))


def replicated(param_or_shape: torch.Tensor | tuple[int, ...], *, grad_partial: tuple[str, ...] = ()) -> ParamSharding:
    """Every rank holds the whole tensor."""
    shape = param_or_shape.shape if isinstance(param_or_shape, torch.Tensor) else param_or_shape
    return ParamSharding(tuple(shape), grad_partial=grad_partial)


def declare(param: torch.nn.Parameter, sharding: ParamSharding, initializer: Initializer, *, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Give `param` its record, the public attributes that derive from it, and initial values (unless the model draws them at its end).

    A layer built outside of a model draws from the default generator, which must be in the same state on all tensor-parallel ranks.
    """
    declared: Any = param
    declared.sharding = sharding
    declared.initializer = initializer
    declared.tp_coordinates = (tp_rank, tp_size)
    declared.tensor_model_parallel = sharding.is_split
    declared.partition_dim = sharding.split_dim if sharding.is_split else -1
    declared.partition_stride = max(1, sum(1 for segment in sharding.segments if segment.axis))
    declared.sequence_parallel = "tp" in sharding.grad_partial and not sharding.is_expert
    declared.allreduce = not sharding.is_expert
    declared.shared = sharding.shared_with is not None
    expected = local_shape(sharding, tp_size)
    assert tuple(param.shape) == expected, f"parameter of shape {tuple(param.shape)} declared as {expected}"
    if not is_deferred():
        _draw(param)


def local_shape(sharding: ParamSharding, tp_size: int) -> tuple[int, ...]:
    """Shape of one rank's part, with the dimension of experts where there is one."""
    shape = list(sharding.global_shape)
    if sharding.split_dim is not None:
        shape[sharding.split_dim] = sum(divide(segment.size, tp_size if segment.axis else 1) for segment in sharding.segments)
    return (*((sharding.experts.count,) if sharding.expert_dims else ()), *shape)  # type: ignore[union-attr,return-value]


def local_pieces(sharding: ParamSharding, tp_rank: int, tp_size: int) -> list[tuple[int, int, int]]:
    """(offset in the whole, offset in the part, rows) along split_dim for each run of rows that rank `tp_rank` holds."""
    pieces: list[tuple[int, int, int]] = []
    whole = part = 0
    for segment in sharding.segments:
        rows = divide(segment.size, tp_size) if segment.axis else segment.size
        pieces.append((whole + (tp_rank * rows if segment.axis else 0), part, rows))
        whole += segment.size
        part += rows
    return pieces


def local_part(full: torch.Tensor, sharding: ParamSharding, tp_rank: int, tp_size: int) -> torch.Tensor:
    """The part of the whole tensor `full` that rank `tp_rank` holds; of an expert's parameter `full` is [all experts, ...]."""
    experts = sharding.experts
    if experts is not None:
        full = full[experts.first] if experts.count is None else full.narrow(0, experts.first, experts.count)
    return _tensor_part(full, sharding, tp_rank, tp_size, sharding.expert_dims)


def _tensor_part(full: torch.Tensor, sharding: ParamSharding, tp_rank: int, tp_size: int, before: int = 0) -> torch.Tensor:
    """The part along split_dim, which `before` other dimensions of `full` precede."""
    if sharding.split_dim is None:
        return full
    dim = sharding.split_dim + before
    return torch.cat([full.narrow(dim, start, rows) for start, _, rows in local_pieces(sharding, tp_rank, tp_size)], dim=dim)


def _draw_whole(like: torch.Tensor, sharding: ParamSharding, initializer: Initializer) -> torch.Tensor:
    """The whole tensor (of one expert) in fp32, rows that are padding 0."""
    full = torch.zeros(sharding.global_shape, dtype=torch.float32, device=like.device)
    initializer(full[: sharding.logical_size])
    return full


def _draw(param: torch.nn.Parameter) -> None:
    """Fill `param` from the default generator: the whole tensor, then this rank's part of it.

    Of experts the tensors of all are drawn in their order: ranks that hold others stay in step.
    """
    described: Any = param
    sharding: ParamSharding = described.sharding
    experts = sharding.experts
    with torch.no_grad():
        if experts is None:
            full = _draw_whole(param, sharding, described.initializer)
            param.copy_(_tensor_part(full, sharding, *described.tp_coordinates))
            return
        for expert in range(experts.total):
            full = _draw_whole(param, sharding, described.initializer)
            if expert in experts.held:
                _expert_slice(param, experts, expert).copy_(_tensor_part(full, sharding, *described.tp_coordinates))


def _expert_slice(param: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
    return param if experts.count is None else param[expert - experts.first]


def initialize_parameters(model_chunk: Any, seed: int) -> None:
    """Draw all parameters of a (wrapped) chunk, each from a generator seeded by (seed, checkpoint key, layer) on its own device.

    Experts are drawn one by one, seeded by their index too: values depend neither on how experts are spread over ranks, nor on whether a
    parameter holds one of them or several.
    """
    for record in build_param_table(model_chunk).values():
        param: Any = record.param
        experts = record.sharding.experts
        if experts is None:
            with device.seeded(param.device, value_seed(seed, record.family, record.layer)):
                _draw(param)
            continue
        for expert in experts.held:
            with device.seeded(param.device, value_seed(seed, f"{record.family}/{expert}", record.layer)), torch.no_grad():
                full = _draw_whole(param, record.sharding, param.initializer)
                _expert_slice(param, experts, expert).copy_(_tensor_part(full, record.sharding, *param.tp_coordinates))


def layers_are_stacked(config: Any) -> bool:
    """Whether all layers of a model have the same parameters, so that a checkpoint stores each stacked over layers."""
    every = getattr(config, "moe_layer_freq", 1)
    return not getattr(config, "num_moe_experts", None) or (isinstance(every, int) and every == 1)


def build_param_table(model_chunk: Any) -> dict[str, ParamRecord]:
    """Name -> record of every parameter of a (wrapped) chunk, in registration order.

    Raises ValueError naming the parameters that no layer declared.
    """
    model = unwrap_model(model_chunk)
    layers = _layers_of(model)
    table, missing = {}, []
    for name, param in model.named_parameters():
        if not hasattr(param, "sharding"):
            missing.append(name)
            continue
        table[name] = _record_of(name, param, layers)
    if missing:
        raise ValueError(
            f"parameters without a sharding record: {', '.join(missing)}; the layer that makes one must call "
            "param_sharding.declare(param, ParamSharding(...), initializer)"
        )
    return table


def buffer_table(model_chunk: Any) -> dict[str, ParamRecord]:
    """The same of the buffers that have a sharding record, which are stored like parameters: the expert bias of routers."""
    model = unwrap_model(model_chunk)
    layers = _layers_of(model)
    return {name: _record_of(name, buffer, layers) for name, buffer in model.named_buffers() if hasattr(buffer, "sharding")}


def state_records(model_chunk: Any) -> dict[str, list[ParamRecord]]:
    """`<module>._extra_state` -> record of its place in a checkpoint, for modules that keep more than parameters; one for each expert that
    the module holds. The records' `param` is none."""
    model = unwrap_model(model_chunk)
    layers, found = _layers_of(model), {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is torch.nn.Module.get_extra_state:
            continue
        own = [param.sharding for name, param in module.named_parameters(recurse=False) if name.startswith("weight")]
        places = [replace(replicated(()), is_expert=one.is_expert, experts=one.experts) for one in own] or [replicated(())]
        name = f"{path}._extra_state"
        found[name] = [_record_of(name, SimpleNamespace(sharding=place), layers) for place in places]
    return found


def _layers_of(model: Any) -> dict[str, Any]:
    return {prefix: module for prefix, module in model.named_modules() if hasattr(module, "sharded_state_dict_keys_map")}


def _record_of(name: str, param: Any, layers: dict[str, Any]) -> ParamRecord:
    prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
    if prefix is None:
        key = param.sharding.shared_with or _expert_key(name, param.sharding)
        return ParamRecord(name, param, param.sharding, None, key, False, 0, key)
    layer = layers[prefix]
    if layer.layer_number > layer.config.num_layers:  # behind the last one, in a layer for multi-token prediction: stored by itself
        own = mapped_key(name[len(prefix) + 1 :], layer.sharded_state_dict_keys_map)
        key = f"{prefix}.{_expert_key(own, param.sharding)}"
        return ParamRecord(name, param, param.sharding, None, key, False, 0, key)
    stack, own = prefix.rpartition(".")[0], mapped_key(name[len(prefix) + 1 :], layer.sharded_state_dict_keys_map)
    family = f"{stack}.{_expert_key(own, param.sharding)}".lstrip(".")
    index, stacked = layer.layer_number - 1, layers_are_stacked(layer.config)
    key = family if stacked else f"{stack}.{index}{family[len(stack) :]}".lstrip(".")
    return ParamRecord(name, param, param.sharding, index, key, stacked, layer.config.num_layers, family)


def mapped_key(name: str, keys_map: dict[str, str]) -> str:
    """`name` with the first prefix that `keys_map` knows replaced."""
    for old, new in keys_map.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


_LOCAL_EXPERT = re.compile(r"(^|\.)experts\.(?:local_experts\.\d+\.)?")
_NUMBERED = re.compile(r"(weight|bias)\d+$")  # of one expert, in a module that has a parameter for each


def _expert_key(name: str, sharding: ParamSharding) -> str:
    """`name` with an expert's parameter under one key whichever expert it is, alone (`experts.local_experts.3.`,
    `weight3`) or with others."""
    return name if sharding.experts is None else _NUMBERED.sub(r"\1", _LOCAL_EXPERT.sub(r"\1experts.experts.", name, count=1))


def count_parameters(model_chunk: Any) -> int:
    """What this chunk contributes to the model's parameter count: whole tensors without padding, a tied weight once.

    The experts of a layer all count, those of other expert-parallel ranks too: these ranks' chunks are the same part of the model.
    """
    total = 0
    counted: set[tuple[str, int | None]] = set()
    for record in build_param_table(model_chunk).values():
        sharding = record.sharding
        if sharding.shared_with is not None and record.name != sharding.shared_with:
            continue
        if sharding.experts is not None:
            if (record.family, record.layer) in counted:
                continue
            counted.add((record.family, record.layer))
        rows = sharding.global_shape[0] if sharding.logical_size is None else sharding.logical_size
        copies = 1 if sharding.experts is None else sharding.experts.total
        total += copies * rows * math.prod(sharding.global_shape[1:])
    return total
