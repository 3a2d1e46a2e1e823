"""Multi-latent attention in float64 against its formulas written out head by head, YaRN against its definition, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.flops import LatentSizes, model_flops
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import concentration, kept_share
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.param_sharding import build_param_table, count_parameters
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, rotary_embedding_of, softmax_scale_of
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training import check_config, model_size
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from tests.unit_tests.training.lines import TINY, checked

S, B, HEADS = 7, 2, 4
Q, KV, FIXED, TURNING, VALUE = 12, 10, 6, 4, 5
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 30,  # no multiple of the heads: nothing needs it
    "num_attention_heads": HEADS,
    "q_lora_rank": Q,
    "kv_lora_rank": KV,
    "qk_head_dim": FIXED,
    "qk_pos_emb_head_dim": TURNING,
    "v_head_dim": VALUE,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": torch.float64,
    "init_method_std": 0.3,
}
YARN = {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 16, "beta_fast": 2}


def config_of(**extra: Any) -> MLATransformerConfig:
    return MLATransformerConfig(**{**SIZES, **YARN, **extra})


def attention(config: MLATransformerConfig) -> MLASelfAttention:
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, multi_latent_attention=True).submodules.self_attention
    module = build_module(spec, config=config, layer_number=1)
    for parameter in module.parameters():
        parameter.data.uniform_(-1.0, 1.0)
    return module


def frequencies_of(config: MLATransformerConfig) -> list[float]:
    """By pair, in double precision."""
    frequencies = [config.rotary_base ** (-2 * i / TURNING) for i in range(TURNING // 2)]
    if config.rope_type == "rope":
        return frequencies
    share = kept_share(TURNING, config.rotary_base, config.original_max_position_embeddings, config.beta_fast, config.beta_slow)
    return [f * k + f / config.rotary_scaling_factor * (1 - k) for f, k in zip(frequencies, share.tolist())]


def angles(config: MLATransformerConfig, length: int = S) -> torch.Tensor:
    """As rotary_embedding_of makes them, which test_angles holds against these."""
    each = torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies_of(config), dtype=torch.float64))
    return each.repeat_interleave(2, dim=-1)[:, None, None]


def plain(module: MLASelfAttention, x: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V2's equations (37 to 47), one sample, head and pair of channels at a time. x [s, h] -> [s, h]."""
    config, weights = module.config, dict(module.named_parameters())

    def normed(latent: torch.Tensor, name: str) -> torch.Tensor:
        if f"{name}.weight" not in weights:
            return latent
        return latent / (latent.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * weights[f"{name}.weight"]

    frequencies = frequencies_of(config)
    factor = concentration(config.rotary_scaling_factor, config.mscale, config.mscale_all_dim) if config.rope_type == "yarn" else 1.0

    def turned(t: torch.Tensor) -> torch.Tensor:
        rows = []
        for position, row in enumerate(t):
            pairs = []
            for i, frequency in enumerate(frequencies):
                cos, sin = factor * math.cos(position * frequency), factor * math.sin(position * frequency)
                a, b = row[2 * i], row[2 * i + 1]
                pairs += [a * cos - b * sin, a * sin + b * cos]
            rows.append(torch.stack(pairs))
        return torch.stack(rows)

    if config.q_lora_rank is None:
        queries = x @ weights["linear_q_proj.weight"].T
    else:
        queries = normed(x @ weights["linear_q_down_proj.weight"].T, "q_layernorm") @ weights["linear_q_up_proj.weight"].T
    mixed = x @ weights["linear_kv_down_proj.weight"].T
    keys_and_values = normed(mixed[:, :KV], "kv_layernorm") @ weights["linear_kv_up_proj.weight"].T
    shared_key, heads = turned(mixed[:, KV:]), []
    for head in range(HEADS):
        query = queries[:, head * (FIXED + TURNING) : (head + 1) * (FIXED + TURNING)]
        key, value = keys_and_values[:, head * (FIXED + VALUE) : (head + 1) * (FIXED + VALUE)].split([FIXED, VALUE], dim=-1)
        scores = query[:, :FIXED] @ key.T + turned(query[:, FIXED:]) @ shared_key.T
        scale = (0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor) + 1) ** 2 if config.rope_type == "yarn" else 1.0
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        heads.append((scores * scale / math.sqrt(FIXED + TURNING)).masked_fill(later, -math.inf).softmax(-1) @ value)
    out = torch.cat(heads, dim=-1) @ weights["linear_proj.weight"].T
    return out + weights["linear_proj.bias"] if "linear_proj.bias" in weights else out


