"""Checkpoints of a run: what is in one, where it stands, when it is complete.

On disk (a contract, Megatron-LM's): `<save>/iter_%07d/` in torch_dist format and `<save>/latest_checkpointed_iteration.txt`, which holds
the iteration as text. A checkpoint is written under another name and renamed when all ranks are done; the tracker follows last, so it only
ever names a complete one.
"""

import argparse
import errno
import os
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device, dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, DamagedCheckpointError, StrictHandling
from megatron.core.dist_checkpointing.integrity import check_sizes, write_checksums
from megatron.core.dist_checkpointing.saving import SaveStrategy
from megatron.core.utils import get_world_rank
from megatron.training import checkpoint_folders, dcp_checkpoints, fp8_checkpoint, legacy_checkpoint_writer
from megatron.training.checkpoint_contents import (
    RNG_KEY,
    content_metadata,
    contents_of,
    is_rounded,
    main_params_of_weights,
    model_state,
    optimizer_state,
    rng_object,
    rng_state,
    set_rng_state,
    state_from,
    stored_rng_object,
)
from megatron.training.checkpoint_formats import StoredCheckpoint, open_checkpoint
from megatron.training.checkpoint_names import (
    RELEASE,
    TRACKER,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    iteration_of,
    read_metadata,
)
from megatron.training.checkpoint_strategies import save_strategy
from megatron.training.extra_state import restore_extra_state
from megatron.training.phase import phase
from megatron.training.resume_checks import Taken, refusals
from megatron.training.resume_report import report, schedule_report
from megatron.training.train_step import TrainState
from megatron.training.training_log import print_rank_0


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def prepare_folder(save: str) -> None:
    """Make the folder for checkpoints now: one that cannot be made or written to is no news for the first save, hours later."""

    def make() -> None:
        Path(save).mkdir(parents=True, exist_ok=True)
        if not os.access(save, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "--save folder cannot be written to", save)

    _first_rank_does(make)


def save_checkpoint(
    save: str,
    args: argparse.Namespace,
    state: TrainState,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    opt_param_scheduler: Any | None,
    *,
    save_rng: bool = True,
    strategy: SaveStrategy | None = None,
) -> Path:
    """Write the checkpoint of `state.iteration` under `save`; return its folder. Every rank calls it.

    strategy: how the ranks divide the work, one for all saves of a run; what the flags say by default.

    Raises OSError as the file system does (a full disk); the checkpoints that are there stay as they are.
    """
    with phase("saving a checkpoint", state.iteration):
        started = device.Stopwatch()
        final, unfinished = start_folder(save, state.iteration)
        contents = contents_of(args, state, model, optimizer, opt_param_scheduler, save_rng=save_rng)
        try:
            if args.ckpt_format == "torch":
                legacy_checkpoint_writer.write(unfinished, contents, model, optimizer, rng_state() if save_rng else None)
                _first_rank_does(lambda: write_checksums(unfinished, {}))
            elif args.ckpt_format == "torch_dcp":
                dcp_checkpoints.write(unfinished, contents, model, optimizer, rng_state() if save_rng else None)
            else:
                strategy = strategy or save_strategy(args)
                dist_checkpointing.save(contents, unfinished, sharded_strategy=strategy, content_metadata=content_metadata(optimizer))
        except (OSError, ValueError):
            shutil.rmtree(unfinished, ignore_errors=True)  # gives a full disk its space back; all ranks have failed
            raise
        publish_on_all(unfinished, final)
        seconds = started.elapsed()
        saved = f"successfully saved checkpoint from iteration {state.iteration:7d} to {save}"
        print_rank_0(f"  [{datetime.now()}] {saved} [ {seconds:.1f} s ]")
    return final


def start_folder(save: str, iteration: int) -> tuple[Path, Path]:
    """(the folder of a new checkpoint, the empty one that it is written into). Every rank calls it."""
    final = Path(get_checkpoint_name(save, iteration))
    _first_rank_does(lambda: checkpoint_folders.start(final))
    return final, final.with_name(final.name + checkpoint_folders.UNFINISHED)


def publish_on_all(unfinished: Path, final: Path) -> None:
    """Give a written checkpoint its name, and the tracker its iteration. Every rank calls it."""
    _first_rank_does(lambda: checkpoint_folders.publish(unfinished, final))


def _first_rank_does(action: Callable[[], object]) -> None:
    """Rank 0 does it, and an OSError of its is raised on every rank."""
    failure: OSError | None = None
    if get_world_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = error
    _agree(failure)


