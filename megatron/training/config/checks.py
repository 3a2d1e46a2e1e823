"""What must hold between flags. Each rule is a generator of Problems over the parsed arguments; none raises, none stops at the first.

A rule whose inputs are missing says nothing: the missing flag is reported by its own rule. Values that follow from others are already
filled in by `arguments.derive`. File and package rules are in `checks_files`, the layout's in `checks_layout`.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from megatron.core.broken_rule import BrokenRule
from megatron.core.fp8.settings import fp8_problems
from megatron.core.num_microbatches_calculator import parse_step_batch_size_schedule
from megatron.core.transformer.recompute import recompute_problems
from megatron.training.argument_utils import Problem, all_fields, spellings, value_type
from megatron.training.checkpoint_names import legacy_problem
from megatron.training.config.fp8 import Fp8Flags
from megatron.training.config.moe import MoEFlags

Args = argparse.Namespace
FLAG_OF = {"num_moe_experts": "num_experts"}  # config fields whose flag has another name
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
EXAMPLES = {"num_layers": "12", "hidden_size": "768", "num_attention_heads": "12", "seq_length": "1024", "max_position_embeddings": "1024"}


def name_of(dest: str) -> str:
    """The flag's usual spelling."""
    return spellings(all_fields()[dest])[0]


def was_given(args: Args, dest: str) -> bool:
    """Whether the user gave this flag (on the command line or in YAML), also when it repeats the default."""
    return args.provenance.get(dest) in ("command line", "yaml")


def text_of(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(str, value))})"
    return " ".join(map(str, value)) if isinstance(value, list) else str(getattr(value, "name", value))


def as_given(dest: str, value: Any) -> str:
    """A flag's value in words; of a switch that turns off what is on by default, whether it was given."""
    return text_of(not value if isinstance(value, bool) and all_fields()[dest].default is True else value)


def problem(args: Args, dest: str, rule: str, works: object = "") -> Problem:
    """A Problem with the flag `dest` as it stands in `args`; `works` is a value of it, or a text that starts with dashes."""
    value = getattr(args, dest)
    bare = isinstance(value, bool) or value is None
    name = name_of(dest)
    text = str(works)
    example = text if not text or text.startswith(("--", "without ", "leave ", "after ", "pip ")) else f"{name} {text}"
    return Problem(name, None if value is None else "" if bare else text_of(value), rule, example)


def broken_rule(args: Args, broken: BrokenRule) -> Problem:
    """One of core's rules in the words of the line."""
    dest = FLAG_OF.get(broken.setting, broken.setting)
    works = "leave it out" if broken.works == "" else name_of(dest) if broken.works is True else in_flags(text_of(broken.works))
    return problem(args, dest, in_flags(broken.rule), works)


def in_flags(text: str) -> str:
    """`text` with the names of settings as flags."""
    return re.sub(r"[a-z]+(_[a-z]+)+", lambda word: _flag(word.group()), text)


def _flag(word: str) -> str:
    dest = FLAG_OF.get(word, word)
    return name_of(dest) if dest in all_fields() else word


def check_ranges(args: Args) -> Iterator[Problem]:
    for dest, field in all_fields().items():
        meta = field.metadata
        value = getattr(args, dest)
        if value is None or isinstance(value, (bool, str)):
            continue
        default = field.default if isinstance(field.default, (int, float)) else None
        for bound, broken, words in (
            (meta["minimum"], lambda v, b: v < b, "must be at least"),
            (meta["maximum"], lambda v, b: v > b, "must be at most"),
            (meta["above"], lambda v, b: v <= b, "must be more than"),
            (meta["below"], lambda v, b: v >= b, "must be below"),
        ):
            if bound is not None and broken(value, bound):
                number = int(bound) if value_type(field) is int else bound
                unit = f" {meta['unit']}" if meta["unit"] else ""
                works = default if default is not None else number + 1 if bound == meta["above"] else number
                if default is None and bound == meta["below"]:
                    works = number - 1 if value_type(field) is int else number / 2
                yield problem(args, dest, f"{words} {number}{unit}", works)


