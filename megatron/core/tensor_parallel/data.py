"""Hand one rank's batch to its tensor-parallel peers."""

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.utils import Group, get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none


def broadcast_data(
    keys: list[str], data: dict[str, torch.Tensor] | None, datatype: torch.dtype, tp_group: Group = None
) -> dict[str, torch.Tensor]:
    """The tensors `keys` of rank 0's `data` (all of dtype `datatype`), on the device, on every rank of the group.

    Other ranks may pass None. Raises ValueError for a tensor of another dtype.
    """
    group = get_tensor_model_parallel_group_if_none(tp_group)
    where = device.current_device()
    if get_pg_rank(group) == 0:
        assert data is not None, "the first rank of the group has the data"
        for key in keys:
            if data[key].dtype != datatype:
                raise ValueError(f"broadcast_data: {key} is {data[key].dtype}, expected {datatype}")
    if get_pg_size(group) == 1:
        return {key: data[key].to(where, non_blocking=True) for key in keys}  # type: ignore[index]
    shapes = [[tuple(data[key].shape) for key in keys] if get_pg_rank(group) == 0 else None]  # type: ignore[index]
    source = dist.get_global_rank(group, 0)  # type: ignore[arg-type]
    dist.broadcast_object_list(shapes, src=source, group=group)
    sizes = [torch.Size(shape) for shape in shapes[0]]  # type: ignore[union-attr]
    if get_pg_rank(group) == 0:
        flat = torch.cat([data[key].reshape(-1) for key in keys]).to(where)  # type: ignore[index]
    else:
        flat = torch.empty(sum(size.numel() for size in sizes), dtype=datatype, device=where)
    dist.broadcast(flat, src=source, group=group)
    parts = flat.split([size.numel() for size in sizes])
    return {key: part.view(size) for key, part, size in zip(keys, parts, sizes)}