def gradients(module: MLASelfAttention, out: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    weight, leaves = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin(), [x, *module.parameters()]
    (out * weight).sum().backward()
    found = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(found) == len(leaves)
    for leaf in leaves:
        leaf.grad = None
    return found


VARIANTS: dict[str, dict[str, Any]] = {
    "as DeepSeek-V3": {"qk_layernorm": True, "add_bias_linear": False},
    "without a latent of queries, rope": {"q_lora_rank": None, "rope_type": "rope", "qk_layernorm": True, "mscale_all_dim": 0.0},
    "without norms, plain kernels": {"attention_backend": AttnBackend.unfused, "apply_rope_fusion": False},
    "flash, which has one width": {"attention_backend": AttnBackend.flash},
    "fused rope": {"apply_rope_fusion": True, "qk_layernorm": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"], "qk_layernorm": True},
    "recompute all": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
    "fused weight gradients": {"gradient_accumulation_fusion": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_equations(name: str) -> None:
    module = attention(config_of(**VARIANTS[name]))
    x = torch.randn(S, B, 30, dtype=torch.float64, requires_grad=True)
    out, _ = module(x, rotary_pos_emb=angles(module.config))
    expected = torch.stack([plain(module, x[:, sample]) for sample in range(B)], dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients(module, out, x), gradients(module, expected, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_angles(rope_type: str) -> None:
    config = config_of(rope_type=rope_type, mscale_all_dim=0.0)
    torch.testing.assert_close(rotary_embedding_of(config)(S).double(), angles(config), rtol=1e-6, atol=1e-6)


def test_packed_sequences_do_not_see_each_other_and_count_from_0() -> None:
    """Beside the judge: with a window too, whose stretches nothing sees have the width of values."""
    module = attention(config_of(qk_layernorm=True))
    x = torch.randn(S, 1, 30, dtype=torch.float64)
    ends = torch.tensor([0, 3, S])
    out, _ = module(x, rotary_pos_emb=angles(module.config), packed_seq_params=PackedSeqParams("thd", ends, ends))
    expected = torch.cat([plain(module, x[:3, 0]), plain(module, x[3:, 0])])
    torch.testing.assert_close(out[:, 0], expected, rtol=1e-11, atol=1e-11)
    window = attention(config_of(window_size=(2, 0)))
    both = [attention(config_of(window_size=(2, 0), attention_backend=backend)) for backend in (AttnBackend.auto, AttnBackend.unfused)]
    results = [module(x, rotary_pos_emb=angles(window.config))[0] for module in both]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_recompute_frees_queries_keys_and_values() -> None:
    """The one tensor that holds them is empty between forward and backward, and there again for the gradients."""
    module = attention(config_of(recompute_granularity="selective", recompute_modules=["mla_up_proj"]))
    seen = []
    module.core_attention.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].untyped_storage()))
    x = torch.randn(S, B, 30, dtype=torch.float64, requires_grad=True)
    out, _ = module(x, rotary_pos_emb=angles(module.config))
    assert seen[0].nbytes() == 0
    out.sum().backward()
    assert seen[0].nbytes() == S * B * HEADS * (2 * (FIXED + TURNING) + VALUE) * 8
    module.eval()
    module(x, rotary_pos_emb=angles(module.config))
    assert seen[1].nbytes() > 0


@pytest.mark.parametrize(("factor", "all_dim"), [(40.0, 1.0), (40.0, 0.5), (4.0, 0.707), (1.0, 1.0)])
def test_softmax_scale_comes_from_mscale_all_dim(factor: float, all_dim: float) -> None:
    """Megatron-LM took mscale for it, so that models with another mscale_all_dim attended too sharply."""
    config = config_of(rotary_scaling_factor=factor, mscale=1.0, mscale_all_dim=all_dim)
    expected = (0.1 * all_dim * math.log(factor) + 1) ** 2 / math.sqrt(FIXED + TURNING)
    assert softmax_scale_of(config) == pytest.approx(expected, rel=1e-12)
    assert attention(config).core_attention.softmax_scale == softmax_scale_of(config)
    assert attention(config_of(softmax_scale=0.3)).core_attention.softmax_scale == 0.3


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones() -> None:
    """DeepSeek-V3's: of 32 pairs those up to 10 turn more than 32 times over 4096 tokens, those from 23 on less than once."""
    config = config_of(qk_pos_emb_head_dim=64, original_max_position_embeddings=4096, beta_fast=32, rotary_scaling_factor=40.0)
    frequencies = rotary_embedding_of(config).inv_freq
    base = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    turns = 4096 * base / (2 * math.pi)
    ratio = frequencies.double() / base
    assert ratio[:11].sub(1).abs().max() < 1e-6 and turns[10] > 32 > turns[11]
    assert ratio[23:].mul(40).sub(1).abs().max() < 1e-6 and turns[22] > 1 > turns[23]
    assert torch.equal(ratio.argsort(descending=True)[11:], torch.arange(11, 32)) or (ratio[10:24].diff() < 0).all()
    assert torch.equal(kept_share(4, 10000.0, 8, 2, 1), torch.tensor([1.0, 0.0])), "no share where both ends fall on one pair"
    assert concentration(40.0, 1.0, 1.0) == 1.0 and concentration(40.0, 1.0, 0.0) == 0.1 * math.log(40.0) + 1


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 1.0), (0.707, 0.707), (1.0, 0.5)])
def test_yarn_is_that_of_transformers(mscale: float, all_dim: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": mscale, "mscale_all_dim": all_dim}
    theirs = transformers.DeepseekV3Config(rope_parameters=rope | {"original_max_position_embeddings": 4096})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, None)
    more = {"original_max_position_embeddings": 4096, "beta_fast": 32}
    ours = config_of(qk_pos_emb_head_dim=64, mscale=mscale, mscale_all_dim=all_dim, **more)
    torch.testing.assert_close(rotary_embedding_of(ours).inv_freq, frequencies, rtol=1e-6, atol=0)
    assert attention(ours).mscale == pytest.approx(factor, rel=1e-12)


