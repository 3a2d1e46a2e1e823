"""Tensor parallelism: layers, the conjugate pairs between their regions, the loss, random states. Names load when first used."""

import importlib
from typing import Any

_EXPORTS = {
    "cross_entropy": ("vocab_parallel_cross_entropy",),
    "data": ("broadcast_data",),
    "layers": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "linear_with_grad_accumulation_and_async_allreduce",
    ),
    "mappings": (
        "all_gather_last_dim_from_tensor_parallel_region",
        "copy_to_tensor_model_parallel_region",
        "gather_from_sequence_parallel_region",
        "gather_from_tensor_model_parallel_region",
        "reduce_from_tensor_model_parallel_region",
        "reduce_scatter_last_dim_to_tensor_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "scatter_to_tensor_model_parallel_region",
    ),
    "random": ("checkpoint", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"),
    "utils": ("split_tensor_along_last_dim",),
}
_WHERE = {name: module for module, names in _EXPORTS.items() for name in names}
_SUBMODULES = ("cross_entropy", "data", "init", "layers", "mappings", "param_sharding", "random", "utils", "weight_grad")


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
