"""What may be asked for of FP8, for the command line and for configs made in Python. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.broken_rule import BrokenRule

FORMATS = ("e4m3", "hybrid")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
ONE_SCALE = ("tensorwise", "delayed")
AMAX_ALGOS = ("most_recent", "max")
ALIGNMENT = 16  # of the dimensions of a product, in elements
LARGEST_MARGIN = 17  # e4m3 reaches from 2 ** -9 to 1.75 * 2 ** 8: of a scale still smaller the largest number would become 0


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
    for name, known, works in (
        ("fp8", FORMATS, "hybrid"),
        ("fp8_recipe", RECIPES, "delayed"),
        ("fp8_amax_compute_algo", AMAX_ALGOS, "max"),
    ):
        if getattr(settings, name) not in known:
            yield BrokenRule(name, f"must be one of {', '.join(known)}", works)
    if settings.fp8_amax_history_len < 1:
        yield BrokenRule("fp8_amax_history_len", "must be at least 1", 1)
    if not 0 <= settings.fp8_margin <= LARGEST_MARGIN:
        rule = f"must be between 0 and {LARGEST_MARGIN} powers of two: with more every number becomes 0, with less the largest are cut off"
        yield BrokenRule("fp8_margin", rule, 0)
    if not settings.bf16:
        yield BrokenRule("bf16", "is needed by FP8: in it is all that FP8 leaves, and the copy of the weights that is quantized", True)
    if settings.tp_comm_overlap:
        yield BrokenRule("tp_comm_overlap", "is built for products in bf16, and these are in FP8")
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if num_layers and settings.first_last_layers_bf16 and not 0 <= getattr(settings, name) <= num_layers:
            yield BrokenRule(name, f"must be between 0 and the model's {num_layers} layers", 1)
    yield from _size_problems(settings, groups)


def _size_problems(settings: Any, groups: int | None) -> Iterator[BrokenRule]:
    """Sizes of a rank's matrices that are no multiple of ALIGNMENT."""
    tp, heads, width = settings.tensor_model_parallel_size, settings.num_attention_heads, settings.kv_channels
    odd_hidden = settings.hidden_size and settings.hidden_size % ALIGNMENT
    if odd_hidden:
        works = -(-settings.hidden_size // ALIGNMENT) * ALIGNMENT
        yield BrokenRule("hidden_size", f"must be a multiple of {ALIGNMENT}, as all sizes of FP8 products", works)
    if not tp or tp < 1:
        return
    if getattr(settings, "multi_latent_attention", False):
        yield from _latent_size_problems(settings, tp)
    elif heads and width and groups and heads % tp == 0 and groups % tp == 0 and not (odd_hidden and width * heads == settings.hidden_size):
        outputs, inputs = (heads + 2 * groups) * width // tp, heads * width // tp
        if outputs % ALIGNMENT or inputs % ALIGNMENT:
            rule = f"gives a rank {outputs} rows of queries, keys and values, {inputs} of heads: FP8 products need multiples of {ALIGNMENT}"
            yield BrokenRule("kv_channels", rule, -(-width // ALIGNMENT) * ALIGNMENT)
    for name, of, ranks in (
        ("ffn_hidden_size", "", tp),
        ("moe_ffn_hidden_size", " of an expert", settings.expert_tensor_parallel_size or tp),
        ("moe_shared_expert_intermediate_size", " of the shared experts", tp),
    ):
        size = getattr(settings, name)
        if size and size % ranks == 0 and size // ranks % ALIGNMENT:
            rule = f"gives a rank {size // ranks} channels{of}: FP8 products need a multiple of {ALIGNMENT}"
            yield BrokenRule(name, rule, -(-size // (ALIGNMENT * ranks)) * ALIGNMENT * ranks)


def _latent_size_problems(settings: Any, tp: int) -> Iterator[BrokenRule]:
    """Of latent attention. The projections down to the latents stay in bf16."""
    for name in ("q_lora_rank", "kv_lora_rank"):
        rank = getattr(settings, name)
        if rank and rank % ALIGNMENT:
            yield BrokenRule(name, f"must be a multiple of {ALIGNMENT}, as all sizes of FP8 products", -(-rank // ALIGNMENT) * ALIGNMENT)
    heads = settings.num_attention_heads
    if not heads or heads % tp:
        return
    for name, of in (("v_head_dim", "values"), ("qk_head_dim", "keys"), ("qk_pos_emb_head_dim", "turning channels")):
        rows = heads // tp * getattr(settings, name)
        if rows % ALIGNMENT:
            rule = f"gives a rank {rows} rows of {of}: FP8 products need multiples of {ALIGNMENT}"
            yield BrokenRule(name, rule, -(-getattr(settings, name) // ALIGNMENT) * ALIGNMENT)
