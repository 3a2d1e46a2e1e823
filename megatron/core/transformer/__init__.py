"""The transformer: config, specs, attention, MLP, layer, block. Names load when first used."""

import importlib
from typing import Any

_EXPORTS = {
    "MLATransformerConfig": "transformer_config",
    "MegatronModule": "module",
    "ModuleSpec": "spec_utils",
    "build_module": "spec_utils",
    "TransformerConfig": "transformer_config",
    "TransformerLayer": "transformer_layer",
    "TransformerLayerSubmodules": "transformer_layer",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
