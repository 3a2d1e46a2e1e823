"""Triton kernels. A module here imports Triton at its top, so it is imported only where `kernels_run_on` says so.

Each has a torch path beside it, at the place that calls it, which is its plain twin and what runs where Triton does not:

    cross_entropy  tensor_parallel/cross_entropy.py       permute    transformer/moe/permutation.py
    swiglu         fusions/fused_bias_swiglu.py           adam       optimizer/fused_optimizers.py
    rope           fusions/fused_rope.py                  embedding  tensor_parallel/weight_grad.py; twin: F.embedding in layers.py
    norm           fusions/fused_layer_norm.py            probe      nobody: does Triton work here at all?
    precision      other kernels: how numbers are rounded
    fp8_tiles      other kernels: what becomes of a number in FP8, and of a tile
    quantize, quantize_blocks  fp8/quantize.py            scaled_mm  fp8/gemm.py
    mx_scales      fp8/mx_scales.py
    quantize_groups  fp8/grouped.py, fp8/grouped_blocks.py; the twin of blocks is fp8/quantize.py, group by group
    scaled_grouped_mm  fp8/grouped.py
    router         transformer/moe/router.py; its twin is transformer/moe/routing.py
    swiglu_quantize, swiglu_quantize_blocks  fp8/swiglu_mlp.py; the first in fp8/expert_mlp.py too; their twin is what transformer/mlp.py
                   does without them
    swiglu_quantize_groups  fp8/expert_mlp.py; its twin is what transformer/moe/experts.py does without it
"""

import logging
from functools import cache

import torch

from megatron.core import device
from megatron.core.optional_imports import available

logger = logging.getLogger(__name__)
# Kernels on the CPU, for tests: true only where TRITON_INTERPRET=1 was set before Triton was first imported.
interpreted = False


def kernels_run_on(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels take `tensor`: it is not empty, and on a GPU for which Triton compiles (or in Triton's interpreter)."""
    if tensor.numel() == 0 or not available("triton"):
        return False
    return compiles() if device.on_accelerator(tensor) else interpreted


@cache
def compiles() -> bool:
    """Whether Triton can make a kernel for this process's device: found out once, said once where it cannot."""
    try:
        from megatron.core.fusions.kernels.probe import probe

        probe()
    except Exception as error:  # whatever a compiler that is missing or wrong makes of it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("Triton's kernels do not run here (%s): going on with torch's operations, which are slower", reason)
        return False
    return True
