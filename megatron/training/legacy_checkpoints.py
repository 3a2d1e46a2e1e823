"""Reading Megatron-LM's legacy `torch` format: a file for each model-parallel rank, named and counted as that rank sees its parameters.

On disk (a contract): `iter_%07d/mp_rank_TT/model_optim_rng.pt` (tensor rank), `mp_rank_TT_PPP` with pipeline stages, a further `_EEE` with
expert parallelism. Files are mapped, not read: a rank touches only the parts that its own parameters lie in, whatever layout wrote them.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError, ShardedObject
from megatron.core.dist_checkpointing.parts import Block, load_from_parts
from megatron.core.dist_checkpointing.safe_pickle import load_torch
from megatron.core.optimizer import has_weight_decay, is_embedding_or_output
from megatron.training.source_layout import KnownModel, SourceLayout, blocks_of, place_of

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
Rank = tuple[int, int, int]  # tensor, pipeline, expert
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def rank_folder(rank: Rank, stages: int, expert_ranks: int) -> str:
    """The folder's name of one model-parallel rank: stage and expert rank stand there where there are several."""
    tensor, stage, expert = rank
    return f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "") + (f"_{expert:03d}" if expert_ranks > 1 else "")


def is_legacy(folder: Path) -> bool:
    """Whether a checkpoint's folder is of this format."""
    return any(_FOLDER.fullmatch(path.name) and (path / MODEL_FILE).is_file() for path in folder.iterdir())


class LegacyCheckpoint:
    """One checkpoint of the `torch` format. Raises CheckpointError where files are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, dict[str, Any]] = {}
        first = min((path.name for path in folder.iterdir() if _FOLDER.fullmatch(path.name)), default=None)
        if first is None:
            raise CheckpointError(f"{folder} holds no mp_rank_* folder")
        self._first = self._read(first)

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._files:
            path = self.folder / name / MODEL_FILE
            try:
                self._files[name] = _mapped(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is not there: the checkpoint's arguments say that a rank of this name saved") from None
            except Exception as error:  # what junk does to an unpickler has no common class
                raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None
            if not isinstance(self._files[name], dict):
                raise CheckpointError(f"{path} holds no state dict")
        return self._files[name]

    @cached_property
    def saved(self) -> Mapping[str, Any]:
        """The arguments that it was saved with."""
        found = self._first.get("args")
        if not isinstance(found, argparse.Namespace):
            raise CheckpointError(f"{self.folder} has no args: which layers and experts its files hold cannot be told")
        return vars(found)

    @cached_property
    def layout(self) -> SourceLayout:
        layout = SourceLayout.of(self.saved)
        if layout.num_experts and layout.expert_tensor != layout.tensor:
            raise CheckpointError(
                f"{self.folder} was saved with --expert-tensor-parallel-size {layout.expert_tensor} and --tensor-model-parallel-size "
                f"{layout.tensor}: in the torch format experts are read where the two are equal; save it with --ckpt-format torch_dist"
            )
        return layout

    def ranks(self) -> Iterator[Rank]:
        """Every model-parallel rank that saved."""
        for stage in range(self.layout.pipeline):
            for expert in range(self.layout.expert):
                for tensor in range(self.layout.tensor):
                    yield tensor, stage, expert

    def file(self, rank: Rank) -> dict[str, Any]:
        return self._read(rank_folder(rank, self.layout.pipeline, self.layout.expert))

    def common(self) -> dict[str, Any]:
        """What is the same for all ranks; of the optimizer the parameter groups and the loss scale."""
        common = {key: value for key, value in self._first.items() if not re.fullmatch(r"model\d*|optimizer|rng_state", key)}
        if self._first.get("optimizer") is not None:
            groups: list[Any] = []
            scaler = None
            for stage in range(self.layout.pipeline):
                for state in _optimizers(self.file((0, stage, 0))):
                    groups += _inner(state)["param_groups"]
                    scaler = state.get("grad_scaler", scaler)
            common["optimizer"] = {"param_groups": groups} | ({} if scaler is None else {"grad_scaler": scaler})
        return common

    def objects(self, key: str) -> list[ShardedObject]:
        """The stored `rng_state` of each (pipeline, tensor) rank, with data."""
        if key not in self._first:
            return []
        sizes = (self.layout.pipeline, self.layout.tensor)
        ranks = [rank for rank in self.ranks() if rank[2] == 0]
        return [ShardedObject(key, self.file(rank)[key], sizes, (rank[1], rank[0])) for rank in ranks if key in self.file(rank)]

    def parts(self, model: list[torch.nn.Module], with_optimizer: bool) -> dict[str, list[tuple[Block, torch.Tensor]]]:
        """Key of the torch_dist format -> the blocks of it that the files hold, for `load_from_parts`. A collective over all ranks."""
        known = KnownModel.of(model)
        found: dict[str, list[tuple[Block, torch.Tensor]]] = {}
        for rank in self.ranks():
            named = rank_parameters(self.file(rank))
            states = optimizer_states(self.file(rank), named, known, self.saved) if with_optimizer else {}
            for (chunk, name), tensor in named.items():
                place = place_of(name, self.layout, rank[1], chunk, rank[2], known)
                param = known.params.get(place.key)
                if param is None or _is_copy(rank, param.sharding, name, place.key):
                    continue
                blocks = blocks_of(place, param, tuple(tensor.shape), rank[0], self.layout.tensor)
                for prefix, part in [("", tensor), *((f"optimizer.state.{k}.", v) for k, v in states.get((chunk, name), {}).items())]:
                    found.setdefault(prefix + place.key, []).extend((block, part) for block in blocks)
        return found

    def load(self, wanted: dict[str, Any], parts: dict[str, list[tuple[Block, torch.Tensor]]]) -> dict[str, Any]:
        """Fill `wanted` from `parts`."""
        return load_from_parts(wanted, parts, str(self.folder))


def _mapped(path: Path) -> Any:
    try:
        return load_torch(str(path), mmap=True)
    except RuntimeError:  # torch's format before zip files cannot be mapped
        return load_torch(str(path))


def _is_copy(rank: Rank, sharding: Any, name: str, key: str) -> bool:
    """Whether another rank's file has the same values: of replicated tensors the first rank's are read."""
    tensor, _, expert = rank
    tied = name == "output_layer.weight" != key
    return tied or (tensor > 0 and not sharding.is_split) or (expert > 0 and not sharding.is_expert)


def rank_parameters(file: Mapping[str, Any]) -> dict[tuple[int, str], torch.Tensor]:
    """(chunk, name) -> tensor of a rank's model, in registration order."""
    names = ["model"] if "model" in file else sorted((key for key in file if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))
    return {
        (chunk, name): tensor
        for chunk, key in enumerate(names)
        for name, tensor in file[key].items()
        if torch.is_tensor(tensor) and not name.endswith("_extra_state")
    }


