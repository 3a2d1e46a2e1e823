"""The `torch_dcp` format: a rank's state dict, as the legacy format has it, written by torch.distributed.checkpoint as it comes.

On disk (a contract, torch's): `__<rank>_0.distcp` and `.metadata`, whose `planner_data` says which path in the nested state dict each flat
key (`model.embedding.word_embeddings.weight`, `optimizer.state.0.exp_avg`, `args`) stands for; `checksums.json` is ours. The state dict has
parameters by the model's own names, layers one by one, and the optimizer's state by number: what the file of one model-parallel rank
holds in the legacy format (legacy_checkpoints.py), so that it is read, into any layout, as that one is. It knows no tensor, pipeline or
expert parallelism: data-parallel ranks hold the same, and torch shares out among them what they write.
"""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron.core.dist_checkpointing import CheckpointError, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.integrity import sync_folder, write_checksums
from megatron.core.dist_checkpointing.parts import Block
from megatron.core.dist_checkpointing.planners import ShardedLoadPlanner
from megatron.core.dist_checkpointing.reading import Reader, dcp_load, first_cause
from megatron.core.dist_checkpointing.safe_pickle import load_torch
from megatron.core.dist_checkpointing.saving import Written, on_all_ranks, write_shards
from megatron.core.dist_checkpointing.serialization import check_is_checkpoint
from megatron.core.utils import get_world_rank, world_is_initialized
from megatron.training.checkpoint_names import LegacyFile
from megatron.training.legacy_checkpoint_writer import model_state_dict, optimizer_state_dict
from megatron.training.legacy_checkpoints import LegacyCheckpoint, chained


def state_dict(contents: dict[str, Any], model: list[torch.nn.Module], optimizer: Any | None, rng_state: Any | None) -> dict[str, Any]:
    """What a checkpoint of this format holds, nested. contents: as for torch_dist; what is sharded there is left out.

    Ranks but the first give tensors alone: of what differs from rank to rank (`args.rank`) the first's is stored.
    """
    (chunk,) = model
    found: dict[str, Any] = {"model": model_state_dict(chunk)}
    if optimizer is not None:
        found["optimizer"] = optimizer_state_dict(optimizer)
    if get_world_rank() > 0:
        return found
    if rng_state is not None:
        found["rng_state"] = [rng_state]
    return {**{key: value for key, value in contents.items() if not key.startswith("model")}, **found}


class _Writer(dcp.FileSystemWriter):
    """torch's writer of index and names, with our way of writing a file."""

    written: Written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"

        def resolve(item: Any) -> torch.Tensor | io.BytesIO:
            return planner.resolve_data(item)  # type: ignore[return-value]

        self.written = write_shards(Path(self.path), name, plan.items, resolve)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.written.results)
        return done


def write(folder: Path, contents: dict[str, Any], model: list[torch.nn.Module], optimizer: Any | None, rng_state: Any | None) -> None:
    """Write a checkpoint into its (unfinished) folder, synced. Collective: raises on every rank what failed on one."""
    writer = _Writer(folder, sync_files=True)
    try:
        dcp.save(
            state_dict(contents, model, optimizer, rng_state),
            storage_writer=writer,
            planner=DefaultSavePlanner(),
            no_dist=not world_is_initialized(),
        )
    except CheckpointException as error:
        raise first_cause(error) from error
    written = on_all_ranks(lambda: writer.written)

    def finish() -> None:
        if written:
            write_checksums(folder, {one.name: one.sum for one in written})
            sync_folder(folder)

    on_all_ranks(finish)


class _Planner(ShardedLoadPlanner):
    """Whole tensors and objects by their flat keys."""

    def __init__(self, tensors: list[ShardedTensor], objects: list[str]) -> None:
        super().__init__(tensors, [])
        self.objects = {key: ShardedObject(key, None, (1,), (0,)) for key in objects}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn].data = load_torch(value)


class DcpCheckpoint(LegacyCheckpoint):
    """One checkpoint of this format: the file of the only model-parallel rank there is, tensors read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = Reader(folder)
        self._index = self._reader.read_metadata()
        if not isinstance(self._index.planner_data, dict):
            check_is_checkpoint(folder)  # a torch_dist checkpoint without its last file: says so
            raise CheckpointError(f"{folder}/.metadata does not say how its keys are nested: torch.distributed.checkpoint.save does")
        self._flat: dict[str, Any] = {}
        self._read_under("rng_state")

    def tensors(self) -> dict[str, ShardedTensor]:
        """Flat key -> the whole tensor, without data."""
        found = {}
        for key, entry in self._index.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                shape = tuple(entry.size)
                found[key] = ShardedTensor(key, None, entry.properties.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))
        return found

    def values(self, key: str) -> torch.Tensor:
        """One tensor's."""
        tensor = self.tensors()[key]
        tensor.init_data("cpu")
        dcp_load(self._reader, _Planner([tensor], []), alone=True)
        assert tensor.data is not None
        return tensor.data

    def _read_under(self, *tops: str) -> None:
        """Read the objects, and the tensors under these keys of the state dict."""
        tensors = [one for key, one in self.tensors().items() if key not in self._flat and self._index.planner_data[key][0] in tops]
        for tensor in tensors:
            tensor.init_data("cpu")
        stored = self._index.state_dict_metadata.items()
        planner = _Planner(tensors, [key for key, entry in stored if isinstance(entry, BytesStorageMetadata) and key not in self._flat])
        dcp_load(self._reader, planner, alone=True)
        self._flat |= {tensor.key: tensor.data for tensor in tensors} | {key: item.data for key, item in planner.objects.items()}
        # in the order of the state dict that was saved, which the optimizer's numbers go by and which planner_data keeps
        paths = {key: path for key, path in self._index.planner_data.items() if key in self._flat}
        self._first = unflatten_state_dict({key: self._flat[key] for key in paths}, paths)
        for optimizer in chained(self._first.get("optimizer") or {}):
            inner = optimizer.get("optimizer", optimizer)
            if "state" in inner:  # torch makes text of numbers that are keys
                inner["state"] = {int(number): tensors for number, tensors in inner["state"].items()}

    def file(self, rank: LegacyFile) -> dict[str, Any]:
        if (self.layout.tensor, self.layout.pipeline, self.layout.expert) != (1, 1, 1):
            raise CheckpointError(f"{self.folder} was saved with model parallelism: in the torch_dcp format its ranks overwrote each other")
        return self._first

    def parts(self, model: list[torch.nn.Module], with_optimizer: bool) -> dict[str, list[tuple[Block, torch.Tensor]]]:
        self._read_under("model", *(["optimizer"] if with_optimizer else []))
        return super().parts(model, with_optimizer)