def _agree(failure: Exception | None) -> None:
    """Raise on every rank what failed on rank 0, so that none waits for it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        box: list[Any] = [failure]
        dist.broadcast_object_list(box, src=0)
        failure = box[0]
    if failure is not None:
        failure.failed_rank = 0  # type: ignore[attr-defined]
        raise failure


# --- loading ---


def find_checkpoint(load: str, step: int | None = None) -> Path | None:
    """The folder of iteration `step`, or of the one that the tracker names; None where there is no checkpoint at all.

    Raises CheckpointError when one is named and its folder is not there.
    """
    if step is not None:
        folder = checkpoint_folders.where_it_stands(Path(get_checkpoint_name(load, step)))
        if not folder.is_dir():
            raise CheckpointError(f"--ckpt-step {step}: {folder} does not exist; there are {_known(load) or 'no checkpoints'}")
        return folder
    tracker = Path(get_checkpoint_tracker_filename(load))
    if not tracker.exists():
        return None
    iteration, release = read_metadata(str(tracker))
    folder = checkpoint_folders.where_it_stands(Path(get_checkpoint_name(load, iteration, release)))
    if not folder.is_dir():
        raise CheckpointError(f"{tracker} names {folder.name}, which is not there; there are {_known(load) or 'no checkpoints'}")
    return folder


def _known(load: str) -> str:
    return ", ".join(sorted(path.name for path in Path(load).glob("iter_*") if path.is_dir() and path.suffix == ""))


def checkpoint_to_begin_with(args: argparse.Namespace, load_arg: str = "load") -> tuple[Path, str] | None:
    """(folder of the checkpoint that a run begins with, why it takes the weights alone or ""); None where there is none.

    --pretrained-checkpoint stands in for a folder of `args.<load_arg>` that holds none yet.
    """
    load = getattr(args, load_arg)
    if load and (folder := find_checkpoint(load, args.ckpt_step)) is not None:
        return folder, "--finetune" if args.finetune else "a release" if folder.name == RELEASE else ""
    if not args.pretrained_checkpoint:
        return None
    folder = find_checkpoint(args.pretrained_checkpoint)
    if folder is None:
        raise CheckpointError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds no checkpoint ({TRACKER} is not there)")
    return folder, "--pretrained-checkpoint"


def checkpoint_args(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that the run's checkpoint was saved with, {} when there is none (for --use-checkpoint-args).

    A padded vocabulary that followed from the layout is left out: it follows from this run's.
    """
    found = checkpoint_to_begin_with(args)
    saved = open_checkpoint(found[0], args).common().get("args") if found else None
    values = dict(vars(saved)) if isinstance(saved, argparse.Namespace) else {}
    if (values.get("provenance") or {}).get("padded_vocab_size") == "derived":
        values.pop("padded_vocab_size", None)
    return values


def stored_position(args: argparse.Namespace) -> TrainState:
    """Where the run of --load stands, without its weights (--build-index-only)."""
    found = checkpoint_to_begin_with(args)
    if found is None or found[1]:
        return TrainState()
    common = open_checkpoint(found[0], args).common()
    return state_from(common, int(common.get("iteration", 0)))


def load_checkpoint(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    opt_param_scheduler: Any | None,
    *,
    load_arg: str = "load",
) -> TrainState:
    """Restore a run from the folder that `args.<load_arg>` names; a fresh TrainState where there is nothing to load.

    --finetune takes the weights alone. --no-load-optim keeps a fresh optimizer but the checkpoint's position and schedule;
    --no-load-rng keeps the present random states. Rank 0 prints one report of what was restored and what was not.
    Raises CheckpointError with all reasons why the checkpoint is not this run's, on every rank.
    """
    load = getattr(args, load_arg)
    found = _seen_by_all_ranks(lambda: checkpoint_to_begin_with(args, load_arg))
    if found is None:
        if load and args.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {load} holds no checkpoint ({TRACKER} is not there) and --exit-on-missing-checkpoint was given")
        if load:
            print_rank_0(f"WARNING: no checkpoint in {load}: training starts from random weights")
        if args.save and os.path.isfile(tracker := get_checkpoint_tracker_filename(args.save)):
            there = Path(tracker).read_text().strip()[:40]
            print_rank_0(
                f"WARNING: {args.save} holds checkpoints of another run, the last one of iteration {there}, and this run will replace "
                f"those of the same iterations: give --load {args.save} to go on with that run, or another --save"
            )
        return TrainState()
    folder, weights_alone = found
    taken = Taken.by_flags(args, weights_alone, has_optimizer=optimizer is not None)
    with phase("loading a checkpoint"):
        try:
            _check_sizes(folder)
            return _restore(folder, taken, args, model, optimizer, opt_param_scheduler)
        except DamagedCheckpointError as error:
            raise CheckpointError(f"{error}. {_others(folder)}") from None


def _seen_by_all_ranks(look: Callable[[], tuple[Path, str] | None]) -> tuple[Path, str] | None:
    """The checkpoint that `look` finds; raises on all ranks what it raises on one, and where ranks see different ones."""
    own: Any = None
    try:
        own = look()
    except (CheckpointError, OSError) as error:
        own = error
    everyone = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    for rank, seen in enumerate(everyone):
        if isinstance(seen, Exception):
            seen.failed_rank = rank  # type: ignore[attr-defined]
            raise seen
        if seen != everyone[0]:
            first, other = ("no checkpoint" if one is None else str(one[0]) for one in (everyone[0], seen))
            raise CheckpointError(f"rank 0 sees {first}, rank {rank} sees {other}: checkpoints must stand where all nodes read them")
    return own


