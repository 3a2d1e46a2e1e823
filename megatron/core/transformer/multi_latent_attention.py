"""Multi-latent attention (DeepSeek-V2, section 2.1): queries, keys and values made of low-rank latents, positions in channels of their own.

Rows of the projections, a contract with checkpoints: linear_q_up_proj (linear_q_proj where queries have no latent) head by head
[qk_head_dim without | qk_pos_emb_head_dim with positions]; linear_kv_down_proj [kv_lora_rank | qk_pos_emb_head_dim], the latter the one
key with positions that all heads share; linear_kv_up_proj head by head [qk_head_dim of the key | v_head_dim of the value]. Channels with
positions turn in pairs of neighbours. What makes latents is held whole by every tensor-parallel rank, what reads them is split by heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding, apply_rotary_pos_emb, packed_angles
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding, concentration, yarn_get_mscale
from megatron.core.packed_seq_params import PackedSeqParams, packed_documents
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import RecomputedOutput
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.utils import Group, divide, get_pg_size


@dataclass
class MLASelfAttentionSubmodules:
    linear_q_proj: Any = None
    linear_q_down_proj: Any = None
    linear_q_up_proj: Any = None
    linear_kv_down_proj: Any = None
    linear_kv_up_proj: Any = None
    core_attention: Any = None
    linear_proj: Any = None
    q_layernorm: Any = None
    kv_layernorm: Any = None


def rotary_embedding_of(config: MLATransformerConfig, cp_group: Group = None) -> RotaryEmbedding:
    """The angles of config.rope_type for the channels with positions."""
    common: dict[str, Any] = {
        "rotary_percent": config.rotary_percent,
        "rotary_interleaved": True,
        "rotary_base": config.rotary_base,
        "use_cpu_initialization": config.use_cpu_initialization,
        "cp_group": cp_group,
    }
    if config.rope_type == "rope":
        return RotaryEmbedding(config.qk_pos_emb_head_dim, **common)
    return YarnRotaryEmbedding(
        config.qk_pos_emb_head_dim,
        scaling_factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        **common,
    )


def softmax_scale_of(config: MLATransformerConfig) -> float:
    """config.softmax_scale, or 1 / sqrt(a head's channels), under YaRN times the square of its factor for mscale_all_dim: that of queries
    times that of keys."""
    if config.softmax_scale is not None:
        return config.softmax_scale
    factor = yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim) if config.rope_type == "yarn" else 1.0
    return factor**2 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


class MLASelfAttention(Attention):
    """forward: [s, b, h] (tokens split under sequence parallelism) -> ([s, b, h], bias or None).

    rotary_pos_emb: the angles that `rotary_embedding_of` makes; GPTModel hands them to all its layers.
    """

    config: MLATransformerConfig

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        settings = (config, submodules, layer_number, attn_mask_type, cp_comm_type, pg_collection)
        super().__init__(*settings, value_width=config.v_head_dim, softmax_scale=softmax_scale_of(config))
        self.heads = divide(config.num_attention_heads, get_pg_size(self.pg_collection.tp))  # of this rank
        self.mscale = 1.0
        if config.rope_type == "yarn":
            self.mscale = concentration(config.rotary_scaling_factor, config.mscale, config.mscale_all_dim)
        # The order in which Megatron-LM registers them, by which its optimizer files number parameters: after linear_proj, which all kinds
        # of attention share, the projections of queries, those of keys and values, last the norms. An assumption: no stored file of such a
        # model was at hand. optimizer_buckets.py notices another order by the values; legacy files hold their own, names come with them.
        queries = config.num_attention_heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
        keys_and_values = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_q_proj: Any = None
        self.linear_q_down_proj: Any = None
        self.linear_q_up_proj: Any = None
        if config.q_lora_rank is None:
            self.linear_q_proj = self._linear(submodules.linear_q_proj, config.hidden_size, queries, "q", gather_output=False)
        else:
            self.linear_q_down_proj = self._linear(submodules.linear_q_down_proj, config.hidden_size, config.q_lora_rank, "q_down")
            self.linear_q_up_proj = self._linear(submodules.linear_q_up_proj, config.q_lora_rank, queries, "q_up", gather_output=False)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = self._linear(submodules.linear_kv_down_proj, config.hidden_size, latent, "kv_down")
        self.linear_kv_up_proj = self._linear(
            submodules.linear_kv_up_proj, config.kv_lora_rank, keys_and_values, "kv_up", gather_output=False
        )
        self.q_layernorm = self._latent_norm(submodules.q_layernorm, config.q_lora_rank)
        self.kv_layernorm = self._latent_norm(submodules.kv_layernorm, config.kv_lora_rank)

    def _linear(self, spec: Any, inputs: int, outputs: int, name: str, **more: Any) -> Any:
        config = self.config
        common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        return build_module(spec, inputs, outputs, **common, **more, tp_comm_buffer_name=name, pg_collection=self.pg_collection)

    def _latent_norm(self, spec: Any, width: int | None) -> Any:
        """None where latents are not normalized, or where there are none."""
        if spec is None or width is None:
            return None
        return build_module(spec, config=self.config, hidden_size=width, eps=self.config.layernorm_epsilon)

    def _latents(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of this rank's tokens: what queries are made of, what keys and values are made of, the key with positions before it turns."""
        query = hidden_states
        if self.linear_q_down_proj is not None:
            query, _ = self.linear_q_down_proj(hidden_states)
            query = query if self.q_layernorm is None else self.q_layernorm(query)
        mixed, _ = self.linear_kv_down_proj(hidden_states)
        latent, turning = mixed.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        latent = latent.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent)
        return query, latent, turning

    def _heads(
        self, query_latent: torch.Tensor, latent: torch.Tensor, turning: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query and key [s, b, heads, d] and value [s, b, heads, v_head_dim] of this rank's heads; under sequence parallelism the tokens of
        all tensor-parallel ranks."""
        config, tp = self.config, self.pg_collection.tp
        fixed, positional = config.qk_head_dim, config.qk_pos_emb_head_dim

        def turned(t: torch.Tensor) -> torch.Tensor:
            return apply_rotary_pos_emb(t, angles, config, mscale=self.mscale, mla_rotary_interleaved=True)

        to_queries = self.linear_q_proj if self.linear_q_up_proj is None else self.linear_q_up_proj
        query, _ = to_queries(query_latent)
        query_fixed, query_turning = query.unflatten(-1, (self.heads, -1)).split([fixed, positional], dim=-1)
        query = torch.cat([query_fixed, turned(query_turning)], dim=-1)

        mixed, _ = self.linear_kv_up_proj(latent)
        key_fixed, value = mixed.unflatten(-1, (self.heads, -1)).split([fixed, config.v_head_dim], dim=-1)
        # All ranks' heads read the one turning key: the gradients of this rank's heads are a part of its gradient.
        if config.sequence_parallel:
            turning = gather_from_sequence_parallel_region(turning, group=tp)
        else:
            turning = copy_to_tensor_model_parallel_region(turning, group=tp)
        key_turned = turned(turning.unsqueeze(2))
        key = torch.cat([key_fixed, key_turned.expand(*key_fixed.shape[:-1], -1)], dim=-1)
        return query, key, value.contiguous()  # the last to hold on to the whole projection, which now can go

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, rotary_pos_emb: torch.Tensor, packed_seq_params: PackedSeqParams | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[s, b, h] -> query, key, value as `_heads` says."""
        return self._heads(*self._latents(hidden_states), self._angles(rotary_pos_emb, packed_seq_params))

    def _angles(self, rotary_pos_emb: torch.Tensor, packed_seq_params: PackedSeqParams | None) -> torch.Tensor:
        if packed_seq_params is None:
            return rotary_pos_emb
        return packed_angles(rotary_pos_emb, packed_documents(packed_seq_params), self.pg_collection.cp)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if inference_context is not None:
            raise ValueError("MLASelfAttention: generation with a cache of latents is not built yet; leave inference_context out")
        if rotary_pos_emb is None:
            raise ValueError("MLASelfAttention needs rotary_pos_emb, the angles that rotary_embedding_of(config) makes")
        latents, angles = self._latents(hidden_states), self._angles(rotary_pos_emb, packed_seq_params)
        arguments = (attention_mask, attention_bias, packed_seq_params)
        if not (self.training and self.config.recomputes("mla_up_proj")):
            query, key, value = self._heads(*latents, angles)
            return self.linear_proj(self._attend(query, key, value, *arguments))
        recomputed = RecomputedOutput()
        flat = recomputed.run(self._in_one(angles), *latents)
        width = self.config.qk_head_dim + self.config.qk_pos_emb_head_dim
        widths = (width, width, self.config.v_head_dim)
        rows = flat.numel() // sum(widths)
        parts = flat.split([rows * each for each in widths])
        query, key, value = (part.view(-1, hidden_states.shape[1], self.heads, each) for part, each in zip(parts, widths, strict=True))
        context = self._attend(query, key, value, *arguments)
        recomputed.free_until_backward_of(context)
        return self.linear_proj(context)

    def _in_one(self, angles: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Queries, keys and values as one tensor [n], which one call can free, one after the other: each is contiguous, as without
        recompute, so that a product takes the same kernel, and gives the same bits."""

        def heads(query_latent: torch.Tensor, latent: torch.Tensor, turning: torch.Tensor) -> torch.Tensor:
            return torch.cat([part.flatten() for part in self._heads(query_latent, latent, turning, angles)])

        return heads
