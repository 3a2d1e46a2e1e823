"""The one record of how each parameter is split, stored and reduced. Everything that needs to know reads it here.

A layer declares the record of each parameter it makes; `build_param_table` collects a chunk's records and checks that none is missing.
Read by initialization, gradient reduction, gradient norm, optimizer sharding and checkpoints.
"""

from dataclasses import dataclass
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
class ParamSharding:
    global_shape: tuple[int, ...]  # of the whole tensor, with padding, without a layer dimension
    split_dim: int | None = None
    segments: tuple[Segment, ...] = ()  # of split_dim, in the whole tensor's order
    logical_size: int | None = None  # rows of dim 0 that are not padding; None: all
    grad_partial: tuple[str, ...] = ()  # axes over which the gradients of the copies must be summed
    shared_with: str | None = None  # checkpoint key of the tied parameter that another stage holds
    is_expert: bool = False

    @property
    def is_split(self) -> bool:
        return any(segment.axis for segment in self.segments)


@dataclass(frozen=True)
class ParamRecord:
    name: str  # as in named_parameters of the unwrapped chunk
    param: torch.nn.Parameter
    sharding: ParamSharding
    layer: int | None  # counted over the whole model, from 0; None outside of the layers
    key: str  # in a checkpoint
    stacked: bool  # stored with a leading layer dimension
    num_layers: int  # size of that dimension


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
    declared.sequence_parallel = "tp" in sharding.grad_partial
    declared.allreduce = not sharding.is_expert
    declared.shared = sharding.shared_with is not None
    expected = local_shape(sharding, tp_size)
    assert tuple(param.shape) == expected, f"parameter of shape {tuple(param.shape)} declared as {expected}"
    if not is_deferred():
        _draw(param)


def local_shape(sharding: ParamSharding, tp_size: int) -> tuple[int, ...]:
    """Shape of one rank's part."""
    shape = list(sharding.global_shape)
    if sharding.split_dim is not None:
        shape[sharding.split_dim] = sum(divide(segment.size, tp_size if segment.axis else 1) for segment in sharding.segments)
    return tuple(shape)


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
    """The part of the whole tensor `full` that rank `tp_rank` holds."""
    dim = sharding.split_dim
    if dim is None:
        return full
    return torch.cat([full.narrow(dim, start, rows) for start, _, rows in local_pieces(sharding, tp_rank, tp_size)], dim=dim)


def _draw(param: torch.nn.Parameter) -> None:
    """Fill `param`: the whole tensor in fp32, then this rank's part of it. Rows that are padding are 0."""
    described: Any = param
    sharding: ParamSharding = described.sharding
    full = torch.zeros(sharding.global_shape, dtype=torch.float32, device=param.device)
    described.initializer(full[: sharding.logical_size])
    with torch.no_grad():
        param.copy_(local_part(full, sharding, *described.tp_coordinates))


def initialize_parameters(model_chunk: Any, seed: int) -> None:
    """Draw all parameters of a (wrapped) chunk, each from a generator seeded by (seed, checkpoint key, layer) on its own device."""
    for record in build_param_table(model_chunk).values():
        with device.seeded(record.param.device, value_seed(seed, record.key, record.layer)):
            _draw(record.param)


def build_param_table(model_chunk: Any) -> dict[str, ParamRecord]:
    """Name -> record of every parameter of a (wrapped) chunk, in registration order.

    Raises ValueError naming the parameters that no layer declared.
    """
    model = unwrap_model(model_chunk)
    layers = {prefix: module for prefix, module in model.named_modules() if hasattr(module, "sharded_state_dict_keys_map")}
    table, missing = {}, []
    for name, param in model.named_parameters():
        if not hasattr(param, "sharding"):
            missing.append(name)
            continue
        prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if prefix is None:
            key = param.sharding.shared_with or name
            table[name] = ParamRecord(name, param, param.sharding, None, key, False, 0)
        else:
            layer = layers[prefix]
            key = f"{prefix.rpartition('.')[0]}.{mapped_key(name[len(prefix) + 1 :], layer.sharded_state_dict_keys_map)}".lstrip(".")
            table[name] = ParamRecord(name, param, param.sharding, layer.layer_number - 1, key, True, layer.config.num_layers)
    if missing:
        raise ValueError(
            f"parameters without a sharding record: {', '.join(missing)}; the layer that makes one must call "
            "param_sharding.declare(param, ParamSharding(...), initializer)"
        )
    return table


def mapped_key(name: str, keys_map: dict[str, str]) -> str:
    """`name` with the first prefix that `keys_map` knows replaced."""
    for old, new in keys_map.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def count_parameters(model_chunk: Any) -> int:
    """What this chunk contributes to the model's parameter count: whole tensors without padding, a tied weight once."""
    total = 0
    for record in build_param_table(model_chunk).values():
        sharding = record.sharding
        if sharding.shared_with is not None and record.name != sharding.shared_with:
            continue
        rows = sharding.global_shape[0] if sharding.logical_size is None else sharding.logical_size
        total += rows * torch.Size(sharding.global_shape[1:]).numel()
    return total
