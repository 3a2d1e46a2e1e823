"""Floating-point operations of a step: the model's matrix products, as the throughput in the log counts them."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LatentSizes:
    """Of multi-latent attention, under the names of MLATransformerConfig."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, settings: Any) -> "LatentSizes | None":
        """Of flags or a config; None where the model has another attention."""
        if not settings.multi_latent_attention:
            return None
        return cls(*(getattr(settings, field.name) for field in fields(cls)))

    @property
    def score_channels(self) -> int:
        """Of a head's queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    def projections(self, hidden_size: int, heads: int) -> int:
        """Elements of the weights between the hidden states and the heads' queries, keys and values."""
        rank = hidden_size if self.q_lora_rank is None else self.q_lora_rank
        queries, keys_and_values = heads * self.score_channels, heads * (self.qk_head_dim + self.v_head_dim)
        return self.down_projections(hidden_size) + rank * queries + self.kv_lora_rank * keys_and_values

    def down_projections(self, hidden_size: int) -> int:
        """Of them those that make latents, which tensor parallelism does not divide."""
        return hidden_size * ((self.q_lora_rank or 0) + self.kv_lora_rank + self.qk_pos_emb_head_dim)


def model_flops(
    *,
    num_layers: int,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    ffn_hidden_size: int,
    seq_length: int,
    vocab_size: int,
    gated_linear_unit: bool = False,
    causal: bool = True,
    num_experts: int | None = None,
    moe_layers: int = 0,
    moe_ffn_hidden_size: int = 0,
    moe_router_topk: int = 0,
    moe_shared_expert_intermediate_size: int | None = None,
    moe_shared_expert_gate: bool = False,
    latents: "LatentSizes | None" = None,
) -> float:
    """FLOPs of forward and backward for one sample of `seq_length` tokens; vocab_size with its padding.

    A product of [m, k] and [k, n] counts 2 m k n, and the backward twice the forward. Causal attention counts half of its square, as in
    Megatron's log. Norms, activations, softmax, embedding lookups and recompute do not count. In `moe_layers` of the layers the experts
    that a token goes to, the shared ones, and the gates count. `latents`: of multi-latent attention, which has neither query groups nor
    kv_channels.
    """
    if latents is None:
        score_width = value_width = num_attention_heads * kv_channels
        into_heads = hidden_size * (score_width + 2 * num_query_groups * kv_channels)
    else:
        score_width, value_width = num_attention_heads * latents.score_channels, num_attention_heads * latents.v_head_dim
        into_heads = latents.projections(hidden_size, num_attention_heads)
    qkv_and_proj = into_heads + value_width * hidden_size
    scores_and_context = seq_length * (score_width + value_width) * (0.5 if causal else 1.0)
    matrices = 3 if gated_linear_unit else 2
    mlp = matrices * hidden_size * ffn_hidden_size
    moe_width = moe_router_topk * moe_ffn_hidden_size + (moe_shared_expert_intermediate_size or 0)
    moe = matrices * hidden_size * moe_width + hidden_size * ((num_experts or 0) + moe_shared_expert_gate)
    feed_forward = (num_layers - moe_layers) * mlp + moe_layers * moe
    per_token = num_layers * (qkv_and_proj + scores_and_context) + feed_forward + hidden_size * vocab_size
    return 3 * 2 * seq_length * per_token