def test_checkpoint_keys_are_those_of_fused_norms() -> None:
    config = config_of(qk_layernorm=True, normalization="LayerNorm")
    model = GPTModel(config, get_gpt_decoder_block_spec(config, False), 32, 8)
    assert model.rotary_pos_emb is not None and model.position_embedding_type == "learned_absolute"
    table = build_param_table(model)
    names = {name.removeprefix("decoder.layers.0."): record.key.removeprefix("decoder.layers.") for name, record in table.items()}
    assert names["input_layernorm.weight"] == "input_layernorm.weight"
    assert names["self_attention.q_layernorm.weight"] == "self_attention.linear_q_up_proj.layer_norm_weight"
    assert names["self_attention.kv_layernorm.bias"] == "self_attention.linear_kv_up_proj.layer_norm_bias"
    assert names["pre_mlp_layernorm.weight"] == "mlp.linear_fc1.layer_norm_weight"
    order = [name for name in names if name.startswith("self_attention.") and name.endswith("weight")]
    assert [name.split(".")[1] for name in order] == [
        "linear_proj",
        "linear_q_down_proj",
        "linear_q_up_proj",
        "linear_kv_down_proj",
        "linear_kv_up_proj",
        "q_layernorm",
        "kv_layernorm",
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_query_groups": 2}, "num_query_groups 2: multi_latent_attention gives each .* 4 a key and a value of its own; 4 works"),
        ({"rotary_interleaved": True}, "rotary_interleaved True: multi_latent_attention always turns pairs of neighbouring channels"),
        ({"add_qkv_bias": True}, "add_qkv_bias True: multi_latent_attention has no bias"),
        ({"rope_type": "ntk"}, "rope_type 'ntk': must be rope or yarn"),
        ({"rotary_percent": 0.5}, "rotary_percent 0.5: rope_type yarn turns all of qk_pos_emb_head_dim; 1.0 works"),
        ({"rope_type": "rope", "rotary_percent": 0.75, "mscale_all_dim": 0.0}, "qk_pos_emb_head_dim 4: of which rotary_percent 0.75 turn"),
        ({"rope_type": "rope"}, "mscale_all_dim 0.5: scales the softmax of rope_type yarn"),
        ({"rotary_scaling_factor": 0.5}, "rotary_scaling_factor 0.5: must be at least 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank 0: must be at least 1"),
        ({"cache_mla_latents": True}, "cache_mla_latents = True is not built yet"),
        ({"mla_down_proj_fusion": True}, "mla_down_proj_fusion = True is not built yet"),
        ({"multi_latent_attention": False}, "build a TransformerConfig for a model without"),
    ],
)
def test_what_does_not_go_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**extra)


