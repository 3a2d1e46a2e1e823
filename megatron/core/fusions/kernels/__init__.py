"""Triton kernels. A module here imports Triton at its top, so it is imported only where `kernels_run_on` says so.

Each kernel has its plain twin at the place that calls it.
"""

import torch

from megatron.core import device
from megatron.core.optional_imports import available

# Kernels on the CPU, for tests: true only where TRITON_INTERPRET=1 was set before Triton was first imported.
interpreted = False


def kernels_run_on(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels take `tensor`: it is not empty, and on a GPU with Triton installed (or in Triton's interpreter)."""
    return tensor.numel() > 0 and (device.on_accelerator(tensor) or interpreted) and available("triton")
