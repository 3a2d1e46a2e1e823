"""Scales of 1 x 32 blocks to bytes in cuBLAS's tiles, in one pass. The layout is described in fp8/mx_scales.py, the plain twin."""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.mx_scales import LANES, TALL, WIDE


@triton.jit
def mx_scales_tiles(scales, out, rows, blocks, stride_row, stride_block, TALL: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    down, across = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place = tl.arange(0, TALL * WIDE)  # in the tile as it is stored
    lane, quarter, column = place // (TALL // LANES * WIDE), place // WIDE % (TALL // LANES), place % WIDE
    row, block = down * TALL + quarter * LANES + lane, across * WIDE + column
    scale = tl.load(scales + row * stride_row + block * stride_block, mask=(row < rows) & (block < blocks), other=0.0)
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 0xFF
    tl.store(out + (down * tl.num_programs(1) + across) * (TALL * WIDE) + place, exponent.to(tl.uint8))


def tiles(scales: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, blocks] -> uint8 [scales of whole tiles]."""
    rows, blocks = scales.shape
    down, across = triton.cdiv(rows, TALL), triton.cdiv(blocks, WIDE)
    out = torch.empty(down * across * TALL * WIDE, dtype=torch.uint8, device=scales.device)
    mx_scales_tiles[(down, across)](scales, out, rows, blocks, *scales.stride(), TALL=TALL, LANES=LANES, WIDE=WIDE, num_warps=4)
    return out