def test_other_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="multi_latent_attention needs MLATransformerConfig"):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, multi_latent_attention=True)
    config = config_of()
    with pytest.raises(ValueError, match="rope_scaling and seq_len_interpolation_factor do not stretch latent attention"):
        GPTModel(config, get_gpt_decoder_block_spec(config, False), 32, 8, rope_scaling=True)
    with pytest.raises(ValueError, match="needs rotary_pos_emb"):
        attention(config)(torch.zeros(S, B, 30, dtype=torch.float64))


# --- the command line ---

LINE = "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"


def test_flags_become_the_config() -> None:
    config = core_transformer_config_from_args(checked([*TINY, *LINE.split()]))
    assert isinstance(config, MLATransformerConfig)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim) == (12, 8, 8, 4, 6)
    assert (config.rope_type, config.rotary_scaling_factor, config.mscale, config.mscale_all_dim) == ("yarn", 1.0, 1.0, 0.0)
    more = "--rope-type rope --rotary-base 50000 --hidden-size 66"
    config = core_transformer_config_from_args(checked([*TINY, *LINE.split(), *more.split()]))
    assert (config.rope_type, config.rotary_base, config.hidden_size) == ("rope", 50000, 66)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{LINE} --group-query-attention --num-query-groups 2", ["--num-query-groups 2", "--num-attention-heads 4"]),
        (f"{LINE} --rotary-interleaved", ["--rotary-interleaved", "--multi-latent-attention always turns"]),
        (f"{LINE} --position-embedding-type rope --use-rope-scaling", ["--use-rope-scaling", "--rope-type yarn"]),
        (f"{LINE} --position-embedding-type rope --rotary-seq-len-interpolation-factor 2", ["--rope-type yarn"]),
        (f"{LINE} --rotary-percent 0.5", ["--rotary-percent 0.5", "--rope-type yarn"]),
        (f"{LINE} --rope-type rope --rotary-scaling-factor 4 --mscale-all-dim 1.0", ["--mscale-all-dim 1.0", "--rope-type yarn"]),
        ("--rope-type yarn", ["--rope-type yarn", "--multi-latent-attention"]),
        (f"{LINE} --mla-down-proj-fusion", ["--mla-down-proj-fusion", "does not support yet"]),
    ],
)
def test_lines_that_do_not_go(flags: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        checked([*TINY, *flags.split()])
    assert all(word in str(refused.value) for word in words), refused.value


def test_idle_flags_are_said() -> None:
    line = [*TINY, "--v-head-dim", "8", "--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj"]
    (note,) = validate_args(parse_args(argv=line)).notes
    assert note == "--v-head-dim, --recompute-modules mla_up_proj: no effect without --multi-latent-attention"


@pytest.mark.parametrize("more", ["", "--qk-layernorm --swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 48"])
def test_check_config_counts_the_models_parameters(more: str) -> None:
    args = checked([*TINY, *LINE.split(), *more.split()])
    config = core_transformer_config_from_args(args)
    model = GPTModel(config, get_gpt_decoder_block_spec(config, False), 128, 32, share_embeddings_and_output_weights=True)
    counted = sum(model_size.parameters_of_layers(args)) + (model_size.embedding_parameters(args) or 0)
    assert counted == count_parameters(model) == sum(param.numel() for param in model.parameters())
    assert "roughly" in check_config.report(args)


@pytest.mark.parametrize("rank", [12, None])
def test_flops_are_those_that_run(rank: int | None) -> None:
    config = config_of(q_lora_rank=rank, attention_backend=AttnBackend.unfused)
    model = GPTModel(config, get_gpt_decoder_block_spec(config, False), 64, 16)
    ids = torch.randint(0, 64, (1, 16))
    with FlopCounterMode(display=False) as counter:
        model(ids, ids % 16, None, labels=ids).sum().backward()
    sizes = {name: getattr(config, name) for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")}
    flops = model_flops(
        **sizes,
        kv_channels=999,
        ffn_hidden_size=config.ffn_hidden_size or 0,
        seq_length=16,
        vocab_size=64,
        causal=False,
        latents=LatentSizes.of(config),
    )
    assert counter.get_total_flops() == pytest.approx(flops, rel=1e-6)
