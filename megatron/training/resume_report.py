"""The one report of what a run took from a checkpoint: restored, reset, overridden, changed."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.training.resume_checks import Taken, changed_flags, changes_of_data, vocabulary_differences
from megatron.training.train_step import TrainState


def report(
    folder: Path, iteration: int, taken: Taken, saved: Mapping[str, Any], args: argparse.Namespace, schedule: str, state: TrainState
) -> str:
    """Lines for rank 0 to print. `saved`: the checkpoint's arguments; `schedule`: of `schedule_report`."""
    lines = [f"restored: {taken.restored()}"]
    if taken.reset():
        lines.append(f"reset: {taken.reset()}")
    if schedule:
        lines.append(schedule)
    if changed := list(changed_flags(saved, args)):
        lines.append(f"changed: {'; '.join(changed)}")
    lines.append(f"next: iteration {state.iteration + 1}, after {state.consumed_train_samples} samples")
    warnings = changes_of_data(saved, args) if taken.position else vocabulary_differences(saved, args)
    lines += [f"WARNING: {text}" for text in warnings]
    return "\n    ".join([f"  successfully loaded checkpoint from {folder.parent} at iteration {iteration}", *lines])


def schedule_report(before: Mapping[str, Any], saved: Mapping[str, Any] | None, args: argparse.Namespace) -> str:
    """Which schedule of learning rate and weight decay holds where the two differ, "" where they do not or nothing was asked.

    before: this run's, as its flags make it; saved: the checkpoint's, None where it has none.
    """
    if saved is None:
        return "schedule: the checkpoint has none; this run's flags hold, from this position on"
    pairs = [(key, saved[key], now) for key, now in before.items() if key != "num_steps" and saved.get(key, now) != now]
    if pairs and args.override_opt_param_scheduler:
        return f"overridden: schedule (--override-opt_param-scheduler): {', '.join(f'{key} {was} -> {now}' for key, was, now in pairs)}"
    if pairs and args.use_checkpoint_opt_param_scheduler:
        kept = ", ".join(f"{key} {was}, not {now}" for key, was, now in pairs)
        return f"restored over this run's flags: schedule (--use-checkpoint-opt_param-scheduler): {kept}"
    return ""
