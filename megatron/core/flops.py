"""Floating-point operations of a step: the model's matrix products, as the throughput in the log counts them."""


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
) -> float:
    """FLOPs of forward and backward for one sample of `seq_length` tokens; vocab_size with its padding.

    A product of [m, k] and [k, n] counts 2 m k n, and the backward twice the forward. Causal attention counts half of its square, as in
    Megatron's log. Norms, activations, softmax, embedding lookups and recompute do not count. In `moe_layers` of the layers the experts
    that a token goes to, the shared ones, and the gates count.
    """
    width = num_attention_heads * kv_channels
    qkv_and_proj = hidden_size * (width + 2 * num_query_groups * kv_channels) + width * hidden_size
    scores_and_context = 2 * seq_length * width * (0.5 if causal else 1.0)
    matrices = 3 if gated_linear_unit else 2
    mlp = matrices * hidden_size * ffn_hidden_size
    moe_width = moe_router_topk * moe_ffn_hidden_size + (moe_shared_expert_intermediate_size or 0)
    moe = matrices * hidden_size * moe_width + hidden_size * ((num_experts or 0) + moe_shared_expert_gate)
    feed_forward = (num_layers - moe_layers) * mlp + moe_layers * moe
    per_token = num_layers * (qkv_and_proj + scores_and_context) + feed_forward + hidden_size * vocab_size
    return 3 * 2 * seq_length * per_token
