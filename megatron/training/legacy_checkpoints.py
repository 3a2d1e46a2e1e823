"""Reading Megatron-LM's legacy `torch` format: a file for each model-parallel rank, named and counted as that rank sees its parameters.

On disk (a contract): `iter_%07d/mp_rank_TT/model_optim_rng.pt` (tensor rank), `mp_rank_TT_PPP` with pipeline stages, a further `_EEE` with
expert parallelism. Files are mapped, not read: a rank touches only the parts that its own parameters lie in, whatever layout wrote them.
"""

import argparse
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError, DamagedCheckpointError, ShardedObject
from megatron.core.dist_checkpointing.integrity import check_file
from megatron.core.dist_checkpointing.parts import Block, load_from_parts
from megatron.core.dist_checkpointing.safe_pickle import load_torch
from megatron.core.optimizer import has_weight_decay, is_embedding_or_output
from megatron.training.checkpoint_names import LegacyFile, legacy_files
from megatron.training.optimizer_buckets import STATES, place_in_buckets
from megatron.training.source_layout import KnownModel, SourceLayout, as_stored, blocks_of, place_of

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
Named = Mapping[tuple[int, str], torch.Tensor]  # (chunk, name) -> the rank's tensor, in registration order
States = dict[tuple[int, str], dict[str, torch.Tensor]]  # the same -> name of the optimizer's state -> tensor
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


def is_legacy(folder: Path) -> bool:
    """Whether a checkpoint's folder is of this format."""
    return any(_FOLDER.fullmatch(path.name) and (path / MODEL_FILE).is_file() for path in folder.iterdir())


