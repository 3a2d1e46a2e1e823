"""Where another layout's ranks hold each parameter: from the arguments that a checkpoint was saved with.

Needed for files that name parameters as one rank sees them (the legacy `torch` format, flat optimizer buffers): layers counted within a
pipeline stage's chunk, experts within a rank, tensors cut by tensor parallelism.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.parts import Block
from megatron.core.tensor_parallel.param_sharding import (
    ParamSharding,
    Segment,
    buffer_table,
    build_param_table,
    local_pieces,
    local_shape,
    mapped_key,
)
from megatron.core.transformer.transformer_layer import layers_of_stage
from megatron.core.utils import unwrap_model


@dataclass(frozen=True)
class KnownParam:
    """How this run's model splits and stores a key."""

    sharding: ParamSharding
    stacked: bool


@dataclass
class KnownModel:
    """Every key of the whole model, those of other pipeline stages and experts too."""

    params: dict[str, KnownParam] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # keys that are stored like parameters and not trained
    key_maps: dict[int, dict[str, str]] = field(default_factory=dict)  # layer -> prefix of a name in it -> prefix of the key

    @classmethod
    def of(cls, model: Iterable[torch.nn.Module]) -> "KnownModel":
        """A collective over all ranks."""
        own = cls()
        for chunk in model:
            unwrapped = unwrap_model(chunk)
            buffers = buffer_table(unwrapped)
            own.buffers |= {record.key for record in buffers.values()}
            for record in [*build_param_table(unwrapped).values(), *buffers.values()]:
                own.params[record.key] = KnownParam(record.sharding, record.stacked)
            for module in unwrapped.modules():
                if hasattr(module, "sharded_state_dict_keys_map"):
                    own.key_maps[module.layer_number - 1] = module.sharded_state_dict_keys_map  # type: ignore[operator,index]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, own)
        whole = cls()
        for other in others:
            whole.params.update(other.params)
            whole.buffers |= other.buffers
            whole.key_maps.update(other.key_maps)
        return whole


@dataclass(frozen=True)
class Place:
    """A parameter's key and its place on the leading dimensions."""

    key: str
    layer: int | None = None
    expert: int | None = None  # counted over the whole layer


@dataclass(frozen=True)
class SourceLayout:
    """The parallel sizes of the run that saved, and which layers its stages hold."""

    tensor: int
    pipeline: int
    chunks: int
    expert: int
    expert_tensor: int
    num_layers: int
    num_experts: int
    config: Any = None

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "SourceLayout":
        """From a checkpoint's arguments. Raises CheckpointError where they do not say how many layers there are."""
        pipeline = int(saved.get("pipeline_model_parallel_size") or 1)
        layout = saved.get("pipeline_model_parallel_layout")
        if layout is not None and not isinstance(layout, str | list):
            layout = (getattr(layout, "state", None) or {}).get("input_data")  # Megatron-LM pickles its own class
        chunks = int(saved.get("virtual_pipeline_model_parallel_size") or 1)
        tensor = int(saved.get("tensor_model_parallel_size") or 1)
        expert = int(saved.get("expert_model_parallel_size") or 1)
        expert_tensor = int(saved.get("expert_tensor_parallel_size") or tensor)
        if not saved.get("num_layers"):
            raise CheckpointError("the checkpoint's arguments have no num_layers: its pipeline stages cannot be told")
        config = SimpleNamespace(
            num_layers=saved["num_layers"],
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
            pipeline_model_parallel_layout=layout,
            num_layers_in_first_pipeline_stage=saved.get("decoder_first_pipeline_num_layers"),
            num_layers_in_last_pipeline_stage=saved.get("decoder_last_pipeline_num_layers"),
            account_for_embedding_in_pipeline_split=bool(saved.get("account_for_embedding_in_pipeline_split")),
            account_for_loss_in_pipeline_split=bool(saved.get("account_for_loss_in_pipeline_split")),
        )
        return cls(tensor, pipeline, chunks, expert, expert_tensor, saved["num_layers"], int(saved.get("num_experts") or 0), config)

    def layers(self, stage: int, chunk: int) -> range:
        return layers_of_stage(self.config, stage, chunk if self.chunks > 1 else None)

    def is_first(self, stage: int, chunk: int) -> bool:
        return stage == 0 and chunk == 0

    def is_last(self, stage: int, chunk: int) -> bool:
        return stage == self.pipeline - 1 and chunk == self.chunks - 1

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.expert


