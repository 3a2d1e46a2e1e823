"""Checkpoints of a run: what is in one, where it stands, when it is complete.

On disk (a contract, Megatron-LM's): `<save>/iter_%07d/` in torch_dist format and `<save>/latest_checkpointed_iteration.txt`, which holds
the iteration as text. A checkpoint is written under another name and renamed when all ranks are done; the tracker follows last, so it only
ever names a complete one.
"""

import argparse
import errno
import os
import random
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core import device, dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import CheckpointError, DamagedCheckpointError, ShardedObject
from megatron.core.dist_checkpointing.integrity import check_sizes, write_checksums
from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import group_identity
from megatron.core.tensor_parallel.random import EXPERT_RNG, get_cuda_rng_tracker
from megatron.core.transformer.utils import sharded_range_of, sharded_tensor_of
from megatron.core.utils import get_world_rank, unwrap_model
from megatron.training import checkpoint_folders, legacy_checkpoint_writer
from megatron.training.argument_utils import all_fields
from megatron.training.checkpoint_formats import StoredCheckpoint, open_checkpoint
from megatron.training.checkpoint_names import (
    RELEASE,
    TRACKER,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    iteration_of,
    read_metadata,
)
from megatron.training.config.checks import name_of
from megatron.training.config.fields import ARCHITECTURE
from megatron.training.data_order import DataOrder
from megatron.training.extra_state import chunk_names, restore_extra_state, stored_extra_state
from megatron.training.phase import phase
from megatron.training.train_step import TrainState
from megatron.training.training_log import print_rank_0

CHECKPOINT_VERSION = 3.0
RNG_KEY = "rng_state"
DATA_ORDER = "data_order"  # ours: see data_order.py; a checkpoint without it (Megatron-LM's) takes its samples by the sizes of this run
# kind of optimizer state -> name of the main parameters in it
MAIN_PARAM = {"plain": "fp32_param", "fully_reshardable": "param"}


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def prepare_folder(save: str) -> None:
    """Make the folder for checkpoints now: one that cannot be made or written to is no news for the first save, hours later."""
    failure: OSError | None = None
    if get_world_rank() == 0:
        try:
            Path(save).mkdir(parents=True, exist_ok=True)
            if not os.access(save, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "--save folder cannot be written to", save)
        except OSError as error:
            failure = error
    _agree(failure)


# --- what is in a checkpoint ---


def rng_state() -> dict[str, Any]:
    """Every generator's state, as Megatron-LM names them."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": device.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any], own_tracker: bool = True, own_experts: bool = True) -> bool:
    """Restore every generator; False when the states are another kind of device's (a GPU's on a CPU) and were left as they are.

    own_tracker: also those that differ by rank; own_experts: also that of experts, which differs by expert-parallel rank too. Without them
    they stay as this rank was seeded.
    """
    version, internal, gauss = state["random_rng_state"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if state["cuda_rng_state"].numel() != device.get_rng_state().numel():
        return False
    device.set_rng_state(state["cuda_rng_state"])
    if own_tracker:
        tracker = get_cuda_rng_tracker()
        kept = {} if own_experts else {name: value for name, value in tracker.get_states().items() if name == EXPERT_RNG}
        tracker.set_states({**state["rng_tracker_states"], **kept})
    return True


def _rng_object(data: Any) -> ShardedObject:
    """One entry per (pipeline, tensor) rank; data-parallel ranks have the same, unless they hold other experts: then one for each."""
    sizes = (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size())
    ranks = (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        return ShardedObject(RNG_KEY, data, (*sizes, replicas), (*ranks, replica))
    return ShardedObject(RNG_KEY, data, sizes, ranks, replica_id=replica)


def _stored_rng_object(checkpoint: StoredCheckpoint) -> tuple[ShardedObject | None, bool, bool]:
    """(the entry to read this rank's random states from, whether those that differ by tensor rank are in it, whether experts' are).

    A checkpoint of another layout has the states of its own ranks: a tensor rank that it lacks takes the states that its stage's ranks
    share from the first of them, a stage that it lacks takes none.
    """
    mine = _rng_object(None)
    stored = {item.unique_key: item for item in checkpoint.objects(RNG_KEY)}
    if mine.unique_key in stored or not stored:
        return stored.get(mine.unique_key, mine), True, True  # the usual case, or an error that names what is missing
    by_rank: dict[tuple[int, ...], ShardedObject] = {}
    for item in stored.values():
        by_rank.setdefault(item.global_offset, item)
        by_rank.setdefault(item.global_offset[:2], item)
    stage, tensor = mine.global_offset[:2]
    own = by_rank.get(mine.global_offset) or by_rank.get((stage, tensor))
    experts_alike = all(len(item.global_shape) == len(mine.global_shape) == 2 for item in stored.values())
    return own or by_rank.get((stage, 0)), own is not None, own is not None and experts_alike


def model_state(model: list[torch.nn.Module]) -> dict[str, Any]:
    """The model's shards, under `model`, or `model0`, `model1`, ... for several chunks, as Megatron-LM has them."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()
    return {name: unwrap_model(chunk).sharded_state_dict() for name, chunk in zip(chunk_names(model), model, strict=True)}


