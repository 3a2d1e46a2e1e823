"""Which activations are made again in the backward pass instead of being kept: what may be asked for. No torch.

full: whole layers. `uniform` drops what is inside each run of recompute_num_layers layers; `block` does so for the first
recompute_num_layers layers of a stage, one by one, and keeps everything of the others. selective: the named parts of every layer.
"""

from collections.abc import Iterator, Sequence

from megatron.core.broken_rule import BrokenRule

GRANULARITIES = ("full", "selective")
METHODS = ("uniform", "block")
# Parts of a layer: `core_attn` scores, softmax and context; `mlp` the feed-forward half; `layernorm` the outputs of both norms;
# of a mixture of experts `moe` all of it, `moe_act` the outputs of the experts' activation function, `shared_experts`; of multi-latent
# attention `mla_up_proj` the queries, keys and values that are made of the latents.
BUILT_MODULES = ("core_attn", "mlp", "layernorm", "moe", "moe_act", "shared_experts", "mla_up_proj")
DEFAULT_MODULES = ("core_attn",)


def recompute_problems(
    granularity: str | None, method: str | None, num_layers: int | None, modules: Sequence[str] | None, total_layers: int | None
) -> Iterator[BrokenRule]:
    """What is wrong with the four recompute_* settings."""
    if granularity not in (None, *GRANULARITIES):
        yield BrokenRule("recompute_granularity", f"must be {' or '.join(GRANULARITIES)}", "selective")
    if method not in (None, *METHODS):
        yield BrokenRule("recompute_method", f"must be {' or '.join(METHODS)}", "uniform")
    if granularity == "full":
        if method is None:
            yield BrokenRule("recompute_method", "is required for full recompute", "uniform")
        if num_layers is None:
            yield BrokenRule("recompute_num_layers", "is required for full recompute", 1)
    else:
        for name, value in (("recompute_method", method), ("recompute_num_layers", num_layers)):
            if value is not None:
                yield BrokenRule(name, "is for full recompute only: it needs recompute_granularity full")
    if num_layers is not None and total_layers and not 1 <= num_layers <= total_layers:
        yield BrokenRule("recompute_num_layers", f"must be between 1 and the model's {total_layers} layers", 1)
    if modules is not None and granularity != "selective":
        yield BrokenRule("recompute_modules", "are for selective recompute only: they need recompute_granularity selective")
    for module in modules or ():
        if module not in BUILT_MODULES:
            yield BrokenRule("recompute_modules", f"{module} is no part of a layer; there are {', '.join(BUILT_MODULES)}", "core_attn")
