"""A family's config.json as our flags of a model, and back.

Flags are complete: every name of PLAIN and SHAPE has a value, in one spelling (`normalized`), so that two sets are the same model where
they are equal. What a config.json asks for and our model does not have is refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.transformer.attention_masks import is_window_layer
from megatron.core.transformer.default_sizes import default_ffn_hidden_size, default_kv_channels
from megatron.core.transformer.moe.settings import moe_layer_pattern

Flags = dict[str, Any]
ConfigReader = Callable[[Mapping[str, Any]], Flags]
ConfigWriter = Callable[[Flags], dict[str, Any]]


class ConversionError(ValueError):
    """A model that cannot be converted, or whose files do not hold what they must."""


# Every flag of a model's architecture besides its shape -> what a model has that knows nothing of it.
PLAIN: Flags = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "apply_residual_connection_post_layernorm": False,
    "group_query_attention": False,
    "kv_lora_rank": 32,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk": 2,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "moe_shared_expert_intermediate_size": None,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "normalization": "LayerNorm",
    "num_experts": None,
    "num_query_groups": 1,
    "openai_gelu": False,
    "position_embedding_type": "learned_absolute",
    "q_lora_rank": None,
    "qk_head_dim": 128,
    "qk_layernorm": False,
    "qk_pos_emb_head_dim": 64,
    "quick_geglu": False,
    "rope_scaling_factor": 8.0,
    "rope_type": None,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "squared_relu": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "use_rope_scaling": False,
    "v_head_dim": 128,
    "window_attn_skip_freq": None,
    "window_size": None,
}
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings")
_EXPERTS_ALONE = tuple(name for name in PLAIN if name.startswith("moe_"))
_LATENTS_ALONE = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_YARN_ALONE = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
_ROPE_ALONE = tuple(name for name in PLAIN if name.startswith(("rotary_", "rope_")) or name == "use_rope_scaling")


def flags_of_checkpoint(saved: Mapping[str, Any]) -> Flags:
    """The complete flags of a checkpoint's arguments. Raises ConversionError when they do not give the model's shape."""
    found = {name: saved.get(name, plain) for name, plain in PLAIN.items()}
    found |= {name: saved.get(name) for name in SHAPE}
    if found["kv_channels"] is None and found["hidden_size"] and found["num_attention_heads"]:
        found["kv_channels"] = default_kv_channels(found["hidden_size"], found["num_attention_heads"])
    if found["ffn_hidden_size"] is None and found["hidden_size"]:
        found["ffn_hidden_size"] = default_ffn_hidden_size(found["hidden_size"], found["swiglu"] or found["quick_geglu"])
    gated_or_other = found["swiglu"] or found["quick_geglu"] or found["squared_relu"]
    if saved.get("bias_gelu_fusion", True) and found["add_bias_linear"] and not gated_or_other:
        found["openai_gelu"] = True  # GELU with its bias in one kernel is the tanh approximation, here as in Megatron-LM
    missing = [name for name in SHAPE if found[name] is None]
    if missing:
        raise ConversionError(f"the checkpoint's arguments do not say {', '.join(missing)}: it must have been saved with `args`")
    return normalized(found)


def normalized(flags: Flags) -> Flags:
    """The same model's flags in one spelling: what nothing reads at its plain value, sizes that follow from others written out."""
    flags = {name: tuple(value) if name == "window_size" and value else value for name, value in flags.items()}
    if flags["num_experts"] is None:
        flags |= {name: PLAIN[name] for name in _EXPERTS_ALONE}
    else:
        flags["moe_ffn_hidden_size"] = flags["moe_ffn_hidden_size"] or flags["ffn_hidden_size"]
        pattern = moe_layer_pattern(flags["moe_layer_freq"], flags["num_layers"])
        flags["moe_layer_freq"] = 1 if flags["moe_layer_freq"] == 1 else pattern
        if all(pattern):  # no layer reads it
            flags["ffn_hidden_size"] = flags["moe_ffn_hidden_size"]
        flags |= _normalized_gate(flags)
    if flags["multi_latent_attention"]:
        flags |= _normalized_latents(flags)
    else:
        flags |= {name: PLAIN[name] for name in (*_LATENTS_ALONE, *_YARN_ALONE, "rope_type")}
        if flags["position_embedding_type"] != "rope":
            flags |= {name: PLAIN[name] for name in _ROPE_ALONE}
    if not flags["use_rope_scaling"]:
        flags["rope_scaling_factor"] = PLAIN["rope_scaling_factor"]
    if not flags["group_query_attention"] or flags["num_query_groups"] == flags["num_attention_heads"]:
        flags |= {"group_query_attention": False, "num_query_groups": 1}
    if flags["add_bias_linear"]:
        flags["add_qkv_bias"] = False  # it has one
    if flags["window_size"] is None or (isinstance(flags["window_attn_skip_freq"], list) and all(flags["window_attn_skip_freq"])):
        flags["window_attn_skip_freq"] = None
    return flags