def optimizer_state(optimizer: Any, stored: Collection[str] | None = None) -> dict[str, Any]:
    """The optimizer's shards: `optimizer.state.<name>.<model key>` in the model's global shapes.

    `stored`: the keys of the checkpoint to read, which may be of the other kind of optimizer (MAIN_PARAM).
    """
    shards: dict[str, Any] = {}
    main = MAIN_PARAM[optimizer.state_kind]
    for record, tensors in optimizer.model_sharded_state(optimizer.state_kind):
        place = optimizer.shard_range(record.param)
        for name, tensor in tensors.items():
            stored_name = name
            if stored is not None and name == main:
                if tensor.dtype == record.param.dtype:  # the model's parameter itself
                    continue
                stored_name = next((n for n in MAIN_PARAM.values() if f"optimizer.state.{n}.{record.key}" in stored), main)
            prefix = f"optimizer.state.{stored_name}."
            where = ".".join([name, record.key, *map(str, record.place)])
            assert where not in shards, f"two parameters are stored as {record.key} at {record.place}"
            if place is None:
                shards[where] = sharded_tensor_of(record, tensor, prefix=prefix)
            else:
                replica = optimizer.shard_replica(record.param)
                shards[where] = sharded_range_of(record, tensor, place[0], prefix, replica)
    return shards


def content_metadata(optimizer: Any | None) -> dict[str, Any]:
    found: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if optimizer is not None and optimizer.state_kind != "plain":
        found["distrib_optim_sharding_type"] = optimizer.state_kind
    return found


