"""Products of FP8 operands, each with the contracted dimension last: a [m, k] times b [n, k] transposed.

On a GPU cuBLAS computes them (torch._scaled_mm); where it does not take the operands, Triton does (fusions/kernels/scaled_mm.py). Which of
them: tried out once for each kind of scales, on the device. On a CPU: the values, multiplied in fp32, which is the twin of both.
"""

import logging
from collections.abc import Iterator
from functools import cache

import torch

from megatron.core import device
from megatron.core.fp8 import cublaslt
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.mx_scales import cublas_scales
from megatron.core.fp8.quantize import (
    BLOCK,
    MX_BLOCK,
    MX_BLOCKS,
    ROW_BLOCKS,
    SQUARE_BLOCKS,
    TENSOR,
    Operand,
    quantize_blocks_plain,
    quantized_rows,
)
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.fusions.kernels import kernels_run_on

logger = logging.getLogger(__name__)
TOLERANCE = 2e-2  # of a product that is tried out; bf16 rounds by 4e-3, a scale in the wrong place is off by a factor of two
MX_SIZES = ((384, 256, 256), (201, 144, 160))  # (m, n, k): whole tiles of scales, and parts of some


def product_plain(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    return a.value().mm(b.value().t()).to(out_dtype)


def product(a: Operand, b: Operand, out_dtype: torch.dtype, *, out: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    """[m, n] in out_dtype, in `out` (contiguous, of that dtype) where it is given.

    fast: sums of more than 128 products may be kept in the tensor cores' own precision (about 14 bits); for outputs that are bf16 anyway.
    """
    if device.on_accelerator(a.data) and a.data.shape[1]:
        if _cublas_takes(a, b, out_dtype):
            return _cublas(a, b, out_dtype, out, fast)
        if kernels_run_on(a.data):
            from megatron.core.fusions.kernels import scaled_mm

            return scaled_mm.product(a, b, out_dtype, out)
    result = product_plain(a, b, out_dtype)
    return result if out is None else out.copy_(result)


def write_product(out: torch.Tensor, a: Operand, b: Operand, *, add: bool) -> None:
    """out [m, n] = or, to `add`, += a [m, k] times b [n, k] transposed; out contiguous."""
    adds = _cublas_adds(out, a, b)  # found out at the first product, not while a CUDA graph is recorded
    if add and adds:
        cublaslt.add_product(out, a, b)
    elif add:
        out.add_(product(a, b, out.dtype))
    else:
        product(a, b, out.dtype, out=out)


def _cublas_adds(out: torch.Tensor, a: Operand, b: Operand) -> bool:
    if not device.on_accelerator(out) or a.kind != b.kind or out.dtype is not torch.float32:
        return False
    return _cublas_takes(a, b, out.dtype) and cublaslt.works(a.kind)


def _cublas_takes(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    (m, k), n = a.data.shape, b.data.shape[0]
    if not m or k % ALIGNMENT or n % ALIGNMENT:
        return False
    if a.kind == b.kind == TENSOR:
        return cublas_works(a.kind, b.kind, out_dtype)
    if MX_BLOCKS in (a.kind, b.kind):
        return a.kind == b.kind and k % MX_BLOCK == 0 and cublas_works(a.kind, b.kind, out_dtype)
    # scales are read in vectors of four: of 1 x 128 those of rows, of 128 x 128 those of blocks along k (others give wrong results)
    whole = SQUARE_BLOCKS not in (a.kind, b.kind) or -(-k // BLOCK) % 4 == 0
    return m % 4 == 0 and whole and cublas_works(a.kind, b.kind, out_dtype)


def _cublas(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    if a.kind == MX_BLOCKS:
        scale_a, scale_b = cublas_scales(a.inverse), cublas_scales(b.inverse)
    else:
        scale_a, scale_b = a.inverse, b.inverse if b.kind == TENSOR else b.inverse.t()
    fast = fast and a.kind == b.kind == TENSOR  # scales of blocks are applied to sums in fp32
    left, right = a.data, b.data.t()
    if out is None:
        return torch._scaled_mm(left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    # the overload that writes where it is told
    torch.ops.aten._scaled_mm.out(left, right, scale_a, scale_b, None, None, out_dtype, fast, out=out)
    return out


@cache
def cublas_works(kind_a: str, kind_b: str, out_dtype: torch.dtype) -> bool:
    """Whether torch multiplies operands of these kinds on this device, and rightly: found out once, said once where it does not."""
    # with blocks of 32 it has not run on a device that has it: more is tried
    try:
        reason = ""
        for a, b in mx_trials(MX_SIZES) if kind_a == MX_BLOCKS else (_trial(kind_a, kind_b),):
            out = torch.empty(len(a.data), len(b.data), dtype=out_dtype, device=a.data.device)
            reason = reason or difference(_cublas(a, b, out_dtype, out), a, b)
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        logger.warning("torch does not multiply FP8 with scales %s times %s (%s): Triton does, more slowly", kind_a, kind_b, reason)
    return not reason


def _trial(kind_a: str, kind_b: str) -> tuple[Operand, Operand]:
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
