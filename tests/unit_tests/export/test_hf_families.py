"""The table of families: config.json and flags say the same model, joins move rows and lose none."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.export import hf_configs
from megatron.core.export.hf_configs import ConversionError, differences, flags_of_checkpoint
from megatron.core.export.hf_families import FAMILIES, family_of_config, family_of_flags, pieces, sizes_of
from megatron.core.export.joins import COPY, FUSED_QKV, GATE_UP, QKV, TRANSPOSED, VOCABULARY, Join, Sizes
from megatron.training.argument_utils import all_fields
from megatron.training.config.fields import ARCHITECTURE

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 100}


YARN: dict[str, Any] = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}


def deepseek_own(family: str) -> dict[str, Any]:
    own: dict[str, Any] = {
        "q_lora_rank": st.sampled_from([None, 12]),
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "v_head_dim": st.sampled_from([6, 8]),
        "tie_word_embeddings": st.booleans(),
        "rope_theta": st.sampled_from([10000, 50000.0]),
        "rope_scaling": st.sampled_from([None, YARN, {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, {**YARN, "factor": 1}]),
        "first_k_dense_replace": st.sampled_from([0, 1, 4]),
        "num_key_value_heads": 4,
    }
    if family == "deepseek_v3":
        return own | {"n_group": st.sampled_from([1, 4, 8]), "routed_scaling_factor": st.sampled_from([1.0, 2.5])}
    return own | {"topk_method": st.sampled_from(["greedy", "group_limited_greedy"])}


def config_of(family: str) -> st.SearchStrategy[dict[str, Any]]:
    """A config.json of the family as its releases have them: some settings are left out."""
    if family == "gpt2":
        own: dict[str, Any] = {
            "n_positions": 64,
            "n_inner": st.sampled_from([None, 40]),
            "layer_norm_epsilon": st.sampled_from([1e-5, 1e-6]),
        }
        own |= {"activation_function": st.sampled_from(["gelu_new", "gelu"]), "tie_word_embeddings": st.booleans()}
        base = GPT2
    else:
        window = st.sampled_from([None, 1, 7])
        own = {
            "num_key_value_heads": st.sampled_from([1, 2, 4]),
            "head_dim": st.sampled_from([None, 8, 16]),
            "rms_norm_eps": st.sampled_from([1e-5, 1e-6]),
            "tie_word_embeddings": st.booleans(),
            "rope_theta": st.sampled_from([10000, 500000.0]),
            "rope_scaling": st.sampled_from([None, {"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 32.0}]),
        }
        if family in ("mistral", "mixtral"):
            own["sliding_window"] = window
        if family.startswith("qwen"):
            own |= {"use_sliding_window": st.booleans(), "sliding_window": st.just(7), "max_window_layers": st.integers(0, 4)}
        if family == "mixtral":
            own |= {"num_local_experts": st.sampled_from([2, 8]), "num_experts_per_tok": st.just(2)}
        if family == "qwen3_moe":
            own |= {"num_experts": st.just(8), "norm_topk_prob": st.booleans()}
            own |= {"mlp_only_layers": st.sampled_from([[], [0], [1, 2]]), "decoder_sparse_step": st.sampled_from([1, 2])}
        if family.startswith("deepseek"):
            own = deepseek_own(family)
        needed = {"qwen3_moe": {"moe_intermediate_size": 24}, "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 6}}
        base = {**LLAMA, **needed.get(family, {})}
    own = {name: value if isinstance(value, st.SearchStrategy) else st.just(value) for name, value in own.items()}
    return st.fixed_dictionaries({}, optional=own).map(lambda found: {**base, "model_type": family, **found})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_flags_of_a_config_make_a_config_of_the_same_flags(name: str, data: st.DataObject) -> None:
    """Also through JSON, by which checkpoints' arguments do not go but config.json does; the family found may be an equal one."""
    flags = FAMILIES[name].to_flags(data.draw(config_of(name)))
    family, config = family_of_flags(flags, 100)
    again = json.loads(json.dumps(config))
    assert differences(family_of_config(again).to_flags(again), flags) == []
    saved = {**flags, "bias_gelu_fusion": not hf_configs.exact_gelu(flags)}
    assert differences(flags_of_checkpoint(saved), flags) == [], "normalized once is normalized"
    sizes = sizes_of(flags, 100, 128)
    found = list(pieces(family, flags, sizes))
    assert len({(piece.key, piece.offset) for piece in found}) == len(found)
    assert len({name for piece in found for name in piece.names}) == sum(len(piece.names) for piece in found)


