"""Scales of 1 x 32 blocks as cuBLAS reads them: a byte each, in tiles of 128 rows by 4 blocks.

The byte is e8m0: a power of two without sign or digits, 2 ** (byte - 127), 255 for NaN. Scales by formats.scale_for are such powers, so
nothing is rounded. Row r and column c of a tile lie at (r % 32) * 16 + (r // 32) * 4 + c of its 512 bytes; tiles lie row by row.
"""

import torch

from megatron.core.fusions.kernels import kernels_run_on

TALL, LANES, WIDE = 128, 32, 4  # rows of a tile, rows that share a column of it, blocks


def exponents(scales: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two, any shape -> e8m0 as uint8. What is below 2 ** -127, 0 too, counts as that; what is not finite is NaN."""
    return ((scales.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """[rows, blocks] of any dtype -> the tiles, [rows * blocks, both filled up with zeros to whole tiles]."""
    rows, blocks = scales.shape
    filled = torch.nn.functional.pad(scales, (0, -blocks % WIDE, 0, -rows % TALL))
    return filled.view(-(-rows // TALL), TALL // LANES, LANES, -(-blocks // WIDE), WIDE).permute(0, 3, 2, 1, 4).reshape(-1)


def untiled(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """What `tiled` gave -> [rows, blocks]."""
    down, across = -(-rows // TALL), -(-blocks // WIDE)
    filled = tiles.view(down, across, LANES, TALL // LANES, WIDE).permute(0, 3, 2, 1, 4).reshape(down * TALL, across * WIDE)
    return filled[:rows, :blocks]


def cublas_scales_plain(inverse: torch.Tensor) -> torch.Tensor:
    return tiled(exponents(inverse)).view(torch.float8_e8m0fnu)


def cublas_scales(inverse: torch.Tensor) -> torch.Tensor:
    """An operand's inverse scales, fp32 [rows, blocks], as torch._scaled_mm takes them: float8_e8m0fnu [scales of whole tiles]."""
    if kernels_run_on(inverse):
        from megatron.core.fusions.kernels import mx_scales as kernels

        return kernels.tiles(inverse).view(torch.float8_e8m0fnu)
    return cublas_scales_plain(inverse)
