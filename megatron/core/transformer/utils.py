"""A module's tensors in checkpoint form, derived from the sharding records of its parameters."""

import math
from typing import Any

import torch

from megatron.core.process_groups_config import default_pg_collection
from megatron.core.tensor_parallel.param_sharding import ParamRecord, build_param_table, local_pieces
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import Group, get_pg_rank, get_pg_size


def sharded_state_dict_default(
    module: torch.nn.Module, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None, tp_group: Group = None
) -> dict[str, Any]:
    """prefix + parameter name -> ShardedTensor (a factory of them where one parameter holds several runs of rows of the whole).

    A submodule whose class overrides `sharded_state_dict` decides for its own parameters.
    """
    groups = default_pg_collection(getattr(module, "pg_collection", None))
    tp = groups.tp if tp_group is None else tp_group
    replica = get_pg_rank(groups.dp_cp)
    out: dict[str, Any] = {}
    for name, record in build_param_table(module).items():
        out[prefix + name] = _sharded_parameter(prefix + record.key, record, record.param.detach(), sharded_offsets, tp, replica)
    for path, child in module.named_modules():
        if path and _overrides(child):
            inside = f"{prefix}{path}."
            out = {name: value for name, value in out.items() if not name.startswith(inside)}
            out.update(child.sharded_state_dict(inside, sharded_offsets, metadata))  # type: ignore[operator]
    return out


def _overrides(module: torch.nn.Module) -> bool:
    method = getattr(type(module), "sharded_state_dict", None)
    return method is not None and method is not MegatronModule.sharded_state_dict


def _sharded_parameter(key: str, record: ParamRecord, data: torch.Tensor, offsets: tuple, tp: Group, replica: int) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    sharding, rank, size = record.sharding, get_pg_rank(tp), get_pg_size(tp)
    stacked = ((0, record.layer, record.num_layers),) if record.stacked else ()
    layer = (*offsets, *stacked)
    # Of the ranks that hold the same piece the one with zeros writes it.
    tied_copy = int(sharding.shared_with is not None and record.name != sharding.shared_with)
    copies = (tied_copy, 0 if sharding.is_split else rank, replica)
    options = {"prepend_axis_num": len(layer), "allow_shape_mismatch": sharding.logical_size is not None}
    if not sharding.is_split or size == 1:
        return ShardedTensor.from_rank_offsets(key, data, *layer, replica_id=copies, **options)
    dim = sharding.split_dim
    assert dim is not None
    pieces = local_pieces(sharding, rank, size)

    def piece(tensor: torch.Tensor, index: int) -> Any:
        whole, part, rows = pieces[index]
        at = (dim + len(layer), whole // rows, sharding.global_shape[dim] // rows)
        return ShardedTensor.from_rank_offsets(key, tensor.narrow(dim, part, rows), *layer, at, replica_id=copies, **options)

    if len(pieces) == 1:
        return piece(data, 0)
    return ShardedTensorFactory(
        key,
        data,
        lambda key, tensor, replica_id, flattened_range: {str(index): piece(tensor, index) for index in range(len(pieces))},
        lambda parts: torch.cat([parts[str(index)] for index in range(len(pieces))], dim=dim),
        replica_id=copies,
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
    groups = default_pg_collection(None)
    return _sharded_parameter(prefix + record.key, record, tensor.detach(), (), groups.tp, get_pg_rank(groups.dp_cp))


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


def sharded_range_of(record: ParamRecord, flat: torch.Tensor, start: int, prefix: str = "") -> list[Any]:
    """ShardedTensors (views of `flat`) of the elements from `start` of the record's flattened parameter, which this rank alone keeps."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    tp = default_pg_collection(None).tp
    sharding, rank, size = record.sharding, get_pg_rank(tp), get_pg_size(tp)
    shape = tuple(record.param.shape)
    dim = (sharding.split_dim or 0) if sharding.is_split else 0
    pieces = local_pieces(sharding, rank, size) if sharding.is_split and size > 1 else [(0, 0, shape[dim])]
    tied_copy = int(sharding.shared_with is not None and record.name != sharding.shared_with)
    layer, layers = ((record.layer,), (record.num_layers,)) if record.stacked else ((), ())
    found = []
    for offsets, sizes, first in boxes_of_range(shape, start, start + flat.numel()):
        data = flat.detach()[first - start : first - start + math.prod(sizes)].view(sizes)
        for whole, part, rows in pieces:
            low, high = max(offsets[dim], part), min(offsets[dim] + sizes[dim], part + rows)
            if low < high:
                inside = data.narrow(dim, low - offsets[dim], high - low)
                at = (*layer, *offsets[:dim], whole + low - part, *offsets[dim + 1 :])
                found.append(
                    ShardedTensor(
                        prefix + record.key,
                        inside,
                        inside.dtype,
                        tuple(inside.shape),
                        (*layers, *sharding.global_shape),  # type: ignore[arg-type]
                        at,  # type: ignore[arg-type]
                        None,
                        replica_id=(tied_copy, 0 if sharding.is_split else rank, 0),
                        prepend_axis_num=len(layer),
                        allow_shape_mismatch=sharding.logical_size is not None,
                    )
                )
    return found