def test_every_flag_of_the_architecture_is_known() -> None:
    """A new one must be given a value that means `not there`, or converted models would lose what it says."""
    known = {*hf_configs.PLAIN, *hf_configs.SHAPE}
    architecture = {dest for dest, field in all_fields().items() if field.metadata["checkpoint"] == ARCHITECTURE}
    assert architecture - known == set()


REFUSED = (
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_bias": True}, "attention_bias True with mlp_bias False"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 1.5}}, "linear by a whole number"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "low_freq_factor = 2.0"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 4096}}, "= 4096"),
    ("llama", {"rope_parameters": {"rope_theta": 10000.5}}, "10000.5"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"hidden_size": 30}, "no head_dim"),
    ("llama", {"hidden_size": "32"}, "hidden_size is '32'"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ("qwen3_moe", {"moe_intermediate_size": 8, "mlp_only_layers": [0, 1, 2, 3]}, "model_type qwen3"),
    ("deepseek_v2", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
    ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "'linear' is not converted: our latent attention has yarn"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale 0.7 with mscale_all_dim None"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "beta_fast": 1}}, "beta_fast = 1"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "original_max_position_embeddings": 8192}}, "original_max_position_embeddings = 8192"),
    ("deepseek_v3", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, "best expert's"),
    ("deepseek_v2", {"topk_method": "random"}, "topk_method = 'random'"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    ("deepseek_v3", {"num_experts_per_tok": 6, "topk_group": 2}, "ours of its best 3"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"n_embd": 30}, "n_head 4"),
)


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_our_model_lacks_is_refused_by_name(family: str, change: dict[str, Any], message: str) -> None:
    base = GPT2 if family == "gpt2" else LLAMA
    with pytest.raises(ConversionError) as refused:
        FAMILIES[family].to_flags({**base, **change})
    assert message in str(refused.value)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "bert", None, 7, ["llama"]])
def test_an_unknown_family_names_the_known(model_type: Any) -> None:
    with pytest.raises(ConversionError, match="there are gpt2, llama, mistral"):
        family_of_config({"model_type": model_type} if model_type else {})


sizes = st.builds(
    lambda groups, heads, head, hidden, vocab, pad: Sizes(hidden, groups * heads, groups, head, 5, vocab, vocab + pad, 7, 0, 0),
    *(st.integers(1, 4) for _ in range(4)),
    st.integers(1, 9),
    st.integers(0, 5),
)
# join, our shape
JOINS = [
    (COPY, ("hidden", "ffn")),
    (TRANSPOSED, ("hidden", "ffn")),
    (GATE_UP, ("gate_up", "hidden")),
    (QKV, ("qkv", "hidden")),
    (QKV, ("qkv",)),
    (FUSED_QKV, ("qkv", "hidden")),
    (FUSED_QKV, ("qkv",)),
]


@settings(max_examples=30, deadline=None)
@given(sizes=sizes)
@pytest.mark.parametrize(("join", "shape"), JOINS)
def test_what_is_taken_apart_is_joined_again(join: Join, shape: tuple[str, ...], sizes: Sizes) -> None:
    if join is FUSED_QKV:
        sizes = Sizes(**{**vars(sizes), "groups": sizes.heads})  # GPT-2 has no groups
    lengths = tuple(map(sizes.of, shape))
    whole = torch.arange(torch.Size(lengths).numel()).reshape(lengths)
    parts = join.to_hf(whole, sizes)
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == whole.flatten().tolist()
    assert torch.equal(join.to_core(parts, sizes), whole)


@settings(max_examples=30, deadline=None)
@given(sizes=sizes)
def test_rows_of_qkv_go_group_by_group(sizes: Sizes) -> None:
    """By the definition: group g has its query heads, then key head g, then value head g, kv_channels rows each."""
    lengths = (sizes.heads * sizes.head, sizes.groups * sizes.head, sizes.groups * sizes.head)
    q, k, v = (torch.arange(length) + 1000 * number for number, length in enumerate(lengths))
    expected = []
    each = sizes.heads // sizes.groups * sizes.head
    for group in range(sizes.groups):
        expected += q[group * each : (group + 1) * each].tolist()
        expected += k[group * sizes.head : (group + 1) * sizes.head].tolist()
        expected += v[group * sizes.head : (group + 1) * sizes.head].tolist()
    assert QKV.to_core([q, k, v], sizes).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(sizes=sizes)
def test_vocabulary_gains_and_loses_its_padding(sizes: Sizes) -> None:
    table = torch.rand(sizes.vocab, sizes.hidden)
    padded = VOCABULARY.to_core([table], sizes)
    assert padded.shape == (sizes.padded_vocab, sizes.hidden) and not padded[sizes.vocab :].any()
    assert torch.equal(VOCABULARY.to_hf(padded, sizes)[0], table)
