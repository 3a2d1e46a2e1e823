"""The formats that a checkpoint's folder can have: which one is there, and one way to read each."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, ShardedObject
from megatron.training.checkpoint_strategies import load_options
from megatron.training.config.checks import was_given
from megatron.training.dcp_checkpoints import DcpCheckpoint
from megatron.training.legacy_checkpoints import LegacyCheckpoint, chained, is_legacy, joined_groups
from megatron.training.optimizer_buckets import BucketedState, group_keys, is_bucketed, load_with_buckets
from megatron.training.source_layout import KnownModel
from megatron.training.training_log import print_rank_0


class StoredCheckpoint(Protocol):
    """A checkpoint that is there. Keys are those of the torch_dist format whatever the files call them."""

    def common(self) -> dict[str, Any]:
        """What is not sharded: args, iteration, scheduler, the optimizer's groups."""

    def objects(self, key: str) -> list[ShardedObject]:
        """The objects stored as `key`, in the grid of the layout that wrote them."""

    def load_objects(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """The data of the ShardedObjects of `wanted`; None where there are none. Called by every rank."""

    def open_tensors(self, model: list[torch.nn.Module], with_optimizer: bool) -> Collection[str]:
        """Keys of the stored tensors; called by every rank, before `load`."""

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill the shards of `wanted`, whatever layout wrote them. Raises CheckpointError for what is missing or of another shape."""


class TorchDist:
    """The torch_dist format, the optimizer's state by model key or by buckets."""

    def __init__(self, folder: Path, args: argparse.Namespace | None = None) -> None:
        self.folder = folder
        self.options = {} if args is None else load_options(args)
        self.buckets: BucketedState | None = None

    def common(self) -> dict[str, Any]:
        common = dist_checkpointing.load_common_state_dict(self.folder)
        states = chained(common.get("optimizer") or {})
        if all("param_groups" in state.get("optimizer", state) for state in states):
            common["optimizer"] = joined_groups(states)
        elif keys := group_keys(dist_checkpointing.load_tensors_metadata(self.folder)):
            objects = [item for key in keys for item in dist_checkpointing.stored_objects(self.folder, key)]
            common["optimizer"] = joined_groups(dist_checkpointing.load({"objects": objects}, self.folder)["objects"])
        return common

    def objects(self, key: str) -> list[ShardedObject]:
        return dist_checkpointing.stored_objects(self.folder, key)

    def load_objects(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return dist_checkpointing.load(wanted, self.folder, strict=dist_checkpointing.StrictHandling.IGNORE_ALL)

    def open_tensors(self, model: list[torch.nn.Module], with_optimizer: bool) -> Collection[str]:
        stored = dist_checkpointing.load_tensors_metadata(self.folder)
        if not with_optimizer or not is_bucketed(stored):
            return stored.keys()
        saved = dist_checkpointing.load_common_state_dict(self.folder).get("args")
        if not isinstance(saved, argparse.Namespace):
            raise CheckpointError(f"{self.folder} has no args: which parameters the optimizer's buckets hold cannot be told")
        self.buckets = BucketedState(stored, vars(saved), KnownModel.of(model))
        return stored.keys() | self.buckets.keys()

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if self.buckets is not None:
            return load_with_buckets(self.folder, wanted, self.buckets)
        loaded = dist_checkpointing.load(wanted, self.folder, **self.options)
        if not isinstance(loaded, tuple):
            return loaded
        loaded, missing, unexpected = loaded
        for keys, what in (
            (unexpected, "lacks, of what this run has, which stays as it is"),
            (missing, "holds, and this run does not load"),
        ):
            if keys:
                print_rank_0(f"WARNING: {self.folder} {what}: {', '.join(sorted(keys))}")
        return loaded


class Legacy:
    """The `torch` format."""

    checkpoint: LegacyCheckpoint

    def __init__(self, folder: Path, args: argparse.Namespace | None = None) -> None:
        self.checkpoint = LegacyCheckpoint(folder)
        self.parts: dict[str, Any] = {}

    def common(self) -> dict[str, Any]:
        return self.checkpoint.common()

    def objects(self, key: str) -> list[ShardedObject]:
        return self.checkpoint.objects(key)

    def load_objects(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {name: {} for name in wanted}  # they stand under one rank's names

    def open_tensors(self, model: list[torch.nn.Module], with_optimizer: bool) -> Collection[str]:
        self.parts = self.checkpoint.parts(model, with_optimizer)
        return self.parts.keys()

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return self.checkpoint.load(wanted, self.parts)


class TorchDcp(Legacy):
    """The `torch_dcp` format: the state dict of a legacy checkpoint of one model-parallel rank, in other files."""

    def __init__(self, folder: Path, args: argparse.Namespace | None = None) -> None:
        self.checkpoint = DcpCheckpoint(folder)
        self.parts: dict[str, Any] = {}


_READERS: dict[str, Any] = {"torch_dist": TorchDist, "torch": Legacy, "torch_dcp": TorchDcp}


def format_of(folder: Path) -> str | None:
    """The --ckpt-format that a checkpoint's folder is in; None where it is none of them, or was cut off in writing."""
    try:
        backend = json.loads((folder / "metadata.json").read_text())["sharded_backend"]
        return backend if isinstance(backend, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if not folder.is_dir():
        return None
    return "torch" if is_legacy(folder) else "torch_dcp" if (folder / ".metadata").is_file() else None


def open_checkpoint(folder: Path, args: argparse.Namespace | None = None) -> StoredCheckpoint:
    """A reader for the format that `folder` is in.

    Raises CheckpointError for a folder in none that is read, and for one in another than a --ckpt-format that was given, unless
    --auto-detect-ckpt-format was given too: then that flag says what is written, not what is read.
    """
    found = format_of(folder)
    if found not in _READERS:
        return TorchDist(folder, args)  # which says what is wrong with it
    asked = args.ckpt_format if args is not None and was_given(args, "ckpt_format") and not args.auto_detect_ckpt_format else found
    if found != asked:
        raise CheckpointError(
            f"{folder} is in the format {found} and --ckpt-format {asked} was given: leave it out, or give --auto-detect-ckpt-format "
            f"to read {found} and write {asked}"
        )
    return _READERS[found](folder, args)
