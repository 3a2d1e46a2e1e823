"""What modules of Transformer Engine keep beside parameters, FP8 scales, in a run's checkpoints. The local backend's: fp8_checkpoint.py."""

from typing import Any

import torch

from megatron.core.transformer.extra_state import extra_state_objects, keeps_extra_state, restore_extra_states
from megatron.training.checkpoint_formats import StoredCheckpoint
from megatron.training.training_log import print_rank_0


def restore_extra_state(checkpoint: StoredCheckpoint, model: list[torch.nn.Module]) -> None:
    """The scales that a run with delayed scaling left; where there are none that fit they start anew, and rank 0 says so."""
    if not any(keeps_extra_state(chunk) for chunk in model):
        return
    wanted: dict[str, Any] = {
        str(number): {name: item.without_data() for name, item in extra_state_objects(chunk).items()} for number, chunk in enumerate(model)
    }
    loaded = checkpoint.load_objects(wanted)
    if not sum(restore_extra_states(chunk, loaded[str(number)]) for number, chunk in enumerate(model)):
        print_rank_0("  FP8: no scales that fit in the checkpoint: they begin as in a new run")
