"""What Transformer Engine's layers, as they are used here, cannot do. No torch: the command line asks it too."""

from collections.abc import Iterator
from typing import Any

from megatron.core.broken_rule import BrokenRule
from megatron.core.context_parallel.combinations import comm_types_of

PRECISIONS = ("e4m3", "hybrid")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# The fourth: its residual is the norm's output, which stays inside of the linear that contains the norm.
_LOCAL_ALONE = (
    "tp_comm_overlap", "cp_comm_overlap", "apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm",
    "multi_latent_attention",
)  # fmt: skip
# Selective recompute runs these parts again outside of the region in which linears quantize.
_WITH_LINEARS = ("mlp", "moe", "shared_experts")


def transformer_engine_problems(config: Any, num_moe_experts: int | None) -> Iterator[BrokenRule]:
    """What `config` (a TransformerConfig, or flags of the same names) asks for beyond that."""
    for name in _LOCAL_ALONE:
        if getattr(config, name, False):  # some are no flags
            yield BrokenRule(name, "is not built for transformer_impl transformer_engine; transformer_impl local has it", False)
    if config.pipeline_schedule == "zero-bubble":
        rule = "zero-bubble excludes transformer_impl transformer_engine, whose linears compute all gradients at once"
        yield BrokenRule("pipeline_schedule", rule, "1f1b")
    kinds = comm_types_of(config.cp_comm_type, 1) if config.context_parallel_size > 1 else []
    if config.window_size is not None and any(kind in ("p2p", "a2a+p2p") for kind in kinds):
        yield BrokenRule("cp_comm_type", "of transformer_impl transformer_engine has no sliding window in a ring", "all_gather")
    yield from _fp8_problems(config, num_moe_experts)


def _fp8_problems(config: Any, num_moe_experts: int | None) -> Iterator[BrokenRule]:
    precision, recipe = getattr(config, "fp8", None), getattr(config, "fp8_recipe", "delayed")
    if not precision:
        return
    if precision not in PRECISIONS:
        yield BrokenRule("fp8", f"must be {' or '.join(PRECISIONS)}", "hybrid")
    if recipe not in RECIPES:
        rule = f"is not built for transformer_impl transformer_engine, whose recipes here are {', '.join(RECIPES)}"
        yield BrokenRule("fp8_recipe", rule, "tensorwise")
    if not getattr(config, "fp8_wgrad", True):
        yield BrokenRule("fp8_wgrad", "False is not built for transformer_impl transformer_engine; transformer_impl local has it", True)
    if num_moe_experts and not config.moe_grouped_gemm:
        rule = "with fp8 and transformer_impl transformer_engine needs moe_grouped_gemm, which pads each expert's rows to what fp8 takes"
        yield BrokenRule("num_moe_experts", rule)
    if again := [part for part in config.recompute_modules or () if part in _WITH_LINEARS]:
        rule = f"{again[0]} excludes fp8 with transformer_impl transformer_engine; full recompute goes with it"
        yield BrokenRule("recompute_modules", rule, "core_attn")
