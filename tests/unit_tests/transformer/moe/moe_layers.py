"""Small mixture-of-experts layers for the tests of this folder."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import initialize_parameters
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, EXPERTS = 8, 4


def moe_config(**settings: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 12,
        "num_moe_experts": EXPERTS,
        "params_dtype": torch.float64,
        "gated_linear_unit": True,
        "activation_func": F.silu,
    }
    return TransformerConfig(**(values | settings))


def moe_layer(config: TransformerConfig, groups: ProcessGroupCollection | None = None, seed: int = 5) -> MoELayer:
    """A layer whose weights and biases depend on the seed alone, not on layout or kind of experts."""
    groups = ProcessGroupCollection() if groups is None else groups
    layer = build_module(get_moe_module_spec(False, EXPERTS, config.moe_grouped_gemm), config, layer_number=1, pg_collection=groups)
    for param in layer.parameters():
        param.initializer = lambda tensor: tensor.normal_(0.0, 0.5)
    initialize_parameters(layer, seed)
    return layer


def router(**settings: Any) -> TopKRouter:
    return moe_layer(moe_config(**settings)).router


def tokens(length: int = 8, samples: int = 2, seed: int = 1) -> torch.Tensor:
    """Hidden states [s, b, h]."""
    return torch.randn(length, samples, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
