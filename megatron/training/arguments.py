"""The command line: parse, check, and turn into the configs of `megatron.core`. No torch until a config is built.

    args = parse_and_validate(extra_args_provider, defaults)    # or prints all problems and exits with 2
    config = core_transformer_config_from_args(args)

The parser is generated from `config/`; what flags mean together stands in `config/checks*.py`; old and other names in `flag_aliases.py`.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from megatron.core import optional_imports
from megatron.core.transformer.default_sizes import default_ffn_hidden_size, default_kv_channels
from megatron.training import flag_aliases
from megatron.training.argument_utils import (
    CheckedLine,
    Problem,
    UsageError,
    all_fields,
    build_parser,
    check_tokens,
    yaml_tokens,
)
from megatron.training.config import (
    TokenizerFlags,
    checks,
    checks_backend,
    checks_files,
    checks_graphs,
    checks_latent,
    checks_layout,
    checks_moe,
)
from megatron.training.config.checks import was_given
from megatron.training.config.data_lists import fill_from_files
from megatron.training.resume_checks import architecture_flags

__all__ = [
    "Problem",
    "UsageError",
    "apply_checkpoint_args",
    "architecture_conflicts",
    "core_transformer_config_from_args",
    "ddp_config_from_args",
    "exit_with_usage_error",
    "finalize_args",
    "gpt_dataset_config_from_args",
    "optimizer_config_from_args",
    "parse_and_validate",
    "parse_args",
    "scheduler_kwargs_from_args",
    "validate_args",
    "was_given",
]

ExtraArgsProvider = Callable[[argparse.ArgumentParser], Any]
DEFAULT_SPLIT = "969,30,1"


def parse_args(
    extra_args_provider: ExtraArgsProvider | None = None,
    ignore_unknown_args: bool = False,
    *,
    argv: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> argparse.Namespace:
    """Read the command line (and --yaml-cfg) into a namespace with every dest.

    Beside the flags it has `rank`, `world_size`, `local_rank` (of the environment), and `provenance`: dest -> "command line", "yaml",
    "script", "checkpoint" or "derived" for every value that is not the flag's default.

    Args:
        extra_args_provider: adds a script's own arguments to the parser that it gets.
        ignore_unknown_args: leave unknown flags to others.
        argv: the line; sys.argv[1:] when None.
        defaults: the script's defaults, used here only to judge a line that has errors.

    Raises UsageError with every problem of the line; if there is one, also those that `validate_args` would have found.
    """
    tokens = list(map(str, sys.argv[1:] if argv is None else argv))
    parser = build_parser(extra_args_provider)
    line = check_tokens(parser, tokens, ignore_unknown_args)
    provenance = dict.fromkeys(line.given, "command line")
    if (yaml_path := _last_value(line.argv, "--yaml-cfg")) is not None:
        extra, from_yaml, problems = yaml_tokens(yaml_path, parser)
        line = _merged(check_tokens(parser, extra, ignore_unknown_args), line, problems)
        provenance = dict.fromkeys(from_yaml, "yaml") | provenance
    args, unknown = parser.parse_known_args(line.argv)
    line.problems += [Problem(name, None, "cannot be read here") for name in unknown]
    if line.ignored:
        args.ignored_flags = line.ignored
    args.provenance = provenance
    _add_environment(args)
    if line.problems:
        # a flag that could not be read is reported once, as such
        seen = {problem.flag for problem in line.problems} | {checks.name_of(dest) for dest in line.bad if dest in all_fields()}
        later = [problem for problem in find_problems(args, defaults or {}) if problem.flag not in seen]
        raise UsageError(line.problems + later)
    return args


def _last_value(argv: Sequence[str], name: str) -> str | None:
    values = [token.partition("=")[2] for token in argv if token.startswith(name + "=")]
    return values[-1] if values else None


def _merged(first: CheckedLine, second: CheckedLine, problems: list[Problem]) -> CheckedLine:
    """Two lines as one; argparse lets the later value win."""
    return CheckedLine(
        first.argv + second.argv,
        first.given | second.given,
        first.bad | second.bad,
        problems + first.problems + second.problems,
        first.ignored + second.ignored,
    )


def _add_environment(args: argparse.Namespace) -> None:
    """Who this process is: torchrun's variables, else SLURM's, else alone."""

    args.rank = _from_environment("RANK", "SLURM_PROCID", default=0)
    args.world_size = _from_environment("WORLD_SIZE", "SLURM_NTASKS", default=1)
    args.local_rank = _from_environment("LOCAL_RANK", "SLURM_LOCALID", default=args.local_rank)
    if args.check_config_world_size and args.check_config_world_size > 0 and (args.check_config or args.build_index_only):
        args.world_size = args.check_config_world_size
    elif args.build_index_only and checks_layout.sensible(args):
        args.world_size = checks_layout.smallest_world_size(args)
    args.checkpoint_args_applied = False
    args.notes = []


def _from_environment(*names: str, default: int) -> int:
    return next((int(os.environ[n]) for n in names if os.environ.get(n, "").isdigit()), default)


def validate_args(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """Apply the script's `defaults` where the user gave nothing, fill in what follows from other flags, and check everything.

    Sets `args.notes`: lines that rank 0 should print. Raises UsageError with all problems. Returns `args`.
    """
    problems = find_problems(args, defaults or {})
    if problems:
        raise UsageError(problems)
    return args


def find_problems(args: argparse.Namespace, defaults: Mapping[str, Any]) -> list[Problem]:
    """All problems of `args`, which is completed in place as far as they allow. Never raises."""
    for dest, value in defaults.items():
        if not was_given(args, dest) and not _other_activation_given(args, dest):
            setattr(args, dest, value)
            args.provenance[dest] = "script"
    ranges = list(checks.check_ranges(args))
    flag_aliases.apply_meanings(args)
    derive(args)
    found = ranges + [problem for rule in _rules() for problem in rule(args)]
    notes = [*checks.dropped_flags(args), *checks_latent.idle_flags(args)]
    args.notes += [note for note in notes if note not in args.notes]
    # a number out of range breaks the rules that compute with it: only the range is reported
    out_of_range = {problem.flag for problem in ranges}
    return [problem for i, problem in enumerate(found) if i < len(ranges) or problem.flag not in out_of_range]


def _rules() -> list[Callable[[argparse.Namespace], Any]]:
    rules = [rule for rule in checks.RULES if rule is not checks.check_ranges]
    by_subject = (checks_layout, checks_moe, checks_latent, checks_graphs, checks_backend, checks_files)
    return [*rules, *(rule for subject in by_subject for rule in subject.RULES)]


def _other_activation_given(args: argparse.Namespace, dest: str) -> bool:
    return dest in flag_aliases.ACTIVATIONS and any(was_given(args, other) for other in flag_aliases.ACTIVATIONS)


def derive(args: argparse.Namespace) -> None:
    """Fill in what was left open and follows from other flags. Leaves alone what it cannot compute."""

    def fill(dest: str, value: Any) -> None:
        if getattr(args, dest) is None and value is not None:
            setattr(args, dest, value)
            args.provenance[dest] = "derived"

    hidden, heads = args.hidden_size, args.num_attention_heads
    if args.multi_latent_attention:
        fill("rope_type", "yarn")
    if hidden and hidden > 0:
        # as Megatron-LM's command line: of the gated activations --swiglu alone narrows the default (three matrices of 8/3 x hidden
        # have as many parameters as two of 4 x hidden), --quick-geglu keeps 4 x hidden
        fill("ffn_hidden_size", default_ffn_hidden_size(hidden, gated=args.swiglu))
        if heads and heads > 0:
            fill("kv_channels", default_kv_channels(hidden, heads))
            if args.multi_latent_attention:  # nothing reads it there: hidden_size need be no multiple of the heads
                fill("kv_channels", args.qk_head_dim)
    args.data_parallel_size = checks_layout.data_parallel_size(args)
    if (steps := checks.batch_size_steps(args)) is not None:
        fill("global_batch_size", steps[-1][1])
    if args.micro_batch_size and args.data_parallel_size:
        fill("global_batch_size", args.micro_batch_size * args.data_parallel_size)
    if args.tokenizer_type is None and args.vocab_file and args.merge_file:
        fill("tokenizer_type", "GPT2BPETokenizer")
    fill("dataloader_type", "single")
    if args.skip_train:
        fill("lr", 0.0)
    fill_from_files(args)  # what is wrong with them is a problem of check_data_source
    if args.split is None and (args.mock_data or args.data_path is not None):
        fill("split", DEFAULT_SPLIT)
    if args.weight_decay_incr_style == "constant":
        fill("start_weight_decay", args.weight_decay)
        fill("end_weight_decay", args.weight_decay)
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:  # as Megatron-LM: a recipe made smaller still runs
        args.sequence_parallel = False
        args.notes.append("--sequence-parallel has no effect without --tensor-model-parallel-size above 1: there is nothing to divide")
    if args.save and args.wandb_project:
        fill("wandb_save_dir", os.path.join(args.save, "wandb"))
    fill("expert_tensor_parallel_size", args.tensor_model_parallel_size)
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):  # several values in form, mostly one
        value = getattr(args, dest)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, dest, value[0])
    args.virtual_pipeline_model_parallel_size = checks_layout.virtual_stages(args)
    # read nowhere here: a name that scripts written for Megatron-LM use
    args.transformer_pipeline_model_parallel_size = args.pipeline_model_parallel_size
    args.variable_seq_lengths = False
    args.params_dtype = None  # a torch.dtype from finalize_args on
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = 0
    _choose_backend(args)


def _choose_backend(args: argparse.Namespace) -> None:
    """Fall back to the local backend, with one line, where Transformer Engine cannot run; what was asked for stays in
    `requested_transformer_impl`."""
    if not hasattr(args, "requested_transformer_impl"):
        args.requested_transformer_impl = args.transformer_impl
    if args.transformer_impl == "transformer_engine" and (reason := _why_no_transformer_engine(args)):
        args.transformer_impl = "local"
        args.notes.append(f"WARNING: {reason}: --transformer-impl local is used instead of transformer_engine")


def _why_no_transformer_engine(args: argparse.Namespace) -> str | None:
    """Why the layers are not made of it. What its layers cannot do is an error where it was asked for by name."""
    if not optional_imports.available("transformer_engine"):
        return f"Transformer Engine is not installed ({optional_imports.INSTALL_COMMAND['transformer_engine']})"
    from megatron.core import device

    if not device.has_accelerator():
        return "there is no GPU for Transformer Engine"
    # so that a recipe that does not ask gives the same on every machine; `local` is as fast
    return None if was_given(args, "transformer_impl") else "Transformer Engine is used where it is asked for by name alone"


def microbatches_calculator_args(args: argparse.Namespace) -> tuple[Any, ...]:
    """What core.num_microbatches_calculator is built from, in its order."""
    return (
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        False,
        args.step_batch_size_schedule,
        args.seq_length,
    )


def finalize_args(args: argparse.Namespace) -> argparse.Namespace:
    """What needs torch: `params_dtype` becomes a torch.dtype. May be called twice."""
    import torch

    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return args


def parse_and_validate(
    extra_args_provider: ExtraArgsProvider | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    argv: Sequence[str] | None = None,
    ignore_unknown_args: bool = False,
    checkpoint_args: Callable[[argparse.Namespace], Mapping[str, Any]] | None = None,
) -> argparse.Namespace:
    """Command line to checked arguments; on problems print all of them on rank 0 and exit with 2. Answers --check-config.

    `checkpoint_args(args)` reads the arguments that a checkpoint was saved with; it is called with --use-checkpoint-args only, and may
    raise ValueError.
    """
    try:
        args = parse_args(extra_args_provider, ignore_unknown_args, argv=argv, defaults=defaults)
        if args.use_checkpoint_args and checkpoint_args is not None and args.load is not None:
            args.notes += apply_checkpoint_args(args, _saved_args(args, checkpoint_args))
        validate_args(args, defaults)
    except UsageError as error:
        exit_with_usage_error(error)
    if args.rank == 0:
        for note in args.notes:
            print(note, file=sys.stderr, flush=True)
    if args.check_config:
        from megatron.training.check_config import report

        if args.rank == 0:
            print(report(args))
        raise SystemExit(0)
    return args


def _saved_args(args: argparse.Namespace, read: Callable[[argparse.Namespace], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return read(args)
    except UsageError:
        raise
    except (ValueError, OSError) as error:
        raise UsageError([checks.problem(args, "load", f"--use-checkpoint-args cannot read it: {error}")]) from None


def exit_with_usage_error(error: ValueError) -> NoReturn:
    """Say what is wrong, on rank 0 and in torchrun's table, and exit with 2. All ranks read the same line, so none waits for another."""
    text = str(error)
    record_for_elastic(text)
    if _from_environment("RANK", "SLURM_PROCID", default=0) == 0:
        sys.stderr.buffer.write((text + "\n").encode("utf-8", "backslashreplace"))
        sys.stderr.flush()
    raise SystemExit(2)


