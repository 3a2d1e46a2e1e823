"""The names under a folder of checkpoints, a contract with Megatron-LM: `iter_%07d/`, `release/`, the tracker file, and a legacy
checkpoint's `mp_rank_TT[_PPP][_EEE]/`. No torch."""

import os
import re
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from megatron.core.rank_grid import make_layout

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


def chunk_names(chunks: int) -> list[str]:
    """Under which names a rank's model chunks are kept."""
    return ["model"] if chunks == 1 else [f"model{number}" for number in range(chunks)]


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """(iteration, is it a `release`) of a tracker file. Raises CheckpointError when it holds neither."""
    text = Path(tracker_filename).read_text().strip()
    if text == RELEASE:
        return 0, True
    if not text.isdigit():
        from megatron.core.dist_checkpointing import CheckpointError  # it needs torch, a name does not

        rule = "it must be an iteration number or `release` (--ckpt-step N loads iteration N, whatever it holds)"
        raise CheckpointError(f"{tracker_filename} holds {text[:40]!r}: {rule}")
    return int(text), False


@dataclass(frozen=True)
class LegacyFile:
    """A folder of the legacy format: which part of the model the rank that wrote it has."""

    tensor: int
    stage: int
    expert: int
    expert_tensor: int  # which part of its experts
    first_of_dense: bool  # of the files with the same parameters outside of experts, the first one
    name: str


def legacy_problem(tensor: int, expert: int, expert_tensor: int) -> str | None:
    """Why the legacy format cannot hold experts of these parallel sizes, None where it can.

    A file is named after tensor rank and expert rank, and the ranks that have a layer's experts for the first time write.
    """
    if expert_tensor > tensor:
        return f"{expert_tensor} ranks share an expert and {tensor} a dense layer: several would write the same file"
    if expert_tensor * expert % tensor:
        return f"the {expert_tensor * expert} ranks that have a layer's experts once are no multiple of the {tensor} of a dense layer"
    return None


def legacy_files(tensor: int, stages: int, expert: int, expert_tensor: int) -> list[LegacyFile]:
    """All that a run of these sizes writes, by stage. Raises ValueError with `legacy_problem`."""
    if problem := legacy_problem(tensor, expert, expert_tensor):
        raise ValueError(problem)
    grid = make_layout(lcm(tensor, expert * expert_tensor) * stages, tp=tensor, pp=stages, ep=expert, etp=expert_tensor)
    found: list[LegacyFile] = []
    dense: set[tuple[int, int]] = set()
    for rank in range(grid.world_size):
        own, among_experts = grid.dense.coordinates(rank), grid.expert.coordinates(rank)
        if among_experts["edp"]:
            continue
        place = (own["tp"], own["pp"], among_experts["ep"])
        found.append(LegacyFile(*place, among_experts["etp"], place[:2] not in dense, rank_folder(place, stages, expert)))
        dense.add(place[:2])
    return found


def rank_folder(rank: tuple[int, int, int], stages: int, expert_ranks: int) -> str:
    """The folder's name of one (tensor, pipeline, expert) rank: stage and expert rank stand there where there are several."""
    tensor, stage, expert = rank
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "") + (f"_{expert:03d}" if expert_ranks > 1 else "")
