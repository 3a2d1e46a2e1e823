"""Train one model of the table in one layout, and hold everything that came out against one process.

`train` runs on every rank of the layout (see tests/distributed.py) and returns what that rank saw; `differences` compares.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import ParamSharding, build_param_table, local_part
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parallel_equivalence.layouts import (
    DIVISIBLE_BY,
    HEADS,
    HIDDEN,
    MICRO_BATCH,
    MODELS,
    NUM_LAYERS,
    SEQ,
    STEPS,
    TOKENS,
    TOLERANCES,
    Layout,
)

Key = tuple[str, int | None]  # a parameter's checkpoint key and layer: the same in every layout


@dataclass
class Weight:
    """A rank's part of a parameter, of its gradient or of whatever has its shape."""

    value: torch.Tensor
    sharding: ParamSharding


@dataclass
class Activation:
    """What came out of a part of the model for one micro batch: a rank's tokens [s, b, ...], and where those stand in the sequence."""

    value: torch.Tensor
    positions: torch.Tensor


@dataclass
class Trace:
    """What one rank saw."""

    tp_rank: int = 0
    tp_size: int = 1
    initial: dict[Key, Weight] = field(default_factory=dict)
    activations: dict[tuple[int, str], Activation] = field(default_factory=dict)  # of the first step, by micro batch and part
    gradients: dict[Key, Weight] = field(default_factory=dict)  # of the first step
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # empty where no loss is computed
    trained: dict[Key, Weight] = field(default_factory=dict)


# --- the training ---


def start_groups(layout: Layout) -> None:
    """Process groups of a layout; none of the layout before is left."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )


def build(layout: Layout, model_name: str, dtype: torch.dtype) -> tuple[list[DistributedDataParallel], Any]:
    """The chunks of this rank, wrapped, and their optimizer, as the trainer makes them."""
    model = MODELS[model_name]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    vocab = vocab_size_with_padding(TOKENS, DIVISIBLE_BY, layout.tp)
    settings: dict[str, Any] = {"num_attention_heads": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0, **model.config}
    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        init_method_std=0.1,  # activations and gradients of a size that shows faults
        params_dtype=dtype,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        calculate_per_token_loss=layout.per_token,
        gradient_accumulation_fusion=True,
        logical_vocab_size=TOKENS,
        softmax_vocab_size=vocab_size_with_padding(TOKENS, DIVISIBLE_BY),
        **settings,
    )
    chunk = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm),
        vocab,
        SEQ,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type=model.position,
        pg_collection=groups,
    )
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=layout.overlap, use_distributed_optimizer=layout.distributed_optimizer, bucket_size=4000
    )
    wrapped = [DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=0.5, use_distributed_optimizer=layout.distributed_optimizer), wrapped
    )
    config.no_sync_func = wrapped[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, optimizer


def micro_batch(index: int) -> dict[str, torch.Tensor]:
    """Micro batch number `index` of the training: the same whoever reads it. Micro batches differ much in how many tokens count."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, TOKENS, (MICRO_BATCH, SEQ + 1), generator=generator)
    share = (0.95, 0.1, 0.5)[index % 3]
    mask = (torch.rand(MICRO_BATCH, SEQ, generator=generator) < share).double()
    mask[0, 3] = 1.0
    return {"index": torch.tensor(index), "tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask}


def batches_of_step(layout: Layout, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's micro batches: those of a step go round the data-parallel ranks."""
    rank = parallel_state.get_data_parallel_rank()
    for number in range(layout.microbatches):
        yield micro_batch(step * layout.global_microbatches + number * layout.dp + rank)


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """pretrain_gpt's, in the precision of the losses."""
    total, count = (losses.view(-1) * loss_mask.view(-1)).sum(), loss_mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach().double(), count.double()])}


