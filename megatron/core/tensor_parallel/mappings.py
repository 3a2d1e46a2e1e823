"""Conjugate pairs: what crosses the tensor-parallel group going forward, and what its gradient does going back.

Sequence regions are split in dim 0 ([s, b, h]), tensor regions in the last dim. `group` None means the tensor-parallel group of
`parallel_state`, or alone where there is none; on one rank every function returns its input.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils import Group, divide, get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none

Move = Callable[[torch.Tensor, Group], torch.Tensor]


# What is communicated


def identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group, in a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def split_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    rows = divide(x.shape[0], get_pg_size(group))
    return x.narrow(0, get_pg_rank(group) * rows, rows).contiguous()


def split_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    columns = divide(x.shape[-1], get_pg_size(group))
    return x.narrow(-1, get_pg_rank(group) * columns, columns).contiguous()


def gather_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * get_pg_size(group), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def start_gather_first_dim(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Callable[[], Any]]:
    """(the gathered rows, what waits for them before they are read). `x` must live until then."""
    out = x.new_empty(x.shape[0] * get_pg_size(group), *x.shape[1:])
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=True).wait


def start_reduce_scatter_first_dim(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Callable[[], Any]]:
    """(this rank's rows of the sum, what waits for them before they are read). `x` must live until then."""
    out = x.new_empty(divide(x.shape[0], get_pg_size(group)), *x.shape[1:])
    return out, dist.reduce_scatter_tensor(out, x.contiguous(), group=group, async_op=True).wait


def gather_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    parts = gather_first_dim(x, group).chunk(get_pg_size(group), dim=0)
    return torch.cat(parts, dim=-1)


def reduce_scatter_first_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = x.new_empty(divide(x.shape[0], get_pg_size(group)), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scatter_last_dim(x: torch.Tensor, group: Group) -> torch.Tensor:
    return reduce_scatter_first_dim(torch.cat(x.chunk(get_pg_size(group), dim=-1), dim=0), group)


# What is computed: the pairs


class _Pair(torch.autograd.Function):
    """Applies `there` going forward and `back` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Move, back: Move, group: Group) -> torch.Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


def _apply(x: torch.Tensor, there: Move, back: Move, group: Group) -> torch.Tensor:
    group = get_tensor_model_parallel_group_if_none(group)
    return x if get_pg_size(group) == 1 else _Pair.apply(x, there, back, group)


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Replicated in, replicated out; gradients are summed."""
    return _apply(input_, identity, all_reduce, group)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Partial sums in, their sum out; the gradient is passed on."""
    return _apply(input_, all_reduce, identity, group)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Replicated in, this rank's columns out."""
    return _apply(input_, split_last_dim, gather_last_dim, group)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """This rank's columns in, all columns out, for a consumer that every rank computes alike."""
    return _apply(input_, gather_last_dim, split_last_dim, group)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Replicated in, this rank's tokens out."""
    return _apply(input_, split_first_dim, gather_first_dim, group)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: list[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """This rank's tokens in, all tokens out.

    `tensor_parallel_output_grad`: the consumer is split over the ranks, so gradients are partial and summed; else each rank takes its part.
    """
    if output_split_sizes is not None or use_global_buffer:
        raise ValueError("gather_from_sequence_parallel_region: output_split_sizes and use_global_buffer are not built yet; leave them out")
    return _apply(input_, gather_first_dim, reduce_scatter_first_dim if tensor_parallel_output_grad else split_first_dim, group)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Partial sums of all tokens in, the sum of this rank's tokens out."""
    return _apply(input_, reduce_scatter_first_dim, gather_first_dim, group)


def all_gather_last_dim_from_tensor_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """This rank's columns in, all columns out, for a consumer that is split over the ranks: gradients are summed."""
    return _apply(input_, gather_last_dim, reduce_scatter_last_dim, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: torch.Tensor, group: Group = None) -> torch.Tensor:
    """Partial sums in, the sum of this rank's columns out."""
    return _apply(input_, reduce_scatter_last_dim, gather_last_dim, group)
