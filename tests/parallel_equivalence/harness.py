"""Train one model of the table in one layout, and keep everything that must not depend on the layout.

`train` runs on every rank of the layout (see tests/distributed.py) and returns what that rank saw; comparison.py holds it against one
process. Where an axis cuts data, this file says how: `rank_part` the batch, `positions_here` the sequence, `weights` the parameters.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device, parallel_state
from megatron.core.context_parallel import positions_of_rank, split_for_context_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import ParamRecord, ParamSharding, build_param_table
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size, unwrap_model
from tests.parallel_equivalence.layouts import (
    DIVISIBLE_BY,
    HEADS,
    HIDDEN,
    MICRO_BATCH,
    MODELS,
    RECOMPUTE,
    SEQ,
    STEPS,
    TOKENS,
    Layout,
)

Key = tuple[str, int | None, int | None]  # a parameter's checkpoint key, layer and expert: the same in every layout
Batch = dict[str, torch.Tensor]


@dataclass
class Weight:
    """A rank's part of a parameter (one expert's), of its gradient or of whatever has its shape."""

    value: torch.Tensor
    sharding: ParamSharding
    rank: int = 0  # which of `size` parts
    size: int = 1


@dataclass
class Activation:
    """What came out of a part of the model for one micro batch: a rank's tokens [s, b, ...], and where those stand in the sequence."""

    value: torch.Tensor
    positions: torch.Tensor


@dataclass
class Trace:
    """What one rank saw."""

    initial: dict[Key, Weight] = field(default_factory=dict)
    activations: dict[tuple[int, str], Activation] = field(default_factory=dict)  # of the first step, by micro batch and part
    gradients: dict[Key, Weight] = field(default_factory=dict)  # of the first step
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of each step, and of an evaluation at the end; empty where no loss is computed
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
        hierarchical_context_parallel_sizes=list(layout.hierarchical_cp) or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.instances,
    )


def config_of(layout: Layout, model_name: str, dtype: torch.dtype) -> TransformerConfig:
    settings: dict[str, Any] = {"num_attention_heads": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0, "overlap_p2p_comm": True}
    settings |= MODELS[model_name].config | layout.config | RECOMPUTE.get(layout.recompute or "", {})
    if layout.cp_comm_type is not None:
        settings["cp_comm_type"] = layout.cp_comm_type
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(
        num_layers=layout.num_layers,
        hidden_size=HIDDEN,
        init_method_std=0.1,  # activations and gradients of a size that shows faults
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        pipeline_schedule=layout.schedule,
        num_layers_in_first_pipeline_stage=layout.first_layers,
        num_layers_in_last_pipeline_stage=layout.last_layers,
        context_parallel_size=layout.cp,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_cp) or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        calculate_per_token_loss=layout.per_token,
        gradient_accumulation_fusion=True,
        logical_vocab_size=TOKENS,
        softmax_vocab_size=vocab_size_with_padding(TOKENS, DIVISIBLE_BY),
        **settings,
    )


def build(layout: Layout, model_name: str, dtype: torch.dtype) -> tuple[list[DistributedDataParallel], Any]:
    """The chunks of this rank, wrapped, and their optimizer, as the trainer makes them."""
    model = MODELS[model_name]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sharded, gathered = layout.distributed_optimizer, layout.distributed_optimizer and layout.overlap
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype is torch.bfloat16,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=gathered,
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=layout.instances,
        bucket_size=4000,
    )
    stage, wrapped = get_pg_rank(groups.pp), []
    for number in range(layout.vpp or 1):
        config = config_of(layout, model_name, dtype)
        vp_stage = None if layout.vpp is None else number
        chunk: torch.nn.Module = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
            vocab_size_with_padding(TOKENS, DIVISIBLE_BY, layout.tp),
            SEQ,
            pre_process=stage == 0 and number == 0,
            post_process=stage == layout.pp - 1 and number == (layout.vpp or 1) - 1,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type=model.position,
            vp_stage=vp_stage,
            pg_collection=groups,
        ).to(device.current_device())
        if config.bf16:
            chunk = Float16Module(config, chunk)
        wrapped.append(DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups))
    settings = OptimizerConfig(
        lr=1e-3,
        weight_decay=0.1,
        clip_grad=0.5,
        bf16=dtype is torch.bfloat16,
        use_distributed_optimizer=sharded,
        overlap_param_gather=gathered,
    )
    optimizer = get_megatron_optimizer(settings, wrapped)
    config = wrapped[0].config
    config.no_sync_func = [chunk.no_sync for chunk in wrapped]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped] if layout.overlap else None
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, optimizer


