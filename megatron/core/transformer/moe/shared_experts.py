"""Experts that every token goes to (DeepSeekMoE), as one MLP."""

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.layers import empty_parameter
from megatron.core.tensor_parallel.param_sharding import declare, replicated
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size


class SharedExpertMLP(MLP):
    """A dense MLP of width config.moe_shared_expert_intermediate_size; with config.moe_shared_expert_gate its output is multiplied by
    sigmoid(x . gate_weight) per token (Qwen2-MoE). forward: [s, b, h] -> [s, b, h]."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        gate: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = default_pg_collection(pg_collection)
        super().__init__(config, submodules, ffn_hidden_size=config.moe_shared_expert_intermediate_size, pg_collection=groups)
        self.use_shared_expert_gate = config.moe_shared_expert_gate if gate is None else gate
        self.gate_weight: Any = None
        if self.use_shared_expert_gate:
            split_tokens = config.sequence_parallel and get_pg_size(groups.tp) > 1
            sharding = replicated((1, config.hidden_size), grad_partial=("tp",) if split_tokens else ())
            self.gate_weight = empty_parameter(sharding, config, 1)
            assert config.init_method is not None
            declare(self.gate_weight, sharding, config.init_method)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        output, bias = super().forward(hidden_states, *args, **kwargs)
        assert bias is None
        return output if self.gate_weight is None else output * F.linear(hidden_states, self.gate_weight).sigmoid()