class Recorder:
    """Forward hooks that keep what the parts of a model put out, while a micro batch of the first step goes forward."""

    def __init__(self, layout: Layout, chunks: list[DistributedDataParallel], trace: Trace) -> None:
        self.layout, self.trace = layout, trace
        self.now: int | None = None
        for chunk in chunks:
            model: Any = chunk.module
            parts = {f"layer {layer.layer_number}": layer for layer in model.decoder.layers}
            if model.pre_process:
                parts["embedding"] = model.embedding
            if model.post_process:
                parts["final norm"] = model.decoder.final_layernorm
            for name, part in parts.items():
                part.register_forward_hook(partial(self._hook, name))

    def _hook(self, name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if self.now is not None:
            self.keep(name, output[0] if isinstance(output, tuple) else output, split=self.layout.sp)

    def keep(self, name: str, value: torch.Tensor, split: bool) -> None:
        positions = torch.arange(SEQ)
        if split:
            positions = positions.chunk(self.trace.tp_size)[self.trace.tp_rank]
        assert self.now is not None
        self.trace.activations[self.now, name] = Activation(value.detach().clone(), positions)

    def forward_step(self, data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
        data = next(data_iterator)
        positions = torch.arange(SEQ).expand(MICRO_BATCH, -1)
        index = int(data["index"])
        self.now = index if index < self.layout.global_microbatches else None  # the first step's
        losses = model(data["tokens"], positions, None, labels=data["labels"], loss_mask=data["loss_mask"])
        if self.now is not None and losses.shape == (MICRO_BATCH, SEQ):
            self.keep("loss", losses.t(), split=False)
        self.now = None
        return losses, partial(loss_func, data["loss_mask"])


def weights(chunks: list[DistributedDataParallel], what: str) -> dict[Key, Weight]:
    """`what` of every parameter of this rank: data or main_grad."""
    return {
        (record.key, record.layer): Weight(getattr(record.param, what).detach().clone(), record.sharding)
        for chunk in chunks
        for record in build_param_table(chunk).values()
    }


def step_loss(reports: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss of a token of the step."""
    pair = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    group = ProcessGroupCollection.use_mpu_process_groups().dp_cp
    if group is not None:
        dist.all_reduce(pair, group=group)
    return float(pair[0] / pair[1])


def train(layout: Layout, model_name: str, dtype: torch.dtype) -> Trace:
    """STEPS steps on this rank's share of the table's data. The process groups must be there."""
    trace = Trace(parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size())
    chunks, optimizer = build(layout, model_name, dtype)
    trace.initial = weights(chunks, "data")
    recorder = Recorder(layout, chunks, trace)
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=recorder.forward_step,
            data_iterator=batches_of_step(layout, step),
            model=chunks,
            num_microbatches=layout.microbatches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        if reports:
            trace.losses.append(step_loss(reports))
        if step == 0:
            trace.gradients = weights(chunks, "main_grad")
        updated, norm, _ = optimizer.step()
        assert bool(updated)
        trace.norms.append(float(norm))
    trace.trained = weights(chunks, "data")
    return trace


def train_all(
    layout: Layout, dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES), fault: Any = None
) -> dict[tuple[str, torch.dtype], Trace]:
    """Every model of the layout in every dtype, on this rank. `fault`: a context in which to do so, for tests of the tests."""
    start_groups(layout)
    with fault() if fault is not None else contextlib.nullcontext():
        return {(name, dtype): train(layout, name, dtype) for name in layout.models for dtype in dtypes}


# --- the comparison ---


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element that is expected; nan when one of them holds nan."""
    scale = expected.abs().max()
    return float((value - expected).abs().max() / (scale if scale > 0 else 1.0))


def part_of(whole: torch.Tensor, trace: Trace, sharding: ParamSharding) -> torch.Tensor:
    """What the rank holds of a tensor of one process, whose vocabulary may have fewer rows of padding (which are zero)."""
    shape = list(sharding.global_shape)
    if sharding.logical_size is not None and shape[0] != whole.shape[0]:
        padded = whole.new_zeros(shape)
        rows = min(shape[0], whole.shape[0])
        padded[:rows] = whole[:rows]
        whole = padded
    return local_part(whole, sharding, trace.tp_rank, trace.tp_size)


def differences(trace: Trace, reference: Trace, dtype: torch.dtype) -> list[str]:
    """What a rank has otherwise than one process, in words, in the order in which a training computes it."""
    tolerances, found = TOLERANCES[dtype], []

    def judge(kind: str, name: str, difference: float) -> None:
        if kind in tolerances and not difference <= tolerances[kind]:
            found.append(f"{kind} of {name} is off by {difference:.1e}, allowed {tolerances[kind]:.0e}")

    for key, weight in trace.initial.items():
        if not torch.equal(weight.value, part_of(reference.initial[key].value, trace, weight.sharding)):
            found.append(f"initial weight {key} has other bits")
    for place, activation in trace.activations.items():
        judge("forward", str(place), distance(activation.value, reference.activations[place].value[activation.positions]))
    for step, (loss, expected) in enumerate(zip(trace.losses, reference.losses)):
        judge("first loss" if step == 0 else "later loss", f"step {step + 1}", abs(loss - expected) / abs(expected))
    for kind, mine, theirs in (
        ("gradient", trace.gradients, reference.gradients),
        ("trained weight", trace.trained, reference.trained),
    ):
        for key, weight in mine.items():
            judge(kind, str(key), distance(weight.value, part_of(theirs[key].value, trace, weight.sharding)))
    for step, (norm, expected) in enumerate(zip(trace.norms, reference.norms)):
        judge("gradient norm", f"step {step + 1}", abs(norm - expected) / expected)
    return found


def coverage(traces: list[Trace], reference: Trace) -> list[str]:
    """What one process has and no rank, or too few: a comparison of nothing finds nothing."""
    found = []
    for name in ("initial", "gradients", "trained", "activations"):
        seen = {key for trace in traces for key in getattr(trace, name)}
        if seen != set(getattr(reference, name)):
            found.append(f"{name}: the ranks and one process differ in {sorted(seen ^ set(getattr(reference, name)), key=str)}")
    if not any(len(trace.losses) == STEPS for trace in traces) or any(len(trace.norms) != STEPS for trace in traces):
        found.append("losses or norms of some steps are missing")
    return found


def unmarked_differences(traces: list[Trace]) -> list[str]:
    """Parameters that are not marked as split and yet not equal, to the bit, on all ranks that hold them."""
    first: dict[tuple[Key, int | None], torch.Tensor] = {}
    found = []
    for trace in traces:
        for key, weight in trace.trained.items():
            place = (key, trace.tp_rank if weight.sharding.is_split else None)
            if not torch.equal(first.setdefault(place, weight.value), weight.value):
                found.append(f"{key} is marked as {'one part' if weight.sharding.is_split else 'replicated'} and differs between ranks")
    return found


def train_alone(layout: Layout, model_name: str, dtype: torch.dtype) -> Trace:
    """The trace of one process without any process group, on the whole global batch of the same micro batches."""
    parallel_state.destroy_model_parallel()
    single = Layout("one process", microbatches=layout.global_microbatches, per_token=layout.per_token)
    return train(single, model_name, dtype)
