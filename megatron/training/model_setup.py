"""Build the model, wrap it for data parallelism, make its optimizer and schedule."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device, parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table, count_parameters
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config, get_pg_rank, get_pg_size
from megatron.training.arguments import ddp_config_from_args, optimizer_config_from_args, scheduler_kwargs_from_args
from megatron.training.global_vars import get_args
from megatron.training.training_log import print_rank_0


def call_provider(provider: Callable, **offered: Any) -> Any:
    """Call a script's provider with those of the keywords that it takes."""
    parameters = inspect.signature(provider).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return provider(**{name: value for name, value in offered.items() if takes_all or name in parameters})


def get_model(
    model_provider_func: Callable,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
    args: argparse.Namespace | None = None,
) -> list[torch.nn.Module]:
    """The model chunks of this rank, on its device, in its precision, wrapped for data parallelism."""
    args = args or get_args()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = _build_chunks(model_provider_func, args.virtual_pipeline_model_parallel_size, groups)
    for chunk in chunks:
        chunk.model_type = model_type
    _report_size(chunks, args.num_layers, groups.pp)
    model = []
    for chunk in chunks:
        chunk = chunk.to(device.current_device())
        config = get_model_config(chunk)
        if args.fp16 or args.bf16:
            chunk = Float16Module(config, chunk)
        if wrap_with_ddp:
            chunk = DistributedDataParallel(config=config, ddp_config=ddp_config_from_args(args), module=chunk, pg_collection=groups)
            chunk.broadcast_params()
        model.append(chunk)
    return model


def _build_chunks(provider: Callable, virtual_stages: int | None, groups: ProcessGroupCollection) -> list[Any]:
    """This pipeline stage's model chunks: the first slot of the pipeline embeds, the last one has the output layer."""
    first, last = get_pg_rank(groups.pp) == 0, get_pg_rank(groups.pp) == get_pg_size(groups.pp) - 1
    chunks = []
    for stage in range(virtual_stages or 1):
        if virtual_stages is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)  # for scripts that ask there
        chunks.append(
            call_provider(
                provider,
                pre_process=first and stage == 0,
                post_process=last and stage == (virtual_stages or 1) - 1,
                vp_stage=None if virtual_stages is None else stage,
                pg_collection=groups,
            )
        )
    if virtual_stages is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)
    return chunks


def _report_size(chunks: list[Any], num_layers: int, pp_group: Any) -> None:
    """Print the whole model's size, and make sure that the pipeline's stages hold each layer once.

    Raises ValueError naming the parameters that no layer declared, and for a weight that one stage trains and another has frozen,
    AssertionError for layers that are missing or doubled.
    """
    tables = [build_param_table(chunk) for chunk in chunks]
    held = [layer for table in tables for layer in {record.layer for record in table.values()} if layer is not None]
    assert all(layer < num_layers for layer in held), f"the model's layers are {held}, but --num-layers is {num_layers}"
    here = torch.zeros(4 + num_layers, dtype=torch.int64, device=device.current_device())
    here[0] = sum(map(count_parameters, chunks))
    here[1] = sum(map(len, tables))
    for layer in held:
        here[4 + layer] += 1
    for table in tables:
        for record in table.values():
            if record.sharding.shared_with is not None:
                here[2 if record.param.requires_grad else 3] += 1
    if get_pg_size(pp_group) > 1:
        dist.all_reduce(here, group=pp_group)
    parameters, tensors, trained, frozen, *copies = here.tolist()
    if trained and frozen:  # one stage would wait for the other's gradient
        raise ValueError(
            "the embedding's weight is tied across pipeline stages, and frozen in one of them alone: freeze both copies, "
            "embedding.word_embeddings.weight of the first stage and output_layer.weight of the last, or neither"
        )
    if any(copies):  # not a model of other parts
        wrong = {layer: count for layer, count in enumerate(copies) if count != 1}
        assert not wrong, f"of the model's {num_layers} layers the pipeline has, by layer counted from 0, these numbers of copies: {wrong}"
    print_rank_0(f" > number of parameters: {parameters:,} in {tensors} tensors")


def setup_model_and_optimizer(
    model_provider_func: Callable, model_type: ModelType, args: argparse.Namespace | None = None
) -> tuple[list[torch.nn.Module], Any, OptimizerParamScheduler]:
    """(model chunks, optimizer, learning-rate and weight-decay schedule), with the model's config told how to scale, sync and finish."""
    args = args or get_args()
    model = get_model(model_provider_func, model_type, args=args)
    optimizer = get_megatron_optimizer(optimizer_config_from_args(args), model)
    scheduler = OptimizerParamScheduler(optimizer, **scheduler_kwargs_from_args(args))
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss if args.fp16 or args.loss_scale else None
    config.no_sync_func = [chunk.no_sync for chunk in model]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in model] if args.overlap_grad_reduce else None
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer, scheduler
