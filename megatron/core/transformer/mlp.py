"""The feed-forward half of a layer."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fp8 import swiglu_mlp
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import SwiGLUActivation, bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.param_sharding import Experts
from megatron.core.tensor_parallel.random import RecomputedOutput
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
    An expert's MLP is split over `expt_tp`: [n, input_size] -> ([n, hidden_size], None), this rank's part of a sum that the dispatcher
    makes, each token times per_token_scale [n].
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
        experts: Experts | None = None,
    ) -> None:
        super().__init__(config)
        groups = default_pg_collection(pg_collection)
        if pg_collection is None and tp_group is not None:
            groups.tp = tp_group
        ffn = config.ffn_hidden_size if ffn_hidden_size is None else ffn_hidden_size
        assert ffn is not None
        segments = fc1_segments(config, ffn)
        shape: dict[str, Any] = {"segments": segments} if config.gated_linear_unit else {}
        which: dict[str, Any] = {"experts": experts} if is_expert else {}
        self.is_expert = is_expert
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            config.hidden_size if input_size is None else input_size,
            sum(size for _, size in segments),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=False,  # the matrix product adds it for free
            is_expert=is_expert,
            tp_comm_buffer_name="fc1",
            pg_collection=groups,
            **shape,
            **which,
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
            skip_bias_add=is_expert,  # an expert's is weighted by token
            is_expert=is_expert,
            tp_comm_buffer_name="fc2",
            pg_collection=groups,
            **which,
        )

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._is_swiglu and swiglu_mlp.takes(self.linear_fc1, self.linear_fc2, hidden_states):
            return self.linear_fc2.summed(swiglu_mlp.swiglu_mlp(self.linear_fc1, self.linear_fc2, hidden_states))
        intermediate, _ = self.linear_fc1(hidden_states)
        if not self.is_expert:
            if per_token_scale is not None:
                raise ValueError("MLP: per_token_scale is for experts; leave it out")
            if self._is_swiglu and kernels_run_on(intermediate) and isinstance(self.linear_fc2, RowParallelLinear):
                return self.linear_fc2(intermediate, SwiGLUActivation())
            return self.linear_fc2(self._activate(intermediate))
        act = RecomputedOutput(self.training and self.config.recomputes("moe_act"))
        scale = intermediate.new_ones(intermediate.shape[:-1]) if per_token_scale is None else per_token_scale
        activated = act.run(self._activate, intermediate, scale)
        output, bias = self.linear_fc2(activated)
        if bias is not None:
            output = output + (bias * scale.unsqueeze(-1)).to(output.dtype)
        act.free_until_backward_of(output)
        return output, None

    @property
    def _is_swiglu(self) -> bool:
        """Whether the linears may take the activation over."""
        return is_fused_swiglu(self.config, self.activation_func) and not self.is_expert

    def _activate(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return activate(self.config, x, scale, self.activation_func)


def fc1_segments(config: TransformerConfig, ffn: int) -> tuple[tuple[str, int], ...]:
    """Rows of fc1. Gate and up are split each by itself: a rank holds the same channels of both."""
    return (("gate", ffn), ("up", ffn)) if config.gated_linear_unit else (("rows0", ffn),)


def is_fused_swiglu(config: TransformerConfig, function: Any) -> bool:
    """Whether the activation is SwiGLU, and may be computed together with what is before and after it."""
    return config.bias_activation_fusion and config.gated_linear_unit and function is F.silu


def activate(config: TransformerConfig, x: torch.Tensor, scale: torch.Tensor | None = None, activation_func: Any = None) -> torch.Tensor:
    """fc1's output [.., rows of fc1] -> fc2's input [.., ffn], times `scale` [..] (of at least its precision) where that is given."""
    function = activation_func or config.activation_func
    fused = config.bias_activation_fusion
    if config.gated_linear_unit:
        if fused and function is F.silu:
            if scale is not None:
                return weighted_bias_swiglu_impl(x, None, scale)
            out = bias_swiglu_impl(x, None)
        else:
            gate, up = x.chunk(2, dim=-1)
            out = function(gate) * up
    elif fused and function is F.gelu:
        out = bias_gelu_impl(x, None)
    else:
        out = function(x)
    return out if scale is None else (out * scale.unsqueeze(-1)).to(out.dtype)