def record_for_elastic(text: str) -> None:
    """Leave `text` where torchrun looks for a worker's reason (the file TORCHELASTIC_ERROR_FILE, as its ErrorHandler writes it)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # torchrun takes the earliest for the cause, by the second, and of several the lowest rank, also of those that it ended itself
    stamp = str(int(time.time()) - 1)
    content = {"message": {"message": text, "extraInfo": {"py_callstack": text, "timestamp": stamp}}}
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file)
    except OSError as failure:
        print(f"cannot write {path}: {failure}", file=sys.stderr)


def architecture_conflicts(args: argparse.Namespace, checkpoint_args: Mapping[str, Any]) -> list[Problem]:
    """Flags that the user gave and that contradict the model in the checkpoint."""
    found = []
    for dest in architecture_flags(checkpoint_args):
        saved = checkpoint_args.get(dest)
        if saved is not None and was_given(args, dest) and saved != getattr(args, dest):
            found.append(checks.problem(args, dest, f"the checkpoint's model has {checks.as_given(dest, saved)}", _as_typed(dest, saved)))
    return found


def _as_typed(dest: str, value: Any) -> str:
    """A value as one would give it; switches that are off are left out."""
    if isinstance(value, bool):
        switched_by = all_fields()[dest].default is not True
        return checks.name_of(dest) if value == switched_by else f"without {checks.name_of(dest)}"
    return f"{checks.name_of(dest)} {checks.text_of(value)}"


_VOCABULARY_ROWS = {"padded_vocab_size", "make_vocab_size_divisible_by"}  # the model's, whatever the tokenizer is


def apply_checkpoint_args(args: argparse.Namespace, checkpoint_args: Mapping[str, Any]) -> list[str]:
    """--use-checkpoint-args: the checkpoint's model, tokenizer and dropout flags become this run's, before `validate_args`.

    An explicit flag wins over the checkpoint, which wins over the default; the model's architecture must not contradict it.
    Returns lines that say what was taken and what was overridden. Raises UsageError for contradictions, with both values.
    """
    args.checkpoint_args_applied = True
    if not checkpoint_args:
        return [f"no checkpoint in --load {args.load}: --use-checkpoint-args takes nothing from it"]
    problems = architecture_conflicts(args, checkpoint_args)
    if problems:
        raise UsageError(problems)
    taken, kept = [], []
    left_out = set() if args.use_tokenizer_model_from_checkpoint_args else {field.name for field in dataclasses.fields(TokenizerFlags)}
    for dest, field in all_fields().items():
        saved = checkpoint_args.get(dest)
        if field.metadata["checkpoint"] is None or saved is None or dest in left_out - _VOCABULARY_ROWS:
            continue
        if not was_given(args, dest):
            if saved != getattr(args, dest):
                taken.append(f"{dest}={checks.text_of(saved)}")
            setattr(args, dest, saved)
            args.provenance[dest] = "checkpoint"
        elif saved != getattr(args, dest):
            kept.append(f"{checks.name_of(dest)} {checks.text_of(getattr(args, dest))} overrides the checkpoint's {checks.text_of(saved)}")
    return ([f"from the checkpoint: {', '.join(taken)}"] if taken else []) + kept


def _same_named(args: argparse.Namespace, config_class: Any) -> dict[str, Any]:
    """The values of `args` that a config has a field of the same name for."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config_class) if f.init and hasattr(args, f.name)}


