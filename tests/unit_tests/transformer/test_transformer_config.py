"""Derived sizes, and all problems at once."""

from typing import Any

import pytest
import torch

from megatron.core.transformer.spec_utils import ModuleSpec, build_module, import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import layers_of_stage

SHAPE: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}


def test_derived_sizes():
    config = TransformerConfig(**SHAPE, bf16=True)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (256, 16, 4)
    assert config.params_dtype is torch.bfloat16
    assert TransformerConfig(**{**SHAPE, "hidden_size": 4096}, gated_linear_unit=True).ffn_hidden_size == 16384  # not 8/3
    assert TransformerConfig(**SHAPE, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=False).attention_softmax_in_fp32


def test_all_problems_at_once():
    with pytest.raises(ValueError) as error:
        TransformerConfig(num_layers=4, hidden_size=65, num_attention_heads=4, fp16=True, bf16=True, normalization="X")
    for part in (
        "choose one",
        "not divisible by num_attention_heads 4; give kv_channels, or a hidden size of 68",
        "'LayerNorm' or 'RMSNorm'",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tensor_model_parallel_size": 4, "num_query_groups": 2}, "num_query_groups 2 is not divisible by tensor_model_parallel_size 4"),
        ({"num_query_groups": 3}, "not divisible by num_query_groups 3"),
        ({"sequence_parallel": True}, "sequence_parallel needs tensor_model_parallel_size > 1"),
        ({"hidden_dropout": 1.0}, "hidden_dropout 1.0 must be in"),
        ({"context_parallel_size": 2}, "attention_dropout 0.1: cp_comm_type p2p does not go with attention dropout"),
        (
            {"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a", "p2p", "all_gather"]},
            "cp_comm_type p2p, a2a, all_gather do not go with attention dropout: context_parallel_size 1 does; 0.0 works",
        ),
        ({"window_attn_skip_freq": 2}, "window_attn_skip_freq 2: needs a window_size; leave it out"),
        ({"recompute_granularity": "full"}, "recompute_method None: is required for full recompute; 'uniform' works; recompute_num_layers"),
        ({"recompute_granularity": "all"}, "recompute_granularity 'all': must be full or selective"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recompute_method 'block': is for full recompute only"),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5}, "between 1 and the model's 4 layers"),
        ({"recompute_granularity": "selective", "recompute_modules": ["attn"]}, "attn is no part of a layer"),
        ({"recompute_modules": ["mlp"]}, "are for selective recompute only"),
        ({"num_moe_experts": 8, "moe_router_topk": 9}, "moe_router_topk 9: must be between 1 and the 8 experts"),
        (
            {"num_moe_experts": 8, "moe_token_dispatcher_type": "flex"},
            r"needs the package deep_ep \(DeepEP\), which is not installed .*; alltoall computes the same without it; 'alltoall' works",
        ),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size 2: needs a model with experts"),
        ({"fp8": "e4m3"}, "bf16 False: is needed by FP8"),
        ({"fp8": "e4m3", "bf16": True, "fp8_margin": 18}, "fp8_margin 18: must be between 0 and 17 powers of two"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection = True is not built yet"),
        ({"variable_seq_lengths": True}, "variable_seq_lengths = True is not built yet; leave it at False"),
        ({"memory_efficient_layer_norm": True}, "memory_efficient_layer_norm = True is not built yet"),
    ],
)
def test_refusals_name_the_setting(extra, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SHAPE, **extra)


def stages(pp, vp=None, layers=8, **extra):
    config = TransformerConfig(
        **{**SHAPE, "num_layers": layers}, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp, **extra
    )
    return [[list(layers_of_stage(config, rank, chunk)) for chunk in range(vp or 1)] for rank in range(pp)]


def test_layers_of_stages():
    assert stages(2) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert stages(2, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert stages(2, num_layers_in_first_pipeline_stage=3) == [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]
    uneven = stages(4, layers=8, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3)
    assert [len(stage[0]) for stage in uneven] == [1, 2, 2, 3]
    accounted = stages(4, layers=10, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert [len(stage[0]) for stage in accounted] == [2, 3, 3, 2]
    both = stages(2, 2, layers=10, num_layers_in_first_pipeline_stage=4)
    assert both == [[[0, 1], [5, 6]], [[2, 3, 4], [7, 8, 9]]]
    accounted = stages(2, 2, layers=6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert accounted == [[[0], [3, 4]], [[1, 2], [5]]]
    with pytest.raises(ValueError, match="10 layers do not divide over 4"):
        stages(2, 2, layers=10, num_layers_in_first_pipeline_stage=3)
    with pytest.raises(ValueError, match="30 layers do not divide over 4"):
        stages(4, layers=30)
    with pytest.raises(ValueError, match="do not divide"):
        stages(2, layers=8, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3)


def test_specs():
    linear = ModuleSpec(module=("torch.nn", "Linear"), params={"bias": False})
    assert build_module(linear, 2, 3).bias is None and build_module(linear, 2, 3, bias=True).bias is not None
    assert build_module(torch.nn.ReLU).inplace is False
    assert build_module(test_derived_sizes) is test_derived_sizes, "a function is not called"
    with pytest.raises(ImportError, match=r"torch\.nn has no Linea"):
        import_module(("torch.nn", "Linea"))
    with pytest.raises(TypeError, match="while building Linear"):
        build_module(linear, 2)
