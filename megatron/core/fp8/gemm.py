"""Products of FP8 operands, each with the contracted dimension last: a [m, k] times b [n, k] transposed.

On a GPU cuBLAS computes them: asked directly (cublaslt.py), so that what is written and what is added takes one way, or through torch
(torch._scaled_mm) where that fails, and for fast sums and blocks of 32. Where it does not take the operands, Triton does
(fusions/kernels/scaled_mm.py). Which of them: tried out once for each kind of scales, on the device. On a CPU: the values, multiplied in
fp32, which is the twin of all.
"""

import logging
from functools import cache

import torch

from megatron.core import device
from megatron.core.fp8 import cublaslt
from megatron.core.fp8.mx_scales import cublas_scales
from megatron.core.fp8.quantize import BLOCK, MX_BLOCK, MX_BLOCKS, SQUARE_BLOCKS, TENSOR, Operand
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.fp8.trials import MX_SIZES, difference, mx_trials, trial
from megatron.core.fusions.kernels import kernels_run_on

logger = logging.getLogger(__name__)


def product_plain(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    return a.value().mm(b.value().t()).to(out_dtype)


def product(a: Operand, b: Operand, out_dtype: torch.dtype, *, out: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    """[m, n] in out_dtype, in `out` (contiguous, of that dtype) where it is given.

    fast: sums of more than 128 products may be kept in the tensor cores' own precision (about 14 bits); for outputs that are bf16 anyway.
    """
    if device.on_accelerator(a.data) and a.data.shape[1]:
        fits, fast = _cublas_takes(a, b), fast and a.kind == b.kind == TENSOR  # with blocks, sums are in fp32 whatever one wants
        if fits and not fast and cublaslt.works(a.kind, b.kind, out_dtype):
            out = a.data.new_empty(len(a.data), len(b.data), dtype=out_dtype) if out is None else out
            cublaslt.write_product(out, a, b, add=False)
            return out
        if fits and cublas_works(a.kind, b.kind, out_dtype):
            return _cublas(a, b, out_dtype, out, fast)
        if kernels_run_on(a.data):
            from megatron.core.fusions.kernels import scaled_mm

            return scaled_mm.product(a, b, out_dtype, out)
    result = product_plain(a, b, out_dtype)
    return result if out is None else out.copy_(result)


def write_product(out: torch.Tensor, a: Operand, b: Operand, *, add: bool) -> None:
    """out [m, n] = or, to `add`, += a [m, k] times b [n, k] transposed; out contiguous."""
    if not add:
        product(a, b, out.dtype, out=out)
    elif _cublaslt_adds(out, a, b):
        cublaslt.write_product(out, a, b, add=True)
    else:
        out.add_(product(a, b, out.dtype))


def _cublaslt_adds(out: torch.Tensor, a: Operand, b: Operand) -> bool:
    if not device.on_accelerator(out) or out.dtype is not torch.float32:
        return False
    return _cublas_takes(a, b) and cublaslt.works(a.kind, b.kind, out.dtype)


def _cublas_takes(a: Operand, b: Operand) -> bool:
    """Sizes and scales that it multiplies, and rightly; others it refuses, or gives wrong results of without a word."""
    (m, k), n = a.data.shape, b.data.shape[0]
    if not m or not k or k % ALIGNMENT or n % ALIGNMENT:
        return False
    if a.kind == b.kind == TENSOR:
        return True
    if MX_BLOCKS in (a.kind, b.kind):
        return a.kind == b.kind and k % MX_BLOCK == 0
    # scales are read in vectors of four: of 1 x 128 those of rows, of 128 x 128 those of blocks along k
    return m % 4 == 0 and (SQUARE_BLOCKS not in (a.kind, b.kind) or -(-k // BLOCK) % 4 == 0)


def _cublas(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    if a.kind == MX_BLOCKS:
        scale_a, scale_b = cublas_scales(a.inverse), cublas_scales(b.inverse)
    else:
        scale_a, scale_b = a.inverse, b.inverse if b.kind == TENSOR else b.inverse.t()
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
        for a, b in mx_trials(MX_SIZES) if kind_a == MX_BLOCKS else (trial(kind_a, kind_b),):
            out = torch.empty(len(a.data), len(b.data), dtype=out_dtype, device=a.data.device)
            reason = reason or difference(_cublas(a, b, out_dtype, out), a, b)
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        logger.warning("torch does not multiply FP8 with scales %s times %s (%s): Triton does, more slowly", kind_a, kind_b, reason)
    return not reason