def core_transformer_config_from_args(args: argparse.Namespace, config_class: Any = None) -> Any:
    """The TransformerConfig (or `config_class`, one of its kind) that the flags describe; an MLATransformerConfig for latent attention."""
    import torch

    from megatron.core import activations
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    finalize_args(args)
    config_class = config_class or (MLATransformerConfig if args.multi_latent_attention else TransformerConfig)
    values = _same_named(args, config_class)
    values["num_query_groups"] = args.num_query_groups if args.group_query_attention else None
    values["attention_backend"] = AttnBackend[args.attention_backend]
    values["pipeline_dtype"] = args.params_dtype
    special = {
        "persist_layer_norm": not args.no_persist_layer_norm,
        "bias_activation_fusion": _bias_activation_fusion(args),
        "use_cpu_initialization": bool(args.use_cpu_initialization),
        "deallocate_pipeline_outputs": True,
        "init_seed": args.seed,
        "num_moe_experts": args.num_experts,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
    }
    known = {f.name for f in dataclasses.fields(config_class)}
    values.update({name: value for name, value in special.items() if name in known})
    for dest, meaning in flag_aliases.ACTIVATIONS.items():
        if getattr(args, dest):
            name = meaning["activation_func"]
            function = getattr(activations, str(name), None) or getattr(torch.nn.functional, str(name))
            values.update(activation_func=function, gated_linear_unit=meaning["gated_linear_unit"])
    return config_class(**values)


