"""From a model and a configuration to an optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, shard_params
from megatron.core.optimizer.fused_optimizers import FusedAdam, FusedOptimizer, FusedSGD
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer, MegatronOptimizer, OptimizedParam
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import strip_wrapper_prefix

__all__ = ["DistributedOptimizer", "MegatronOptimizer", "OptimizerConfig", "get_megatron_optimizer"]

_HALF = (torch.float16, torch.bfloat16)


def has_weight_decay(name: str, param: torch.Tensor, apply_wd_to_qk_layernorm: bool = False) -> bool:
    """Matrices decay; biases and other 1-dimensional parameters (norms) do not, unless q and k norms are asked to."""
    if apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return param.dim() > 1 and not name.endswith(".bias")


def is_embedding_or_output(name: str, param: torch.Tensor) -> bool:
    """Whether the decoupled learning rate is for this parameter (an attribute of this name on it decides)."""
    marked = getattr(param, "is_embedding_or_output_parameter", None)
    return bool(marked) if marked is not None else name.startswith(("embedding.word_embeddings.", "output_layer."))


def named_trainable_params(model_chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """(name without wrappers' prefixes, parameter) in registration order; each once, also when tied. Chunks are told apart."""
    found: list[tuple[str, nn.Parameter]] = []
    seen: set[int] = set()
    for index, chunk in enumerate(model_chunks):
        for name, param in chunk.named_parameters():
            name = strip_wrapper_prefix(name)
            if param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                found.append((name if len(model_chunks) == 1 else f"model{index}.{name}", param))
    return found


def _param_groups(config: OptimizerConfig, params: list[OptimizedParam]) -> tuple[list[dict[str, Any]], list[OptimizedParam]]:
    """Groups for the inner optimizer and the parameters in their order: with weight decay first, the default learning rate first.

    Experts have groups of their own, wherever they are: so a checkpoint has the same groups whatever the layout.
    """
    by_kind: dict[tuple[bool, bool, bool], list[OptimizedParam]] = {}
    for entry in params:
        plain_name = entry.name.partition(".")[2] if entry.name.startswith("model") and entry.name[5:6].isdigit() else entry.name
        decays = has_weight_decay(plain_name, entry.model_param, config.apply_wd_to_qk_layernorm)
        decoupled = config.decoupled_lr is not None and is_embedding_or_output(plain_name, entry.model_param)
        by_kind.setdefault((not decays, decoupled, is_expert(entry.model_param)), []).append(entry)
    groups = []
    ordered: list[OptimizedParam] = []
    for (no_decay, decoupled, of_experts), entries in sorted(by_kind.items()):
        wd_mult = 0.0 if no_decay else 1.0
        max_lr = config.decoupled_lr if decoupled else config.lr
        min_lr = config.decoupled_min_lr if decoupled and config.decoupled_min_lr is not None else config.min_lr
        group: dict[str, Any] = {
            "params": [entry.main_param for entry in entries],
            "lr": max_lr,
            "weight_decay": config.weight_decay * wd_mult,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_decoupled_lr": decoupled,
            "is_expert_parallel": of_experts,
        }
        if decoupled:
            # only here: other groups must follow the scheduler, whose limits a checkpoint may have set
            group.update(max_lr=max_lr, min_lr=min_lr)
        groups.append(group)
        ordered += entries
    return groups, ordered


def _main_param(param: nn.Parameter) -> torch.Tensor:
    return param.detach().float() if param.dtype in _HALF else param


def _inner_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> FusedOptimizer:
    if config.optimizer == "sgd":
        return FusedSGD(groups, config.sgd_momentum)
    return FusedAdam(groups, (config.adam_beta1, config.adam_beta2), config.adam_eps, config.decoupled_weight_decay)


def _grad_scaler(config: OptimizerConfig, device: torch.device) -> MegatronGradScaler | None:
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_interval=int(config.loss_scale_window),
        hysteresis=config.hysteresis,
        device=device,
    )


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    config_overrides: None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    dump_param_to_param_group_map: None = None,
) -> MegatronOptimizer:
    """The optimizer of a model's trainable parameters.

    Args:
        model_chunks: DistributedDataParallel chunks (their main_grad is used), or plain modules (their grad is).
        pg_collection: `mp`, `tp`, `pp`, and of experts `tp_ep_pp`, `expt_tp`, are read; parallel_state's groups by default.
    Raises ValueError for what is not built, a missing learning rate, or a model without trainable parameters.
    """
    if config_overrides or dump_param_to_param_group_map:
        raise ValueError("config_overrides and dump_param_to_param_group_map are not built yet; leave them out")
    if config.lr is None:
        raise ValueError("OptimizerConfig.lr is None: give the maximum learning rate, for example 1e-4")
    if found := config.problems():  # fields may have been set after the configuration was made
        raise ValueError("\n".join(found))
    pg_collection = default_pg_collection(pg_collection)
    named = named_trainable_params(model_chunks)
    if not named:
        raise ValueError("the model has no trainable parameter")
    if any(param.dtype == torch.float16 for _, param in named) and not config.fp16:
        raise ValueError("the model has fp16 parameters but OptimizerConfig.fp16 is False: set it, fp16 needs loss scaling")
    entries: list[OptimizedParam]
    if config.use_distributed_optimizer:
        entries = list(shard_params(config, named, model_chunks))
    else:
        if any(getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False) for chunk in model_chunks):
            raise ValueError("the model reduces gradients for a distributed optimizer: set OptimizerConfig.use_distributed_optimizer too")
        entries = [OptimizedParam(name, param, _main_param(param)) for name, param in named]
    groups, ordered = _param_groups(config, entries)
    kind: type[MegatronOptimizer] = Float16OptimizerWithFloat16Params if any(entry.has_copy for entry in ordered) else FP32Optimizer
    if config.use_distributed_optimizer:
        kind = DistributedOptimizer
    return kind(
        _inner_optimizer(config, groups),
        config,
        params=ordered,
        model_chunks=model_chunks,
        grad_scaler=_grad_scaler(config, ordered[0].main_param.device),
        pg_collection=pg_collection,
    )
