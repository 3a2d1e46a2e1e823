"""FP8 through Transformer Engine: which layers, by which recipe, and recompute that repeats the same scales."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core.extensions.transformer_engine.base import te_pytorch
from megatron.core.fp8.settings import layer_stays_in_bf16
from megatron.core.optional_imports import require
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection


def fp8_recipe(config: Any) -> Any:
    """Transformer Engine's recipe object for config.fp8_recipe."""
    recipes = require("transformer_engine.common.recipe", "fp8")
    kind = getattr(config, "fp8_recipe", "delayed")
    form = {"fp8_format": recipes.Format.E4M3 if config.fp8 == "e4m3" else recipes.Format.HYBRID}
    if kind == "delayed":
        return recipes.DelayedScaling(
            margin=getattr(config, "fp8_margin", 0),
            amax_history_len=getattr(config, "fp8_amax_history_len", 1),
            amax_compute_algo=getattr(config, "fp8_amax_compute_algo", "most_recent"),
            **form,
        )
    classes = {"tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    return getattr(recipes, classes[kind])(**form)


def _region(config: Any, pg_collection: ProcessGroupCollection | None, enabled: bool) -> AbstractContextManager:
    te, groups = te_pytorch("fp8"), default_pg_collection(pg_collection)
    group = groups.tp if getattr(config, "tp_only_amax_red", False) else groups.tp_dp_cp
    recipe = fp8_recipe(config) if enabled else None
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)


def is_delayed(config: Any) -> bool:
    return bool(getattr(config, "fp8", None)) and getattr(config, "fp8_recipe", "delayed") == "delayed"


def fp8_context(
    config: Any, layer_number: int | None = None, pg_collection: ProcessGroupCollection | None = None
) -> AbstractContextManager:
    """Within it Transformer Engine's linears compute as config.fp8 says: around the layer `layer_number` (from 1, over the whole model),
    or, where None, around all layers of a chunk.

    Delayed scaling renews the scales of all linears when the outermost region ends: that must be the one around the chunk.
    """
    if not getattr(config, "fp8", None):
        return nullcontext()
    if layer_number is None:
        return _region(config, pg_collection, True) if is_delayed(config) else nullcontext()
    high = layer_stays_in_bf16(config, layer_number - 1)
    if is_delayed(config):
        return _region(config, pg_collection, False) if high else nullcontext()
    return nullcontext() if high else _region(config, pg_collection, True)


def quantizes_now() -> bool:
    """Whether this is within a region where linears quantize."""
    return require("transformer_engine.pytorch.fp8", "fp8").FP8GlobalStateManager.is_fp8_enabled()


def te_checkpoint(
    forward_func: Callable,
    distribute_saved_activations: bool,
    get_rng_state_tracker: Callable | None,
    tp_group: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Transformer Engine's activation checkpointing: the second run quantizes with the scales of the first."""
    checkpoint = te_pytorch("te_checkpoint").checkpoint
    settings = {"distribute_saved_activations": distribute_saved_activations, "tp_group": tp_group}
    return checkpoint(forward_func, *args, get_rng_state_tracker=get_rng_state_tracker, **settings, **kwargs)
