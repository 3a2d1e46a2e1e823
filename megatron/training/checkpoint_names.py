"""The names under a folder of checkpoints, a contract with Megatron-LM: `iter_%07d/`, `release/` and the tracker file. No torch."""

import os
import re
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"  # holds the iteration of the last complete checkpoint as text, or `release`
RELEASE = "release"  # a checkpoint without an iteration, which training starts from at 0


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    return os.path.join(checkpoints_path, TRACKER)


def get_checkpoint_name(checkpoints_path: str, iteration: int, release: bool = False, return_base_dir: bool = True, **_: Any) -> str:
    """The folder of one checkpoint."""
    return os.path.join(checkpoints_path, RELEASE if release else f"iter_{iteration:07d}")


def iteration_of(folder: str | os.PathLike[str]) -> int | None:
    """The iteration of a checkpoint's folder, None for a folder that is none (or is a `release`, or is still being written)."""
    match = re.fullmatch(r"iter_(\d{7,})", Path(folder).name)
    return int(match[1]) if match else None


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """(iteration, is it a `release`) of a tracker file. Raises CheckpointError when it holds neither."""
    text = Path(tracker_filename).read_text().strip()
    if text == RELEASE:
        return 0, True
    if not text.isdigit():
        from megatron.core.dist_checkpointing import CheckpointError  # it needs torch, a name does not

        raise CheckpointError(f"{tracker_filename} holds {text[:40]!r}: it must be an iteration number or `release`")
    return int(text), False