def unbuilt_values(args: Args, dest: str) -> list[str]:
    """Values of the flag that Megatron-LM knows and this version does not build."""
    built, value = all_fields()[dest].metadata["built"], getattr(args, dest)
    values = value if isinstance(value, list) else [value]
    return [] if built is None or value is None else [each for each in values if each not in built]


def check_built(args: Args) -> Iterator[Problem]:
    for dest, field in all_fields().items():
        if missing := unbuilt_values(args, dest):
            built = field.metadata["built"]
            yield problem(args, dest, f"{', '.join(missing)} is not built yet; there are {', '.join(built)}", built[0])


def check_required(args: Args) -> Iterator[Problem]:
    shape_from_checkpoint = args.use_checkpoint_args and not args.checkpoint_args_applied
    if not shape_from_checkpoint:
        without_one = args.use_checkpoint_args and args.load and "checkpoint" not in args.provenance.values()
        rule = "is required" + (f" (no checkpoint in --load {args.load} to take it from)" if without_one else "")
        for dest in SHAPE:
            optional = dest == "max_position_embeddings" and args.position_embedding_type == "none"
            if getattr(args, dest) is None and not optional:
                yield problem(args, dest, rule, EXAMPLES[dest])
    if args.micro_batch_size is None:
        yield problem(args, "micro_batch_size", "is required", 4)
    if args.train_iters is None and args.train_samples is None and not args.skip_train:
        yield Problem("--train-iters", None, "is required (or --train-samples)", "--train-iters 1000")
    if args.lr is None and not args.skip_train:
        yield problem(args, "lr", "is required", "1e-4")


