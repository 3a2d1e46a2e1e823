"""The families of Hugging Face models that we convert: a row of FAMILIES each.

A family says how its config.json reads as our flags (hf_configs.py) and which of its tensors make up which of ours: RULES below. Keys are
those of torch_dist checkpoints, layers' without `decoder.layers.`; `{e}` is an expert's number. The shapes are ours, by the names of
joins.Sizes; those of the file follow from them.

A new family is a row, and rules where its tensors have other names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.export import hf_configs, hf_deepseek
from megatron.core.export.hf_configs import ConfigReader, ConversionError, Flags
from megatron.core.export.joins import COPY, FUSED_QKV, GATE_UP, QKV, TRANSPOSED, VOCABULARY, Join, Sizes
from megatron.core.transformer.moe.settings import moe_layer_pattern


@dataclass(frozen=True)
class Rule:
    """One of our tensors. `only`: the condition (see _holds) under which a model has it; `fp32`: it is so whatever the weights are."""

    key: str
    names: tuple[str, ...]
    join: Join
    shape: tuple[str, ...]
    only: str = ""
    fp32: bool = False


# Ours, theirs, how, our shape.
LLAMA_ATTENTION = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), COPY, ("hidden",)),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QKV,
        ("qkv", "hidden"),
    ),
    Rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        QKV,
        ("qkv",),
        "qkv_bias",
    ),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), COPY, ("head",), "qk_norm"),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), COPY, ("head",), "qk_norm"),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), COPY, ("hidden", "queries")),
    Rule("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), COPY, ("hidden",), "bias"),
)
LLAMA_MLP = (
    Rule("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",), COPY, ("hidden",), "dense"),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATE_UP, ("gate_up", "hidden"), "dense"),
    Rule("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), GATE_UP, ("gate_up",), "bias"),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), COPY, ("hidden", "ffn"), "dense"),
    Rule("mlp.linear_fc2.bias", ("mlp.down_proj.bias",), COPY, ("hidden",), "bias"),
)
LLAMA_ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), VOCABULARY, ("padded_vocab", "hidden")),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), COPY, ("hidden",)),
    Rule("output_layer.weight", ("lm_head.weight",), VOCABULARY, ("padded_vocab", "hidden"), "untied"),
)


# Rows are theirs, head by head and latent before positions, so that nothing moves.
LATENT_ATTENTION = (
    Rule("input_layernorm.weight", ("input_layernorm.weight",), COPY, ("hidden",)),
    Rule("self_attention.linear_q_proj.weight", ("self_attn.q_proj.weight",), COPY, ("latent_queries", "hidden"), "q_whole"),
    Rule("self_attention.linear_q_down_proj.weight", ("self_attn.q_a_proj.weight",), COPY, ("q_rank", "hidden"), "q_latent"),
    Rule("self_attention.linear_q_up_proj.layer_norm_weight", ("self_attn.q_a_layernorm.weight",), COPY, ("q_rank",), "q_latent"),
    Rule("self_attention.linear_q_up_proj.weight", ("self_attn.q_b_proj.weight",), COPY, ("latent_queries", "q_rank"), "q_latent"),
    Rule("self_attention.linear_kv_down_proj.weight", ("self_attn.kv_a_proj_with_mqa.weight",), COPY, ("latent", "hidden")),
    Rule("self_attention.linear_kv_up_proj.layer_norm_weight", ("self_attn.kv_a_layernorm.weight",), COPY, ("kv_rank",)),
    Rule("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight",), COPY, ("keys_and_values", "kv_rank")),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), COPY, ("hidden", "values")),
)
DEEPSEEK_EXPERTS = (
    Rule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",), COPY, ("experts",), "expert_bias", fp32=True),
    Rule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        GATE_UP,
        ("shared_gate_up", "hidden"),
        "moe",
    ),
    Rule("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight",), COPY, ("hidden", "shared_ffn"), "moe"),
)


def _experts(module: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """A mixture-of-experts layer under its family's names; the norm before it is a module of its own here."""
    inside = f"{module}.experts.{{e}}"
    return (
        Rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), COPY, ("hidden",), "moe"),
        Rule("mlp.router.weight", (f"{module}.gate.weight",), COPY, ("experts", "hidden"), "moe"),
        Rule(
            "mlp.experts.experts.linear_fc1.weight",
            (f"{inside}.{gate}.weight", f"{inside}.{up}.weight"),
            GATE_UP,
            ("expert_gate_up", "hidden"),
            "moe",
        ),
        Rule("mlp.experts.experts.linear_fc2.weight", (f"{inside}.{down}.weight",), COPY, ("hidden", "expert_ffn"), "moe"),
    )


