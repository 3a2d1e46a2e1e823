"""A module's tensors in checkpoint form, derived from the sharding records of its parameters."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.fp8.model import extra_states
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.param_sharding import ParamRecord, buffer_table, build_param_table, local_pieces
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import Group, get_pg_rank, get_pg_size


def sharded_state_dict_default(
    module: torch.nn.Module, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None, tp_group: Group = None
) -> dict[str, Any]:
    """prefix + parameter name -> ShardedTensor (a factory of them where one parameter holds several runs of rows of the whole).

    A submodule whose class overrides `sharded_state_dict` decides for its own parameters.
    """
    groups = default_pg_collection(getattr(module, "pg_collection", None))
    out: dict[str, Any] = {}
    for name, record in {**build_param_table(module), **buffer_table(module)}.items():
        copy = _Copy.of(record, groups, tp_group)
        out[prefix + name] = _sharded_parameter(prefix + record.key, record, record.param.detach(), sharded_offsets, copy)
    out.update(extra_states(module, prefix, groups))
    for path, child in module.named_modules():
        if path and _overrides(child):
            inside = f"{prefix}{path}."
            out = {name: value for name, value in out.items() if not name.startswith(inside)}
            out.update(child.sharded_state_dict(inside, sharded_offsets, metadata))  # type: ignore[operator]
    return out


def _overrides(module: torch.nn.Module) -> bool:
    method = getattr(type(module), "sharded_state_dict", None)
    return method is not None and method is not MegatronModule.sharded_state_dict


@dataclass(frozen=True)
class _Copy:
    """Which of a parameter's parts a rank holds, and which of the ranks that hold it this one is."""

    rank: int  # in the tensor-parallel group (experts': their own)
    size: int
    replica: int  # among the data-parallel ranks

    @classmethod
    def of(cls, record: ParamRecord, groups: ProcessGroupCollection, tp_group: Group = None) -> "_Copy":
        if record.sharding.is_expert:
            return cls(get_pg_rank(groups.expt_tp), get_pg_size(groups.expt_tp), get_pg_rank(groups.expt_dp))
        tp = groups.tp if tp_group is None else tp_group
        return cls(get_pg_rank(tp), get_pg_size(tp), get_pg_rank(groups.dp_cp))

    def replica_id(self, record: ParamRecord) -> tuple[int, int, int]:
        """Of the ranks that hold the same piece the one with zeros writes it."""
        sharding = record.sharding
        tied_copy = int(sharding.shared_with is not None and record.name != sharding.shared_with)
        return (tied_copy, 0 if sharding.is_split else self.rank, self.replica)


def _sharded_parameter(key: str, record: ParamRecord, data: torch.Tensor, offsets: tuple, copy: _Copy) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    sharding = record.sharding
    # Dimensions before the tensor's own: those of `offsets` (axis, index, size), then layer and experts.
    leading, sizes = tuple(index for _, index, _ in offsets), tuple(size for _, _, size in offsets)
    own = len(record.place)
    shape = (*sizes, *record.whole_shape)
    prepended = len(offsets) + record.prepended

    def shard(tensor: torch.Tensor, first_row: int) -> ShardedTensor:
        within = [0] * len(sharding.global_shape)
        if sharding.split_dim is not None:
            within[sharding.split_dim] = first_row
        return ShardedTensor(
            key,
            tensor,
            tensor.dtype,
            tuple(tensor.shape),
            shape,
            (*leading, *record.place, *within),
            None,
            replica_id=copy.replica_id(record),
            prepend_axis_num=prepended,
            allow_shape_mismatch=sharding.logical_size is not None,
        )

    assert len(shape) == len(offsets) + own + len(sharding.global_shape)
    if not sharding.is_split or copy.size == 1:
        return shard(data, 0)
    assert sharding.split_dim is not None
    dim = sharding.split_dim + sharding.expert_dims
    pieces = local_pieces(sharding, copy.rank, copy.size)
    if len(pieces) == 1:
        return shard(data, pieces[0][0])
    return ShardedTensorFactory(
        key,
        data,
        lambda key, tensor, replica_id, flattened_range: {
            str(index): shard(tensor.narrow(dim, part, rows), whole) for index, (whole, part, rows) in enumerate(pieces)
        },
        lambda parts: torch.cat([parts[str(index)] for index in range(len(pieces))], dim=dim),
        replica_id=copy.replica_id(record),
    )


