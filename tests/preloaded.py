"""All that a training imports, imported once, in the process that tests/fork_server.py forks ranks from.

Nothing here may start a thread, a process group or CUDA, or run a backward: a fork takes none of them along.
"""

import gc
import importlib

NAMES = (
    "torch.multiprocessing.spawn",
    "torch.distributed.nn.functional",
    "torch.distributed.checkpoint",
    "megatron.training.training",
    "megatron.core.dist_checkpointing.serialization",
    "pretrain_gpt",
    "pretrain_llama",
)

for name in NAMES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # a collection in a child must not touch, and so copy, what it shares with all others
