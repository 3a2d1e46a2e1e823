"""The feed-forward half of a layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import Group


@dataclass
class MLPSubmodules:
    linear_fc1: Any = None
    linear_fc2: Any = None
    activation_func: Any = None


class MLP(MegatronModule):
    """h -> ffn -> h, each linear split over the tensor-parallel ranks; fc1 holds gate rows then up rows for gated activations.

    forward: [s, b, input_size] -> ([s, b, hidden_size], bias or None).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = default_pg_collection(pg_collection)
        if pg_collection is None and tp_group is not None:
            groups.tp = tp_group
        ffn = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        assert ffn is not None
        gated = config.gated_linear_unit
        # gate and up are split each by itself: a rank holds the same channels of both
        shape: dict[str, Any] = {"segments": (("gate", ffn), ("up", ffn))} if gated else {}
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size if input_size is None else input_size,
            2 * ffn if gated else ffn,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=False,  # the matrix product adds it for free
            is_expert=is_expert,
            tp_comm_buffer_name="fc1",
            pg_collection=groups,
            **shape,
        )
        self.activation_func = build_module(submodules.activation_func, config) if submodules.activation_func else config.activation_func
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            ffn,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=is_expert,
            tp_comm_buffer_name="fc2",
            pg_collection=groups,
        )

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if per_token_scale is not None:
            raise ValueError("MLP: per_token_scale is not built yet; leave it out")
        intermediate, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(self._activate(intermediate))

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.config.bias_activation_fusion
        if self.config.gated_linear_unit:
            if fused and self.activation_func is F.silu:
                return bias_swiglu_impl(x, None)
            gate, up = x.chunk(2, dim=-1)
            return self.activation_func(gate) * up
        if fused and self.activation_func is F.gelu:
            return bias_gelu_impl(x, None)
        return self.activation_func(x)
