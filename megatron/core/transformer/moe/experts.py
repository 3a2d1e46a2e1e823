"""The experts of a rank. forward: rows [n, h] sorted by expert, their counts, their weights [n] -> ([n, h] times the weights, None)."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.fp8 import expert_mlp
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.layers import empty_parameter, share_of_sum
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, declare
from megatron.core.tensor_parallel.random import RecomputedOutput
from megatron.core.transformer.mlp import MLP, MLPSubmodules, activate, fc1_segments, is_fused_swiglu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.grouped_gemm import grouped_linear, row_bias
from megatron.core.transformer.moe.token_dispatcher import TokenCounts
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size


def expert_ffn_size(config: TransformerConfig) -> int:
    """Inner width of one expert."""
    size = config.moe_ffn_hidden_size or config.ffn_hidden_size
    assert size is not None
    return size


def local_experts(config: TransformerConfig, pg_collection: ProcessGroupCollection) -> Experts:
    """The experts of this expert-parallel rank."""
    assert config.num_moe_experts is not None
    count = config.num_moe_experts // get_pg_size(pg_collection.ep)
    return Experts(get_pg_rank(pg_collection.ep) * count, config.num_moe_experts, count)


class SequentialMLP(MegatronModule):
    """One MLP per local expert, run one after the other. The number of rows of each is read by the host."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = default_pg_collection(pg_collection)
        held = local_experts(config, groups)
        assert held.count == num_local_experts
        self.num_local_experts = num_local_experts
        self.local_experts = torch.nn.ModuleList(
            MLP(
                config,
                submodules,
                is_expert=True,
                ffn_hidden_size=expert_ffn_size(config),
                pg_collection=groups,
                experts=Experts(held.first + index, held.total),
            )
            for index in range(num_local_experts)
        )

    def forward(self, rows: torch.Tensor, counts: TokenCounts, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        sizes = counts.tolist()
        parts = zip(self.local_experts, rows.split(sizes), probs.split(sizes))
        outputs = [expert(part, per_token_scale=weights)[0] for expert, part, weights in parts]
        return torch.cat(outputs), None


class GroupedLinear(torch.nn.Module):
    """y = x A_e^T (+ b_e) for rows of several experts in one call; A is [local experts, out, in].

    split "column": the outputs are split over `expt_tp`; "row": the inputs are, and y is this rank's part of a sum, its bias too.
    forward: rows [n, in], counts, with a row bias times `bias_scale` [n].
    `fp8`: an Fp8Experts or Fp8BlockExperts (fp8/) that computes in its place, set by the decoder layer that it is a part of.
    `input_is_recomputed`: what it is given is freed after its forward, and there again for its backward.
    """

    fp8: Any = None
    input_is_recomputed = False

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool,
        split: str,
        pg_collection: ProcessGroupCollection,
        segments: tuple[tuple[str, int], ...] | None = None,
    ) -> None:
        super().__init__()
        held = local_experts(config, pg_collection)
        assert held.count == num_local_experts
        rank, self.etp = get_pg_rank(pg_collection.expt_tp), get_pg_size(pg_collection.expt_tp)
        self.config, self.column = config, split == "column"
        rows = tuple(Segment(name, size, "tp") for name, size in segments or ((split, output_size if self.column else input_size),))
        sharding = ParamSharding((output_size, input_size), 0 if self.column else 1, rows, is_expert=True, experts=held)
        self.weight = empty_parameter(sharding, config, self.etp)
        declare(self.weight, sharding, init_method, tp_rank=rank, tp_size=self.etp)
        if bias:
            split_rows = {"split_dim": 0, "segments": rows} if self.column else {}
            sharding = ParamSharding((output_size,), **split_rows, is_expert=True, experts=held)  # type: ignore[arg-type]
            self.bias = empty_parameter(sharding, config, self.etp)
            declare(self.bias, sharding, torch.nn.init.zeros_, tp_rank=rank, tp_size=self.etp)
        else:
            self.register_parameter("bias", None)

    def forward(self, rows: torch.Tensor, counts: TokenCounts, bias_scale: torch.Tensor | None = None) -> torch.Tensor:
        fuse = self.config.gradient_accumulation_fusion
        if self.fp8 is None:
            out = grouped_linear(rows, self.weight, counts, fuse)
        else:
            out = self.fp8.of_rows(rows, counts, fuse_weight_grad=fuse, training=self.training, keep_input=self.input_is_recomputed)
        if self.bias is None:
            return out
        added = row_bias(self.bias if self.column else share_of_sum(self.bias, self.etp), counts, rows.shape[0])
        return out + added if bias_scale is None else out + (added * bias_scale.unsqueeze(-1)).to(out.dtype)


@dataclass
class GroupedMLPSubmodules:
    linear_fc1: Any = GroupedLinear
    linear_fc2: Any = GroupedLinear


class GroupedMLP(MegatronModule):
    """The local experts' weights in one parameter a linear, their products by one grouped GEMM."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: GroupedMLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        groups = default_pg_collection(pg_collection)
        submodules = submodules or GroupedMLPSubmodules()
        self.num_local_experts = num_local_experts
        ffn, hidden = expert_ffn_size(config), config.hidden_size
        segments = fc1_segments(config, ffn)
        common: dict[str, Any] = {"config": config, "bias": config.add_bias_linear, "pg_collection": groups}
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            num_local_experts,
            hidden,
            sum(size for _, size in segments),
            init_method=config.init_method,
            split="column",
            segments=segments,
            **common,
        )
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            num_local_experts,
            ffn,
            hidden,
            init_method=config.output_layer_init_method,
            split="row",
            **common,
        )
        if isinstance(self.linear_fc2, GroupedLinear):
            self.linear_fc2.input_is_recomputed = config.recomputes("moe_act")

    def forward(self, rows: torch.Tensor, counts: TokenCounts, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        if is_fused_swiglu(self.config, self.config.activation_func) and expert_mlp.takes(self.linear_fc1, self.linear_fc2, rows):
            return expert_mlp.expert_mlp(self.linear_fc1, self.linear_fc2, rows, counts, probs), None
        intermediate = self.linear_fc1(rows, counts)
        act = RecomputedOutput(self.training and self.config.recomputes("moe_act"))
        activated = act.run(lambda x, scale: activate(self.config, x, scale), intermediate, probs)
        output = self.linear_fc2(activated, counts, probs)
        act.free_until_backward_of(output)
        return output, None
