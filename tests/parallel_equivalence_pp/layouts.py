"""Train a small model in float64 on any pipeline layout, and say everything that must not depend on it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size

LAYERS, VOCAB, SEQ, MICRO, MICROBATCHES, STEPS = 8, 24, 6, 2, 8, 3  # MICROBATCHES: of all data-parallel ranks together
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"config": {}, "model": {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute"}},
    "llama": {
        "config": {
            "normalization": "RMSNorm",
            "num_query_groups": 1,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
        },
        "model": {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"},
    },
}


@dataclass(frozen=True)
class Layout:
    """One way to spread the model. `config`: settings of the TransformerConfig beside the sizes."""

    world: int = 1
    pp: int = 1
    vp: int | None = None
    overlap: bool = False
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What this rank saw. Tensors by (checkpoint key, layer); losses on the last stage alone."""

    initial: dict[tuple, torch.Tensor]
    gradients: dict[tuple, torch.Tensor]  # after the first step's reduction
    final: dict[tuple, torch.Tensor]
    losses: list[torch.Tensor]  # a step: the sum over the micro batches of this rank, [loss sum, tokens]
    evaluation: torch.Tensor | None
    norms: list[float]


def batches(step: int, replica: int, replicas: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens [b, s + 1], loss mask [b, s]) of each micro batch of a data-parallel rank."""
    random = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, MICRO, SEQ + 1), generator=random)
    masks = (torch.rand(MICROBATCHES, MICRO, SEQ, generator=random) < 0.7).double()
    return list(zip(tokens, masks, strict=True))[replica::replicas]


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, mask = next(iterator)
    output = model(tokens[:, :-1], torch.arange(SEQ).expand(MICRO, -1), None, labels=tokens[:, 1:])
    return output, partial(loss_func, mask)


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = (losses * mask).sum()
    return total, mask.sum(), torch.stack([total.detach(), mask.sum()])


def build(kind: str, layout: Layout, groups: ProcessGroupCollection) -> list[DistributedDataParallel]:
    chunks = []
    for stage in range(layout.vp or 1):
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=2,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.float64,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp,
            gradient_accumulation_fusion=True,
            **{**MODELS[kind]["config"], **layout.config},
        )
        vp_stage = None if layout.vp is None else stage
        chunk = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
            VOCAB,
            SEQ,
            pre_process=get_pg_rank(groups.pp) == 0 and stage == 0,
            post_process=get_pg_rank(groups.pp) == layout.pp - 1 and stage == (layout.vp or 1) - 1,
            vp_stage=vp_stage,
            pg_collection=groups,
            **MODELS[kind]["model"],
        )
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=layout.overlap, bucket_size=1000)
        chunks.append(DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups))
    config = chunks[0].config
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    return chunks


def train(kind: str, layout: Layout) -> Outcome:
    """STEPS steps and an evaluation on this layout. Every rank of a world of its size calls it."""
    if dist.is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=layout.pp, virtual_pipeline_model_parallel_size=layout.vp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = build(kind, layout, groups)
    settings = OptimizerConfig(lr=1e-2, min_lr=1e-2, clip_grad=0.5, weight_decay=0.1)
    optimizer = get_megatron_optimizer(settings, chunks, pg_collection=groups)
    params = {(r.key, r.layer): r.param for chunk in chunks for r in build_param_table(chunk).values()}
    initial = {name: param.detach().clone() for name, param in params.items()}
    run = get_forward_backward_func(schedule_pg_collection=groups)
    mine = partial(batches, replica=get_pg_rank(groups.dp), replicas=get_pg_size(groups.dp))
    common = {"forward_step_func": forward_step, "model": chunks, "seq_length": SEQ, "micro_batch_size": MICRO, "pg_collection": groups}
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        data = mine(step)
        reports = run(data_iterator=iter(data), num_microbatches=len(data), **common)
        if step == 0:
            gradients = {name: param.main_grad.clone() for name, param in params.items()}  # type: ignore[attr-defined]
        losses += [torch.stack(reports).sum(0)] if reports else []
        norms.append(float(optimizer.step()[1]))
    data = mine(STEPS)
    reports = run(data_iterator=iter(data), num_microbatches=len(data), forward_only=True, **common)
    final = {name: param.detach().clone() for name, param in params.items()}
    parallel_state.destroy_model_parallel()
    return Outcome(initial, gradients, final, losses, torch.stack(reports).sum(0) if reports else None, norms)


def train_all(cases: list[tuple[str, Layout]]) -> list[Outcome]:
    """Several layouts one after the other in the same processes: starting those costs most."""
    return [train(kind, layout) for kind, layout in cases]
