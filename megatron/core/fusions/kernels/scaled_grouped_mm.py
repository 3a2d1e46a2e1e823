"""Products of FP8 operands of several groups in one call, with one scale a tensor: rows times their group's matrix, and the gradient of
these matrices, which may add to what is there. Sums in fp32; groups of any number of rows, read on the device.

Plain twins: fp8/grouped.rows_product_plain and weight_grads_plain.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.quantize_groups import group_of_tile, lanes_for

NEXT_TO_EACH_OTHER = 8  # tiles down of programs that follow each other: they share rows of both operands in the cache


@triton.jit
def place_of(program, down, across, GROUP: tl.constexpr):
    """(tile down, tile across) of a program among down x across."""
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    return first + program % (GROUP * across) % height, program % (GROUP * across) // height


@triton.jit
def scaled_mm_of_groups(
    a, b, counts, out, scale_a, scale_b, down, n, k, groups,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    tile, across = place_of(tl.program_id(0), down, tl.cdiv(n, WIDE), GROUP)
    group, first, rows, _, _, within = group_of_tile(counts, groups, tile, GROUPS, TALL)
    if rows > 0:
        local = within * TALL + tl.arange(0, TALL)
        row = first.to(tl.int64) + local
        column = across.to(tl.int64) * WIDE + tl.arange(0, WIDE)
        matrix = b + group.to(tl.int64) * n * k
        depth = tl.arange(0, DEEP)
        total = tl.zeros([TALL, WIDE], dtype=tl.float32)
        for start in range(0, k, DEEP):
            place, inner = start + depth, start + depth < k
            left = tl.load(a + row[:, None] * k + place[None, :], mask=(local < rows)[:, None] & inner[None, :], other=0.0)
            right = tl.load(matrix + column[None, :] * k + place[:, None], mask=(column < n)[None, :] & inner[:, None], other=0.0)
            total = tl.dot(left, right, total)
        total *= tl.load(scale_a) * tl.load(scale_b)
        inside = (local < rows)[:, None] & (column < n)[None, :]
        tl.store(out + row[:, None] * n + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scaled_mm_weight_grads(
    a, b, counts, out, scale_a, scale_b, m, n, groups,
    ADD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    tile, across = place_of(tl.program_id(0), tl.cdiv(m, TALL), tl.cdiv(n, WIDE), GROUP)
    lane = tl.arange(0, GROUPS)
    units = tl.cdiv(tl.load(counts + lane, mask=lane < groups, other=0).to(tl.int32), 16)
    filled = tl.sum(tl.where(lane == group, units, 0), 0) * 16
    first = (tl.sum(tl.where(lane < group, units, 0), 0) * 16).to(tl.int64)
    row = tile.to(tl.int64) * TALL + tl.arange(0, TALL)
    column = across.to(tl.int64) * WIDE + tl.arange(0, WIDE)
    left_of, right_of, depth = a + first * m, b + first * n, tl.arange(0, DEEP)
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(0, filled, DEEP):
        place, inner = start + depth, start + depth < filled
        left = tl.load(left_of + row[:, None] * filled + place[None, :], mask=(row < m)[:, None] & inner[None, :], other=0.0)
        right = tl.load(right_of + column[None, :] * filled + place[:, None], mask=(column < n)[None, :] & inner[:, None], other=0.0)
        total = tl.dot(left, right, total)
    total *= tl.load(scale_a) * tl.load(scale_b)
    target = out + group.to(tl.int64) * m * n + row[:, None] * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def rows_product(
    a: torch.Tensor, inverse_a: torch.Tensor, b: torch.Tensor, inverse_b: torch.Tensor, counts: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [rows, k], at least one, sorted by group, b [groups, n, k], both contiguous -> [rows, n]: rows times their matrix's transpose."""
    (rows, k), (groups, n, _) = a.shape, b.shape
    out = torch.empty(rows, n, dtype=out_dtype, device=a.device)
    tall, wide = 128, 256 if n >= 256 else 128
    down = rows // tall + groups  # at most
    scaled_mm_of_groups[(down * triton.cdiv(n, wide),)](
        a, b, counts, out, inverse_a, inverse_b, down, n, k, groups,
        GROUPS=lanes_for(groups), GROUP=NEXT_TO_EACH_OTHER, TALL=tall, WIDE=wide, DEEP=128, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def weight_grads(
    a: torch.Tensor, inverse_a: torch.Tensor, b: torch.Tensor, inverse_b: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, add: bool
) -> None:
    """out [groups, m, n], contiguous, becomes (or is raised by) each group's product: a [m, its rows] times b [n, its rows] transposed,
    one group after the other in `a` and `b`, its rows filled up with zeros to a multiple of 16."""
    groups, m, n = out.shape
    tall, wide = 128, 256 if n >= 256 else 128
    scaled_mm_weight_grads[(triton.cdiv(m, tall) * triton.cdiv(n, wide), groups)](
        a, b, counts, out, inverse_a, inverse_b, m, n, groups,
        ADD=add, GROUPS=lanes_for(groups), GROUP=NEXT_TO_EACH_OTHER, TALL=tall, WIDE=wide, DEEP=128,
        num_warps=8, num_stages=3,
    )  # fmt: skip
