"""Reading the distributed optimizer's state by buckets: flat tensors over one model-parallel rank's parameters, in Megatron-LM's order.

Keys in a torch_dist checkpoint (its default form, `dp_reshardable`): `[chained_C.]optimizer.distributed.dp_group_idx_G.gbuf_idx_B.
dtype_(PARAM, GRAD).bucket_idx_K.<param|exp_avg|exp_avg_sq>`. G is the model-parallel rank (tensor rank first), B the buffer: one for
each pipeline chunk and dtype. With experts, chain 0 has the dense parameters and chain 1 the experts, where G counts expert tensor
rank, expert rank, stage; without expert parallelism experts may be among the others. A buffer holds its parameters last registered
first. Which those are follows from the arguments that the checkpoint was saved with; that they are the right ones is checked by the
stored main parameters: rounded they are the model's weights.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.parts import Block, narrowed, overlap, sharded_tensors, uncovered
from megatron.core.tensor_parallel.param_sharding import local_shape, mapped_key
from megatron.training.source_layout import KnownModel, KnownParam, Place, SourceLayout, blocks_of, with_stored_rows

ALIGNMENT = 64  # elements: where a parameter begins in a buffer
STATES = ("param", "exp_avg", "exp_avg_sq")
_BUCKET = re.compile(
    r"(?P<prefix>.*?)distributed\.dp_group_idx_(?P<group>\d+)\.gbuf_idx_(?P<buffer>\d+)\.dtype_\((?P<dtype>[\w.]+), [\w.]+\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
# Registration order of a layer's parts. A norm that is fused with a linear is registered right before its weight; unfused it is stored
# under the fused name and registered as _UNFUSED says. (Of latent attention no stored file was at hand: its order is an assumption, which
# the values of the main parameters confirm or refute.)
_LAYER_ORDER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.layer_norm_",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.layer_norm_",
    "self_attention.linear_kv_up_proj.",
    *(f"self_attention.{name}_layernorm." for name in ("q", "k", "kv")),
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.",
    "mlp.shared_experts.linear_fc2.",
    "mlp.linear_fc1.layer_norm_",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
_UNFUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_BEFORE_LAYERS = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_AFTER_LAYERS = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight", "output_layer.bias")
_WORDS, _OUTPUT = _BEFORE_LAYERS[0], _AFTER_LAYERS[2]
_EXPERT_PREFIX = "mlp.experts.experts."


def is_bucketed(keys: Iterable[str]) -> bool:
    """Whether stored tensors' keys are those of this form."""
    return any(_BUCKET.fullmatch(key) for key in keys)


@dataclass(frozen=True)
class Stretch:
    """Where one rank's part of a parameter lies: in the flat tensors `<bucket>.<state>` from element `start` on."""

    bucket: str
    start: int
    shape: tuple[int, ...]


def registration_rank(part: str, fused_norms: bool) -> int:
    """Position of a layer's parameter (its key without the layer) among the layer's, weights before biases. Raises CheckpointError."""
    if not fused_norms:
        part = mapped_key(part, _UNFUSED)
    prefixes = [number for number, prefix in enumerate(_LAYER_ORDER) if part.startswith(prefix)]
    if not prefixes:
        raise CheckpointError(
            f"the optimizer's state is stored by buckets and where {part} stands in them is not known: save the checkpoint with "
            "--dist-ckpt-optim-fully-reshardable, or give --no-load-optim to train on with a fresh optimizer"
        )
    best = max(prefixes, key=lambda number: len(_LAYER_ORDER[number]))
    return 2 * best + part.endswith("bias")


