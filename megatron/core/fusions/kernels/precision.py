"""In which precision kernels compute."""

import torch
import triton.language as tl


def wide(x: torch.Tensor) -> tl.dtype:
    """fp32, and fp64 for fp64 tensors."""
    return tl.float64 if x.dtype is torch.float64 else tl.float32