class LegacyCheckpoint:
    """One checkpoint of the `torch` format. Raises CheckpointError where files are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unknown: set[str] = set()
        self._files: dict[str, dict[str, Any]] = {}
        first = min((path.name for path in folder.iterdir() if _FOLDER.fullmatch(path.name)), default=None)
        if first is None:
            raise CheckpointError(f"{folder} holds no mp_rank_* folder")
        self._first = self._read(first)

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self._files:
            path = self.folder / name / MODEL_FILE
            try:
                check_file(self.folder, f"{name}/{MODEL_FILE}")
                self._files[name] = _mapped(path)
            except DamagedCheckpointError:
                raise
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
        return SourceLayout.of(self.saved)

    @cached_property
    def ranks(self) -> list[LegacyFile]:
        """Every model-parallel rank that saved."""
        layout = self.layout
        expert_tensor = layout.expert_tensor if layout.num_experts else layout.tensor
        try:
            return legacy_files(layout.tensor, layout.pipeline, layout.expert, expert_tensor)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: no files of the torch format hold its experts: {error}") from None

    def file(self, rank: LegacyFile) -> dict[str, Any]:
        return self._read(rank.name)

    def common(self) -> dict[str, Any]:
        """What is the same for all ranks; of the optimizer the parameter groups and the loss scale."""
        common = {key: value for key, value in self._first.items() if not re.fullmatch(r"model\d*|optimizer|rng_state", key)}
        if self._first.get("optimizer") is not None:
            firsts = {rank.stage: rank for rank in reversed(self.ranks)}
            stages = [self.file(firsts[stage])["optimizer"] for stage in sorted(firsts)]
            common["optimizer"] = joined_groups([state for stage in stages for state in chained(stage)])
        return common

    def objects(self, key: str) -> list[ShardedObject]:
        """The stored `rng_state` of each (pipeline, tensor) rank, with data."""
        if key not in self._first:
            return []
        sizes = (self.layout.pipeline, self.layout.tensor)
        ranks = [rank for rank in self.ranks if rank.first_of_dense]
        return [ShardedObject(key, self.file(rank)[key], sizes, (rank.stage, rank.tensor)) for rank in ranks if key in self.file(rank)]

    def parts(self, model: list[torch.nn.Module], with_optimizer: bool) -> dict[str, list[tuple[Block, torch.Tensor]]]:
        """Key of the torch_dist format -> the blocks of it that the files hold, for `load_from_parts`. A collective over all ranks.

        What the model lacks is left out, and its keys are in `unknown` then.
        """
        known = KnownModel.of(model)
        self.unknown = set()
        found: dict[str, list[tuple[Block, torch.Tensor]]] = {}
        for rank in self.ranks:
            named = rank_parameters(self.file(rank))
            states = self._optimizer_states(rank, named) if with_optimizer else {}
            for (chunk, name), tensor in named.items():
                place = place_of(name, self.layout, rank.stage, chunk, rank.expert, known)
                param = known.params.get(place.key)
                if param is None:
                    self.unknown.add(place.key)
                    continue
                param = as_stored(param, tuple(tensor.shape), self.layout.tensor)
                if param is None or _is_copy(rank, param.sharding, name, place.key):
                    continue
                part = (rank.expert_tensor, self.layout.expert_tensor) if param.sharding.is_expert else (rank.tensor, self.layout.tensor)
                blocks = blocks_of(place, param, tuple(tensor.shape), *part)
                for prefix, value in [("", tensor), *((f"optimizer.state.{k}.", v) for k, v in states.get((chunk, name), {}).items())]:
                    found.setdefault(prefix + place.key, []).extend((block, value) for block in blocks)
        return found

    def _optimizer_states(self, rank: LegacyFile, named: Named) -> States:
        path = self.folder / rank.name / OPTIMIZER_FILE
        if not path.exists():
            return optimizer_states(self.file(rank), named, self.saved)
        check_file(self.folder, f"{rank.name}/{OPTIMIZER_FILE}")
        try:
            return flat_optimizer_states(_mapped(path), named)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def load(self, wanted: dict[str, Any], parts: dict[str, list[tuple[Block, torch.Tensor]]]) -> dict[str, Any]:
        """Fill `wanted` from `parts`."""
        return load_from_parts(wanted, parts, str(self.folder))


def _mapped(path: Path) -> Any:
    try:
        return load_torch(str(path), mmap=True)
    except RuntimeError:  # torch's format before zip files cannot be mapped
        return load_torch(str(path))


def _is_copy(rank: LegacyFile, sharding: Any, name: str, key: str) -> bool:
    """Whether another rank's file has the same values: of replicated tensors the first rank's are read."""
    if sharding.is_expert:
        return rank.expert_tensor > 0 and not sharding.is_split
    # the last stage has the embedding again where it is the output layer, or where multi-token prediction embeds tokens
    tied = name == "output_layer.weight" != key or (key == "embedding.word_embeddings.weight" and rank.stage > 0)
    return tied or not rank.first_of_dense or (rank.tensor > 0 and not sharding.is_split)


def rank_parameters(file: Mapping[str, Any]) -> Named:
    """(chunk, name) -> tensor of a rank's model, in registration order."""
    names = ["model"] if "model" in file else sorted((key for key in file if re.fullmatch(r"model\d+", key)), key=lambda key: int(key[5:]))
    return {
        (chunk, name): tensor
        for chunk, key in enumerate(names)
        for name, tensor in file[key].items()
        if torch.is_tensor(tensor) and not name.endswith("_extra_state")
    }


def chained(optimizer: Any) -> list[dict[str, Any]]:
    """A rank's optimizers: one, or the chain of the dense parameters' and the experts', a list or numbered."""
    if isinstance(optimizer, dict):
        numbered = [key for key in optimizer if isinstance(key, int)]
        return [optimizer[key] for key in sorted(numbered)] if numbered else [optimizer]
    return list(optimizer)


