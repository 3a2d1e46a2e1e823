"""Delayed scaling's history in checkpoints: what of it one has, and what to do about what it lacks.

A checkpoint without it (of a run in bf16, of another recipe) or with another program's is no error: the scales begin as in a new run.
"""

from typing import Any

from megatron.core.fp8.model import EXTRA_STATE, load_extra_states
from megatron.core.utils import unwrap_model
from megatron.training.checkpoint_formats import StoredCheckpoint
from megatron.training.checkpoint_names import chunk_names
from megatron.training.training_log import print_rank_0


def leave_out_missing(wanted: dict[str, Any], checkpoint: StoredCheckpoint) -> None:
    """Take the extra states that the checkpoint lacks out of what is to be read."""
    states = [(part, name) for part in wanted.values() if isinstance(part, dict) for name in part if str(name).endswith(EXTRA_STATE)]
    keys = {part[name].key for part, name in states}
    stored = {item.unique_key for key in keys for item in checkpoint.objects(key)}
    for part, name in states:
        if part[name].unique_key not in stored:
            del part[name]


def restore(model: list[Any], loaded: dict[str, Any]) -> None:
    """Give each linear of the model's chunks its own; one note for all that have none."""
    chunks = zip(chunk_names(len(model)), model, strict=True)
    fresh = sum(load_extra_states(unwrap_model(chunk), loaded.get(name, {})) for name, chunk in chunks)
    if fresh:
        print_rank_0(f"  FP8: no history of scales for {fresh} linears of the first stage in the checkpoint: they begin as in a new run")
