"""Parameters of the model that a command line describes, counted without making it. No torch."""

import argparse

from megatron.core.flops import LatentSizes
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.transformer.moe.settings import moe_layer_pattern


def padded_vocab_size(args: argparse.Namespace) -> int | None:
    """Rows of the embedding, None where only the tokenizer's file would tell."""
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    if args.vocab_size is None:
        return None
    tokens = args.vocab_size + args.vocab_extra_ids
    if args.tokenizer_type == "NullTokenizer":
        tokens = NullTokenizer(args.vocab_size, args.null_tokenizer_eod_id, args.null_tokenizer_pad_id).vocab_size
    return vocab_size_with_padding(tokens, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def expert_parameters(args: argparse.Namespace) -> int:
    """Parameters of one expert."""
    hidden, ffn = args.hidden_size, args.moe_ffn_hidden_size or args.ffn_hidden_size
    in_ffn = ffn * (2 if args.swiglu or args.quick_geglu else 1)
    return hidden * in_ffn + ffn * hidden + (in_ffn + hidden if args.add_bias_linear else 0)


def moe_layer_parameters(args: argparse.Namespace) -> int:
    """Parameters of a layer with experts, without these: attention, norms, gate, shared experts."""
    shared = args.moe_shared_expert_intermediate_size
    count = layer_parameters(args, ffn=shared or 0) + args.hidden_size * (args.num_experts + bool(args.moe_shared_expert_gate))
    return count - (args.hidden_size if args.add_bias_linear and not shared else 0)  # the bias of an MLP that is not there


def layer_parameters(args: argparse.Namespace, ffn: int | None = None) -> int:
    """Parameters of one Transformer layer: attention, MLP of inner width `ffn` (--ffn-hidden-size), norms."""
    hidden, ffn = args.hidden_size, args.ffn_hidden_size if ffn is None else ffn
    in_ffn = ffn * (2 if args.swiglu or args.quick_geglu else 1)
    norm = 1 if args.normalization == "RMSNorm" else 2
    count = attention_parameters(args, norm) + hidden * in_ffn + ffn * hidden + 2 * norm * hidden
    return count + (in_ffn + hidden if args.add_bias_linear else 0)


def attention_parameters(args: argparse.Namespace, norm: int) -> int:
    """Of the projections, their biases, and the norms of heads or latents; a norm has `norm` parameters a channel."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    bias = hidden if args.add_bias_linear else 0
    latents = LatentSizes.of(args)
    if latents is not None:
        count = latents.projections(hidden, heads) + heads * latents.v_head_dim * hidden
        return count + bias + (norm * ((latents.q_lora_rank or 0) + latents.kv_lora_rank) if args.qk_layernorm else 0)
    head, groups = args.kv_channels, args.num_query_groups if args.group_query_attention else heads
    qkv = (heads + 2 * groups) * head
    count = hidden * qkv + heads * head * hidden + bias
    return count + (qkv if args.add_bias_linear or args.add_qkv_bias else 0) + (2 * norm * head if args.qk_layernorm else 0)


def embedding_parameters(args: argparse.Namespace) -> int | None:
    """Parameters of embedding, learned positions, final norm and untied head."""
    vocab = padded_vocab_size(args)
    if vocab is None:
        return None
    count = vocab * args.hidden_size * (2 if args.untie_embeddings_and_output_weights else 1)
    if args.position_embedding_type == "learned_absolute":
        count += args.max_position_embeddings * args.hidden_size
    return count + args.hidden_size * (1 if args.normalization == "RMSNorm" else 2)


def joining_parameters(args: argparse.Namespace) -> int:
    """Of a layer for multi-token prediction, what joins hidden states and embeddings; the layer beside it is as the model's last one."""
    return 2 * args.hidden_size**2 + 3 * args.hidden_size * (1 if args.normalization == "RMSNorm" else 2)


def moe_layers(args: argparse.Namespace) -> int:
    """Layers with experts, those for multi-token prediction not counted."""
    return 0 if args.num_experts is None else sum(moe_layer_pattern(args.moe_layer_freq, args.num_layers))


def parameters_of_layers(args: argparse.Namespace) -> tuple[int, int]:
    """Of all layers, those for multi-token prediction among them: (parameters without experts, those of experts)."""
    ahead = args.mtp_num_layers or 0
    joining = ahead * joining_parameters(args)
    if args.num_experts is None:
        return (args.num_layers + ahead) * layer_parameters(args) + joining, 0
    moe = moe_layers(args) + (ahead if moe_layer_pattern(args.moe_layer_freq, args.num_layers)[-1] else 0)
    dense = (args.num_layers + ahead - moe) * layer_parameters(args) + moe * moe_layer_parameters(args) + joining
    return dense, moe * args.num_experts * expert_parameters(args)