def joined_groups(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What several ranks' or chained optimizers have beside tensors: all parameter groups, and the loss scale where there is one."""
    scaler = next((state["grad_scaler"] for state in states if "grad_scaler" in state), None)
    groups = [group for state in states for group in _inner(state)["param_groups"]]
    return {"param_groups": groups} | ({} if scaler is None else {"grad_scaler": scaler})


def _inner(state: Mapping[str, Any]) -> Any:
    return state.get("optimizer", state)


def optimizer_states(file: Mapping[str, Any], named: Named, saved: Mapping[str, Any]) -> States:
    """(chunk, name) -> {exp_avg, exp_avg_sq, fp32_param where there is a copy}.

    The file numbers parameters: group by group, in registration order within one. Which group a parameter is in follows from what groups
    are made by; counts that do not agree with that raise CheckpointError.
    """
    found: States = {}
    trained = _trained(named)
    optimizers = chained(file["optimizer"])
    apart = any(group.get("is_expert_parallel") for state in optimizers for group in _inner(state)["param_groups"])
    for state in optimizers:
        inner = _inner(state)
        copies = state.get("fp32_from_fp16_params", [])
        if "state" not in inner:
            raise CheckpointError(f"its optimizer has no state, and {OPTIMIZER_FILE} is not beside it: give --no-load-optim")
        for number, group in enumerate(inner["param_groups"]):
            members = [place for place, tensor in trained.items() if _in_group(group, place[1], tensor, saved, apart)]
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


def _trained(named: Named) -> Named:
    return {place: tensor for place, tensor in named.items() if not place[1].endswith("router.expert_bias")}


def _is_experts(name: str) -> bool:
    return bool(re.search(r"\bmlp\.experts\.", name))


def _in_group(group: Mapping[str, Any], name: str, tensor: torch.Tensor, saved: Mapping[str, Any], apart: bool) -> bool:
    """apart: whether experts have groups of their own; Megatron-LM's have not without expert parallelism."""
    decays = has_weight_decay(name, tensor, bool(saved.get("apply_wd_to_qk_layernorm")))
    decoupled = saved.get("decoupled_lr") is not None and is_embedding_or_output(name, tensor)
    own = (decays, decoupled, apart and _is_experts(name))
    return own == (group.get("wd_mult", 1.0) != 0.0, bool(group.get("is_decoupled_lr")), bool(group.get("is_expert_parallel")))


def flat_optimizer_states(stored: Any, named: Named) -> States:
    """(chunk, name) -> {param, exp_avg, exp_avg_sq} from a distributed optimizer's own file.

    It holds, for each of the chained optimizers, buffer number -> (dtype of parameters, of gradients) -> state -> one flat tensor over all
    data-parallel ranks, in the order that optimizer_buckets.py describes. Raises CheckpointError where that is not what is there.
    """
    found: States = {}
    trained = _trained(named)
    optimizers = list(stored) if isinstance(stored, list | tuple) else [stored]
    for number, optimizer in enumerate(optimizers):
        chunks: dict[torch.dtype, int] = {}
        for buffer in sorted(key for key in optimizer if isinstance(key, int)):
            for dtypes, tensors in optimizer[buffer].items():
                dtype = dtypes[0] if isinstance(dtypes, tuple) else dtypes
                chunk = chunks.get(dtype, 0)
                chunks[dtype] = chunk + 1
                members = {place: tensor for place, tensor in trained.items() if place[0] == chunk and tensor.dtype == dtype}
                if len(optimizers) > 1:
                    members = {place: tensor for place, tensor in members.items() if _is_experts(place[1]) == (number > 0)}
                found.update(_cut(tensors, members))
    if lacking := [name for (_, name) in trained if not any(name == place[1] for place in found)]:
        raise CheckpointError(f"the state of {', '.join(lacking[:8])} is not there: give --no-load-optim")
    return found


def _cut(tensors: Mapping[str, Any], members: Named) -> States:
    """The flat tensors of one buffer, parameter by parameter."""
    flats = {state: tensors[state] for state in STATES if torch.is_tensor(tensors.get(state))}
    if flats.keys() != set(STATES):
        raise CheckpointError(
            f"a buffer holds {sorted(map(str, tensors))} and not {', '.join(STATES)} as one tensor each: give --no-load-optim"
        )
    backwards = list(members.items())[::-1]
    size = int(tensors.get("numel_unpadded", flats["param"].numel()))
    places = place_in_buckets([size], [tensor.numel() for _, tensor in backwards])
    if places is None:
        raise CheckpointError(f"a buffer holds {size} elements, its {len(members)} parameters have others: give --no-load-optim")
    found = {}
    for (_, start), (place, like) in zip(places, backwards, strict=True):
        found[place] = {state: flat.flatten()[start : start + like.numel()].view(like.shape) for state, flat in flats.items()}
        # norms and biases are enough to tell whether the order is right, and cost little to read
        if like.dim() == 1 and not torch.equal(found[place]["param"].to(like.dtype), like):
            raise CheckpointError(f"the main values of {place[1]} are not its weights: the order is not known; give --no-load-optim")
    return found
