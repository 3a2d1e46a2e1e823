"""In which precision kernels compute."""

import os

import torch
import triton
import triton.language as tl

# Whether there is NVIDIA's assembler, which Triton's interpreter and other compilers have not
_ASSEMBLER = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1")


def wide(x: torch.Tensor) -> tl.dtype:
    """fp32, and fp64 for fp64 tensors."""
    return tl.float64 if x.dtype is torch.float64 else tl.float32


@triton.jit
def rounded_to(value, dtype: tl.constexpr):
    """fp32 -> dtype, to the nearest. To bf16 two at once: one by one, as the compiler does where they are used further on, the conversion
    has an eighth of the speed."""
    if _ASSEMBLER and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [value], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return value.to(dtype)
