"""Checkpoints that know each shard's place in the whole: any layout writes them, any layout reads them.

`serialization` loads when first used: torch.distributed.checkpoint is a third of the time that `import torch` takes.
"""

import importlib
from typing import Any

from .errors import CheckpointError, DamagedCheckpointError
from .mapping import LocalNonpersistentObject, ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict

_LAZY = {
    **dict.fromkeys(("begin_save", "load", "load_common_state_dict", "load_content_metadata", "load_plain_tensors"), "serialization"),
    **dict.fromkeys(("load_sharded_metadata", "load_tensors_metadata", "save", "stored_objects"), "serialization"),
    "StrictHandling": "validation",
}

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    *_LAZY,
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
