"""GPTModel: every variant runs and learns the right things, fast and plain agree, two ranks equal one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.param_sharding import build_param_table, local_part
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import run_on_ranks

VOCAB, SEQ, BATCH = 48, 12, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "normalization": "RMSNorm",
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    },
    "qkv_bias": {"add_bias_linear": False, "add_qkv_bias": True, "activation_func": squared_relu},
    "zero_centered": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True, "kv_channels": 12},
    "quick_gelu": {"activation_func": quick_gelu, "gated_linear_unit": True, "rotary_interleaved": True, "ffn_hidden_size": 40},
    "post_norm_residual": {"apply_residual_connection_post_layernorm": True},
}


def model(variant="gpt", position="rope", tied=False, vocab=VOCAB, model_options=None, **extra):
    settings: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float64,
        **VARIANTS[variant],
        **extra,
    }
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **settings)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    return GPTModel(
        config, spec, vocab, SEQ, share_embeddings_and_output_weights=tied, position_embedding_type=position, **(model_options or {})
    )


def batch():
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], torch.arange(SEQ).expand(BATCH, -1), ids[:, 1:]


def loss_and_gradients(chunk):
    ids, positions, labels = batch()
    loss = chunk(ids, positions, None, labels=labels)
    loss.mean().backward()
    return loss.detach(), {name: param.grad for name, param in chunk.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", ["learned_absolute", "rope", "none"])
def test_fast_and_plain_paths_agree(variant, position):
    fast: dict[str, Any] = {
        "apply_rope_fusion": True,
        "bias_dropout_fusion": True,
        "bias_activation_fusion": VARIANTS[variant].get("activation_func") is F.silu,
    }
    results = [loss_and_gradients(model(variant, position, **options)) for options in (fast, {"attention_backend": AttnBackend.unfused})]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    loss, gradients = results[0]
    assert loss.shape == (BATCH, SEQ) and all(grad is not None and grad.abs().sum() > 0 for grad in gradients.values())


def test_gelu_is_exact_without_fusion_and_tanh_with_it():
    exact, tanh = (model(bias_activation_fusion=fused).decoder.layers[0].mlp for fused in (False, True))
    x = torch.linspace(-3, 3, 50, dtype=torch.float64)
    assert torch.equal(exact._activate(x), F.gelu(x)) and torch.equal(tanh._activate(x), F.gelu(x, approximate="tanh"))


def test_logits_and_loss_are_of_one_model():
    chunk = model(tied=True).eval()
    ids, positions, labels = batch()
    logits = chunk(ids, positions, None)
    assert logits.shape == (BATCH, SEQ, VOCAB)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(BATCH, SEQ)
    torch.testing.assert_close(chunk(ids, positions, None, labels=labels), expected)
    early = ids.clone()
    early[:, 6:] = 0
    torch.testing.assert_close(chunk(early, positions, None)[:, :6], logits[:, :6], msg="a token saw what comes after it")


def test_interpolation_and_partial_rotation():
    half = model(model_options={"seq_len_interpolation_factor": 2.0}).rotary_pos_emb
    whole = model().rotary_pos_emb
    torch.testing.assert_close(half(SEQ)[::2], whole(SEQ // 2))
    assert model(model_options={"rotary_percent": 0.5}).rotary_pos_emb(SEQ).shape == (SEQ, 1, 1, 4)
    base = model(model_options={"rotary_base": 500000}).rotary_pos_emb.inv_freq
    assert base[1] == pytest.approx(500000 ** (-2 / 8))
    scaled = model(model_options={"rope_scaling": True, "rope_scaling_factor": 8.0}).rotary_pos_emb.inv_freq
    torch.testing.assert_close(scaled[:2], whole.inv_freq[:2])  # short waves are kept


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision(dtype):
    chunk = model("llama", tied=False, **{dtype: True, "params_dtype": torch.float32})
    wrapped = Float16Module(chunk.config, chunk)
    loss, gradients = loss_and_gradients(wrapped)
    assert loss.dtype is torch.float32 and all(grad.dtype is wrapped.float16_dtype for grad in gradients.values())
    assert list(wrapped.state_dict()) == list(chunk.state_dict()) and hasattr(next(wrapped.parameters()), "sharding")
    expected, _ = loss_and_gradients(model("llama"))
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=2e-2)
    assert wrapped(*batch()[:2], None).dtype is torch.float32


def test_dropout_only_in_training():
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunk = model(hidden_dropout=0.2, attention_dropout=0.2)
    ids, positions, labels = batch()
    model_parallel_cuda_manual_seed(1)
    first, second = (chunk(ids, positions, None, labels=labels) for _ in range(2))
    assert not torch.equal(first, second)
    chunk.eval()
    torch.testing.assert_close(chunk(ids, positions, None, labels=labels), model()(ids, positions, None, labels=labels))


def test_pipeline_chunks_compose():
    """Two chunks by hand, tied weights in both, equal the whole model."""
    config = model(tied=True).config
    whole = model(tied=True)
    chunk = model(tied=True)
    ids, positions, labels = batch()
    hidden = chunk.decoder.layers[0](chunk.embedding(ids, positions), rotary_pos_emb=chunk.rotary_pos_emb(SEQ))[0]
    last = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQ,
        pre_process=False,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    assert torch.equal(last.output_layer.weight, whole.embedding.word_embeddings.weight)
    record = build_param_table(last)["output_layer.weight"]
    assert record.key == "embedding.word_embeddings.weight" == record.sharding.shared_with and record.param.shared  # type: ignore[attr-defined]
    last.decoder.layers = last.decoder.layers[1:]
    last.set_input_tensor(hidden)
    torch.testing.assert_close(last(None, positions, None, labels=labels), whole(ids, positions, None, labels=labels))


def test_refusals():
    with pytest.raises(ValueError, match="position_embedding_type 'sinus'"):
        model(position="sinus")
    with pytest.raises(ValueError, match="logical_vocab_size 99"):
        model(logical_vocab_size=99)
    with pytest.raises(ValueError, match="multi_latent_attention = True is not built yet"):
        get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True)
    with pytest.raises(ValueError, match="qk_l2_norm = True is not built yet; leave it out"):
        get_gpt_layer_local_spec(qk_l2_norm=True)
    with pytest.raises(ValueError, match="max_position_embeddings is 12"):
        model(position="learned_absolute")(torch.zeros(1, 14, dtype=torch.long), torch.arange(14)[None], None)
    with pytest.raises(ValueError, match="the block's spec lists 2 layers"):
        config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4)
        GPTModel(config, get_gpt_decoder_block_spec(model().config, False), VOCAB, SEQ)


def test_a_normalization_that_contradicts_the_config_is_refused():
    config = model("llama").config
    for normalization in (None, "RMSNorm"):
        GPTModel(config, get_gpt_layer_local_spec(normalization=normalization), VOCAB, SEQ)
    for spec in (get_gpt_layer_local_spec(normalization="LayerNorm"), get_gpt_decoder_block_spec(config, False, normalization="LayerNorm")):
        with pytest.raises(ValueError, match=r"'LayerNorm' contradicts config.normalization 'RMSNorm'"):
            GPTModel(config, spec, VOCAB, SEQ)
    with pytest.raises(ValueError, match="'X' must be 'LayerNorm' or 'RMSNorm'"):
        get_gpt_layer_local_spec(normalization="X")


def test_block_spec_builds_the_same_model():
    config = model().config
    built = GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCAB, SEQ, position_embedding_type="rope")
    torch.testing.assert_close(loss_and_gradients(built), loss_and_gradients(model()))


def _on_two_ranks(variant, position, tied, options):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    chunk = model(variant, position, tied, tensor_model_parallel_size=2, **options)
    loss, gradients = loss_and_gradients(chunk)
    table = build_param_table(chunk)
    return loss, {name: (record.param.detach(), gradients[name], record.sharding) for name, record in table.items()}


@pytest.mark.parametrize(
    ("variant", "position", "tied", "options"),
    [
        ("gpt", "learned_absolute", True, {"sequence_parallel": True}),
        ("gpt", "learned_absolute", True, {}),
        ("llama", "rope", False, {"sequence_parallel": True, "apply_rope_fusion": True, "bias_activation_fusion": True}),
        ("zero_centered", "rope", False, {"logical_vocab_size": 46, "softmax_vocab_size": 47}),
    ],
)
def test_two_ranks_equal_one(variant, position, tied, options):
    """Initial weights to the bit; loss and every gradient to 1e-9."""
    single = {name: value for name, value in options.items() if name != "sequence_parallel"}
    loss, gradients = loss_and_gradients(whole := model(variant, position, tied, **single))
    ranks = run_on_ranks(2, _on_two_ranks, variant, position, tied, options)
    params = dict(whole.named_parameters())
    for index, (rank_loss, rank_params) in enumerate(ranks):
        torch.testing.assert_close(rank_loss, loss, rtol=1e-9, atol=1e-9)
        assert list(rank_params) == list(params)
        for name, (value, grad, sharding) in rank_params.items():
            assert torch.equal(value, local_part(params[name].detach(), sharding, index, 2)), name
            if "tp" in sharding.grad_partial:
                grad = sum(other[1][name][1] for other in ranks)
            torch.testing.assert_close(grad, local_part(gradients[name], sharding, index, 2), rtol=1e-9, atol=1e-9, msg=name)


def test_padding_for_the_tensor_split_changes_nothing():
    """Rows beyond softmax_vocab_size: same loss, zero gradient."""
    loss, _ = loss_and_gradients(model())
    padded_loss, gradients = loss_and_gradients(model(vocab=64, logical_vocab_size=VOCAB, softmax_vocab_size=VOCAB))
    torch.testing.assert_close(padded_loss, loss)
    assert (gradients["output_layer.weight"][VOCAB:] == 0).all()