@dataclass(frozen=True)
class Registered:
    """The model that was saved: every key's shape and the facts that decide in which order a rank registered its parameters."""

    shapes: Mapping[str, tuple[int, ...]]
    known: KnownModel
    layout: SourceLayout
    fused_norms: bool
    grouped_experts: bool

    def of_rank(self, stage: int, chunk: int, expert_rank: int) -> Iterator[tuple[Place, bool]]:
        """(parameter, whether it is another stage's copy of a tied one) in order."""
        if self.layout.is_first(stage, chunk):
            yield from ((Place(key), False) for key in _BEFORE_LAYERS if key in self.shapes)
        for layer in self.layout.layers(stage, chunk):
            yield from ((place, False) for place in self._of_layer(layer, expert_rank))
        if self.layout.is_last(stage, chunk):
            yield from ((Place(key), False) for key in _AFTER_LAYERS if key in self.shapes and key != _OUTPUT)
            if _OUTPUT in self.shapes:
                yield Place(_OUTPUT), False
            elif not self.layout.is_first(stage, chunk):
                yield Place(_WORDS), True

    def _of_layer(self, layer: int, expert_rank: int) -> list[Place]:
        keys = {}
        for stem in ("decoder.layers.", f"decoder.layers.{layer}."):
            keys.update({key.removeprefix(stem): key for key in self.shapes if key.startswith(stem)})
        keys = {part: key for part, key in keys.items() if not re.match(r"\d+\.", part)}
        ordered = sorted(
            (part for part in keys if not part.startswith(_EXPERT_PREFIX)), key=lambda p: registration_rank(p, self.fused_norms)
        )
        places = [Place(keys[part], layer) for part in ordered]
        of_experts = [part for part in keys if part.startswith(_EXPERT_PREFIX)]
        first = expert_rank * self.layout.local_experts if of_experts else 0
        experts = [(part, first + number) for part in sorted(of_experts, key=_linear) for number in range(self.layout.local_experts)]
        # grouped: one linear's experts after each other; else one expert's linears; a weight is followed by its bias
        experts.sort(key=lambda one: (_linear(one[0])[0], one[1], _linear(one[0])) if self.grouped_experts else (one[1], _linear(one[0])))
        return places + [Place(keys[part], layer, expert) for part, expert in experts]


def _linear(part: str) -> tuple[str, bool]:
    return part.removeprefix(_EXPERT_PREFIX).partition(".")[0], part.endswith("bias")


def place_in_buckets(sizes: list[int], numels: list[int]) -> list[tuple[int, int]] | None:
    """(bucket, first element) of each parameter, in order, when they fill buckets of these sizes exactly; None when they do not."""
    for alignment in (ALIGNMENT, 1):
        places, bucket, end = [], 0, 0
        for numel in numels:
            if bucket < len(sizes) and end == sizes[bucket]:
                bucket, end = bucket + 1, 0
            start = math.ceil(end / alignment) * alignment
            if bucket == len(sizes) or start + numel > sizes[bucket]:
                break
            places.append((bucket, start))
            end = start + numel
        if len(places) == len(numels) and bucket == len(sizes) - 1 and end == sizes[bucket]:
            return places
    return None


