"""The formula against torch's own counter of the operations that run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.flops import model_flops
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"ffn_hidden_size": 176, "gated_linear_unit": True, "num_query_groups": 2},
        {"kv_channels": 24, "num_query_groups": 1},
        {"num_moe_experts": 8, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 48, "gated_linear_unit": True},
        {
            "num_moe_experts": 4,
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_gate": True,
        },
    ],
)
def test_formula_counts_what_runs(extra):
    config = TransformerConfig(**SHAPE, **extra, activation_func=F.silu, attention_backend=AttnBackend.unfused, attention_dropout=0.0)
    model = GPTModel(config, get_gpt_decoder_block_spec(config, False), 256, 32, position_embedding_type="rope")
    ids = torch.randint(0, 256, (1, 32))
    with FlopCounterMode(display=False) as counter:
        model(ids, None, None, labels=ids).sum().backward()
    counted = counter.get_total_flops()
    derived: dict[str, Any] = {name: getattr(config, name) for name in ("num_query_groups", "kv_channels", "ffn_hidden_size")}
    flops = model_flops(
        **SHAPE,
        **derived,
        gated_linear_unit=config.gated_linear_unit,
        seq_length=32,
        vocab_size=256,
        causal=False,
        num_experts=config.num_moe_experts,
        moe_layers=sum(config.moe_layers()),
        moe_ffn_hidden_size=config.moe_ffn_hidden_size or config.ffn_hidden_size or 0,
        moe_router_topk=config.moe_router_topk,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=config.moe_shared_expert_gate,
    )
    assert counted == pytest.approx(flops, rel=1e-6)


def test_llama_8_layers_of_the_peer():
    """499 TFLOP for 4 samples of 8192 tokens, causal attention counted half."""
    flops = model_flops(
        num_layers=8,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        gated_linear_unit=True,
        seq_length=8192,
        vocab_size=128256,
    )
    assert 4 * flops / 1e12 == pytest.approx(499, abs=0.5)