def _normalized_gate(flags: Flags) -> Flags:
    """Another spelling of a gate's flags: nothing reads pre-softmax beside another function, all groups are none, 1 scales nothing."""
    all_groups = flags["moe_router_num_groups"] == flags["moe_router_group_topk"]
    return {
        "moe_router_pre_softmax": flags["moe_router_pre_softmax"] and flags["moe_router_score_function"] == "softmax",
        "moe_router_num_groups": None if all_groups else flags["moe_router_num_groups"],
        "moe_router_group_topk": None if all_groups else flags["moe_router_group_topk"],
        "moe_router_topk_scaling_factor": None
        if flags["moe_router_topk_scaling_factor"] == 1.0
        else flags["moe_router_topk_scaling_factor"],
    }


def _normalized_latents(flags: Flags) -> Flags:
    """Latent attention has rotary positions whether asked for or not, and no kv_channels; yarn that stretches by 1 is rope."""
    rope = flags["rope_type"] == "rope" or flags["rotary_scaling_factor"] == 1.0
    return {
        "position_embedding_type": "rope" if flags["position_embedding_type"] == "none" else flags["position_embedding_type"],
        "kv_channels": flags["qk_head_dim"],
        **({"rope_type": "rope"} | {name: PLAIN[name] for name in _YARN_ALONE} if rope else {"rope_type": "yarn"}),
    }


def exact_gelu(flags: Flags) -> bool:
    """Whether the model has the GELU that is not the tanh approximation: in training it takes --no-bias-gelu-fusion."""
    return not any(flags[name] for name in ("openai_gelu", "swiglu", "quick_geglu", "squared_relu"))


def differences(ours: Flags, theirs: Flags) -> list[str]:
    """Names with both values, of what is not the same."""
    return [f"{name} {ours[name]!r} instead of {theirs[name]!r}" for name in (*SHAPE, *PLAIN) if ours[name] != theirs[name]]


def _need(config: Mapping[str, Any], name: str) -> int:
    """A size."""
    value = config.get(name)
    if value is None:
        raise ConversionError(f"config.json lacks {name}")
    if not isinstance(value, int) or value < 1:
        raise ConversionError(f"config.json: {name} is {value!r}, it must be a whole number of at least 1")
    return value


def _refuse_unless(config: Mapping[str, Any], why: str = "our model does not have it", **wanted: Any) -> None:
    """Each of `wanted` is what a config must say, if it says anything (a tuple: one of them)."""
    for name, value in wanted.items():
        allowed = value if isinstance(value, tuple) else (value,)
        if config.get(name) is not None and config[name] not in allowed:
            raise ConversionError(f"config.json: {name} = {config[name]!r} is not converted ({why}); {allowed[0]!r} is")


# --- rotary positions ---


def rope_of(config: Mapping[str, Any], default_base: int) -> tuple[dict[str, Any], int, str]:
    """(everything that is said of rotary positions, base, kind of scaling), from both spellings: `rope_parameters`, and the older
    `rope_theta` with `rope_scaling`."""
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= {name: value for name, value in (config.get("rope_parameters") or {}).items() if value is not None}
    base, kind = rope["rope_theta"] or default_base, rope.get("rope_type", rope.get("type", "default"))
    if base != int(base):
        raise ConversionError(f"config.json: rope_theta {base} is not converted: --rotary-base is a whole number")
    _refuse_unless({"partial_rotary_factor": config.get("partial_rotary_factor"), **rope}, partial_rotary_factor=1.0)
    return rope, int(base), kind


def rope_factor(rope: Mapping[str, Any], kind: str) -> float:
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise ConversionError(f"config.json: rope scaling {kind!r} has factor {factor!r}, it must be a number of at least 1")
    return float(factor)


