"""Whether this GPU computes what the mxfp8 recipe is: tried out once, when the first layer in FP8 is built.

The recipe follows the libraries' documentation and has not run on a GPU that has it. So each part is compared here with the plain twins,
which are emulation in fp32, and a run does not start where one differs.
"""

from functools import cache

import torch

from megatron.core import device
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.gemm import product, write_product
from megatron.core.fp8.quantize import MX_BLOCKS, Operand, Quantized, padded, quantize_blocks, quantize_blocks_plain
from megatron.core.fp8.trials import MX_SIZES, difference, mx_trials

SIZES = (*MX_SIZES, (72, 48, 80), (136, 272, 80))  # with half a block too: Triton multiplies those, in tiles of two sizes


@cache
def mx_problem() -> str | None:
    """What this process's device computes otherwise than the twins; None: nothing. Waits for the device."""
    try:
        return _wrong_quantization() or _wrong_product()
    except Exception as failure:  # whatever a compiler or a library makes of a GPU that it does not know
        return f"{type(failure).__name__}: {failure}".splitlines()[0]


def _wrong_quantization() -> str | None:
    """Rows and columns, to the bit, of numbers of all sizes, some of them not finite."""
    generator = torch.Generator("cpu").manual_seed(4)
    x = torch.randn(201, 176, generator=generator) * torch.randn(201, 176, generator=generator).mul(8).exp2()
    x[7], x[9, 11], x[100, 60], x[150, 150] = 0.0, torch.inf, -torch.inf, torch.nan
    x = x.to(device.current_device(), torch.bfloat16)
    turned = torch.nn.functional.pad(x.t(), (0, padded(len(x)) - len(x))).contiguous()
    for dtype in (E4M3, E5M2):
        expected = Quantized(quantize_blocks_plain(x, dtype, MX_BLOCKS), quantize_blocks_plain(turned, dtype, MX_BLOCKS))
        for name, found, plain in zip(Quantized._fields, quantize_blocks(x, dtype, MX_BLOCKS), expected, strict=True):
            if not _same(found, plain):
                return f"numbers quantized to {dtype} in {name} are not those of the rule"
    return None


def _same(found: Operand | None, plain: Operand | None) -> bool:
    assert found is not None and plain is not None
    numbers = torch.allclose(found.data.float(), plain.data.float(), rtol=0, atol=0, equal_nan=True)
    return numbers and torch.equal(found.inverse, plain.inverse)


def _wrong_product() -> str | None:
    """By whatever computes it here: written, and added to fp32 as weight gradients are."""
    for a, b in mx_trials(SIZES):
        of = f"{a.data.dtype} {tuple(a.data.shape)} times {tuple(b.data.shape)}"
        for out_dtype in (torch.bfloat16, torch.float32):
            if different := difference(product(a, b, out_dtype), a, b):
                return f"a product of {of} to {out_dtype}: {different}"
        total = torch.ones(len(a.data), len(b.data), device=a.data.device)
        write_product(total, a, b, add=True)
        if different := difference(total - 1.0, a, b):
            return f"a product of {of} added to a sum: {different}"
    return None
