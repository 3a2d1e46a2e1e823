"""Tokens in the order of their experts, and back.

A token's copy for an expert is a row. Both directions read by index and sum in a fixed order, in forward and backward, so results do not
change from run to run: nothing is added atomically, and nothing waits for the device.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.fusions.kernels import kernels_run_on


@dataclass(frozen=True)
class RowMap:
    """Which rows belong to which tokens. T tokens, E experts, `rows` rows."""

    token_of_row: torch.Tensor  # [rows], T: the row is empty
    pair_of_row: torch.Tensor  # [rows], token * E + expert; T * E: empty
    rows_of_token: torch.Tensor  # [T, copies], `rows`: no such copy
    full: bool  # no row is empty and no token has fewer copies
    fused: bool = False  # by Triton's kernels where they run

    @property
    def rows(self) -> int:
        return self.token_of_row.shape[0]


@torch.no_grad()
def make_row_map(
    routing_map: torch.Tensor, rows: int, copies: int, *, capacity: int | None = None, full: bool = False, fused: bool = False
) -> RowMap:
    """Rows by expert, then by token, of routing_map [T, E] bool.

    rows: their number, which the caller knows (the map's true entries). copies: most experts of a token.
    capacity: each expert has that many rows instead, the last ones empty where it has fewer tokens (more are not allowed).
    full: rows is T x copies: every token goes to `copies` experts.
    fused: rows are copied and summed by one kernel each (--moe-permute-fusion).
    """
    tokens, experts = routing_map.shape
    within = count_down(routing_map)  # from 1, among the expert's tokens
    if capacity is None:
        counts = within[-1] if tokens else routing_map.new_zeros(experts, dtype=torch.int64)
        first = counts.cumsum(dim=0) - counts
    else:
        first = torch.arange(experts, device=routing_map.device) * capacity
    row = torch.where(routing_map, within - 1 + first, rows)  # [T, E]; beyond the last row: no copy
    pairs = torch.arange(tokens * experts, device=routing_map.device)
    pair_of_row = pairs.new_full((rows + 1,), tokens * experts).scatter_(0, row.flatten(), pairs)[:rows]
    if not full:
        pair_of_row = torch.where(_taken(routing_map, rows, capacity), pair_of_row, tokens * experts)
    copy = torch.where(routing_map, routing_map.cumsum(dim=1) - 1, copies)
    rows_of_token = row.new_full((tokens, copies + 1), rows).scatter_(1, copy, row)[:, :copies]
    if not full:
        has = torch.arange(copies, device=row.device) < routing_map.sum(dim=1, keepdim=True)
        rows_of_token = torch.where(has, rows_of_token, rows)
    return RowMap(pair_of_row // experts, pair_of_row, rows_of_token.contiguous(), full, fused)


def _taken(routing_map: torch.Tensor, rows: int, capacity: int | None) -> torch.Tensor:
    """[rows] bool: whether a token is in the row."""
    if capacity is None:
        return torch.ones(rows, dtype=torch.bool, device=routing_map.device)
    filled = torch.arange(capacity, device=routing_map.device) < routing_map.sum(dim=0).unsqueeze(1)
    return filled.flatten()


def count_down(routing_map: torch.Tensor) -> torch.Tensor:
    """[T, E] bool -> int64 [T, E]: how many of the column's entries are true down to this one. By rows of the transpose: scans over the
    first dimension take a GPU sixty times as long."""
    return routing_map.t().contiguous().cumsum(dim=1).t()


# What is computed, forward and backward alike. The kernels' plain twin is what follows them.


def take_rows(x: torch.Tensor, index: torch.Tensor, full: bool, fused: bool = False) -> torch.Tensor:
    """[n, h] -> [len(index), h]; an index of n gives zeros (none is n when `full`)."""
    if x.shape[0] == 0 or index.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    if fused and kernels_run_on(x):
        from megatron.core.fusions.kernels import permute as kernels

        return kernels.take_rows(x, index)
    if full:
        return x.index_select(0, index)
    missing = index >= x.shape[0]
    return x.index_select(0, index.clamp(max=x.shape[0] - 1)).masked_fill_(missing.unsqueeze(-1), 0.0)


def sum_rows(x: torch.Tensor, index: torch.Tensor, full: bool, fused: bool = False) -> torch.Tensor:
    """[n, h], index [T, copies] -> [T, h]: the sum of each token's rows, in fp32 at least, in the order of its experts."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    if fused and index.shape[0] and kernels_run_on(x):
        from megatron.core.fusions.kernels import permute as kernels

        return kernels.sum_rows(x, index)
    total: torch.Tensor | None = None
    for copy in range(index.shape[1]):
        part = take_rows(x, index[:, copy], full).to(wide)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.to(x.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        ctx.row_map = row_map
        return take_rows(tokens, row_map.token_of_row, row_map.full, row_map.fused)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_rows(grads[0], ctx.row_map.rows_of_token, ctx.row_map.full, ctx.row_map.fused), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        ctx.row_map = row_map
        return sum_rows(rows, row_map.rows_of_token, row_map.full, row_map.fused)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return take_rows(grads[0], ctx.row_map.token_of_row, ctx.row_map.full, ctx.row_map.fused), None


class _TakePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, row_map: RowMap) -> torch.Tensor:
        ctx.row_map, ctx.shape = row_map, probs.shape
        return take_rows(probs.reshape(-1, 1), row_map.pair_of_row, row_map.full).squeeze(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # one place beyond the end for empty rows, which alone may be written twice
        grad = grads[0].new_zeros(ctx.shape.numel() + 1).scatter_(0, ctx.row_map.pair_of_row, grads[0])
        return grad[:-1].view(ctx.shape), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].index_select(0, ctx.inverse), None, None


def permute(tokens: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """[T, h] -> [rows, h]: a copy of each token for each of its experts; empty rows are 0."""
    return _Permute.apply(tokens, row_map)


def unpermute(rows: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """[rows, h] -> [T, h]: the sum of each token's rows; 0 where it has none."""
    return _Unpermute.apply(rows, row_map)


def take_probs(probs: torch.Tensor, row_map: RowMap) -> torch.Tensor:
    """[T, E] -> [rows]: each row's weight; 0 for empty ones."""
    return _TakePairs.apply(probs, row_map)


def reorder(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """x[order], a permutation of the rows whose inverse is `inverse`."""
    return _Reorder.apply(x, order, inverse)


@torch.no_grad()
def transposed_chunks(sizes: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, inverse) that bring rows, chunks of sizes [A, B] in order of (a, b), into the order of (b, a). `rows`: the sum of sizes."""
    flat = sizes.flatten()
    start = (flat.cumsum(0) - flat).view_as(sizes).t().flatten()  # of each chunk before, in the order after
    after = sizes.t().flatten()
    shift = start - (after.cumsum(0) - after)
    order = torch.arange(rows, device=sizes.device) + shift.repeat_interleave(after, output_size=rows)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=sizes.device))
    return order, inverse


def permute_plain(tokens: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
    """The plain twin of `permute` without capacity, by a loop over experts."""
    return torch.cat([tokens[routing_map[:, expert]] for expert in range(routing_map.shape[1])])


def unpermute_plain(rows: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
    """The plain twin of `unpermute`."""
    out = rows.new_zeros(routing_map.shape[0], rows.shape[1])
    for expert, part in enumerate(rows.split(routing_map.sum(dim=0).tolist())):
        out[routing_map[:, expert]] = out[routing_map[:, expert]] + part
    return out
