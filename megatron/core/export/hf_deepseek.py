"""DeepSeek-V2 and V3: their config.json as our flags, and back.

What they share: multi-latent attention with normalized latents, dense layers before those with experts, shared experts. V2's gate is a
softmax over all experts, V3's a sigmoid with a bias that chooses. Our model says them but for these, which are refused by name: an epsilon
of norms other than 1e-6 (theirs of the latents always is that), YaRN from another length than 4096, groups scored in another way.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.export.hf_configs import (
    _SAME,
    PLAIN,
    ConversionError,
    Flags,
    _need,
    _refuse_unless,
    normalized,
    rope_factor,
    rope_of,
)
from megatron.core.transformer.moe.settings import moe_layer_pattern

# config.json, our flag
_LATENTS = (
    ("kv_lora_rank", "kv_lora_rank"),
    ("qk_nope_head_dim", "qk_head_dim"),
    ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    ("v_head_dim", "v_head_dim"),
)
_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}  # fixed: no flag of ours says them
_EPSILON = 1e-6
# What a config.json that leaves it out means.
_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": _EPSILON,
}
_V2_DEFAULTS = _DEFAULTS | {
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
_V3_DEFAULTS = _DEFAULTS | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


# --- what the two share ---


def _rotary_flags(config: Mapping[str, Any]) -> Flags:
    rope, base, kind = rope_of(config, 10000)
    flags: Flags = {"position_embedding_type": "rope", "rotary_base": base}
    if kind == "default":
        return flags | {"rope_type": "rope"}
    if kind != "yarn":
        raise ConversionError(f"config.json: rope scaling {kind!r} is not converted: our latent attention has yarn")
    _refuse_unless(rope, "our yarn has it fixed", **_YARN, truncate=True)
    if rope.get("attention_factor") is not None:
        raise ConversionError("config.json: rope scaling's attention_factor is not converted: give mscale and mscale_all_dim")
    factors = rope.get("mscale"), rope.get("mscale_all_dim")
    if bool(factors[0]) != bool(factors[1]):
        rule = "transformers reads one alone in another way than DeepSeek's own code"
        raise ConversionError(f"config.json: mscale {factors[0]} with mscale_all_dim {factors[1]} is not converted: {rule}")
    mscale, all_dim = (float(factors[0]), float(factors[1])) if factors[0] and factors[1] else (1.0, 0.0)
    return flags | {"rope_type": "yarn", "rotary_scaling_factor": rope_factor(rope, kind), "mscale": mscale, "mscale_all_dim": all_dim}


def _rotary_config(flags: Flags) -> dict[str, Any]:
    """In the older spelling, which all versions of transformers read."""
    found: dict[str, Any] = {"rope_theta": float(flags["rotary_base"])}
    if flags["rope_type"] != "yarn":
        return found
    factors = {name: flags[name] for name in ("mscale", "mscale_all_dim")}
    if factors == {"mscale": 1.0, "mscale_all_dim": 0.0}:
        factors = {}
    return found | {"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": flags["rotary_scaling_factor"], **_YARN, **factors}}


def _experts_flags(config: Mapping[str, Any], layers: int) -> Flags:
    """Where any layer has experts; those before first_k_dense_replace are dense."""
    _refuse_unless(config, "every layer behind the dense ones has experts", moe_layer_freq=1)
    dense = config["first_k_dense_replace"] or 0
    if dense >= layers:
        return {}
    width = _need(config, "moe_intermediate_size")
    return {
        "num_experts": _need(config, "n_routed_experts"),
        "moe_router_topk": _need(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
        "moe_shared_expert_intermediate_size": width * _need(config, "n_shared_experts"),
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_router_num_groups": config.get("n_group"),
        "moe_router_group_topk": config.get("topk_group"),
    }


def _flags(config: Mapping[str, Any], **gate: Any) -> Flags:
    _refuse_unless(config, hidden_act=("silu", "swish"), attention_bias=False, mlp_bias=False)
    _refuse_unless(config, "norms of latents have this one whatever it says, and ours are all alike", rms_norm_eps=_EPSILON)
    heads, layers = _need(config, "num_attention_heads"), _need(config, "num_hidden_layers")
    _refuse_unless(config, "each head has a key and a value of its own", num_key_value_heads=heads)
    experts = _experts_flags(config, layers)
    flags = PLAIN | {name: _need(config, theirs) for theirs, name in (*_SAME, *_LATENTS)}
    flags |= {
        "multi_latent_attention": True,
        "q_lora_rank": None if config["q_lora_rank"] is None else _need(config, "q_lora_rank"),
        "kv_channels": flags["qk_head_dim"],
        "qk_layernorm": True,
        "layernorm_epsilon": config["rms_norm_eps"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        **_rotary_flags(config),
        **experts,
        **(gate if experts else {}),
    }
    return normalized(flags)


def _config(flags: Flags) -> dict[str, Any]:
    heads, layers, experts = flags["num_attention_heads"], flags["num_layers"], flags["num_experts"]
    pattern = moe_layer_pattern(flags["moe_layer_freq"], layers) if experts else [0] * layers
    width, shared = flags["moe_ffn_hidden_size"] or 0, flags["moe_shared_expert_intermediate_size"] or 0
    mixture = {
        "n_routed_experts": experts,
        "num_experts_per_tok": flags["moe_router_topk"],
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width if width else 0,
        "routed_scaling_factor": flags["moe_router_topk_scaling_factor"] or 1.0,
        "n_group": flags["moe_router_num_groups"] or 1,
        "topk_group": flags["moe_router_group_topk"] or 1,
    }
    return {
        **{theirs: flags[name] for theirs, name in (*_SAME, *_LATENTS)},
        "q_lora_rank": flags["q_lora_rank"],
        "num_key_value_heads": heads,
        "rms_norm_eps": flags["layernorm_epsilon"],
        "tie_word_embeddings": not flags["untie_embeddings_and_output_weights"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "first_k_dense_replace": (pattern + [1]).index(1),
        **(mixture if experts else {}),
        **_rotary_config(flags),
    }


# --- V2 ---


def deepseek_v2_flags(config: Mapping[str, Any]) -> Flags:
    config = {**_V2_DEFAULTS, **config}
    _refuse_unless(config, "a softmax over all experts", scoring_func="softmax", norm_topk_prob=False)
    _refuse_unless(config, topk_method=("greedy", "group_limited_greedy"))
    if config["topk_method"] == "greedy":
        config |= {"n_group": None, "topk_group": None}
    elif _need(config, "topk_group") < _need(config, "n_group"):
        scored_by = _need(config, "num_experts_per_tok") // config["topk_group"]
        if scored_by > 1:
            rule = f"there a group's score is its best expert's, ours the sum of its best {scored_by}"
            raise ConversionError(f"config.json: topk_method 'group_limited_greedy' is not converted ({rule}); 'greedy' is")
    return _flags(config, moe_router_pre_softmax=True)


def deepseek_v2_config(flags: Flags) -> dict[str, Any]:
    limited = flags["moe_router_num_groups"] is not None
    return {**_config(flags), "topk_method": "group_limited_greedy" if limited else "greedy", "norm_topk_prob": False}


# --- V3 ---


def deepseek_v3_flags(config: Mapping[str, Any]) -> Flags:
    config = {**_V3_DEFAULTS, **config}
    _refuse_unless(config, scoring_func="sigmoid", topk_method="noaux_tc")
    _refuse_unless(config, "our pairs that turn are neighbours", rope_interleave=True)
    flags = _flags(config, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    if flags["num_experts"] is None:
        return flags
    topk = flags["moe_router_topk"]
    _refuse_unless(config, f"weights of {topk} experts: ours sum to 1 where there are several", norm_topk_prob=topk > 1)
    groups, limit = flags["moe_router_num_groups"], flags["moe_router_group_topk"]
    if groups is not None and min(max(1, topk // limit), flags["num_experts"] // groups) != 2:
        rule = f"there a group's score is the sum of its best 2 experts, ours of its best {max(1, topk // limit)}"
        raise ConversionError(f"config.json: num_experts_per_tok {topk} with topk_group {limit} is not converted: {rule}")
    return flags


def deepseek_v3_config(flags: Flags) -> dict[str, Any]:
    return {
        **_config(flags),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": flags["moe_router_topk"] > 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
    }