_LAYER = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
_ONE_EXPERT = re.compile(r"(.*\bexperts\.)local_experts\.(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"(.*\bmlp\.experts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")


def place_of(name: str, layout: SourceLayout, stage: int, chunk: int, expert_rank: int, known: KnownModel) -> Place:
    """What a rank's parameter `name` is in the whole model. The key may be one that this run's model lacks."""
    found = _LAYER.fullmatch(name)
    if found is None:
        is_tied = name == "output_layer.weight" and name not in known.params
        return Place("embedding.word_embeddings.weight" if is_tied else name)
    stack, number, rest = found[1], int(found[2]), found[3]
    layers = layout.layers(stage, chunk)
    if number >= len(layers):
        raise CheckpointError(f"{name} in the files of stage {stage}, which by the checkpoint's arguments holds {len(layers)} layers")
    layer, expert = layers[number], None
    if one := _ONE_EXPERT.fullmatch(rest):
        rest, expert = f"{one[1]}experts.{one[3]}", int(one[2])
    elif one := _GROUPED_EXPERT.fullmatch(rest):
        rest, expert = f"{one[1]}experts.{one[2]}", int(one[3])
    rest = mapped_key(rest, known.key_maps.get(layer, {}))
    stacked = f"{stack}.{rest}"
    key = stacked if stacked in known.params else f"{stack}.{layer}.{rest}"
    return Place(key, layer, None if expert is None else expert + expert_rank * layout.local_experts)


def with_stored_rows(sharding: ParamSharding, rows: int) -> ParamSharding:
    """The same of a checkpoint whose vocabulary has `rows` rows: its padding depends on the layout that saved."""
    if sharding.logical_size is None or not sharding.is_split:
        return sharding
    return replace(sharding, global_shape=(rows, *sharding.global_shape[1:]), segments=(Segment("rows", rows, "tp"),))


def as_stored(param: KnownParam, shape: tuple[int, ...], tensor_size: int) -> KnownParam:
    """The same where a tensor that we hold whole was stored by rows: Megatron-LM's local layers split the down-projections of latents."""
    whole = param.sharding.global_shape
    if param.sharding.is_split or tensor_size == 1 or len(whole) != 2 or shape != (whole[0] // tensor_size, whole[1]):
        return param
    return replace(param, sharding=replace(param.sharding, split_dim=0, segments=(Segment("rows", whole[0], "tp"),)))


def blocks_of(place: Place, param: KnownParam, shape: tuple[int, ...], tensor_rank: int, tensor_size: int) -> list[Block]:
    """The boxes of the whole tensor that one rank's tensor of `shape` consists of.

    Raises CheckpointError where a tensor of this shape is no part of this run's model.
    """
    sharding = with_stored_rows(replace(param.sharding, experts=None), shape[0] * tensor_size if shape else 0)
    expected = local_shape(sharding, tensor_size)
    if shape != expected and not (sharding.logical_size is not None and shape[1:] == expected[1:]):
        raise CheckpointError(f"{place.key} is {shape} in the checkpoint's files and would be {expected} for this run's model")
    leading = ((place.layer,) if param.stacked else ()) + ((place.expert,) if param.sharding.experts else ())
    ones, zeros = (1,) * len(leading), (0,) * len(leading)
    dim = sharding.split_dim if sharding.is_split and tensor_size > 1 else None
    if dim is None:
        return [Block((*leading, *(0,) * len(shape)), (*ones, *shape), (*zeros, *(0,) * len(shape)))]  # type: ignore[arg-type]
    blocks = []
    for whole, part, rows in local_pieces(sharding, tensor_rank, tensor_size):
        offset, size, inside = [0] * len(shape), list(shape), [0] * len(shape)
        offset[dim], size[dim], inside[dim] = whole, rows, part
        blocks.append(Block((*leading, *offset), (*ones, *size), (*zeros, *inside)))  # type: ignore[arg-type]
    return blocks