def _rope_flags(config: Mapping[str, Any], default_base: int) -> Flags:
    rope, base, kind = rope_of(config, default_base)
    flags: Flags = {"position_embedding_type": "rope", "rotary_base": base}
    if kind == "default":
        return flags
    factor = rope_factor(rope, kind)
    if kind == "linear" and factor == int(factor):
        return flags | {"rotary_seq_len_interpolation_factor": int(factor)}
    if kind != "llama3":
        raise ConversionError(
            f"config.json: rope scaling {kind!r} (factor {factor}) is not converted: our model has llama3, and linear by a whole number"
        )
    fixed = "--use-rope-scaling has it fixed"
    _refuse_unless(rope, fixed, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return flags | {"use_rope_scaling": True, "rope_scaling_factor": factor}


def _rope_config(flags: Flags) -> dict[str, Any]:
    """In the older spelling, which all versions of transformers read."""
    found: dict[str, Any] = {"rope_theta": float(flags["rotary_base"])}
    if flags["use_rope_scaling"]:
        found["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": flags["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif flags["rotary_seq_len_interpolation_factor"]:
        found["rope_scaling"] = {"rope_type": "linear", "factor": float(flags["rotary_seq_len_interpolation_factor"])}
    return found


# --- LLaMA and those that follow it ---

# config.json, our flag
_SAME = (
    ("hidden_size", "hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_attention_heads"),
    ("intermediate_size", "ffn_hidden_size"),
    ("max_position_embeddings", "max_position_embeddings"),
)


def _llama_like(config: Mapping[str, Any], *, base: int = 10000, epsilon: float = 1e-6, groups: int | None = None, **own: Any) -> Flags:
    """base, epsilon, groups: the family's own defaults, for a config.json that does not say."""
    _refuse_unless(config, hidden_act=("silu", "swish"))
    flags = PLAIN | {name: _need(config, theirs) for theirs, name in _SAME}
    heads = flags["num_attention_heads"]
    flags |= {
        "kv_channels": config.get("head_dim") or default_kv_channels(flags["hidden_size"], heads),
        "group_query_attention": True,
        "num_query_groups": config.get("num_key_value_heads") or groups or heads,
        "layernorm_epsilon": config.get("rms_norm_eps", epsilon),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        **_rope_flags(config, base),
        **own,
    }
    if flags["kv_channels"] is None:
        rule = f"is no multiple of num_attention_heads {heads}, and there is no head_dim"
        raise ConversionError(f"config.json: hidden_size {flags['hidden_size']} {rule}")
    return normalized(flags)


def _llama_like_config(flags: Flags) -> dict[str, Any]:
    heads = flags["num_attention_heads"]
    return {
        **{theirs: flags[name] for theirs, name in _SAME},
        "head_dim": flags["kv_channels"],
        "num_key_value_heads": flags["num_query_groups"] if flags["group_query_attention"] else heads,
        "rms_norm_eps": flags["layernorm_epsilon"],
        "tie_word_embeddings": not flags["untie_embeddings_and_output_weights"],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **_rope_config(flags),
    }


def llama_flags(config: Mapping[str, Any]) -> Flags:
    biases = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if biases[0] != biases[1]:
        raise ConversionError(
            f"config.json: attention_bias {biases[0]} with mlp_bias {biases[1]} is not converted: our linear layers all have biases or none"
        )
    return _llama_like(config, add_bias_linear=biases[0])


def llama_config(flags: Flags) -> dict[str, Any]:
    return {**_llama_like_config(flags), "attention_bias": flags["add_bias_linear"], "mlp_bias": flags["add_bias_linear"]}


def _window(width: int | None) -> tuple[int, int] | None:
    """transformers counts a query's own key, we do not."""
    return None if width is None else (width - 1, 0)


def mistral_flags(config: Mapping[str, Any]) -> Flags:
    return _llama_like(config, groups=8, window_size=_window(config.get("sliding_window", 4096)))


def mistral_config(flags: Flags) -> dict[str, Any]:
    window = flags["window_size"]
    return {**_llama_like_config(flags), "sliding_window": None if window is None else window[0] + 1}


def _qwen_windows(config: Mapping[str, Any], layers: int) -> Flags:
    """With use_sliding_window the layers from max_window_layers on have a window, or those that layer_types names."""
    width = config.get("sliding_window", 4096)
    if not config.get("use_sliding_window") or width is None:
        return {}
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if not set(kinds) <= {"full_attention", "sliding_attention"} or len(kinds) != layers:
        raise ConversionError(f"config.json: layer_types {kinds} is not converted: {layers} of full_attention or sliding_attention are")
    windows = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": _window(width), "window_attn_skip_freq": windows} if any(windows) else {}


def _qwen_config(flags: Flags) -> dict[str, Any]:
    config, window, layers = _llama_like_config(flags), flags["window_size"], flags["num_layers"]
    if window is None:
        return {**config, "use_sliding_window": False}
    windows = [is_window_layer(window, flags["window_attn_skip_freq"], number) for number in range(1, layers + 1)]
    kinds = ["sliding_attention" if has else "full_attention" for has in windows]
    return {**config, "use_sliding_window": True, "sliding_window": window[0] + 1, "max_window_layers": 0, "layer_types": kinds}


def qwen2_flags(config: Mapping[str, Any]) -> Flags:
    return _llama_like(config, groups=32, add_qkv_bias=True, **_qwen_windows(config, _need(config, "num_hidden_layers")))


def qwen3_flags(config: Mapping[str, Any]) -> Flags:
    _refuse_unless(config, "our attention has biases in the QKV projection alone, or all linear layers have", attention_bias=False)
    own = {"kv_channels": config.get("head_dim") or 128}
    return _llama_like(config, groups=32, qk_layernorm=True, **own, **_qwen_windows(config, _need(config, "num_hidden_layers")))


qwen2_config, qwen3_config = _qwen_config, _qwen_config


def mixtral_flags(config: Mapping[str, Any]) -> Flags:
    own = {
        "num_experts": config.get("num_local_experts", 8),
        "moe_router_topk": config.get("num_experts_per_tok", 2),
        "moe_ffn_hidden_size": _need(config, "intermediate_size"),
        "window_size": _window(config.get("sliding_window")),
    }
    return _llama_like(config, base=1000000, epsilon=1e-5, groups=8, **own)


def mixtral_config(flags: Flags) -> dict[str, Any]:
    return {
        **mistral_config(flags),
        "num_local_experts": flags["num_experts"],
        "num_experts_per_tok": flags["moe_router_topk"],
        "intermediate_size": flags["moe_ffn_hidden_size"],
    }


def qwen3_moe_flags(config: Mapping[str, Any]) -> Flags:
    layers, every, dense = _need(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    pattern = [int(layer not in dense and (layer + 1) % every == 0) for layer in range(layers)]
    if not any(pattern):
        raise ConversionError("config.json: decoder_sparse_step and mlp_only_layers leave no layer with experts: that is model_type qwen3")
    _refuse_unless(config, "our attention has biases in the QKV projection alone, or all linear layers have", attention_bias=False)
    own = {
        "qk_layernorm": True,
        "num_experts": config.get("num_experts") or config.get("num_local_experts") or 128,
        "moe_router_topk": config.get("num_experts_per_tok", 8),
        "moe_ffn_hidden_size": _need(config, "moe_intermediate_size"),
        "moe_layer_freq": 1 if all(pattern) else pattern,
        # weights of the chosen experts that do not sum to 1: those of a softmax over all of them
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None  # of all layers, whatever max_window_layers
    return _llama_like(config, groups=4, window_size=_window(window), **own)


def qwen3_moe_config(flags: Flags) -> dict[str, Any]:
    pattern = moe_layer_pattern(flags["moe_layer_freq"], flags["num_layers"]) if flags["num_experts"] else [0]
    return {
        **mistral_config(flags),
        "use_sliding_window": flags["window_size"] is not None,
        "num_experts": flags["num_experts"],
        "num_experts_per_tok": flags["moe_router_topk"],
        "moe_intermediate_size": flags["moe_ffn_hidden_size"] or flags["ffn_hidden_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, moe in enumerate(pattern) if not moe],
        "norm_topk_prob": not flags["moe_router_pre_softmax"],
    }


# --- GPT-2 ---


def gpt2_flags(config: Mapping[str, Any]) -> Flags:
    activations = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}
    activation = config.get("activation_function", "gelu_new")
    _refuse_unless(config, activation_function=tuple(activations), add_cross_attention=False)
    _refuse_unless(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    hidden, heads = _need(config, "n_embd"), _need(config, "n_head")
    flags = PLAIN | {
        "num_layers": _need(config, "n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": default_kv_channels(hidden, heads),
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "max_position_embeddings": config.get("n_positions") or config.get("n_ctx") or 1024,
        "layernorm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "openai_gelu": activations[activation],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
    }
    if flags["kv_channels"] is None:
        raise ConversionError(f"config.json: n_embd {hidden} is no multiple of n_head {heads}")
    return normalized(flags)


def gpt2_config(flags: Flags) -> dict[str, Any]:
    return {
        "n_layer": flags["num_layers"],
        "n_embd": flags["hidden_size"],
        "n_head": flags["num_attention_heads"],
        "n_inner": flags["ffn_hidden_size"],
        "n_positions": flags["max_position_embeddings"],
        "n_ctx": flags["max_position_embeddings"],
        "layer_norm_epsilon": flags["layernorm_epsilon"],
        "activation_function": "gelu_new" if flags["openai_gelu"] else "gelu",
        "tie_word_embeddings": not flags["untie_embeddings_and_output_weights"],
    }
