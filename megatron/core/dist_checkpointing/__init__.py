"""Checkpoints that know each shard's place in the whole: any layout writes them, any layout reads them."""

from .mapping import LocalNonpersistentObject, ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from .serialization import (
    CheckpointError,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_tensors_metadata,
    save,
)

__all__ = [
    "CheckpointError",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "load",
    "load_common_state_dict",
    "load_plain_tensors",
    "load_tensors_metadata",
    "save",
]