def _gpt2_pair(key: str, name: str, join: Join, shape: tuple[str, ...]) -> tuple[Rule, Rule]:
    """A linear's weight and bias."""
    return (
        Rule(f"{key}.weight", (f"{name}.weight",), join, shape),
        Rule(f"{key}.bias", (f"{name}.bias",), FUSED_QKV if join is FUSED_QKV else COPY, shape[:1]),
    )


GPT2_LAYER = (
    Rule("self_attention.linear_qkv.layer_norm_weight", ("ln_1.weight",), COPY, ("hidden",)),
    Rule("self_attention.linear_qkv.layer_norm_bias", ("ln_1.bias",), COPY, ("hidden",)),
    *_gpt2_pair("self_attention.linear_qkv", "attn.c_attn", FUSED_QKV, ("qkv", "hidden")),
    *_gpt2_pair("self_attention.linear_proj", "attn.c_proj", TRANSPOSED, ("hidden", "queries")),
    Rule("mlp.linear_fc1.layer_norm_weight", ("ln_2.weight",), COPY, ("hidden",)),
    Rule("mlp.linear_fc1.layer_norm_bias", ("ln_2.bias",), COPY, ("hidden",)),
    *_gpt2_pair("mlp.linear_fc1", "mlp.c_fc", TRANSPOSED, ("ffn", "hidden")),
    *_gpt2_pair("mlp.linear_fc2", "mlp.c_proj", TRANSPOSED, ("hidden", "ffn")),
)
GPT2_ENDS = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",), VOCABULARY, ("padded_vocab", "hidden")),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",), COPY, ("positions", "hidden")),
    Rule("decoder.final_layernorm.weight", ("transformer.ln_f.weight",), COPY, ("hidden",)),
    Rule("decoder.final_layernorm.bias", ("transformer.ln_f.bias",), COPY, ("hidden",)),
    Rule("output_layer.weight", ("lm_head.weight",), VOCABULARY, ("padded_vocab", "hidden"), "untied"),
)


@dataclass(frozen=True)
class Family:
    """`model_type` and `architecture` are config.json's; `ends` are the rules of what is outside the layers, the embedding first.

    `optional_prefix`: what older files leave out of their tensors' names. `ignored`: the ends of names that files of the family may have
    and that hold no weights.
    """

    model_type: str
    architecture: str
    to_flags: ConfigReader
    to_config: hf_configs.ConfigWriter
    layer: tuple[Rule, ...]
    ends: tuple[Rule, ...]
    layers_at: str = "model.layers.{l}."
    optional_prefix: str = ""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


_DENSE = LLAMA_ATTENTION + LLAMA_MLP
_MIXTRAL = LLAMA_ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2")
_QWEN_MOE = _DENSE + _experts("mlp", "gate_proj", "up_proj", "down_proj")
_DEEPSEEK = LATENT_ATTENTION + LLAMA_MLP + _experts("mlp", "gate_proj", "up_proj", "down_proj") + DEEPSEEK_EXPERTS
# Of checkpoints that several families would describe the first one is taken.
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            hf_configs.gpt2_flags,
            hf_configs.gpt2_config,
            GPT2_LAYER,
            GPT2_ENDS,
            "transformer.h.{l}.",
            "transformer.",
            ("attn.bias", "attn.masked_bias"),
        ),
        Family("llama", "LlamaForCausalLM", hf_configs.llama_flags, hf_configs.llama_config, _DENSE, LLAMA_ENDS),
        Family("mistral", "MistralForCausalLM", hf_configs.mistral_flags, hf_configs.mistral_config, _DENSE, LLAMA_ENDS),
        Family("qwen2", "Qwen2ForCausalLM", hf_configs.qwen2_flags, hf_configs.qwen2_config, _DENSE, LLAMA_ENDS),
        Family("qwen3", "Qwen3ForCausalLM", hf_configs.qwen3_flags, hf_configs.qwen3_config, _DENSE, LLAMA_ENDS),
        Family("mixtral", "MixtralForCausalLM", hf_configs.mixtral_flags, hf_configs.mixtral_config, _MIXTRAL, LLAMA_ENDS),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", hf_configs.qwen3_moe_flags, hf_configs.qwen3_moe_config, _QWEN_MOE, LLAMA_ENDS),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            hf_deepseek.deepseek_v2_flags,
            hf_deepseek.deepseek_v2_config,
            _DEEPSEEK,
            LLAMA_ENDS,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            hf_deepseek.deepseek_v3_flags,
            hf_deepseek.deepseek_v3_config,
            _DEEPSEEK,
            LLAMA_ENDS,
        ),
    )
}


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Raises ConversionError for a model_type that is not in the table."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConversionError(f"config.json: model_type {model_type!r} is not converted; there are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def family_of_flags(flags: Flags, vocab: int) -> tuple[Family, dict[str, Any]]:
    """(the family whose config.json can say all of `flags` (complete, see hf_configs.flags_of_checkpoint), that config.json).

    Raises ConversionError that says what keeps the model out of the closest family.
    """
    closest: tuple[int, str] | None = None
    for family in FAMILIES.values():
        config = {**family.to_config(flags), "architectures": [family.architecture], "model_type": family.model_type, "vocab_size": vocab}
        try:
            found = hf_configs.differences(family.to_flags(config), flags)
        except ConversionError:  # a config.json that this family does not have, such as one without experts
            continue
        if not found:
            return family, config
        if closest is None or len(found) < closest[0]:
            closest = (len(found), f"{family.model_type} would need {'; '.join(found)}")
    assert closest is not None
    raise ConversionError(f"no Hugging Face family has such a model: {closest[1]}")


