"""--check-config: what a command line would do, without doing it. No torch, no process group."""

import argparse
import dataclasses

from megatron.training import memory_estimate, model_size
from megatron.training.config import SECTIONS, checks

GIB = 2**30


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


def _layer_lines(args: argparse.Namespace) -> list[str]:
    layer, moe = model_size.layer_parameters(args), model_size.moe_layers(args)
    line = f"layers: {args.num_layers} of {layer} parameters"
    if args.num_experts is not None:
        outside, expert = model_size.moe_layer_parameters(args), model_size.expert_parameters(args)
        line = (
            f"layers: {args.num_layers - moe} dense of {layer} parameters, {moe} of {outside} + {args.num_experts} experts of {expert} "
            f"({args.moe_router_topk} of them for a token)"
        )
    if not args.mtp_num_layers:
        return [line]
    joining = model_size.joining_parameters(args)
    return [line, f"multi-token prediction: {args.mtp_num_layers} layers, each as the last one and {joining} parameters"]


def _model_lines(args: argparse.Namespace) -> list[str]:
    if any(getattr(args, dest) is None for dest in ("num_layers", "hidden_size", "num_attention_heads", "kv_channels", "seq_length")):
        return ["model: as in the checkpoint"]
    lines, in_layers = _layer_lines(args), sum(model_size.parameters_of_layers(args))
    rest = model_size.embedding_parameters(args)
    if rest is None:
        return [*lines, f"parameters: {in_layers} + embeddings (their size is the tokenizer's)"]
    state, activations = memory_estimate.state_bytes(args), memory_estimate.activation_bytes(args)
    return [
        *lines,
        f"vocabulary: {model_size.padded_vocab_size(args)} rows; embeddings, final norm and head: {rest} parameters",
        f"parameters: {in_layers + rest}",
        f"memory of a process, roughly: {state / GIB:.2f} GiB of weights, gradients and optimizer state "
        f"+ {activations / GIB:.2f} GiB of activations of one micro batch",
    ]
