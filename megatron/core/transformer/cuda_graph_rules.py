"""What CUDA graphs cannot record. No torch: the command line asks it too."""

from collections.abc import Iterator
from typing import Any

from megatron.core.broken_rule import BrokenRule

IMPLEMENTATIONS = ("none", "local", "full_iteration")
_REFUSED = {
    "recompute_granularity": "recomputing sets random states from the host",
    "moe_layer_recompute": "recomputing sets random states from the host",
    "moe_shared_expert_overlap": "its stream may still read what the next graph overwrites",
    "tp_comm_overlap": "its signals count the exchanges, which a graph would repeat with the same numbers",
    "cp_comm_overlap": "its signals count the transfers, which a graph would repeat with the same numbers",
}


def cuda_graph_problems(config: Any, num_moe_experts: int | None) -> Iterator[BrokenRule]:
    """What `config` (a TransformerConfig, or flags of the same names) asks for that its cuda_graph_impl cannot record."""
    kind = config.cuda_graph_impl
    if kind == "none":
        return

    def excludes(what: str, reason: str, works: str = "none") -> BrokenRule:
        return BrokenRule("cuda_graph_impl", f"excludes {what}: {reason}", works)

    for name, reason in _REFUSED.items():
        if getattr(config, name):
            yield excludes(name, reason)
    if kind == "full_iteration" and num_moe_experts:
        yield excludes("num_moe_experts", "experts read their tokens' counts on the host", "local")
    if config.transformer_impl == "transformer_engine":
        yield excludes("transformer_impl transformer_engine", "its modules decide on the host what to launch; transformer_impl local goes")
    if config.pipeline_schedule == "zero-bubble":
        yield excludes("pipeline_schedule zero-bubble", "weight gradients that are put off are in no layer's graph")
    if kind == "full_iteration" and config.pipeline_model_parallel_size > 1:
        yield excludes("pipeline_model_parallel_size above 1", "stages wait for each other", "local")
    if kind == "full_iteration" and config.fp16:
        yield excludes("fp16", "its loss scale is a number of the host", "local")
    if config.cuda_graph_warmup_steps < 1:
        rule = "must be at least 1: kernels are compiled, and communicators made, outside of a graph"
        yield BrokenRule("cuda_graph_warmup_steps", rule, 3)
