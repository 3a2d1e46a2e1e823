"""What modules keep beside parameters, Transformer Engine's FP8 scales, in a run's checkpoints."""

import argparse
from typing import Any

import torch

from megatron.core.transformer.extra_state import extra_state_objects, restore_extra_states
from megatron.training.checkpoint_formats import StoredCheckpoint
from megatron.training.training_log import print_rank_0


def chunk_names(model: list[torch.nn.Module]) -> list[str]:
    """A checkpoint's names of a rank's chunks, as Megatron-LM has them."""
    return ["model"] if len(model) == 1 else [f"model{number}" for number in range(len(model))]


def stored_extra_state(model: list[torch.nn.Module]) -> dict[str, Any]:
    """ShardedObjects by the chunk's name and the module's."""
    return {name: extra_state_objects(chunk) for name, chunk in zip(chunk_names(model), model, strict=True)}


def restore_extra_state(checkpoint: StoredCheckpoint, model: list[torch.nn.Module], args: argparse.Namespace) -> None:
    """The scales that a run with delayed scaling left; where there are none that fit they start anew, and rank 0 says so."""
    precision, recipe = getattr(args, "fp8", None), getattr(args, "fp8_recipe", "delayed")
    if args.transformer_impl != "transformer_engine" or not precision or recipe != "delayed":
        return
    wanted = {name: {where: item.without_data() for where, item in objects.items()} for name, objects in stored_extra_state(model).items()}
    loaded = checkpoint.load_objects(wanted)
    if not sum(restore_extra_states(chunk, loaded[name]) for name, chunk in zip(chunk_names(model), model, strict=True)):
        print_rank_0("the checkpoint has no FP8 scales that fit: they start anew")
