"""The gradient of an embedding's table, added to the rows that were looked up alone, in one order: no atomic additions."""

import torch
import triton
import triton.language as tl


@triton.jit
def embedding_add_rows(table, ids, order, grad, count, columns, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(ids + place)
    before = tl.load(ids + tl.maximum(place - 1, 0))
    if (row >= 0) & ((place == 0) | (before != row)):  # the first of its id does all of them
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        total = tl.load(table + row * columns + column, mask=inside, other=0.0)
        following = row
        while (place < count) & (following == row):
            source = tl.load(order + place)
            total += tl.load(grad + source * columns + column, mask=inside, other=0.0).to(total.dtype)
            place += 1
            following = tl.load(ids + tl.minimum(place, count - 1))
        tl.store(table + row * columns + column, total, mask=inside)


def add_rows(table: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor) -> None:
    """table[ids[i]] += grad[i] for every i, in their order; ids below 0 are left out.

    table [n, h], ids int64 [t], grad [t, h], t above 0.
    """
    ids, order = torch.sort(ids, stable=True)
    grad, columns = grad.contiguous(), table.shape[1]
    block = min(512, triton.next_power_of_2(columns))
    embedding_add_rows[(len(ids), triton.cdiv(columns, block))](table, ids, order, grad, len(ids), columns, BLOCK=block, num_warps=2)
