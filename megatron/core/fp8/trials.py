"""Products that are tried out on a device before a library is trusted with them: operands, and what counts as right."""

from collections.abc import Iterator

import torch

from megatron.core import device
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantize import MX_BLOCK, MX_BLOCKS, ROW_BLOCKS, Operand, quantize_blocks_plain, quantized_rows

TOLERANCE = 2e-2  # of a product that is tried out; bf16 rounds by 4e-3, a scale in the wrong place is off by a factor of two
MX_SIZES = ((384, 256, 256), (201, 144, 160))  # (m, n, k): whole tiles of scales, and parts of some


def trial(kind_a: str, kind_b: str) -> tuple[Operand, Operand]:
    """Operands [512, k] in e5m2 and [512, k] in e4m3."""
    generator = torch.Generator("cpu").manual_seed(1)
    depth = 656 if kind_a == kind_b == ROW_BLOCKS else 1024  # ends within a block, the sixth, and scales are read by fours
    drawn = (torch.randn(512, depth, generator=generator).to(device.current_device(), torch.bfloat16) for _ in range(2))
    a, b = (quantized_rows(x, dtype, kind) for x, dtype, kind in zip(drawn, (E5M2, E4M3), (kind_a, kind_b), strict=True))
    return a, b


def mx_trials(sizes: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[Operand, Operand]]:
    """Operands [m, k] and [n, k] with blocks of 32 of each of the sizes (m, n, k), as gradients of either format and as weights.

    All numbers are above 0 and scales differ from block to block, so that a scale that is read from elsewhere is seen in each result.
    """
    generator = torch.Generator("cpu").manual_seed(3)
    for m, n, k in sizes:
        for dtype in (E5M2, E4M3):
            a, b = (
                quantize_blocks_plain(_of_many_scales(rows, k, generator).to(device.current_device()), to, MX_BLOCKS)
                for rows, to in ((m, dtype), (n, E4M3))
            )
            yield a, b


def _of_many_scales(rows: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """bf16 [rows, k] above 0, of magnitudes that differ by up to 8 between blocks of 32."""
    powers = torch.randint(4, (rows, -(-k // MX_BLOCK)), generator=generator).exp2().repeat_interleave(MX_BLOCK, dim=1)[:, :k]
    return ((torch.rand(rows, k, generator=generator) + 0.5) * powers).bfloat16()


def difference(found: torch.Tensor, a: Operand, b: Operand) -> str:
    """Why `found` [m, n] is not the product of a and b; empty where it is. Of positive operands each element counts as it is."""
    expected = a.value() @ b.value().t()
    measure = expected if a.kind == MX_BLOCKS else expected.abs().max()
    error = float(((found.float() - expected).abs() / measure).max())
    return "" if error < TOLERANCE else f"results differ by {error:.3g} of {'their size' if a.kind == MX_BLOCKS else 'the largest'}"
