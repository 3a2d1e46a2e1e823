"""The library floor: model, parallelism, optimizers, data, checkpoints. It takes configs and process groups, never flags.

Submodules load when first named, so that a tool which needs no tensors never imports torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> where it lives, for `from megatron.core import X` of things that are not submodules
_EXPORTS = {
    "ModelParallelConfig": "megatron.core.model_parallel_config",
    "InferenceParams": "megatron.core.inference_params",
    "Timers": "megatron.core.timers",
}
_ALIASES = {"mpu": "megatron.core.parallel_state"}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    try:
        return importlib.import_module(_ALIASES.get(name, f"{__name__}.{name}"))
    except ModuleNotFoundError as error:
        if error.name == f"{__name__}.{name}":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        raise