def micro_batch(index: int) -> Batch:
    """Micro batch number `index` of the training: the same whoever reads it. Micro batches differ much in how many tokens count."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(0, TOKENS, (MICRO_BATCH, SEQ + 1), generator=generator)
    share = (0.95, 0.1, 0.5)[index % 3]
    mask = (torch.rand(MICRO_BATCH, SEQ, generator=generator) < share).double()
    mask[0, 3] = 1.0
    positions = torch.arange(SEQ).expand(MICRO_BATCH, -1)
    return {"index": torch.tensor(index), "tokens": ids[:, :-1], "labels": ids[:, 1:], "loss_mask": mask, "positions": positions}


def rank_part(layout: Layout, batch: Batch) -> Batch:
    """What this rank gets of a micro batch that its data-parallel rank trains on: its part of the sequence."""
    if layout.cp == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    return {name: value if value.dim() < 2 else split_for_context_parallel(value, 1, rank, layout.cp) for name, value in batch.items()}


def positions_here(layout: Layout) -> torch.Tensor:
    """Which tokens of the sequence this rank has in attention's parts of the model."""
    if layout.cp == 1:
        return torch.arange(SEQ)
    return positions_of_rank(SEQ, parallel_state.get_context_parallel_rank(), layout.cp)


def batches_of_step(layout: Layout, step: int) -> Iterator[Batch]:
    """This rank's micro batches: those of a step go round the data-parallel ranks."""
    rank = parallel_state.get_data_parallel_rank()
    for number in range(layout.microbatches):
        yield rank_part(layout, micro_batch(step * layout.global_microbatches + number * layout.dp + rank))


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """pretrain_gpt's, in the precision of the losses."""
    total, count = (losses.view(-1) * loss_mask.reshape(-1)).sum(), loss_mask.sum()
    return total, count.to(torch.int), {"lm loss": torch.stack([total.detach().double(), count.double()])}


class Recorder:
    """Forward hooks that keep what the parts of a model put out, while a micro batch of the first step goes forward."""

    def __init__(self, layout: Layout, chunks: Sequence[DistributedDataParallel], trace: Trace) -> None:
        self.layout, self.trace = layout, trace
        self.now: int | None = None
        for chunk in chunks:
            model: Any = unwrap_model(chunk)
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
        positions = positions_here(self.layout)
        if split:
            positions = positions.chunk(self.layout.tp)[parallel_state.get_tensor_model_parallel_rank()]
        assert self.now is not None
        self.trace.activations[self.now, name] = Activation(value.detach().cpu().clone(), positions)

    def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, partial]:
        data = {name: value.to(device.current_device()) for name, value in next(data_iterator).items()}
        index = int(data["index"])
        first = torch.is_grad_enabled() and not self.trace.norms and index < self.layout.global_microbatches
        self.now = index if first else None
        losses = model(data["tokens"], data["positions"], None, labels=data["labels"], loss_mask=data["loss_mask"])
        if first and losses.dim() == 2:  # of the last stage: [b, s]
            self.keep("loss", losses.t(), split=False)
        self.now = None
        return losses, partial(loss_func, data["loss_mask"])


def weights(chunks: Sequence[DistributedDataParallel], what: Callable[[ParamRecord], torch.Tensor]) -> dict[Key, Weight]:
    """`what` of every parameter of this rank, on the CPU; of parameters that hold experts, for each expert by itself."""
    found: dict[Key, Weight] = {}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for chunk in chunks:
        for record in build_param_table(chunk).values():
            value, experts = what(record).detach().cpu().clone(), record.sharding.experts
            tensor_group = groups.expt_tp if record.sharding.is_expert else groups.tp
            sharding = record.sharding
            parts: list[tuple[int | None, torch.Tensor]] = [(None, value)]
            if experts is not None:
                sharding = replace(sharding, experts=None)  # that of one expert's tensor, as the values below
                parts = [(experts.first + i, part) for i, part in enumerate([value] if experts.count is None else value.unbind(0))]
            for expert, part in parts:
                key = (record.key, record.layer, expert)
                assert key not in found, f"{key} twice on one rank"
                found[key] = Weight(part, sharding, get_pg_rank(tensor_group), get_pg_size(tensor_group))
    return found


def data(record: ParamRecord) -> torch.Tensor:
    return record.param


def gradients(chunks: Sequence[DistributedDataParallel]) -> dict[Key, Weight]:
    """Of the step whose gradients were just reduced. The distributed optimizer's ranks have a part of each bucket: they collect all."""
    whole: dict[int, torch.Tensor] = {}
    for chunk in chunks:
        for buffer in chunk.grad_buffers:
            flat = buffer.grad_data.clone()
            if buffer.distributed and get_pg_size(buffer.group) > 1:
                for bucket in buffer.layout.buckets:
                    part = flat[bucket.start : bucket.end]
                    dist.all_gather_into_tensor(part, buffer.own_part(part).clone(), group=buffer.group)
            for slot, param in zip(buffer.layout.params, buffer.params, strict=True):
                whole[id(param)] = flat[slot.start : slot.end].view(param.shape)
    return weights(chunks, lambda record: whole[id(record.param)])


def step_loss(reports: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss of a token of the step."""
    pair = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    group = ProcessGroupCollection.use_mpu_process_groups().dp_cp
    if group is not None:
        dist.all_reduce(pair, group=group)
    return float(pair[0] / pair[1])


def train(layout: Layout, model_name: str, dtype: torch.dtype) -> Trace:
    """STEPS steps on this rank's share of the table's data, and an evaluation. The process groups must be there."""
    trace = Trace()
    chunks, optimizer = build(layout, model_name, dtype)
    trace.initial = weights(chunks, data)
    recorder = Recorder(layout, chunks, trace)

    def run(step: int, forward_only: bool = False) -> None:
        reports = get_forward_backward_func()(
            forward_step_func=recorder.forward_step,
            data_iterator=batches_of_step(layout, step),
            model=chunks,
            num_microbatches=layout.microbatches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        if reports:
            trace.losses.append(step_loss(reports))

    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run(step)
        if step == 0:
            trace.gradients = gradients(chunks)
        updated, norm, _ = optimizer.step()
        assert bool(updated)
        trace.norms.append(float(norm))
    run(0, forward_only=True)
    for chunk in chunks:
        chunk.finish_param_sync()
    trace.trained = weights(chunks, data)
    return trace


Traces = dict[tuple[str, torch.dtype], Trace]


def train_all(layout: Layout, dtypes: Sequence[torch.dtype], fault: Any = None) -> Traces:
    """Every model of the layout in every dtype, on this rank. `fault`: a context in which to do so, for tests of the tests."""
    start_groups(layout)
    with fault() if fault is not None else contextlib.nullcontext():
        return {(name, dtype): train(layout, name, dtype) for name in layout.models for dtype in dtypes}


def train_each(layouts: Sequence[Layout], dtypes: Sequence[torch.dtype]) -> list[Traces]:
    return [train_all(layout, dtypes) for layout in layouts]


def train_alone(layout: Layout, model_name: str, dtype: torch.dtype) -> Trace:
    """The trace of one process without any process group, on the whole global batch of the same micro batches."""
    parallel_state.destroy_model_parallel()
    return train(layout.alone, model_name, dtype)