def _bias_activation_fusion(args: argparse.Namespace) -> bool:
    """SwiGLU has its own switch; GELU's is about its bias; the other activations have no fused form."""
    others = [dest for dest in flag_aliases.ACTIVATIONS if getattr(args, dest)]
    if others:
        return others == ["swiglu"] and args.bias_swiglu_fusion
    return args.bias_gelu_fusion and args.add_bias_linear


def optimizer_config_from_args(args: argparse.Namespace) -> Any:
    """The OptimizerConfig that the flags describe."""
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    finalize_args(args)
    return OptimizerConfig(**_same_named(args, OptimizerConfig))


def ddp_config_from_args(args: argparse.Namespace) -> Any:
    """The DistributedDataParallelConfig that the flags describe."""
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

    values = _same_named(args, DistributedDataParallelConfig)
    values["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
    values["bucket_size"], values["num_buckets"] = args.ddp_bucket_size, args.ddp_num_buckets
    values["pad_buckets_for_high_nccl_busbw"] = args.ddp_pad_buckets_for_high_nccl_busbw
    values["average_in_collective"] = args.ddp_average_in_collective
    values["reduce_scatter_with_fp32_accumulation"] = args.ddp_reduce_scatter_with_fp32_accumulation
    values["check_for_nan_in_grad"] = args.check_for_nan_in_loss_and_grad
    return DistributedDataParallelConfig(**values)


def gpt_dataset_config_from_args(args: argparse.Namespace, tokenizer: Any = None) -> Any:
    """The GPTDatasetConfig that the flags describe: blends as (prefixes, weights or None), sequence length, split, caches."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    square = args.reset_attention_mask and not checks_layout.packs_documents(args)
    values: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": get_blend_from_list(args.data_path),
        "blend_per_split": [get_blend_from_list(paths) for paths in per_split] if any(p is not None for p in per_split) else None,
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "mock": args.mock_data,
        "vocab_size": getattr(tokenizer, "vocab_size", args.padded_vocab_size),
        "tokenizer": tokenizer,
        # a causal mask needs no tensor, nor do packed documents
        "create_attention_mask": square,
        "reset_attention_mask": square,
        "data_order": getattr(args, "data_order", None),
    }
    if args.sft:
        from megatron.training.datasets.sft_dataset import SFTDatasetConfig

        values["multiple"] = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
        return SFTDatasetConfig(**(_same_named(args, GPTDatasetConfig) | values))
    if args.fim_data:
        from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig, fim_settings

        return GPTFIMDatasetConfig(**(_same_named(args, GPTDatasetConfig) | values | fim_settings(args)))
    return GPTDatasetConfig(**(_same_named(args, GPTDatasetConfig) | values))


def scheduler_kwargs_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of OptimizerParamScheduler beside the optimizer; lengths in samples (an iteration counts --global-batch-size of them)."""
    lengths = checks.schedule_lengths(args)
    return {
        "init_lr": args.lr_warmup_init,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": lengths["warmup"] or 0,
        "lr_decay_steps": lengths["decay"] or 1,  # evaluation alone has no length
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay,
        "end_wd": args.end_weight_decay,
        "wd_incr_steps": lengths["total"] or 1,
        "wd_incr_style": args.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": args.use_checkpoint_opt_param_scheduler,
        "override_opt_param_scheduler": args.override_opt_param_scheduler,
        "wsd_decay_steps": lengths["wsd_decay"],
        "lr_wsd_decay_style": args.lr_wsd_decay_style,
    }