def check_model(args: Args) -> Iterator[Problem]:
    hidden, heads = args.hidden_size, args.num_attention_heads
    if hidden and heads and args.kv_channels is None and hidden % heads:
        works = " or ".join(f"--hidden-size {size}" for size in multiples(hidden, heads))
        yield problem(args, "hidden_size", f"must be a multiple of --num-attention-heads {heads}, or give --kv-channels", works)
    if heads and args.group_query_attention and args.num_query_groups > 0 and heads % args.num_query_groups:
        rule = f"must divide --num-attention-heads {heads}"
        yield problem(args, "num_query_groups", rule, nearest_divisor(heads, args.num_query_groups))
    activations = [d for d in ("swiglu", "squared_relu", "quick_geglu", "openai_gelu") if getattr(args, d)]
    if len(activations) > 1:
        yield Problem(name_of(activations[1]), "", f"excludes {name_of(activations[0])}: one activation function", name_of(activations[0]))
    positions = args.position_embedding_type
    if args.use_rotary_position_embeddings and positions != "rope":
        rule = "--use-rotary-position-embeddings asks for rope"
        yield problem(args, "position_embedding_type", rule, "rope")
    if not args.add_position_embedding and positions not in ("rope", "none"):
        yield problem(args, "add_position_embedding", f"contradicts positions of kind {positions}", "--position-embedding-type none")
    if args.mtp_num_layers and positions == "learned_absolute" and args.pipeline_model_parallel_size > 1:
        rule = "--mtp-num-layers embeds tokens in the last pipeline stage, which has no learned positions"
        yield problem(args, "position_embedding_type", rule, "rope")
    if args.mtp_num_layers and isinstance(args.window_attn_skip_freq, list):
        yield problem(args, "window_attn_skip_freq", "a list says nothing of the layers of --mtp-num-layers", 2)
    longest = args.max_position_embeddings
    if positions == "learned_absolute" and longest and args.seq_length and args.seq_length > longest:
        rule = f"exceeds the {longest} learned positions of --max-position-embeddings"
        yield problem(args, "seq_length", rule, f"--max-position-embeddings {args.seq_length}")
    channels = args.kv_channels or (hidden // heads if hidden and heads and hidden % heads == 0 else None)
    if positions == "rope" and channels and not args.multi_latent_attention and int(channels * args.rotary_percent) % 2:
        rule = f"leaves {int(channels * args.rotary_percent)} rotating channels of a head's {channels}: it must be an even number"
        yield problem(args, "rotary_percent", rule, f"--kv-channels {channels + 1}" if channels % 2 else 1.0)


def check_recompute(args: Args) -> Iterator[Problem]:
    granularity, method, layers = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    if args.recompute_activations and granularity != "selective":
        yield problem(args, "recompute_granularity", "--recompute-activations asks for selective", "selective")
    total = args.num_layers if (layers or 1) > 0 else None  # what is below 1 is a matter of ranges
    for broken in recompute_problems(granularity, method, layers, args.recompute_modules, total):
        yield broken_rule(args, broken)


def check_batch(args: Args) -> Iterator[Problem]:
    micro, total, replicas = args.micro_batch_size, args.global_batch_size, args.data_parallel_size
    if not micro or not total or not replicas or micro < 0:
        return
    unit = micro * replicas
    made_of = f"--micro-batch-size {micro} x data-parallel size {replicas} = {unit}"
    if total > 0 and total % unit:
        works = " or ".join(f"--global-batch-size {size}" for size in multiples(total, unit))
        yield problem(args, "global_batch_size", f"must be a multiple of {made_of}", works)
    if args.step_batch_size_schedule is not None:
        yield from _check_batch_size_steps(args, unit, made_of)
    if args.rampup_batch_size is None:
        return
    start, step, samples = args.rampup_batch_size
    example = f"{unit} {unit} 1000"
    if start < 1 or step < 1 or samples < 0:
        yield problem(args, "rampup_batch_size", "start and increment must be positive, the samples not negative", example)
        return
    for number, what in ((start, "start"), (step, "increment")):
        if number % unit:
            yield problem(args, "rampup_batch_size", f"the {what} {number} must be a multiple of {made_of}", example)
            return
    if start > total or (total - start) % step:
        rule = f"from {start} by {step} does not meet --global-batch-size {total}"
        yield problem(args, "rampup_batch_size", rule, f"--global-batch-size {start + max(1, (total - start) // step) * step}")
    if args.train_samples is None and args.train_iters is not None:
        yield problem(args, "rampup_batch_size", "needs a length in samples", "--train-samples instead of --train-iters")


def batch_size_steps(args: Args) -> list[tuple[int, int]] | None:
    """--step-batch-size-schedule as (tokens, global batch size); None where it is not given or cannot be read."""
    try:
        return None if args.step_batch_size_schedule is None else parse_step_batch_size_schedule(args.step_batch_size_schedule)
    except ValueError:
        return None


def _check_batch_size_steps(args: Args, unit: int, made_of: str) -> Iterator[Problem]:
    if args.rampup_batch_size is not None:
        yield problem(
            args, "step_batch_size_schedule", "excludes --rampup-batch-size: give one of them", "--step-batch-size-schedule alone"
        )
    try:
        steps = parse_step_batch_size_schedule(args.step_batch_size_schedule)
    except ValueError as error:
        yield problem(args, "step_batch_size_schedule", str(error), f"--step-batch-size-schedule '0:{unit} 1B:{2 * unit}'")
        return
    for _, size in steps:
        if size < 1 or size % unit:
            works = " or ".join(map(str, multiples(size, unit)))
            yield problem(args, "step_batch_size_schedule", f"the size {size} must be a multiple of {made_of}, such as {works}")
            return
    if args.global_batch_size != steps[-1][1]:
        rule = f"must be the last size of --step-batch-size-schedule, {steps[-1][1]}"
        yield problem(args, "global_batch_size", rule, "leave it out")
    if args.train_samples is None and args.train_iters is not None:
        yield problem(args, "step_batch_size_schedule", "needs a length in samples", "--train-samples instead of --train-iters")


def check_profile(args: Args) -> Iterator[Problem]:
    if not args.profile:
        return
    if args.profile_step_end <= args.profile_step_start:
        rule = f"must be above --profile-step-start {args.profile_step_start}"
        yield problem(args, "profile_step_end", rule, args.profile_step_start + 2)
    for rank in args.profile_ranks:
        if not 0 <= rank < args.world_size:
            yield problem(args, "profile_ranks", f"there are ranks 0 to {args.world_size - 1}", 0)


def check_length(args: Args) -> Iterator[Problem]:
    if args.train_iters is not None and args.train_samples is not None:
        yield problem(args, "train_samples", f"excludes --train-iters {args.train_iters}: give one of them", "--train-iters alone")
        return
    by_samples = args.train_samples is not None
    if by_samples == (args.train_iters is not None):
        return
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        wrong, right = (f"{stem}_iters", f"{stem}_samples") if by_samples else (f"{stem}_samples", f"{stem}_iters")
        if getattr(args, wrong):
            length = "--train-samples" if by_samples else "--train-iters"
            yield problem(args, wrong, f"does not go with {length}: lengths are all in iterations or all in samples", name_of(right))


def schedule_lengths(args: Args) -> dict[str, float | None]:
    """Lengths of the learning-rate schedule in samples: total, decay, warmup, wsd_decay. None where unknown or not given."""
    per_step = args.global_batch_size
    by_samples = args.train_samples is not None
    if not by_samples and (args.train_iters is None or not per_step):
        return {"total": None, "decay": None, "warmup": None, "wsd_decay": None}

    def length(stem: str) -> int | None:
        value = getattr(args, f"{stem}_{'samples' if by_samples else 'iters'}")
        return value if by_samples or value is None else value * per_step

    total = length("train")
    decay = length("lr_decay")
    decay = total if decay is None else decay
    warmup: float | None = length("lr_warmup")
    if args.lr_warmup_fraction is not None and decay is not None:
        warmup = args.lr_warmup_fraction * decay
    return {"total": total, "decay": decay, "warmup": warmup, "wsd_decay": length("lr_wsd_decay")}


def check_learning_rate(args: Args) -> Iterator[Problem]:
    if args.lr is not None:
        if args.min_lr > args.lr:
            yield problem(args, "min_lr", f"must be at most --lr {args.lr}", args.lr / 10)
        if args.lr_warmup_init > args.lr:
            yield problem(args, "lr_warmup_init", f"must be at most --lr {args.lr}", 0.0)
    if args.decoupled_min_lr is not None and args.decoupled_lr is None:
        yield problem(args, "decoupled_min_lr", "needs --decoupled-lr", f"--decoupled-lr {args.lr or 1e-4}")
    if args.decoupled_lr is not None and args.decoupled_min_lr is not None and args.decoupled_min_lr > args.decoupled_lr:
        yield problem(args, "decoupled_min_lr", f"must be at most --decoupled-lr {args.decoupled_lr}", args.decoupled_lr / 10)
    if args.lr_warmup_fraction is not None and (args.lr_warmup_iters or args.lr_warmup_samples):
        other = "lr_warmup_iters" if args.lr_warmup_iters else "lr_warmup_samples"
        yield problem(args, "lr_warmup_fraction", f"excludes {name_of(other)} {getattr(args, other)}: give one of them", name_of(other))
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        rule = "excludes --use-checkpoint-opt_param-scheduler: give one of them"
        yield problem(args, "override_opt_param_scheduler", rule, "--override-opt_param-scheduler")
    lengths = schedule_lengths(args)
    decay, warmup, wsd = lengths["decay"], lengths["warmup"], lengths["wsd_decay"]
    unit = "samples" if args.train_samples is not None else "iters"
    per_step = 1 if unit == "samples" else args.global_batch_size
    if decay and warmup is not None and warmup >= decay:
        dest = "lr_warmup_fraction" if args.lr_warmup_fraction is not None else f"lr_warmup_{unit}"
        rule = f"warm-up must end before the decay does, at {decay // per_step:g} {unit}"
        yield problem(args, dest, rule, 0.01 if dest == "lr_warmup_fraction" else int(decay // per_step) // 10)
    if args.lr_decay_style == "WSD":
        if decay and wsd is None:
            works = f"{name_of(f'lr_wsd_decay_{unit}')} {max(1, int(decay // per_step) // 10)}"
            yield problem(args, "lr_decay_style", f"needs the length of its decay, {name_of(f'lr_wsd_decay_{unit}')}", works)
        elif decay and wsd and wsd > decay - (warmup or 0):
            longest = max(1, int((decay - (warmup or 0)) // per_step))
            rule = f"is longer than the {longest} {unit} between warm-up and the end"
            yield problem(args, f"lr_wsd_decay_{unit}", rule, longest)


def check_optimizer(args: Args) -> Iterator[Problem]:
    style, start, end = args.weight_decay_incr_style, args.start_weight_decay, args.end_weight_decay
    if style == "constant":
        for dest in ("start_weight_decay", "end_weight_decay"):
            if was_given(args, dest):
                yield problem(args, dest, "needs --weight-decay-incr-style linear or cosine", "--weight-decay-incr-style linear")
    else:
        for dest in ("start_weight_decay", "end_weight_decay"):
            if getattr(args, dest) is None:
                yield problem(args, dest, f"is required with --weight-decay-incr-style {style}", args.weight_decay)
        if start is not None and end is not None and start > end:
            yield problem(args, "end_weight_decay", f"must be at least --start-weight-decay {start}", start)


def check_distribution(args: Args) -> Iterator[Problem]:
    for dest in ("use_distributed_optimizer", "overlap_grad_reduce"):
        if args.overlap_param_gather and not getattr(args, dest):
            yield problem(args, "overlap_param_gather", f"needs {name_of(dest)}", name_of(dest))
    if args.ddp_bucket_size is not None and args.ddp_num_buckets is not None:
        yield problem(args, "ddp_num_buckets", "excludes --ddp-bucket-size: one follows from the other", "leave one out")
    if args.ddp_reduce_scatter_with_fp32_accumulation and not args.use_distributed_optimizer:
        rule = "needs --use-distributed-optimizer: only it reduce-scatters"
        yield problem(args, "ddp_reduce_scatter_with_fp32_accumulation", rule, "--use-distributed-optimizer")
    if args.deterministic_mode and args.attention_backend == "fused":
        yield problem(args, "attention_backend", "cuDNN's kernel is not deterministic, and --deterministic-mode was given", "flash")


def check_precision(args: Args) -> Iterator[Problem]:
    if args.fp16 and args.bf16:
        yield Problem("--fp16", "", "excludes --bf16: one number format", "--bf16")
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        yield problem(
            args, "grad_reduce_in_bf16", "excludes --accumulate-allreduce-grads-in-fp32: one format of gradients", "leave one out"
        )
    if args.min_loss_scale > args.initial_loss_scale:
        yield problem(args, "min_loss_scale", f"must be at most --initial-loss-scale {args.initial_loss_scale:g}", 1.0)


def check_fp8(args: Args) -> Iterator[Problem]:
    for dest, meant in (("fp8_hybrid", "hybrid"), ("fp8_e4m3", "e4m3")):
        if getattr(args, dest) and args.fp8 != meant:
            yield problem(args, "fp8", f"{name_of(dest)} asks for {meant}", meant)
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    for broken in fp8_problems(args, args.num_layers, groups):
        if not unbuilt_values(args, FLAG_OF.get(broken.setting, broken.setting)):
            yield broken_rule(args, broken)
    if args.fp8 and args.fp8_recipe == "delayed" and args.save and args.ckpt_format in ("torch", "torch_dcp"):
        yield problem(args, "ckpt_format", "has no place for the scales' history of --fp8-recipe delayed", "torch_dist")


def _check_one_state_dict(args: Args) -> Iterator[Problem]:
    """What --ckpt-format torch_dcp cannot write."""
    for dest in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        if getattr(args, dest) > 1:
            rule = f"writes one state dict for all ranks, and with {name_of(dest)} {getattr(args, dest)} theirs differ"
            yield problem(args, "ckpt_format", rule, "torch_dist")
    if args.use_distributed_optimizer:
        rule = "writes the optimizer's state parameter by parameter, and --use-distributed-optimizer cuts it into ranges"
        yield problem(args, "ckpt_format", rule, "torch_dist")


def check_run(args: Args) -> Iterator[Problem]:
    for dest, needs in (
        ("save_interval", "save"),
        ("save_retain_interval", "save_interval"),
        ("keep_last", "save"),
        ("async_save", "save"),
        ("log_progress", "save"),
        ("ckpt_step", "load"),
        ("use_checkpoint_args", "load"),
        ("exit_on_missing_checkpoint", "load"),
        ("wandb_project", "wandb_exp_name"),
    ):
        value = getattr(args, dest)
        if value is not None and value is not False and not getattr(args, needs):
            yield problem(args, dest, f"needs {name_of(needs)}", f"{name_of(needs)} {'NAME' if needs == 'wandb_exp_name' else 'FOLDER'}")
    if args.ckpt_format == "torch" and args.save:
        sizes = (args.tensor_model_parallel_size, args.expert_model_parallel_size)
        why = legacy_problem(*sizes, args.expert_tensor_parallel_size or sizes[0]) if args.num_experts and min(sizes) > 0 else None
        if why:
            yield problem(args, "ckpt_format", f"cannot hold these experts: {why}", "torch_dist")
    if args.ckpt_format == "torch_dcp" and args.save:
        yield from _check_one_state_dict(args)
    if args.async_save and args.ckpt_format != "torch_dist":
        yield problem(args, "async_save", f"writes torch_dist, and --ckpt-format is {args.ckpt_format}", "--ckpt-format torch_dist")
    if args.save_retain_interval and args.save_interval and args.save_retain_interval % args.save_interval:
        rule = f"must be a multiple of --save-interval {args.save_interval}: no checkpoint is at the others"
        yield problem(args, "save_retain_interval", rule, args.save_interval * max(1, args.save_retain_interval // args.save_interval))
    if args.exit_signal_handler and args.exit_signal.name in ("SIGKILL", "SIGSTOP"):
        yield problem(args, "exit_signal", "cannot be caught by a process", "SIGTERM")


def _expert_notes(args: Args) -> Iterator[str]:
    """Flags of experts that another one makes idle, and the one balance loss that depends on the layout."""
    balancing = args.moe_router_load_balancing_type
    if args.num_experts is None:
        if was_given(args, "expert_tensor_parallel_size") and args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
            yield f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} has no effect without --num-experts"
        if idle := {"moe", "moe_act", "shared_experts"} & set(args.recompute_modules or ()):
            yield f"--recompute-modules {' '.join(sorted(idle))} has no effect without --num-experts"
        return
    if balancing == "none" and args.moe_aux_loss_coeff:
        yield f"--moe-aux-loss-coeff {text_of(args.moe_aux_loss_coeff)} has no effect with --moe-router-load-balancing-type none"
    if was_given(args, "moe_token_drop_policy") and args.moe_expert_capacity_factor is None:
        yield f"--moe-token-drop-policy {args.moe_token_drop_policy} has no effect without --moe-expert-capacity-factor: nothing is dropped"
    if was_given(args, "moe_router_bias_update_rate") and not args.moe_router_enable_expert_bias:
        yield f"--moe-router-bias-update-rate {args.moe_router_bias_update_rate} has no effect without --moe-router-enable-expert-bias"
    if "global_aux_loss" in (balancing if isinstance(balancing, list) else [balancing]):
        yield (
            "--moe-router-load-balancing-type global_aux_loss counts tokens over the data-parallel ranks and a step's micro batches so "
            "far: unlike the other balance losses it gives another training on another number of data-parallel ranks"
        )


def _fp8_notes(args: Args) -> Iterator[str]:
    """Flags of FP8 that another one makes idle."""
    if not args.fp8:
        return
    of_layers = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if not args.first_last_layers_bf16 and (idle := [dest for dest in of_layers if was_given(args, dest)]):
        yield f"{', '.join(map(name_of, idle))}: no effect without --first-last-layers-bf16"
    elif args.first_last_layers_bf16 and sum(getattr(args, dest) for dest in of_layers) >= args.num_layers:
        yield f"WARNING: --first-last-layers-bf16 keeps all {args.num_layers} layers in bf16: none is in FP8"
    of_delayed = ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
    if args.fp8_recipe != "delayed" and (idle := [dest for dest in of_delayed if was_given(args, dest)]):
        yield f"{', '.join(map(name_of, idle))}: no effect with --fp8-recipe {args.fp8_recipe}, which keeps no history"


def _given_of(args: Args, section: type) -> list[str]:
    """Flags of a section that were given and have an effect at all."""
    return [f.name for f in dataclasses.fields(section) if was_given(args, f.name) and not f.metadata["no_effect"]]


def dropped_flags(args: Args) -> Iterator[str]:
    """Notes on flags that were given and change nothing, and on schedules that look like a mistake."""
    if was_given(args, "num_query_groups") and not args.group_query_attention:
        yield f"--num-query-groups {args.num_query_groups} has no effect without --group-query-attention"
    if was_given(args, "mtp_loss_scaling_factor") and not args.mtp_num_layers:
        yield f"--mtp-loss-scaling-factor {args.mtp_loss_scaling_factor:g} has no effect without --mtp-num-layers"
    if args.manual_gc_interval and not args.manual_gc:
        yield f"--manual-gc-interval {args.manual_gc_interval} has no effect without --manual-gc"
    if args.loss_scale is not None and not args.fp16:
        yield f"--loss-scale {args.loss_scale:g} has no effect without --fp16"
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16 has no effect without --bf16"
    if args.overlap_param_gather and args.cuda_graph_impl != "none":
        yield "--overlap-param-gather: parameters are gathered at once with --cuda-graph-impl: a graph cannot wait for what began outside"
    if args.timing_log_level == 2:
        yield "--timing-log-level 2 shows what 1 does, and timers of level 2 that the script itself starts"
    yield from _expert_notes(args)
    if args.fp8 is None and (idle := _given_of(args, Fp8Flags)):
        yield f"{', '.join(map(name_of, idle))}: no effect without --fp8-format"
    yield from _fp8_notes(args)
    if was_given(args, "cuda_graph_warmup_steps") and args.cuda_graph_impl == "none":
        yield f"--cuda-graph-warmup-steps {args.cuda_graph_warmup_steps} has no effect without --cuda-graph-impl"
    if args.num_experts is None and (experts := _given_of(args, MoEFlags)):
        yield f"{', '.join(map(name_of, experts))}: no effect without --num-experts"
    effectless = [(dest, field) for dest, field in all_fields().items() if field.metadata["no_effect"]]
    given = [(dest, field) for dest, field in effectless if was_given(args, dest) and getattr(args, dest) != field.default]
    if given:
        reasons = "; ".join(f"{name_of(dest)} ({field.metadata['no_effect']})" for dest, field in given)
        yield f"accepted, without effect here: {reasons}"
    if args.save and args.save_interval is None and not args.skip_train:
        yield f"--save {args.save} without --save-interval: the only checkpoint is written when training ends or is stopped"
    lengths = schedule_lengths(args)
    total, decay = lengths["total"], lengths["decay"]
    if total and decay and decay < total and args.lr_decay_style not in ("constant", "inverse-square-root") and not args.skip_train:
        per_step, unit = (1, "samples") if args.train_samples is not None else (args.global_batch_size, "iters")
        gap, words = (total - decay) / per_step, "samples" if unit == "samples" else "iterations"
        yield (
            f"WARNING: the learning rate's decay ends {gap:g} {words} before training does ({name_of('lr_decay_' + unit)} "
            f"{decay / per_step:g} counts from the start, warm-up included; training has {total / per_step:g}): "
            f"the rate stays at --min-lr {args.min_lr:g} from there"
        )


def multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, the lower one first where it is positive."""
    lower = value // unit * unit
    return [size for size in (lower, lower + unit) if size > 0]


def nearest_divisor(whole: int, near: int) -> int:
    return min((d for d in range(1, min(whole, 4096) + 1) if whole % d == 0), key=lambda d: abs(d - near))


RULES = (
    check_ranges,
    check_built,
    check_required,
    check_model,
    check_recompute,
    check_batch,
    check_length,
    check_profile,
    check_learning_rate,
    check_optimizer,
    check_distribution,
    check_precision,
    check_fp8,
    check_run,
)