def _check_sizes(folder: Path) -> None:
    """A missing or cut off file is an error before anything is read; rank 0 looks, for all."""
    failure: Exception | None = None
    if get_world_rank() == 0:
        try:
            check_sizes(folder)
        except (CheckpointError, OSError) as error:
            failure = error
    _agree(failure)


def _others(folder: Path) -> str:
    """What to load in place of a damaged checkpoint, in words."""
    others = [number for number in checkpoint_folders.complete_iterations(folder.parent) if number != iteration_of(folder)]
    return f"--ckpt-step {others[-1]} loads another one" if others else f"No other checkpoint is in {folder.parent}"


def _restore(
    folder: Path, taken: Taken, args: argparse.Namespace, model: list, optimizer: Any | None, scheduler: Any | None
) -> TrainState:
    checkpoint = open_checkpoint(folder, args)
    common = checkpoint.common()
    saved = vars(common["args"]) if "args" in common else {}
    iteration = int(common.get("iteration", 0))
    state = state_from(common, iteration) if taken.position else TrainState()
    problems = _missing_parts(taken, common, checkpoint)
    if StrictHandling(args.dist_ckpt_strictness).raises:
        problems = refusals(taken, saved, args) + problems
    else:  # takes what is there of another model
        for problem in refusals(taken, saved, args):
            print_rank_0(f"WARNING: {problem}")
    schedule = ""
    if taken.schedule and scheduler is not None:
        own, stored_schedule = scheduler.state_dict(), common.get("opt_param_scheduler")
        try:
            _restore_schedule(scheduler, stored_schedule, state)
        except ValueError as error:
            problems.append(str(error))
        schedule = schedule_report(own, stored_schedule, args)
    if problems:  # before anything is read, on every rank: all see the same
        raise CheckpointError(f"{folder} is not for this run:" + "".join(f"\n  {problem}" for problem in problems))
    _read(folder, taken, checkpoint, common, model, optimizer, is_rounded(saved) and not is_rounded(vars(args)))
    print_rank_0(report(folder, iteration, taken, saved, args, schedule, state))
    _barrier()
    return state


def _missing_parts(taken: Taken, common: dict[str, Any], checkpoint: StoredCheckpoint) -> list[str]:
    found = []
    if taken.optimizer and "optimizer" not in common:
        found.append("it was saved without an optimizer: give --no-load-optim to train on with a fresh one, or --finetune")
    if taken.random_states and not checkpoint.objects(RNG_KEY):
        found.append(f"it was saved without random states ({RNG_KEY}): give --no-load-rng to train on with those of --seed")
    return found


def _restore_schedule(scheduler: Any, stored: dict[str, Any] | None, state: TrainState) -> None:
    """Take the position, of the checkpoint's schedule or, where it has none (--no-save-optim), of its samples."""
    if stored is None:
        scheduler.step(state.consumed_train_samples)
    else:
        scheduler.load_state_dict(stored)


def _read(
    folder: Path,
    taken: Taken,
    checkpoint: StoredCheckpoint,
    common: dict[str, Any],
    model: list,
    optimizer: Any | None,
    unrounds: bool,
) -> None:
    """Fill the model, and of optimizer and random states what is taken. unrounds: a model in fp32 goes on from one in half precision."""
    wanted: dict[str, Any] = model_state(model)
    stored = checkpoint.open_tensors(model, taken.optimizer)
    if taken.optimizer:
        wanted["optimizer"] = {"shards": optimizer_state(optimizer, stored)}
        if wanted["optimizer"]["shards"] and not any(key.startswith("optimizer.") for key in stored):
            raise CheckpointError(f"{folder}: the optimizer's state in it is empty: give --no-load-optim to train on with a fresh one")
    states, *own_states = stored_rng_object(checkpoint) if taken.random_states else (None, False, False)
    if states is not None:
        wanted[RNG_KEY] = states
    fp8_checkpoint.leave_out_missing(wanted, checkpoint)
    loaded = _load(wanted, checkpoint)
    if taken.optimizer and unrounds:
        checkpoint.load({"optimizer": main_params_of_weights(wanted, stored)})
    fp8_checkpoint.restore(model, loaded)
    restore_extra_state(checkpoint, model)
    if optimizer is not None:
        if taken.optimizer:
            optimizer.load_common_state_dict(common["optimizer"])
        else:
            optimizer.reload_model_params()
    if states is not None and not set_rng_state(loaded[RNG_KEY][0], *own_states):
        print_rank_0("WARNING: the checkpoint's random states are those of another kind of device: dropout goes on with other masks")
    if taken.random_states and (states is None or states.unique_key != rng_object(None).unique_key):
        print_rank_0("  the checkpoint is of another layout: random states were taken where it has them, the others are fresh")


def _load(wanted: dict[str, Any], checkpoint: StoredCheckpoint) -> dict[str, Any]:
    try:
        return checkpoint.load(wanted)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        if "optimizer.state." not in str(error):
            raise
        raise CheckpointError(f"{error}\ngive --no-load-optim to train on with a fresh optimizer") from None