def make_sharded_tensors_for_checkpoint(
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    tensor_parallel_layers_axis_map: dict[str, int] | None = None,
    sharded_offsets: tuple = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: Group = None,
    dp_cp_group: Group = None,
) -> dict[str, Any]:
    """For modules that have no sharding records: prefix + name -> ShardedTensor, split over tp in the map's dim, else replicated."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    axes = tensor_parallel_layers_axis_map or {}
    rank, size, replica = get_pg_rank(tp_group), get_pg_size(tp_group), get_pg_rank(dp_cp_group)
    out = {}
    for name, tensor in state_dict.items():
        if name.endswith(extra_state_suffix):
            continue
        split = ((axes[name] + len(sharded_offsets), rank, size),) if name in axes else ()
        out[prefix + name] = ShardedTensor.from_rank_offsets(
            prefix + name,
            tensor,
            *sharded_offsets,
            *split,
            replica_id=(0, 0 if name in axes else rank, replica),
            prepend_axis_num=len(sharded_offsets),
        )
    return out


def sharded_tensor_of(record: ParamRecord, tensor: torch.Tensor, prefix: str = "") -> Any:
    """`tensor`, which belongs to the record's parameter and has its shape (an optimizer's moment), as that parameter is sharded."""
    return _sharded_parameter(prefix + record.key, record, tensor.detach(), (), _Copy.of(record, default_pg_collection(None)))


Box = tuple[tuple[int, ...], tuple[int, ...], int]


def boxes_of_range(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """(offsets, sizes, first element) of the boxes, in order, that make up the elements [start, end) of a flattened tensor."""
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start,), (end - start,), start)]
    width = math.prod(shape[1:])

    def within_row(row: int, low: int, high: int) -> list[Box]:
        inside = boxes_of_range(shape[1:], low - row * width, high - row * width)
        return [((row, *offsets), (1, *sizes), first + row * width) for offsets, sizes, first in inside]

    first_row, last_row = -(-start // width), end // width  # of the whole rows: first, one after the last
    if first_row > last_row:
        return within_row(last_row, start, end)
    found = within_row(first_row - 1, start, first_row * width)
    if first_row < last_row:
        rest = (0,) * (len(shape) - 1)
        found.append(((first_row, *rest), (last_row - first_row, *shape[1:]), first_row * width))
    return found + within_row(last_row, last_row * width, end)


def sharded_range_of(record: ParamRecord, flat: torch.Tensor, start: int, prefix: str = "", replica: int = 0) -> list[Any]:
    """ShardedTensors (views of `flat`) of the elements from `start` of the record's flattened parameter.

    `replica`: 0 on one of the ranks that keep the same elements, which writes them.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    copy = replace(_Copy.of(record, default_pg_collection(None)), replica=replica)
    sharding, shape = record.sharding, tuple(record.param.shape)
    dim = (sharding.split_dim or 0) + sharding.expert_dims if sharding.is_split else 0
    split = sharding.is_split and copy.size > 1
    pieces = local_pieces(sharding, copy.rank, copy.size) if split else [(0, 0, shape[dim])]
    place = record.place
    found = []
    for offsets, sizes, first in boxes_of_range(shape, start, start + flat.numel()):
        data = flat.detach()[first - start : first - start + math.prod(sizes)].view(sizes)
        for whole, part, rows in pieces:
            low, high = max(offsets[dim], part), min(offsets[dim] + sizes[dim], part + rows)
            if low >= high:
                continue
            inside = data.narrow(dim, low - offsets[dim], high - low)
            at = [*offsets[:dim], whole + low - part, *offsets[dim + 1 :]]
            if sharding.expert_dims:  # the parameter's own first dimension counts from its first expert
                at[0] += place[-1]
            found.append(
                ShardedTensor(
                    prefix + record.key,
                    inside,
                    inside.dtype,
                    tuple(inside.shape),
                    record.whole_shape,
                    (*place[: record.prepended], *at),
                    None,
                    replica_id=copy.replica_id(record),
                    prepend_axis_num=record.prepended,
                    allow_shape_mismatch=sharding.logical_size is not None,
                )
            )
    return found
