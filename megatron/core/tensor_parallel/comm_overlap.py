"""Communication of sequence parallelism that hides behind the matrix products it feeds or comes from, chunk by chunk.

The plain twin is what layers.py does without `tp_comm_overlap`: gather all rows, then multiply; multiply, then reduce-scatter. Here the
rows that each rank holds are cut in chunks. Gathering: a rank multiplies its own rows while the first chunk of the others' is on its way,
and each chunk while the next is. Reducing: a chunk is on its way while the next is multiplied. Results stand where the twin puts them,
and no buffer is larger than its. Every rank issues its collectives in the order of the chunks; nothing waits for the host.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.tensor_parallel.mappings import gather_first_dim
from megatron.core.tensor_parallel.weight_grad import weight_grad
from megatron.core.utils import Group, get_pg_rank, get_pg_size

# Of a rank's rows. More hide more of the first (or last) transfer, but make products that fill a GPU less.
CHUNKS = 4

Wait = Callable[[], None]


def num_chunks(rows: int) -> int:
    """Into how many equal chunks `rows` are cut: CHUNKS, or the most below it that divides them."""
    return next(chunks for chunks in range(CHUNKS, 0, -1) if rows % chunks == 0)


def gather_matmul(x: torch.Tensor, matrix: torch.Tensor, group: Group, chunks: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [s / ranks, b, k], of all ranks, times matrix [k, n].

    Returns (product [s, b, n], gathered x). The gathered rows [s, b, k] are ordered by chunk, then rank: with one chunk by rank.
    """
    size, rank, rows = get_pg_size(group), get_pg_rank(group), x.shape[0]
    chunks = num_chunks(rows) if chunks is None else chunks
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
    return out, gathered


def matmul_reduce_scatter(x: torch.Tensor, matrix: torch.Tensor, group: Group) -> tuple[torch.Tensor, Wait]:
    """x [s, b, k] times matrix [k, n], summed over the ranks.

    Returns (this rank's rows of the sum [s / ranks, b, n], what waits until they are there).
    """
    size = get_pg_size(group)
    rows = x.shape[0] // size
    assert rows * size == x.shape[0], f"{x.shape[0]} rows over {size} ranks"
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


class LinearReduceScatter(torch.autograd.Function):
    """x W^T, summed over the ranks, whose rows are then divided over them: a row-parallel linear under sequence parallelism.

    x [s, b, in / ranks], weight [out, in / ranks] -> [s / ranks, b, out]. Backward gathers the gradient's rows in one piece, behind the
    product of this rank's own: the weight's gradient wants them in the order of x, in which chunks do not arrive.
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
            grad_input, grad = gather_matmul(grads[0], weight, group, chunks=1)
        else:
            grad = gather_first_dim(grads[0], group)
            grad_input = grad.matmul(weight) if needs_input else None
        if needs_weight:
            grad_weight = weight_grad(weight, grad.view(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]), fuse_weight_grad)
        return grad_input, grad_weight, None, None, None