def _optimizers(file: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A rank's optimizers: one, or the chain of the dense parameters' and the experts'."""
    found = file["optimizer"]
    return list(found) if isinstance(found, list | tuple) else [found]


def _inner(state: Mapping[str, Any]) -> Any:
    return state.get("optimizer", state)


def optimizer_states(
    file: Mapping[str, Any], named: Mapping[tuple[int, str], torch.Tensor], known: KnownModel, saved: Mapping[str, Any]
) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """(chunk, name) -> {exp_avg, exp_avg_sq, fp32_param where there is a copy}.

    The file numbers parameters: group by group, in registration order within one. Which group a parameter is in follows from what groups
    are made by; counts that do not agree with that raise CheckpointError.
    """
    found: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    decoupled = saved.get("decoupled_lr") is not None
    trained = {place: tensor for place, tensor in named.items() if not place[1].endswith("router.expert_bias")}
    for state in _optimizers(file):
        inner = _inner(state)
        copies = state.get("fp32_from_fp16_params", [])
        for number, group in enumerate(inner["param_groups"]):
            members = [place for place, tensor in trained.items() if _in_group(group, place[1], tensor, decoupled, saved)]
            if len(members) != len(group["params"]):
                raise CheckpointError(
                    f"parameter group {number} of the checkpoint's optimizer has {len(group['params'])} parameters and by the model's "
                    f"names {len(members)} belong to it: give --no-load-optim to train on with a fresh optimizer"
                )
            half = iter(copies[number] if number < len(copies) else [])
            for place, index in zip(members, group["params"], strict=True):
                tensors = {key: value for key, value in inner["state"].get(index, {}).items() if torch.is_tensor(value) and value.dim()}
                if trained[place].dtype in (torch.float16, torch.bfloat16) and copies:
                    tensors["fp32_param"] = next(half)
                found[place] = tensors
    return found


def _in_group(group: Mapping[str, Any], name: str, tensor: torch.Tensor, decoupled: bool, saved: Mapping[str, Any]) -> bool:
    decays = has_weight_decay(name, tensor, bool(saved.get("apply_wd_to_qk_layernorm")))
    of_experts = bool(re.search(r"\bmlp\.experts\.", name))
    own = (decays, decoupled and is_embedding_or_output(name, tensor), of_experts)
    return own == (group.get("wd_mult", 1.0) != 0.0, bool(group.get("is_decoupled_lr")), bool(group.get("is_expert_parallel")))
