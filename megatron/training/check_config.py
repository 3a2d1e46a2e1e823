"""--check-config: what a command line would do, without doing it. No torch, no process group."""

import argparse
import dataclasses

from megatron.core.flops import LatentSizes
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.transformer.moe.settings import moe_layer_pattern
from megatron.training.config import SECTIONS, checks

GIB = 2**30


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


def state_bytes_per_parameter(args: argparse.Namespace) -> int:
    """Bytes of weights, gradients and optimizer state, every data-parallel rank holding all of its share of the model."""
    half = args.bf16 or args.fp16
    weights = 2 + 4 if half else 4
    gradients = 4 if args.accumulate_allreduce_grads_in_fp32 or not half else 2
    moments = 8 if args.optimizer == "adam" else 4 if args.sgd_momentum else 0
    return weights + gradients + moments


def activation_bytes(args: argparse.Namespace) -> int:
    """A rough count of what the forward pass of one micro batch keeps: of each layer's linears and norms the inputs, and the logits.

    Tensor parallelism divides heads, MLP and logits, sequence parallelism the residual stream as well.
    """
    tokens, tensor = args.micro_batch_size * args.seq_length, args.tensor_model_parallel_size
    width = 2 if args.bf16 or args.fp16 else 4
    gate = 3 if args.swiglu or args.quick_geglu else 2
    residual = 4 * args.hidden_size // (tensor if args.sequence_parallel else 1)
    ffn = args.ffn_hidden_size
    if args.num_experts is not None:  # most layers have them, and each token goes to several
        routed = args.moe_router_topk * (args.moe_ffn_hidden_size or ffn)
        ffn = max(ffn if not all(moe_layer_pattern(args.moe_layer_freq, args.num_layers)) else 0, routed) + (
            args.moe_shared_expert_intermediate_size or 0
        )
    per_layer = residual + _attention_activations(args) + gate * ffn // tensor
    logits = (padded_vocab_size(args) or 0) // tensor * (width + 4)
    return tokens * (width * per_layer * args.num_layers + logits)


def _attention_activations(args: argparse.Namespace) -> int:
    """What a layer's attention keeps of a token: queries, keys, values and what comes of them; latents before and after their norms."""
    heads, tensor, latents = args.num_attention_heads, args.tensor_model_parallel_size, LatentSizes.of(args)
    if latents is None:
        groups = args.num_query_groups if args.group_query_attention else heads
        return 2 * (heads + groups) * args.kv_channels // tensor
    width = (latents.q_lora_rank or 0) + latents.kv_lora_rank + latents.qk_pos_emb_head_dim
    return 2 * heads * (latents.score_channels + latents.v_head_dim) // tensor + 2 * width // (tensor if args.sequence_parallel else 1)


def report(args: argparse.Namespace) -> str:
    """The resolved configuration as text: every value that is not a plain default with where it came from, then the arithmetic."""
    lines = ["configuration (values that are not defaults):"]
    for section in SECTIONS:
        rows = [f.name for f in dataclasses.fields(section) if f.name in args.provenance]
        if rows:
            lines.append(f"  {(section.__doc__ or '').splitlines()[0]}")
            lines += [f"    {dest:<42} {checks.text_of(getattr(args, dest)):<28} {args.provenance[dest]}" for dest in rows]
    return "\n".join(lines + _batch_lines(args) + _model_lines(args) + ["the command line is valid"])


def _batch_lines(args: argparse.Namespace) -> list[str]:
    unit = args.micro_batch_size * args.data_parallel_size
    lines = [
        f"processes: {args.world_size} = tensor {args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} "
        f"x context {args.context_parallel_size} x data {args.data_parallel_size}",
        f"batch: micro {args.micro_batch_size} x data-parallel {args.data_parallel_size} x {args.global_batch_size // unit} micro batches "
        f"= {args.global_batch_size} samples" + (f" = {args.global_batch_size * args.seq_length} tokens a step" if args.seq_length else ""),
    ]
    if args.rampup_batch_size is not None:
        start, step, samples = args.rampup_batch_size
        lines.append(f"ramp-up: from {start} by {step} over {samples} samples")
    samples = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    if samples and args.seq_length:
        lines.append(f"training: {samples} samples = {samples * args.seq_length} tokens")
    schedule = {name: value for name, value in checks.schedule_lengths(args).items() if value is not None}
    lines.append("learning rate, in samples: " + ", ".join(f"{name} {value:g}" for name, value in schedule.items()))
    return lines


def _layer_lines(args: argparse.Namespace) -> tuple[list[str], int, int]:
    """(lines on the layers, their parameters without experts, those of experts)."""
    layer = layer_parameters(args)
    if args.num_experts is None:
        return [f"layers: {args.num_layers} of {layer} parameters"], args.num_layers * layer, 0
    moe = sum(moe_layer_pattern(args.moe_layer_freq, args.num_layers))
    outside, expert = moe_layer_parameters(args), expert_parameters(args)
    line = (
        f"layers: {args.num_layers - moe} dense of {layer} parameters, {moe} of {outside} + {args.num_experts} experts of {expert} "
        f"({args.moe_router_topk} of them for a token)"
    )
    return [line], (args.num_layers - moe) * layer + moe * outside, moe * args.num_experts * expert


def _model_lines(args: argparse.Namespace) -> list[str]:
    if any(getattr(args, dest) is None for dest in ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "seq_length")):
        return ["model: as in the checkpoint"]
    lines, dense, experts = _layer_lines(args)
    rest = embedding_parameters(args)
    if rest is None:
        return [*lines, f"parameters: {dense + experts} + embeddings (their size is the tokenizer's)"]
    total = dense + experts + rest
    # all but norms and learned positions, which are small, is divided over the tensor-parallel ranks
    latents, tensor = LatentSizes.of(args), args.tensor_model_parallel_size
    whole = 0 if latents is None else args.num_layers * latents.down_projections(args.hidden_size)
    held = whole + (dense - whole + rest) // tensor
    held += experts // (args.expert_model_parallel_size * args.expert_tensor_parallel_size)
    state, activations = held * state_bytes_per_parameter(args), activation_bytes(args)
    return [
        *lines,
        f"vocabulary: {padded_vocab_size(args)} rows; embeddings, final norm and head: {rest} parameters",
        f"parameters: {total}",
        f"memory of a process, roughly: {state / GIB:.2f} GiB of weights, gradients and optimizer state "
        f"+ {activations / GIB:.2f} GiB of activations of one micro batch",
    ]
