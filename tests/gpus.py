"""How many ranks find a GPU here, for tests that need some: as many as there are GPUs, or any number where NCCL lets ranks share one
(NCCL_MULTI_RANK_GPU_ENABLE=1)."""

import pytest
import torch

from megatron.core import device

GPUS = torch.cuda.device_count() if device.has_accelerator() else 0
RANKS = 64 if GPUS and device.gpus_are_shared() else GPUS


def needs_gpus(ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(ranks > RANKS, reason=f"needs {ranks} GPUs, this machine has {GPUS}")


needs_two_gpus = needs_gpus(2)