def _common_of_pipeline(common: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's common state, with the parameter groups that only other stages have: rank 0's is written."""
    group = parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
    if group is None or dist.get_world_size(group) == 1:
        return common
    stages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(stages, common["param_groups"], group=group)
    kinds: dict[tuple, dict[str, Any]] = {}
    for param_group in common["param_groups"] + [other for stage in stages for other in stage]:
        kinds.setdefault(group_identity(param_group), param_group)
    return {**common, "param_groups": list(kinds.values())}


def save_checkpoint(
    save: str,
    args: argparse.Namespace,
    state: TrainState,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    opt_param_scheduler: Any | None,
    *,
    save_rng: bool = True,
) -> Path:
    """Write the checkpoint of `state.iteration` under `save`; return its folder. Every rank calls it.

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
            else:
                dist_checkpointing.save(contents, unfinished, content_metadata=content_metadata(optimizer))
        except (OSError, ValueError):
            shutil.rmtree(unfinished, ignore_errors=True)  # gives a full disk its space back; all ranks have failed
            raise
        publish_on_all(unfinished, final)
        seconds = started.elapsed()
        saved = f"successfully saved checkpoint from iteration {state.iteration:7d} to {save}"
        print_rank_0(f"  [{datetime.now()}] {saved} [ {seconds:.1f} s ]")
    return final


def contents_of(
    args: argparse.Namespace,
    state: TrainState,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    opt_param_scheduler: Any | None,
    *,
    save_rng: bool = True,
) -> dict[str, Any]:
    """All that a checkpoint holds, as this rank has it. Every rank calls it."""
    contents: dict[str, Any] = {
        "args": plain_namespace({**vars(args), **_position(state)}),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.num_floating_point_operations_so_far,
        **model_state(model),
    }
    for name, objects in stored_extra_state(model).items():
        contents[name].update(objects)
    if state.data_order is not None:
        contents[DATA_ORDER] = state.data_order.state_dict(state.consumed_train_samples, state.consumed_valid_samples)
    if optimizer is not None:
        contents["optimizer"] = {**_common_of_pipeline(optimizer.common_state_dict()), "shards": optimizer_state(optimizer)}
    if opt_param_scheduler is not None:
        contents["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    if save_rng:
        contents[RNG_KEY] = _rng_object([rng_state()])
    return contents


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


def _position(state: TrainState) -> dict[str, Any]:
    """The run's position under the names that Megatron-LM keeps in `args`."""
    elsewhere = {"num_floating_point_operations_so_far", "data_order"}
    return {item.name: getattr(state, item.name) for item in fields(state) if item.name not in elsewhere}


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


def checkpoint_args(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that the checkpoint of --load was saved with, {} when there is none (for --use-checkpoint-args).

    A padded vocabulary that followed from the layout is left out: it follows from this run's.
    """
    folder = find_checkpoint(args.load, args.ckpt_step)
    saved = open_checkpoint(folder, args).common().get("args") if folder else None
    values = dict(vars(saved)) if isinstance(saved, argparse.Namespace) else {}
    if (values.get("provenance") or {}).get("padded_vocab_size") == "derived":
        values.pop("padded_vocab_size", None)
    return values


def stored_position(args: argparse.Namespace) -> TrainState:
    """Where the run of --load stands, without its weights (--build-index-only)."""
    folder = find_checkpoint(args.load, args.ckpt_step) if args.load else None
    if folder is None or args.finetune or folder.name == RELEASE:
        return TrainState()
    common = open_checkpoint(folder, args).common()
    return _state_from(common, int(common.get("iteration", 0)))


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
    """
    load = getattr(args, load_arg)
    folder = find_checkpoint(load, args.ckpt_step) if load else None
    if folder is None:
        if load and args.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {load} holds no checkpoint ({TRACKER} is not there) and --exit-on-missing-checkpoint was given")
        if load:
            print_rank_0(f"WARNING: no checkpoint in {load}: training starts from random weights")
        return TrainState()
    with phase("loading a checkpoint"):
        try:
            _check_sizes(folder)
            return _restore(folder, args, model, optimizer, opt_param_scheduler)
        except DamagedCheckpointError as error:
            raise CheckpointError(f"{error}. {_others(folder)}") from None


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


def _restore(folder: Path, args: argparse.Namespace, model: list, optimizer: Any | None, scheduler: Any | None) -> TrainState:
    checkpoint = open_checkpoint(folder, args)
    common = checkpoint.common()
    iteration = int(common.get("iteration", 0))
    resume = not args.finetune and folder.name != RELEASE
    with_optimizer = resume and optimizer is not None and not args.no_load_optim
    with_rng = resume and not args.no_load_rng
    wanted: dict[str, Any] = model_state(model)
    stored = checkpoint.open_tensors(model, with_optimizer and "optimizer" in common)
    if with_optimizer:
        if "optimizer" not in common:
            raise CheckpointError(
                f"{folder} was saved without an optimizer: give --no-load-optim to train on with a fresh one, or --finetune"
            )
        wanted["optimizer"] = {"shards": optimizer_state(optimizer, stored)}
    states, *own_states = _stored_rng_object(checkpoint) if with_rng else (None, False, False)
    if states is not None:
        wanted[RNG_KEY] = states
    loaded = _load_matching(wanted, checkpoint, folder, model_differences(vars(common["args"]) if "args" in common else {}, args))
    restore_extra_state(checkpoint, model, args)
    if optimizer is not None:
        if with_optimizer:
            optimizer.load_common_state_dict(common["optimizer"])
        else:
            optimizer.reload_model_params()
    if resume and scheduler is not None and "opt_param_scheduler" in common:
        scheduler.load_state_dict(common["opt_param_scheduler"])
    if states is not None and not set_rng_state(loaded[RNG_KEY][0], *own_states):
        print_rank_0("WARNING: the checkpoint's random states are those of another kind of device: dropout goes on with other masks")
    if with_rng and (states is None or states.unique_key != _rng_object(None).unique_key):
        print_rank_0("  the checkpoint is of another layout: random states were taken where it has them, the others are fresh")
    state = _state_from(common, iteration) if resume else TrainState()
    print_rank_0(_report(folder, iteration, resume, with_optimizer, with_rng, state))
    if resume and "args" in common:
        for change in changes_of_data(vars(common["args"]), args):
            print_rank_0(f"WARNING: {change}")
    _barrier()
    return state


def _load_matching(wanted: dict[str, Any], checkpoint: StoredCheckpoint, folder: Path, differences: list[str]) -> dict[str, Any]:
    """Read the checkpoint; CheckpointError with the flags that differ when it holds another model, also one whose tensors would fit."""
    flags = "".join(f"\n  {text}" for text in differences)
    try:
        loaded = checkpoint.load(wanted)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}{flags}") from None
    if differences:
        raise CheckpointError(f"{folder} holds another model:{flags}")
    return loaded


# A model's flags that may differ from the checkpoint's: long-context training stretches its positions.
_ADJUSTABLE = {
    "layernorm_epsilon",
    "rope_scaling_factor",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
}


def model_differences(saved: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Flags of the model's shape that are not as in the checkpoint's arguments, in words."""
    found = []
    for dest, flag in all_fields().items():
        before, now = saved.get(dest), getattr(args, dest, None)
        if flag.metadata["checkpoint"] != ARCHITECTURE or dest in _ADJUSTABLE or before is None or now is None:
            continue
        if dest == "add_qkv_bias" and args.add_bias_linear and saved.get("add_bias_linear"):
            continue  # the linears have biases, this one among them
        if dest == "num_query_groups" and not (args.group_query_attention and saved.get("group_query_attention")):
            continue
        if before != now:
            found.append(f"{name_of(dest)} is {now} here and {before} there")
    return found


def changes_of_data(saved: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """What makes this run read other samples than the one it goes on from, in one sentence each."""
    effects = {
        "seq_length": "documents are cut and shuffled anew: tokens that were read may come again, others are left out",
        "split": "documents move between training, validation and test: held-out text may be trained on",
        "seed": "samples come in another order: some that were read come again, others are left out",
        "dataloader_type": "samples come in another order: some that were read come again, others are left out",
        "global_batch_size": "the order of samples goes on, but steps consume another number of them",
    }
    found = []
    for dest, effect in effects.items():
        before, now = saved.get(dest), getattr(args, dest, None)
        if before is not None and before != now:
            found.append(f"--{dest.replace('_', '-')} is {now} and was {before} in the checkpoint: {effect}")
    return found


def _state_from(common: dict[str, Any], iteration: int) -> TrainState:
    saved = vars(common["args"]) if "args" in common else {}
    return TrainState(
        iteration=iteration,
        consumed_train_samples=int(saved.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(saved.get("consumed_valid_samples", 0)),
        skipped_train_samples=int(saved.get("skipped_train_samples", 0)),
        num_floating_point_operations_so_far=float(common.get("num_floating_point_operations_so_far", 0.0)),
        data_order=DataOrder(common[DATA_ORDER]) if isinstance(common.get(DATA_ORDER), dict) else None,
    )


def _report(folder: Path, iteration: int, resume: bool, with_optimizer: bool, with_rng: bool, state: TrainState) -> str:
    fresh = [name for name, restored in (("optimizer", with_optimizer), ("random states", with_rng), ("position", resume)) if not restored]
    restored = [
        name for name, done in (("optimizer", with_optimizer), ("random states", with_rng), ("schedule and position", resume)) if done
    ]
    text = f"  successfully loaded checkpoint from {folder.parent} at iteration {iteration}\n    restored: weights" + "".join(
        f", {n}" for n in restored
    )
    if fresh:
        text += f"\n    fresh: {', '.join(fresh)}"
    return text + f"\n    next: iteration {state.iteration + 1}, after {state.consumed_train_samples} samples"
