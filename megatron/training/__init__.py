"""The application floor: flags become configs, configs become a model, the loop runs. Names load when first used."""

import importlib
from typing import Any

_EXPORTS = {
    "pretrain": "megatron.training.training",
    "get_args": "megatron.training.global_vars",
    "get_timers": "megatron.training.global_vars",
    "get_tokenizer": "megatron.training.global_vars",
    "get_tensorboard_writer": "megatron.training.global_vars",
    "get_wandb_writer": "megatron.training.global_vars",
    "print_rank_0": "megatron.training.training_log",
    "print_rank_last": "megatron.training.training_log",
    "get_model": "megatron.training.model_setup",
    "initialize_megatron": "megatron.training.initialize",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise
