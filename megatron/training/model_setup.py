"""Build the model, wrap it for data parallelism, make its optimizer and schedule."""

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import torch

from megatron.core import device
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table, count_parameters
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
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
    model = call_provider(model_provider_func, pre_process=True, post_process=True, vp_stage=None, pg_collection=groups)
    model.model_type = model_type
    table = build_param_table(model)  # complete, or an error that names the parameter
    print_rank_0(f" > number of parameters: {count_parameters(model):,} in {len(table)} tensors")
    model = model.to(device.current_device())
    config = get_model_config(model)
    if args.fp16 or args.bf16:
        model = Float16Module(config, model)
    if not wrap_with_ddp:
        return [model]
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp_config_from_args(args), module=model, pg_collection=groups)
    wrapped.broadcast_params()
    return [wrapped]


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
    config.no_sync_func = model[0].no_sync if len(model) == 1 else None
    config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer, scheduler
