"""Products of FP8 operands, each with the contracted dimension last: a [m, k] times b [n, k] transposed.

On a GPU cuBLAS computes them (torch._scaled_mm); where it does not take the operands, Triton does (fusions/kernels/scaled_mm.py). Which of
them: tried out once for each kind of scales, on the device. On a CPU: the values, multiplied in fp32, which is the twin of both.
"""

import logging
from functools import cache

import torch

from megatron.core import device
from megatron.core.fp8 import cublaslt
from megatron.core.fp8.quantize import TENSOR, Operand, quantized_rows
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.fusions.kernels import kernels_run_on

logger = logging.getLogger(__name__)


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
    # scales are read in vectors of four
    return m % 4 == 0 and -(-k // 128) % 4 == 0 and cublas_works(a.kind, b.kind, out_dtype)


def _cublas(a: Operand, b: Operand, out_dtype: torch.dtype, out: torch.Tensor | None = None, fast: bool = False) -> torch.Tensor:
    scale_b = b.inverse if b.kind == TENSOR else b.inverse.t()
    fast = fast and a.kind == b.kind == TENSOR  # scales of blocks are applied to sums in fp32
    left, right = a.data, b.data.t()
    if out is None:
        return torch._scaled_mm(left, right, scale_a=a.inverse, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    # the overload that writes where it is told
    torch.ops.aten._scaled_mm.out(left, right, a.inverse, scale_b, None, None, out_dtype, fast, out=out)
    return out


@cache
def cublas_works(kind_a: str, kind_b: str, out_dtype: torch.dtype) -> bool:
    """Whether torch multiplies operands of these kinds on this device, and rightly: found out once, said once where it does not."""
    generator = torch.Generator("cpu").manual_seed(1)
    where = device.current_device()
    a, b = (
        quantized_rows(torch.randn(512, 1024, generator=generator).to(where, torch.bfloat16), dtype, kind)
        for kind, dtype in ((kind_a, torch.float8_e5m2), (kind_b, torch.float8_e4m3fn))
    )
    try:
        found = _cublas(a, b, out_dtype, torch.empty(512, 512, dtype=out_dtype, device=where)).float()
        expected = a.value() @ b.value().t()
        error = float((found - expected).abs().max() / expected.abs().max())
        reason = "" if error < 2e-2 else f"results differ by {error:.3g} of the largest"
    except (RuntimeError, ValueError, NotImplementedError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        logger.warning("torch does not multiply FP8 with scales %s times %s (%s): Triton does, more slowly", kind_a, kind_b, reason)
    return not reason