def sizes_of(flags: Flags, vocab: int, padded_vocab: int) -> Sizes:
    """From complete flags; `vocab` of the `padded_vocab` rows are tokens."""
    heads = flags["num_attention_heads"]
    return Sizes(
        hidden=flags["hidden_size"],
        heads=heads,
        groups=flags["num_query_groups"] if flags["group_query_attention"] else heads,
        head=flags["kv_channels"],
        ffn=flags["ffn_hidden_size"],
        vocab=vocab,
        padded_vocab=padded_vocab,
        positions=flags["max_position_embeddings"],
        experts=flags["num_experts"] or 0,
        expert_ffn=flags["moe_ffn_hidden_size"] or 0,
        shared_ffn=flags["moe_shared_expert_intermediate_size"] or 0,
        q_rank=flags["q_lora_rank"] or 0,
        kv_rank=flags["kv_lora_rank"],
        fixed=flags["qk_head_dim"],
        turning=flags["qk_pos_emb_head_dim"],
        value=flags["v_head_dim"],
    )


@dataclass(frozen=True)
class Piece:
    """One of our tensors, or of a stack of them one layer's, or one expert's: what is in memory at a time. fp32: its type, whatever the
    weights'.

    key, global_shape: in the checkpoint; offset: this piece's place along the leading dimensions that `shape` lacks.
    """

    key: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    names: tuple[str, ...]
    join: Join
    layer: int | None
    fp32: bool = False


def pieces(family: Family, flags: Flags, sizes: Sizes) -> Iterator[Piece]:
    """All of a model, in the order of its layers: embeddings first, final norm and head last."""
    number = flags["num_layers"]
    moe = moe_layer_pattern(flags["moe_layer_freq"], number) if flags["num_experts"] else [0] * number
    stacked = not flags["num_experts"] or flags["moe_layer_freq"] == 1
    first = [rule for rule in family.ends if rule.key.startswith("embedding.")]
    last = [rule for rule in family.ends if rule not in first]

    def end(rule: Rule) -> Piece:
        shape = tuple(map(sizes.of, rule.shape))
        return Piece(rule.key, shape, shape, (), rule.names, rule.join, None)

    yield from (end(rule) for rule in first if _holds(rule.only, flags, False))
    for layer in range(number):
        for rule in family.layer:
            if _holds(rule.only, flags, bool(moe[layer])):
                yield from _layer_pieces(rule, family.layers_at.format(l=layer), layer, number if stacked else 0, sizes)
    yield from (end(rule) for rule in last if _holds(rule.only, flags, False))


def _layer_pieces(rule: Rule, at: str, layer: int, stacked: int, sizes: Sizes) -> Iterator[Piece]:
    shape = tuple(map(sizes.of, rule.shape))
    of_experts = any("{e}" in name for name in rule.names)
    key = f"decoder.layers.{rule.key}" if stacked else f"decoder.layers.{layer}.{rule.key}"
    whole = (*((stacked,) if stacked else ()), *((sizes.experts,) if of_experts else ()), *shape)
    for expert in range(sizes.experts if of_experts else 1):
        offset = (*((layer,) if stacked else ()), *((expert,) if of_experts else ()))
        names = tuple(at + name.format(e=expert) for name in rule.names)
        yield Piece(key, shape, whole, offset, names, rule.join, layer, rule.fp32)


def _holds(condition: str, flags: Flags, moe: bool) -> bool:
    """Whether a model (its layer, if `moe`: a mixture of experts) meets a rule's condition."""
    return {
        "": True,
        "dense": not moe,
        "moe": moe,
        "bias": bool(flags["add_bias_linear"]) and not moe,
        "qkv_bias": bool(flags["add_bias_linear"] or flags["add_qkv_bias"]),
        "qk_norm": bool(flags["qk_layernorm"]),
        "q_whole": flags["q_lora_rank"] is None,
        "q_latent": flags["q_lora_rank"] is not None,
        "expert_bias": moe and bool(flags["moe_router_enable_expert_bias"]),
        "untied": bool(flags["untie_embeddings_and_output_weights"]),
    }[condition]
