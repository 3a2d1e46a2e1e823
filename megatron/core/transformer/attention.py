"""Multi-head attention with grouped queries, its projections split over the tensor-parallel ranks by query group.

Rows of linear_qkv go group by group: the group's query heads, its key head, its value head, kv_channels rows each.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.fusions.fused_rope import fused_split_and_rotate
from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb, packed_angles
from megatron.core.packed_seq_params import PackedSeqParams, packed_documents
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide, get_pg_size


@dataclass
class SelfAttentionSubmodules:
    linear_qkv: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    k_layernorm: Any = None


class Attention(MegatronModule):
    """What every kind of attention has after its queries, keys and values: the core, and the projection back.

    value_width: of one head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        cp_comm_type: str | None,
        pg_collection: ProcessGroupCollection | None,
        *,
        value_width: int,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number, self.attn_mask_type = layer_number, attn_mask_type
        self.pg_collection = groups = default_pg_collection(pg_collection)
        # Registered before the projections to queries, keys and values, in the order in which Megatron's optimizer files number parameters.
        self.linear_proj = build_module(
            submodules.linear_proj,
            config.num_attention_heads * value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="proj",
            pg_collection=groups,
        )
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=groups,
            **({} if softmax_scale is None else {"softmax_scale": softmax_scale}),
        )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        packed_seq_params: PackedSeqParams | None,
    ) -> torch.Tensor:
        """The core's output [s, b, heads * d], of which nothing else is kept where that is asked for."""

        def core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return self.core_attention(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type=self.attn_mask_type,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
            )

        if self.training and self.config.recomputes("core_attn"):
            return checkpoint(core, False, query, key, value)
        return core(query, key, value)


class SelfAttention(Attention):
    """forward: [s, b, h] (tokens split under sequence parallelism) -> ([s, b, h], bias or None)."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        assert config.kv_channels is not None and config.num_query_groups is not None
        settings = (config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        super().__init__(*settings, value_width=config.kv_channels)
        groups = self.pg_collection
        self.head_dim = config.kv_channels
        self.heads_per_group = divide(config.num_attention_heads, config.num_query_groups)
        self.num_query_groups_per_partition = divide(config.num_query_groups, get_pg_size(groups.tp))
        self.num_attention_heads_per_partition = self.num_query_groups_per_partition * self.heads_per_group
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            config.num_query_groups * (self.heads_per_group + 2) * self.head_dim,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            pg_collection=groups,
        )
        self.q_layernorm = self._head_norm(submodules.q_layernorm)
        self.k_layernorm = self._head_norm(submodules.k_layernorm)

    def _head_norm(self, spec: Any) -> torch.nn.Module | None:
        if spec is None:
            return None
        norm = build_module(spec, config=self.config, hidden_size=self.head_dim, eps=self.config.layernorm_epsilon)
        if get_pg_size(self.pg_collection.tp) > 1:
            mark_partial_over_tp(norm)
        return norm

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, key_value_states: None = None, *, split_qkv: bool = True) -> tuple:
        """[s, b, h] -> query [s, b, heads, d], key and value [s, b, groups, d] of this rank, head norms applied.

        Without split_qkv: the projection [s, b, groups, (heads of one + 2) d] and what it splits into.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        groups, d = self.num_query_groups_per_partition, self.head_dim
        mixed = mixed.view(*mixed.shape[:2], groups, (self.heads_per_group + 2) * d)
        sizes = [self.heads_per_group * d, d, d]
        if not split_qkv:
            return mixed, sizes
        query, key, value = torch.split(mixed, sizes, dim=-1)
        query = query.reshape(*query.shape[:2], self.num_attention_heads_per_partition, d)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def _with_positions(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        packed_seq_params: PackedSeqParams | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, the first two turned. None of them holds on to the whole projection, which goes before the core runs."""
        query_angles, key_angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
        same = query_angles is key_angles
        if packed_seq_params is not None:
            documents, cp = packed_documents(packed_seq_params), self.pg_collection.cp
            query_angles = packed_angles(query_angles, documents, cp)
            key_angles = query_angles if same else packed_angles(key_angles, documents, cp)
        if same and self.config.apply_rope_fusion and self.q_layernorm is self.k_layernorm is None:
            mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
            return fused_split_and_rotate(mixed, query_angles, self.heads_per_group, self.config.rotary_interleaved)
        query, key, value = self.get_query_key_value_tensors(hidden_states)
        query = apply_rotary_pos_emb(query, query_angles, config=self.config)
        key = apply_rotary_pos_emb(key, key_angles, config=self.config)
        return query, key, value.contiguous()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if inference_context is not None:
            raise ValueError("SelfAttention: generation with a key and value cache is not built yet; leave inference_context out")
        if rotary_pos_emb is None:
            query, key, value = self.get_query_key_value_tensors(hidden_states)
        else:
            query, key, value = self._with_positions(hidden_states, rotary_pos_emb, packed_seq_params)
        return self.linear_proj(self._attend(query, key, value, attention_mask, attention_bias, packed_seq_params))


def mark_partial_over_tp(norm: torch.nn.Module) -> None:
    """Each rank applies this replicated norm to its own heads, so the gradient is partial over tp, with sequence parallelism or without."""
    for param in norm.parameters():
        param.sharding = replace(param.sharding, grad_partial=("tp",))  # type: ignore[attr-defined]
        param.sequence_parallel = True  # type: ignore[attr-defined]