class BucketedState:
    """The optimizer's state of one torch_dist checkpoint.

    stored: the checkpoint's tensors, without data; saved: the arguments it was saved with; known: of this run's model.
    Raises CheckpointError where the buckets' sizes are not those of the model that the arguments describe.
    """

    def __init__(self, stored: Mapping[str, ShardedTensor], saved: Mapping[str, Any], known: KnownModel) -> None:
        self.stored = stored
        self.layout = SourceLayout.of(saved)
        model = {key: tensor for key, tensor in stored.items() if not _BUCKET.fullmatch(key) and not key.endswith("router.expert_bias")}
        if lacking := sorted(key for key in model if key not in known.params):
            raise CheckpointError(f"the checkpoint holds {', '.join(lacking[:8])}, which this run's model lacks")
        self.dtypes = {key: tensor.dtype for key, tensor in model.items()}
        fused = saved.get("transformer_impl") != "local"
        shapes = {key: tensor.global_shape for key, tensor in model.items()}
        self.registered = Registered(shapes, known, self.layout, fused, bool(saved.get("moe_grouped_gemm")))
        self.known = known
        self.is_chained = any("chained_" in key for key in stored if _BUCKET.fullmatch(key))
        self.parts: dict[str, list[tuple[Block, Stretch]]] = {}
        for buffer, buckets in sorted(_buffers(stored).items()):
            self._locate(*buffer, [buckets[number] for number in sorted(buckets)])

    def keys(self) -> Collection[str]:
        """The keys that the same state has in the fully reshardable form."""
        return {f"optimizer.state.{state}.{key}" for state in STATES for key in self.parts}

    def _locate(self, of_experts: bool, group: int, chunk: int, dtype: str, buckets: list[str]) -> None:
        """Find the parameters of one buffer."""
        tensor_size = self.layout.expert_tensor if of_experts else self.layout.tensor
        tensor_rank, rest = group % tensor_size, group // tensor_size
        expert_rank, stage = (rest % self.layout.expert, rest // self.layout.expert) if of_experts else (0, rest)
        if stage >= self.layout.pipeline or chunk >= self.layout.chunks:
            raise CheckpointError(f"{buckets[0]} is of a rank that the checkpoint's arguments do not have")
        members = []
        for place, is_copy in self.registered.of_rank(stage, chunk, expert_rank):
            param = self.known.params[place.key]
            if (not self.is_chained or (param.sharding.experts is not None) == of_experts) and str(self.dtypes[place.key]) == dtype:
                members.append((place, param, self._shape_of(place.key, param, tensor_size), is_copy))
        members.reverse()
        sizes = [self.stored[f"{bucket}.param"].global_shape[0] for bucket in buckets]
        where = place_in_buckets(sizes, [math.prod(shape) for _, _, shape, _ in members])
        if where is None:
            raise CheckpointError(
                f"{buckets[0]} and its other buckets hold {sum(sizes)} elements, and the {len(members)} parameters that by the "
                f"checkpoint's arguments lie in them {sum(math.prod(shape) for _, _, shape, _ in members)}: give --no-load-optim to train "
                "on with a fresh optimizer"
            )
        for (place, param, shape, is_copy), (bucket, start) in zip(members, where, strict=True):
            if is_copy or (tensor_rank > 0 and not param.sharding.is_split):
                continue
            blocks = blocks_of(place, param, shape, tensor_rank, tensor_size)
            stretch = Stretch(buckets[bucket], start, shape)
            self.parts.setdefault(place.key, []).extend((block, stretch) for block in blocks)

    def _shape_of(self, key: str, param: KnownParam, tensor_size: int) -> tuple[int, ...]:
        whole = self.registered.shapes[key][int(param.stacked) + int(param.sharding.experts is not None) :]
        return local_shape(with_stored_rows(replace(param.sharding, experts=None), whole[0] if whole else 0), tensor_size)


def _buffers(stored: Iterable[str]) -> dict[tuple[bool, int, int, str], dict[int, str]]:
    """(of experts, group, pipeline chunk, dtype of the parameters) -> bucket number -> the bucket's key without the state's name."""
    buffers: dict[tuple[bool, int, int, str], dict[int, str]] = {}
    for key in stored:
        if found := _BUCKET.fullmatch(key):
            chain = re.search(r"chained_(\d+)", found["prefix"])
            of_experts = chain is not None and int(chain[1]) > 0
            name = (of_experts, int(found["group"]), int(found["buffer"]), found["dtype"])
            buffers.setdefault(name, {})[int(found["bucket"])] = key.removesuffix(f".{found['state']}")
    # buffers are counted over chunks and, within one, dtypes: the n-th of a dtype is the n-th chunk's
    seen: dict[tuple[bool, int, str], int] = {}
    by_chunk = {}
    for (of_experts, group, _, dtype), buckets in sorted(buffers.items()):
        chunk = seen.get((of_experts, group, dtype), 0)
        seen[of_experts, group, dtype] = chunk + 1
        by_chunk[of_experts, group, chunk, dtype] = buckets
    return by_chunk


def group_keys(stored: Iterable[str]) -> list[str]:
    """Keys of the objects that hold the parameter groups, one for each rank's optimizer."""
    found = {f"{m['prefix']}distributed.dp_group_idx_{m['group']}.optimizer" for key in stored if (m := _BUCKET.fullmatch(key))}
    return sorted(found)


class BucketReader:
    """Collects what is wanted from flat tensors, so that one read of the checkpoint gets it all, and only that."""

    def __init__(self, state: BucketedState) -> None:
        self.state = state
        self.lengths: dict[tuple[str, int], int] = {}  # (flat tensor, first element) -> elements
        self.copies: list[tuple[ShardedTensor, Any, Stretch, tuple[str, int]]] = []

    def want(self, tensor: ShardedTensor) -> bool:
        """Note that `tensor`, whose key is of the fully reshardable form, is to be filled; False where the buckets lack some of it."""
        name, _, key = tensor.key.removeprefix("optimizer.state.").partition(".")
        filled = 0
        for block, stretch in self.state.parts.get(key, []):
            common = overlap(tensor, block)
            if common is None:
                continue
            filled += common.numel
            inside = common.stored[len(common.stored) - len(stretch.shape) :]
            size = common.shape[len(common.shape) - len(stretch.shape) :]
            strides = _strides(stretch.shape)
            first = sum(at * stride for at, stride in zip(inside, strides, strict=True))
            length = sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True)) + 1
            where = (f"{stretch.bucket}.{name}", stretch.start + first)
            self.lengths[where] = max(length, self.lengths.get(where, 0))
            self.copies.append((tensor, common, stretch, where))
        return not uncovered(tensor, filled) or not math.prod(tensor.chunk_shape)

    def requests(self) -> list[ShardedTensor]:
        """Stretches of the flat tensors, to be read."""
        found = []
        for (key, start), length in self.lengths.items():
            whole = self.state.stored[key]
            found.append(ShardedTensor(key, None, whole.dtype, (length,), whole.global_shape, (start,), None))
        return found

    def fill(self, read: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Copy what was read, (flat tensor, first element) -> elements, to where it was wanted."""
        for tensor, common, stretch, where in self.copies:
            assert tensor.data is not None
            size = common.shape[len(common.shape) - len(stretch.shape) :]
            box = read[where].as_strided(size, _strides(stretch.shape))
            dims = len(tensor.global_shape)
            narrowed(tensor.data, dims, common.wanted, common.shape).copy_(box[(None,) * (dims - box.dim())])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def load_with_buckets(folder: Path, wanted: dict[str, Any], state: BucketedState) -> dict[str, Any]:
    """dist_checkpointing.load, with the optimizer's shards from buckets. Every rank calls it.

    Raises CheckpointError also where a main parameter, rounded, is not the model's: then the buckets hold another order of parameters.
    """
    reader = BucketReader(state)
    shards = sharded_tensors(wanted["optimizer"])
    missing = sorted({tensor.key for tensor in shards if not reader.want(tensor)})
    if missing:
        raise CheckpointError(f"{folder} lacks what this run needs: {', '.join(missing[:8])}")
    model = {key: value for key, value in wanted.items() if key != "optimizer"}
    checks = []
    for tensor in sharded_tensors({key: value for key, value in model.items() if key.startswith("model")}):
        if tensor.key in state.parts and tensor.data is not None:
            copy = torch.zeros(tensor.local_shape, dtype=torch.float32)
            checks.append((tensor, replace(tensor, key=f"optimizer.state.param.{tensor.key}", data=copy, dtype=torch.float32)))
            reader.want(checks[-1][1])
    requests = reader.requests()
    loaded = dist_checkpointing.load({**model, "buckets": requests}, folder)
    reader.fill({(request.key, request.global_offset[0]): data for request, data in zip(requests, loaded.pop("buckets"), strict=True)})
    for tensor, main in checks:
        _check_main(folder, tensor, main, reader)
    return loaded


def _check_main(folder: Path, tensor: ShardedTensor, copy: ShardedTensor, reader: BucketReader) -> None:
    assert tensor.data is not None and copy.data is not None
    dims = len(tensor.global_shape)
    for wanted, common, _, _ in reader.copies:
        if wanted is copy:
            stored = reader.state.dtypes[tensor.key]  # this run's model may have another
            main = narrowed(copy.data, dims, common.wanted, common.shape).to(stored).to(tensor.dtype)
            if not torch.equal(main, narrowed(tensor.data, dims, common.wanted, common.shape).cpu()):
                raise CheckpointError(
                    f"{folder}: the optimizer's main parameters of {tensor.key} are not the model's weights: its buckets hold the "
                    "parameters in another order than is known; give --no-load-optim to train on with a fresh optimizer"
                )
