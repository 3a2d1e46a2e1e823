"""A product of FP8 operands with one scale or a scale for each block, which may add to what is there. Sums in fp32.

For operands that torch._scaled_mm does not take. Plain twin: fp8/gemm.product_plain.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.quantize import BLOCK, MX_BLOCK, MX_BLOCKS, SQUARE_BLOCKS, TENSOR, Operand


@triton.jit
def scaled_mm_product(
    a, b, out, scale_a, scale_b, m, n, k, stride_a, stride_b, lines_a, blocks_a, lines_b, blocks_b,
    ONE_A: tl.constexpr, ONE_B: tl.constexpr, HEIGHT_A: tl.constexpr, HEIGHT_B: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    # programs that follow each other share rows of a and b in the cache
    program, down, across = tl.program_id(0), tl.cdiv(m, TALL), tl.cdiv(n, WIDE)
    first = program // (GROUP * across) * GROUP
    group = tl.minimum(down - first, GROUP)
    row = (first + program % (GROUP * across) % group).to(tl.int64) * TALL + tl.arange(0, TALL)
    column = (program % (GROUP * across) // group).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, DEEP)
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(0, k, DEEP):
        place, inner = start + depth, start + depth < k
        left = tl.load(a + row[:, None] * stride_a + place[None, :], mask=(row < m)[:, None] & inner[None, :], other=0.0)
        right = tl.load(b + column[None, :] * stride_b + place[:, None], mask=(column < n)[None, :] & inner[:, None], other=0.0)
        if ONE_A and ONE_B:
            total = tl.dot(left, right, total)
        else:
            part = tl.dot(left, right)
            if not ONE_A:
                part *= tl.load(scale_a + row // HEIGHT_A * lines_a + start // DEEP * blocks_a, mask=row < m, other=0.0)[:, None]
            if not ONE_B:
                part *= tl.load(scale_b + column // HEIGHT_B * lines_b + start // DEEP * blocks_b, mask=column < n, other=0.0)[None, :]
            total += part
    if ONE_A:
        total *= tl.load(scale_a)
    if ONE_B:
        total *= tl.load(scale_b)
    target = out + row[:, None] * n + column[None, :]
    inside = (row < m)[:, None] & (column < n)[None, :]
    if ADD:
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=inside)


def product(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, *, add: bool = False) -> torch.Tensor:
    """a [m, k] times b [n, k] transposed -> [m, n], in `out` (contiguous) where it is given; `add`: to what is there.

    Both with blocks of 32 or neither: the kernel goes along k by blocks."""
    (m, k), n = a.data.shape, b.data.shape[0]
    blocks_of_32 = a.kind == MX_BLOCKS
    assert blocks_of_32 == (b.kind == MX_BLOCKS)
    if out is None:
        out = torch.empty(m, n, dtype=out_dtype, device=a.data.device)
    # scales of blocks need each block's part beside the total: of 128 x 256, both are more than a multiprocessor has registers
    tall, wide = (128, 256) if n >= 256 and a.kind == b.kind == TENSOR else (128, 128)
    scaled_mm_product[(triton.cdiv(m, tall) * triton.cdiv(n, wide),)](
        a.data, b.data, out, a.inverse, b.inverse, m, n, k, a.data.stride(0), b.data.stride(0), *_strides(a), *_strides(b),
        ONE_A=a.kind == TENSOR, ONE_B=b.kind == TENSOR, HEIGHT_A=_height(a), HEIGHT_B=_height(b), ADD=add, GROUP=8,
        TALL=tall, WIDE=wide, DEEP=MX_BLOCK if blocks_of_32 else BLOCK, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _strides(operand: Operand) -> tuple[int, int]:
    return (0, 0) if operand.kind == TENSOR else (operand.inverse.stride(0), operand.inverse.stride(1))


def _height(operand: Operand) -> int:
    return BLOCK if operand.kind == SQUARE_BLOCKS else 1
