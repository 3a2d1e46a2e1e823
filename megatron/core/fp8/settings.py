"""What may be asked for of FP8, for the command line and for configs made in Python. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.broken_rule import BrokenRule

FORMATS = ("e4m3", "hybrid")
RECIPES = ("mxfp8", "blockwise", "tensorwise", "delayed")
ONE_SCALE = ("tensorwise", "delayed")
AMAX_ALGOS = ("most_recent", "max")
ALIGNMENT = 16  # of the dimensions of a product, in elements


@dataclass(frozen=True)
class Fp8Settings:
    """One linear's, from `fp8_settings`. hybrid: gradients have two mantissa bits and a wider range."""

    recipe: str
    hybrid: bool
    margin: int = 0
    history_len: int = 1
    algo: str = "most_recent"
    wgrad: bool = True  # False: weight gradients are products of unquantized tensors

    @property
    def delayed(self) -> bool:
        return self.recipe == "delayed"

    @property
    def one_scale(self) -> bool:
        """For a tensor, where other recipes have one for each block."""
        return self.recipe in ONE_SCALE


def fp8_settings(config: Any, layer: int) -> Fp8Settings | None:
    """Of the layer counted over the whole model from 0; None where its products are not in FP8."""
    if not config.fp8 or layer_stays_in_bf16(config, layer):
        return None
    return Fp8Settings(
        recipe=str(config.fp8_recipe),
        hybrid=config.fp8 == "hybrid",
        margin=config.fp8_margin,
        history_len=config.fp8_amax_history_len,
        algo=config.fp8_amax_compute_algo,
        wgrad=config.fp8_wgrad,
    )


def layer_stays_in_bf16(config: Any, layer: int) -> bool:
    """With first_last_layers_bf16: one of the layers at the start or the end."""
    if not config.first_last_layers_bf16:
        return False
    return layer < config.num_layers_at_start_in_bf16 or layer >= config.num_layers - config.num_layers_at_end_in_bf16


def fp8_problems(settings: Any, num_layers: int | None, groups: int | None) -> Iterator[BrokenRule]:
    """Everything that is wrong with the fp8_* fields of `settings` (flags or a config), under TransformerConfig's names.

    groups: of keys and values, in the whole model.
    """
    if not settings.fp8:
        return
    for name, known in (("fp8", FORMATS), ("fp8_recipe", RECIPES), ("fp8_amax_compute_algo", AMAX_ALGOS)):
        if getattr(settings, name) not in known:
            yield BrokenRule(name, f"must be one of {', '.join(known)}", known[-1])
    if settings.fp8_amax_history_len < 1:
        yield BrokenRule("fp8_amax_history_len", "must be at least 1", 1)
    if not settings.bf16:
        yield BrokenRule("fp8", "needs bf16: so is all that is not in FP8, and the copy of the weights that is quantized")
    if settings.tp_comm_overlap:
        yield BrokenRule("tp_comm_overlap", "is built for products in bf16, and these are in FP8")
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if num_layers and settings.first_last_layers_bf16 and not 0 <= getattr(settings, name) <= num_layers:
            yield BrokenRule(name, f"must be between 0 and the model's {num_layers} layers", 1)
    yield from _size_problems(settings, groups)


def _size_problems(settings: Any, groups: int | None) -> Iterator[BrokenRule]:
    """Sizes of a rank's matrices that are no multiple of ALIGNMENT; those of special layers are seen when the model is built."""
    tp, heads, width = settings.tensor_model_parallel_size, settings.num_attention_heads, settings.kv_channels
    if settings.hidden_size and settings.hidden_size % ALIGNMENT:
        works = -(-settings.hidden_size // ALIGNMENT) * ALIGNMENT
        yield BrokenRule("hidden_size", f"must be a multiple of {ALIGNMENT}, as all sizes of FP8 products", works)
    if not tp or tp < 1:
        return
    latent = getattr(settings, "multi_latent_attention", False)  # whose projections have other sizes
    if heads and width and groups and not latent and heads % tp == 0 and groups % tp == 0:
        outputs, inputs = (heads + 2 * groups) * width // tp, heads * width // tp
        if outputs % ALIGNMENT or inputs % ALIGNMENT:
            rule = f"gives a rank {outputs} rows of queries, keys and values, {inputs} of heads: FP8 products need multiples of {ALIGNMENT}"
            yield BrokenRule("kv_channels", rule, -(-width // ALIGNMENT) * ALIGNMENT)
    ffn = settings.ffn_hidden_size
    if ffn and ffn % tp == 0 and ffn // tp % ALIGNMENT:
        rule = f"gives a rank {ffn // tp} channels: FP8 products need a multiple of {ALIGNMENT}"
        yield BrokenRule("ffn_hidden_size", rule, -(-ffn // (ALIGNMENT * tp)) * ALIGNMENT * tp)
    ffn, etp = settings.moe_ffn_hidden_size, settings.expert_tensor_parallel_size or tp
    if ffn and ffn % etp == 0 and ffn // etp % ALIGNMENT and experts_are_quantized(settings):
        rule = f"gives a rank {ffn // etp} channels of an expert: FP8 products need a multiple of {ALIGNMENT}"
        yield BrokenRule("moe_ffn_hidden_size", rule, -(-ffn // (ALIGNMENT * etp)) * ALIGNMENT * etp)


def experts_are_quantized(settings: Any) -> bool:
    """Whether the products of routed experts are in FP8, of a model that has any."""
    return bool(settings.fp8) and (settings.fp8_recipe in ONE_SCALE or not settings.moe_grouped_gemm)
