"""Communication of sequence parallelism that hides behind the matrix products it feeds or comes from.

The plain twin is what layers.py does without `tp_comm_overlap`: gather all rows, then multiply; multiply, then reduce-scatter. Where the
ranks' GPUs share memory, rows go by copy engines, one product for the rows of each rank (exchange.py). Elsewhere by collectives:
the rows that each rank holds are cut in chunks. Gathering: a rank multiplies its own rows while the first chunk of the others' is on its
way, and each chunk while the next is. Reducing: a chunk is on its way while the next is multiplied. Results stand where the twin puts them,
and no buffer is larger than its. Every rank issues what it sends in the same order; nothing waits for the host.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.symmetric_memory import Wait, exchange_of
from megatron.core.tensor_parallel.exchange import Exchange
from megatron.core.tensor_parallel.mappings import gather_first_dim, start_gather_first_dim, start_reduce_scatter_first_dim
from megatron.core.tensor_parallel.weight_grad import weight_grad
from megatron.core.utils import Group, get_pg_rank, get_pg_size

# Of a rank's rows. More hide more of the first (or last) transfer, but make products that fill a GPU less.
CHUNKS = 4


def num_chunks(rows: int) -> int:
    """Into how many equal chunks `rows` are cut: CHUNKS, or the most below it that divides them."""
    return next(chunks for chunks in range(CHUNKS, 0, -1) if rows % chunks == 0)


def gather_matmul(x: torch.Tensor, matrix: torch.Tensor, group: Group, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [s / ranks, b, k], of all ranks, times matrix [k, n].

    Returns (product [s, b, n], the gathered rows [s, b, k] if `keep`). Rows that are kept come in one piece: chunks come in another order.
    """
    exchange = exchange_of(Exchange, group, x, x.nbytes)
    if exchange is not None:
        return exchange.gather_matmul(x, matrix, keep)
    size, rank, rows = get_pg_size(group), get_pg_rank(group), x.shape[0]
    chunks = 1 if keep else num_chunks(rows)
    x = x.contiguous()
    gathered = x.new_empty(size * rows, *x.shape[1:])
    out = x.new_empty(size * rows, *x.shape[1:-1], matrix.shape[1])
    pieces = x.view(chunks, -1, x.shape[-1])
    arriving = gathered.view(chunks, size, -1, x.shape[-1])
    places = out.view(size, chunks, -1, matrix.shape[1])
    works = [
        dist.all_gather_into_tensor(chunk.view(-1, x.shape[-1]), piece, group=group, async_op=True)
        for chunk, piece in zip(arriving, pieces, strict=True)
    ]
    torch.mm(x.view(-1, x.shape[-1]), matrix, out=places[rank].view(-1, matrix.shape[1]))
    others = [part for part in (slice(0, rank), slice(rank + 1, size)) if part.start < part.stop]
    for index, work in enumerate(works):
        work.wait()
        for part in others:
            torch.bmm(arriving[index, part], matrix.expand(part.stop - part.start, -1, -1), out=places[part, index])
    return out, gathered if keep else None


def matmul_reduce_scatter(x: torch.Tensor, matrix: torch.Tensor, group: Group) -> tuple[torch.Tensor, Wait]:
    """x [s, b, k] times matrix [k, n], summed over the ranks.

    Returns (this rank's rows of the sum [s / ranks, b, n], what waits until they are there).
    """
    size = get_pg_size(group)
    rows = x.shape[0] // size
    assert rows * size == x.shape[0], f"{x.shape[0]} rows over {size} ranks"
    exchange = exchange_of(Exchange, group, x, x.numel() // x.shape[-1] // size * matrix.shape[1] * x.element_size())
    if exchange is not None:
        return exchange.matmul_reduce_scatter(x, matrix)
    chunks = num_chunks(rows)
    x = x.contiguous()
    parts = x.view(size, chunks, -1, x.shape[-1])
    out = x.new_empty(rows, *x.shape[1:-1], matrix.shape[1])
    sending: list[tuple[Any, torch.Tensor]] = []  # what is sent must live until it is
    for index, place in enumerate(out.view(chunks, -1, matrix.shape[1])):
        partial = torch.bmm(parts[:, index], matrix.expand(size, -1, -1)).view(-1, matrix.shape[1])
        sending.append((dist.reduce_scatter_tensor(place, partial, group=group, async_op=True), partial))

    def wait() -> None:
        for work, _ in sending:
            work.wait()
        sending.clear()

    return out, wait


def start_gather(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Callable[[], Any]]:
    """(the rows [s, ...] of x [s / ranks, ...] of all ranks, what waits until they are there). To be hidden by what comes between."""
    exchange = exchange_of(Exchange, group, x, x.nbytes)
    if exchange is not None:
        return exchange.start_gather(x)
    return start_gather_first_dim(x, group)


def start_reduce_scatter(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Callable[[], Any]]:
    """x [s, ...] summed over the ranks: (this rank's rows [s / ranks, ...], what waits until they are there)."""
    exchange = exchange_of(Exchange, group, x, x.nbytes // get_pg_size(group))
    if exchange is not None:
        return exchange.start_reduce_scatter(x)
    return start_reduce_scatter_first_dim(x, group)


class LinearReduceScatter(torch.autograd.Function):
    """x W^T, summed over the ranks, whose rows are then divided over them: a row-parallel linear under sequence parallelism.

    x [s, b, in / ranks], weight [out, in / ranks] -> [s / ranks, b, out]. Backward gathers the gradient's rows behind the product
    of this rank's own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, fuse_weight_grad: bool, overlap_gather: bool, group: Group
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.settings = weight, (fuse_weight_grad, overlap_gather, group)
        out, wait = matmul_reduce_scatter(x, weight.t(), group)
        wait()
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, (fuse_weight_grad, overlap_gather, group) = ctx.weight, ctx.settings
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        grad_input, grad_weight = None, None
        if needs_input and overlap_gather:
            grad_input, gathered = gather_matmul(grads[0], weight, group, keep=True)
            assert gathered is not None
            grad = gathered
        else:
            grad = gather_first_dim(grads[0], group)
            grad_input = grad.matmul(weight) if needs_input else None
        if needs_weight:
            grad_weight = weight_grad(weight, grad.view(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]), fuse_weight_grad)
        return grad_input, grad_weight, None, None, None
