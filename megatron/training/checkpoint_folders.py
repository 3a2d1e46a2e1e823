"""A checkpoint's folder from its first file to its removal: at every moment the tracker names one that is whole. No torch.

A folder has its own name only while it is complete. While it is written it has the suffix `.unfinished`; one that another of the same
iteration replaces has `.replaced` for the moment in between, one that is being removed `.removed`. What a killed run leaves under these
names is cleared at the next save, and nothing else is.
"""

import os
import re
import shutil
from pathlib import Path

from megatron.core.dist_checkpointing.errors import DamagedCheckpointError
from megatron.core.dist_checkpointing.integrity import check_sizes, replace_synced, sync_folder
from megatron.training.checkpoint_names import TRACKER, iteration_of

UNFINISHED, REPLACED, REMOVED = ".unfinished", ".replaced", ".removed"
KEEP_FILE = "keep"  # a file of this name in a checkpoint's folder keeps it from removal


def _with_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def start(final: Path) -> Path:
    """The empty folder to write the checkpoint into that will be `final`. Clears what a killed run left."""
    final.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(final.parent)
    unfinished = _with_suffix(final, UNFINISHED)
    unfinished.mkdir()
    return unfinished


def clear_leftovers(save: Path) -> None:
    """Remove half-written and half-removed folders; a replaced one whose successor did not arrive gets its name back."""
    for path in save.iterdir():
        match = re.fullmatch(rf"(iter_\d{{7,}})({re.escape(UNFINISHED)}|{re.escape(REPLACED)}|{re.escape(REMOVED)})", path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        if match[2] == REPLACED and not (save / match[1]).exists():
            os.rename(path, save / match[1])
        else:
            shutil.rmtree(path, ignore_errors=True)


def publish(unfinished: Path, final: Path) -> None:
    """Give a complete checkpoint, whose files are on the disk, its name; then point the tracker at it.

    On OSError all is as it was before, and the half-written folder is gone.
    """
    replaced, save = _with_suffix(final, REPLACED), final.parent
    try:
        if final.exists():  # the same iteration again: the old one makes way only now
            os.rename(final, replaced)
        os.rename(unfinished, final)
        sync_folder(save)
        replace_synced(save / TRACKER, str(iteration_of(final)), UNFINISHED)
    except OSError:
        (save / (TRACKER + UNFINISHED)).unlink(missing_ok=True)
        if replaced.exists():
            if final.exists():
                os.rename(final, unfinished)
            os.rename(replaced, final)
        elif final.exists() and not unfinished.exists() and not _names(save, final):
            os.rename(final, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)  # gives a full disk its space back
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def _names(save: Path, folder: Path) -> bool:
    """Whether the tracker names `folder`."""
    tracker = save / TRACKER
    return tracker.exists() and tracker.read_text().strip() == str(iteration_of(folder))


def where_it_stands(folder: Path) -> Path:
    """`folder`, or the one that a run was replacing by another of the same iteration when it was killed."""
    replaced = _with_suffix(folder, REPLACED)
    return replaced if replaced.is_dir() and not folder.exists() else folder


def complete_iterations(save: Path) -> list[int]:
    """Iterations of the checkpoints in `save` whose files are there in full size, ascending."""
    found = []
    for path in save.glob("iter_*"):
        iteration = iteration_of(path)
        if iteration is None or not path.is_dir():
            continue
        try:
            check_sizes(path)
        except (DamagedCheckpointError, OSError):
            continue
        found.append(iteration)
    return sorted(found)


def remove_old(save: Path, latest: int, keep_last: int | None, retain_interval: int | None) -> list[str]:
    """After `latest` is complete: remove the checkpoints before it that neither rule keeps. Returns what could not be removed, in words.

    keep_last: the last so many stay, `latest` among them (1 when only the other rule is given). retain_interval: those of its multiples
    stay. So do later iterations (of a run that this one branched off from), links, folders with a file `keep`, and the one that the
    tracker names.
    """
    if keep_last is None and retain_interval is None:
        return []
    last = set([iteration for iteration in complete_iterations(save) if iteration <= latest][-(keep_last or 1) :])
    problems = []
    for path in sorted(save.glob("iter_*")):
        iteration = iteration_of(path)
        if iteration is None or iteration >= latest or iteration in last or path.is_symlink() or not path.is_dir():
            continue
        if (retain_interval and iteration % retain_interval == 0) or (path / KEEP_FILE).exists() or _names(save, path):
            continue
        removed = _with_suffix(path, REMOVED)
        try:
            os.rename(path, removed)  # at once: no reader finds half of it under its name
            shutil.rmtree(removed)
        except OSError as error:
            problems.append(f"{path} could not be removed: {error}")
    return problems
