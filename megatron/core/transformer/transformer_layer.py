"""One transformer layer from its parts, and which layers a pipeline stage holds."""

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.context_parallel.combinations import comm_type_of_layer
from megatron.core.fp8.model import use_fp8
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import NOTHING_ADDED, FusedLayerNorm
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import RecomputedOutput, checkpoint, dropout_state
from megatron.core.transformer.cuda_graphs import LayerGraphs
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.pipeline_parallel_layer_layout import pipeline_layout
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank


def layers_of_stage(config: TransformerConfig, pp_rank: int, vp_stage: int | None = None) -> range:
    """The layers, counted over the whole model from 0, of one stage (its chunk `vp_stage`).

    Interleaved chunks go round the stages: chunk 0 of every stage, then chunk 1, ...
    Raises ValueError when the layers do not divide.
    """
    if config.pipeline_model_parallel_layout is not None:
        return pipeline_layout(config.pipeline_model_parallel_layout, config.pipeline_model_parallel_size).layers(pp_rank, vp_stage)
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    # A stage whose layers are given divides them over its chunks; the others share what is left, the embedding and the loss counted as
    # a layer of the first and the last slot where asked for.
    counts: list[int | None] = [None] * stages
    if stages > 1:
        counts[0], counts[-1] = first, last
    extra_first = config.account_for_embedding_in_pipeline_split and counts[0] is None
    extra_last = config.account_for_loss_in_pipeline_split and counts[-1] is None
    open_slots = counts.count(None) * chunks
    remaining = config.num_layers - sum(count or 0 for count in counts) + extra_first + extra_last
    fixed = [count for count in counts if count is not None]
    if remaining < 0 or (open_slots == 0 and remaining) or (open_slots and remaining % open_slots) or any(n % chunks for n in fixed):
        raise ValueError(
            f"{config.num_layers} layers do not divide over {stages * chunks} stages (pipeline_model_parallel_size {stages} x {chunks} "
            f"chunks: {remaining} layers left for {open_slots}); choose a multiple, or give num_layers_in_first_pipeline_stage or "
            "num_layers_in_last_pipeline_stage, multiples of the chunks"
        )
    sizes = [remaining // open_slots if count is None else count // chunks for count in counts] * chunks
    sizes[0] -= extra_first
    sizes[-1] -= extra_last
    slot = (vp_stage or 0) * stages + pp_rank
    return range(sum(sizes[:slot]), sum(sizes[: slot + 1]))


def get_transformer_layer_offset(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Number of layers before this stage (its chunk `vp_stage`)."""
    return layers_of_stage(config, _pp_rank(pp_rank), vp_stage).start


def _pp_rank(pp_rank: int | None) -> int:
    if pp_rank is not None:
        return pp_rank
    return get_pg_rank(default_pg_collection(None).pp)


@dataclass
class TransformerLayerSubmodules:
    """The parts of a layer. sharded_state_dict_keys_map: prefix of a parameter's name in the layer -> prefix of its checkpoint key.
    precision_context: see BackendSpecProvider."""

    input_layernorm: Any = IdentityOp
    self_attention: Any = IdentityOp
    self_attn_bda: Any = IdentityFuncOp
    pre_cross_attn_layernorm: Any = IdentityOp
    cross_attention: Any = IdentityOp
    cross_attn_bda: Any = IdentityFuncOp
    pre_mlp_layernorm: Any = IdentityOp
    mlp: Any = IdentityOp
    mlp_bda: Any = IdentityFuncOp
    sharded_state_dict_keys_map: dict[str, str] = field(default_factory=dict)
    precision_context: Any = None


class TransformerLayer(MegatronModule):
    """norm, attention, residual; norm, MLP, residual. forward: [s, b, h] -> ([s, b, h], context as given).

    `layer_number` counts this chunk's layers from 1; with `add_layer_offset` self.layer_number counts the whole model's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config)
        self.sharded_state_dict_keys_map = submodules.sharded_state_dict_keys_map
        self.pg_collection = groups = default_pg_collection(pg_collection)
        if add_layer_offset:
            offset = get_transformer_layer_offset(config, vp_stage, get_pg_rank(groups.pp)) if pp_layer_offset is None else pp_layer_offset
            layer_number += offset
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout if hidden_dropout is None else hidden_dropout
        for part in (submodules.cross_attention, submodules.pre_cross_attn_layernorm):
            if part is not IdentityOp:
                raise ValueError("TransformerLayer: cross attention is not built yet; leave its submodules at IdentityOp")

        norm_arguments = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.input_layernorm = build_module(submodules.input_layernorm, **norm_arguments)
        shared = {}
        if config.context_parallel_size > 1:
            shared["cp_comm_type"] = comm_type_of_layer(config.cp_comm_type, layer_number)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=groups, **shared
        )
        self.self_attn_bda = build_module(submodules.self_attn_bda)
        self.pre_mlp_layernorm = build_module(submodules.pre_mlp_layernorm, **norm_arguments)
        self.mlp = build_module(submodules.mlp, config=config, pg_collection=groups)
        self.is_moe_layer = isinstance(self.mlp, BaseMoELayer)
        if self.is_moe_layer:
            self.mlp.set_layer_number(layer_number)
        self.mlp_bda = build_module(submodules.mlp_bda)
        if submodules.precision_context is None:
            use_fp8(self, config, layer_number)
        self.graphs = self._graphs(vp_stage or 0) if config.cuda_graph_impl == "local" else None
        if config.recomputes("layernorm") and all(isinstance(n, IdentityOp) for n in (self.input_layernorm, self.pre_mlp_layernorm)):
            raise ValueError(
                "recompute_modules layernorm: this layer's norms are parts of its linears; leave layernorm out of recompute_modules"
            )

    def _graphs(self, chunk: int) -> LayerGraphs:
        """Of the whole layer; of one with experts, whose tokens are counted on the host, of what comes before them."""
        if self.is_moe_layer:
            return LayerGraphs(self, self._before_experts, self.config, chunk, besides=self.mlp)
        return LayerGraphs(self, self._whole, self.config, chunk)

    def _before_experts(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
        return self._attend(hidden_states, **arguments)[:2]

    def _whole(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
        return self.forward(hidden_states, **arguments)[:1]

    def __call__(self, hidden_states: torch.Tensor, *positional: Any, **arguments: Any) -> Any:
        graphs = None if positional or self.is_moe_layer else self.graphs
        if graphs is not None and graphs.usable(hidden_states, arguments):
            return *graphs(hidden_states, arguments), arguments.get("context")
        return super().__call__(hidden_states, *positional, **arguments)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        loss_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`padding_mask` and `loss_tokens` are for a MoE layer, see MoELayer."""
        arguments = {
            "attention_mask": attention_mask,
            "inference_context": inference_context,
            "rotary_pos_emb": rotary_pos_emb,
            "attention_bias": attention_bias,
            "packed_seq_params": packed_seq_params,
        }
        if self.is_moe_layer and self.graphs is not None and self.graphs.usable(hidden_states, arguments):
            (normed, residual), norm = self.graphs(hidden_states, arguments), RecomputedOutput(False)
        else:
            normed, residual, norm = self._attend(hidden_states, **arguments)
        halves = self.mlp(normed, padding_mask=padding_mask, loss_tokens=loss_tokens) if self.is_moe_layer else self._mlp(normed)
        output = self._join(self.mlp_bda, halves, normed, residual)
        norm.free_until_backward_of(output)
        return output, context

    def _attend(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor, RecomputedOutput]:
        """The first half of a layer: (what the MLP gets, the residual, what frees the former as in `_norm`)."""
        normed, residual, norm = self._norm(self.input_layernorm, hidden_states)
        return self._join_and_norm(self.self_attention(normed, **arguments), normed, residual, norm)

    @property
    def norms_sum_residuals(self) -> bool:
        """Whether the norms make the residual stream's sums and those of its gradients (norm_of_sum): where these are plain sums."""
        config = self.config
        return (
            config.bias_dropout_fusion
            and not (self.training and self.hidden_dropout)
            and not config.apply_residual_connection_post_layernorm
            and not config.recomputes("layernorm")
            and self.self_attn_bda is self.mlp_bda is get_bias_dropout_add
            and type(self.input_layernorm) is type(self.pre_mlp_layernorm) is FusedLayerNorm
        )

    def _norm(self, norm: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, RecomputedOutput]:
        """The norm's output, the residual, and what frees the output once its users have run (unless asked for, nothing is freed)."""
        recomputed = RecomputedOutput(self.training and self.config.recomputes("layernorm") and not isinstance(norm, IdentityOp))
        if self.norms_sum_residuals:
            return *norm(hidden_states, NOTHING_ADDED), recomputed
        return recomputed.run(norm, hidden_states), hidden_states, recomputed

    def _join_and_norm(
        self, attention: Any, normed: torch.Tensor, residual: torch.Tensor, norm: RecomputedOutput
    ) -> tuple[torch.Tensor, torch.Tensor, RecomputedOutput]:
        """What `_norm` gives, of the residual stream that attention has joined."""
        if self.norms_sum_residuals:
            return *self.pre_mlp_layernorm(residual, attention), norm
        hidden_states = self._join(self.self_attn_bda, attention, normed, residual)
        norm.free_until_backward_of(hidden_states)
        return self._norm(self.pre_mlp_layernorm, hidden_states)

    def _mlp(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.training and self.config.recomputes("mlp"):
            return checkpoint(self.mlp, False, normed)
        return self.mlp(normed)

    def _join(self, bda: Any, output_and_bias: Any, normed: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        residual = normed if self.config.apply_residual_connection_post_layernorm else hidden_states
        with dropout_state(self.config, self.hidden_dropout if self.training else 0.0):
            return bda(self.training, self.config.bias_dropout_fusion)(output_and_bias, residual, self.hidden_dropout)
