"""Files and packages that flags name: said when the command line is read, not when a loader first trips over them."""

import os
from collections.abc import Iterator
from glob import glob

from megatron.core import optional_imports
from megatron.core.datasets.object_storage import is_remote
from megatron.core.datasets.utils import get_blend_from_list, normalize, parse_and_normalize_split
from megatron.core.tokenizers.build import TOKENIZER_TYPES, WITH_CHAT_TEMPLATE, WITH_EXTRA_IDS, WITH_SPECIAL_TOKENS
from megatron.training import checkpoint_names
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import Args, name_of, problem
from megatron.training.config.data_lists import fill_from_files

DATA_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
DATA_FILES = ("data_args_path", "per_split_data_args_path")
TOKENIZER_PACKAGES = {
    "BertWordPieceLowerCase": "tokenizers",
    "BertWordPieceCase": "tokenizers",
    "GPT2BPETokenizer": "tiktoken",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "HuggingFaceTokenizer": "transformers",
    "SFTTokenizer": "transformers",
    "TikTokenizer": "tiktoken",
}


def check_data_source(args: Args) -> Iterator[Problem]:
    files = [dest for dest in DATA_FILES if getattr(args, dest) is not None]
    given = [dest for dest in DATA_LISTS if getattr(args, dest) is not None]
    typed = [dest for dest in given if args.provenance.get(dest) != "derived"]
    if files and (typed or args.mock_data or len(files) > 1):
        other = name_of(typed[0]) if typed else "--mock-data" if args.mock_data else name_of(files[1])
        yield problem(args, files[0], f"excludes {other}: give one of them", "leave it out")
    elif files and (wrong := fill_from_files(args)) is not None:
        yield problem(args, files[0], wrong, "FILE")
    if not given and not args.mock_data and not files:
        yield Problem("--data-path", None, "is required (or --mock-data)", "--data-path PREFIX, where PREFIX.bin and PREFIX.idx exist")
    if args.mock_data and given:
        yield problem(args, given[0], "excludes --mock-data: give one of them", "--mock-data")
    kinds = [name_of(dest) for dest in ("mock_data", "sft", "fim_data") if getattr(args, dest)]
    if len(kinds) > 1:
        yield Problem(kinds[1], None, f"excludes {kinds[0]}: samples are of one kind", "one of them")
    if "data_path" in given and len(given) > 1:
        yield problem(args, given[1], "excludes --data-path: one blend that is split, or one per split", "--data-path")
    if args.split is not None:
        if given and "data_path" not in given and args.provenance.get("split") != "derived":
            yield problem(args, "split", f"needs --data-path; {name_of(given[0])} is not divided", "leave it out")
        try:
            parse_and_normalize_split(args.split)
        except ValueError:
            yield problem(args, "split", "must be up to three numbers, not negative and not all 0, separated by commas", "90,5,5")


def check_object_storage(args: Args) -> Iterator[Problem]:
    remote = [prefix for dest in DATA_LISTS for prefix in getattr(args, dest) or [] if is_remote(prefix)]
    if not remote:
        return
    if args.object_storage_cache_path is None:
        yield problem(args, "object_storage_cache_path", f"is required for {remote[0]}: its copy needs a local folder", "FOLDER")
    if not optional_imports.available("fsspec"):
        yield Problem("--data-path", remote[0], "needs the package fsspec", f"after {optional_imports.INSTALL_COMMAND['fsspec']}")


def check_build_index_only(args: Args) -> Iterator[Problem]:
    """How many samples a training asks for must not depend on how many processes it has: this one is alone."""
    if not args.build_index_only or args.check_config_world_size is not None or args.step_batch_size_schedule is not None:
        return
    if args.provenance.get("global_batch_size") == "derived":
        rule = "is required with --build-index-only: its default depends on the training's number of processes (--check-config-world-size)"
        yield Problem("--global-batch-size", None, rule, f"--global-batch-size {args.global_batch_size}")


def check_data_files(args: Args) -> Iterator[Problem]:
    for dest in DATA_LISTS:
        values = getattr(args, dest)
        if values is None or args.mock_data:
            continue
        if not values:
            yield problem(args, dest, "takes at least one prefix", "PREFIX")
            continue
        example = "0.7 PREFIX 0.3 PREFIX"
        try:
            prefixes, weights = get_blend_from_list(values) or (values, None)
        except ValueError:
            yield problem(args, dest, "must be prefixes alone, or a weight before each prefix", example)
            continue
        try:
            normalize([1.0] if weights is None else weights)
        except ValueError:
            yield problem(args, dest, "weights must not be negative, nor all 0", example)
        for prefix in prefixes:
            if args.sft:
                if not os.path.isfile(prefix):
                    yield Problem(name_of(dest), prefix, "no such file", "with --sft, a file of JSON lines, each a conversation")
                continue
            missing = [prefix + end for end in (".bin", ".idx") if not is_remote(prefix) and not os.path.isfile(prefix + end)]
            if missing:
                suffixed = prefix.endswith((".bin", ".idx"))
                hint = f"{name_of(dest)} {prefix[:-4]}" if suffixed else "a prefix that tools/preprocess_data.py wrote"
                yield Problem(name_of(dest), prefix, f"no file {' and no file '.join(missing)}", hint)


def check_tokenizer(args: Args) -> Iterator[Problem]:
    kind = args.tokenizer_type
    if kind is None:
        if not (args.use_checkpoint_args and not args.checkpoint_args_applied):
            yield problem(args, "tokenizer_type", "is required", "NullTokenizer --vocab-size 1024")
        return
    if kind not in TOKENIZER_TYPES:
        return
    package = TOKENIZER_PACKAGES.get(kind)
    for dest in TOKENIZER_TYPES[kind]:
        value = getattr(args, dest)
        if value is None:
            yield problem(args, dest, f"is required with --tokenizer-type {kind}", 1024 if dest == "vocab_size" else "FILE")
            continue
        if dest == "vocab_size" or is_remote(value):
            continue
        on_hub = kind in WITH_CHAT_TEMPLATE
        if on_hub and os.path.exists(value):
            package = "tokenizers"
        elif not os.path.exists(value) and (not on_hub or value.startswith((".", "/", "~"))):  # else a name at the hub
            yield problem(args, dest, "no such file", "FILE")
    if package and not optional_imports.available(package):
        yield problem(args, "tokenizer_type", f"needs the package {package}", f"after {optional_imports.INSTALL_COMMAND[package]}")
    for dest, types in (
        ("vocab_extra_ids", WITH_EXTRA_IDS),
        ("special_tokens", WITH_SPECIAL_TOKENS),
        ("chat_template", WITH_CHAT_TEMPLATE),
    ):
        if getattr(args, dest) and kind not in types:
            yield problem(args, dest, f"is for {' and '.join(types)}, not for {kind}", 0 if dest == "vocab_extra_ids" else "leave it out")
    if args.padded_vocab_size and args.vocab_size and args.padded_vocab_size < args.vocab_size:
        yield problem(args, "padded_vocab_size", f"must be at least --vocab-size {args.vocab_size}", args.vocab_size)


def check_packages(args: Args) -> Iterator[Problem]:
    for dest, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if getattr(args, dest) and not optional_imports.available(package):
            yield problem(args, dest, f"needs the package {package}", f"{optional_imports.INSTALL_COMMAND[package]}, or leave it out")


def check_folders(args: Args) -> Iterator[Problem]:
    for dest in ("save", "load", "pretrained_checkpoint"):
        path = getattr(args, dest)
        if path is not None and is_remote(path):
            yield problem(args, dest, "checkpoints are read and written as files: object storage is not supported", "/a/mounted/folder")
    others = ("tensorboard_dir", "wandb_save_dir", "data_cache_path", "object_storage_cache_path")
    for dest in ("save", "load", "pretrained_checkpoint", *others):
        path = getattr(args, dest)
        if path is not None and not is_remote(path) and os.path.exists(path) and not os.path.isdir(path):
            yield problem(args, dest, "must be a folder, and is a file", "FOLDER")
    if args.metrics_file is not None and os.path.isdir(args.metrics_file):
        yield problem(args, "metrics_file", "must be a file, and is a folder", os.path.join(args.metrics_file, "metrics.jsonl"))
    if args.load is not None and not is_remote(args.load):
        yield from _check_load(args)
    if args.pretrained_checkpoint is not None and not is_remote(args.pretrained_checkpoint):
        yield from _check_pretrained(args)


def _check_load(args: Args) -> Iterator[Problem]:
    """--load names the folder of checkpoints; one of them inside it would pass for an empty folder, which starts anew."""
    names = checkpoint_names
    tracker = names.get_checkpoint_tracker_filename(args.load)
    wanted = tracker if args.ckpt_step is None else names.get_checkpoint_name(args.load, args.ckpt_step)
    if os.path.exists(wanted):
        return
    folder = os.path.abspath(args.load)
    iteration = names.iteration_of(folder)
    if os.path.isdir(folder) and not os.path.exists(tracker) and (iteration is not None or os.path.basename(folder) == names.RELEASE):
        step = "" if iteration is None else f" --ckpt-step {iteration}"
        rule = "is one checkpoint: --load takes the folder that holds it"
        yield problem(args, "load", rule, f"{os.path.dirname(args.load.rstrip('/')) or '.'}{step}")
    elif args.ckpt_step is not None and (known := _iterations(folder)) and not glob(f"{wanted}*"):
        rule = f"names no checkpoint of --load {args.load}, which has {', '.join(map(str, known))}"
        yield problem(args, "ckpt_step", rule, known[-1])
    elif args.exit_on_missing_checkpoint and not args.pretrained_checkpoint:
        rule = f"holds no checkpoint (no {os.path.basename(wanted)}), and --exit-on-missing-checkpoint was given"
        yield problem(args, "load", rule, "FOLDER")


def _iterations(folder: str) -> list[int]:
    """Of the checkpoints there."""
    found = (checkpoint_names.iteration_of(path) for path in glob(os.path.join(folder, "iter_*")))
    return sorted(iteration for iteration in found if iteration is not None)


def _check_pretrained(args: Args) -> Iterator[Problem]:
    tracker = checkpoint_names.get_checkpoint_tracker_filename
    goes_on = args.load is not None and os.path.exists(tracker(args.load))
    if not goes_on and args.ckpt_step is None and not os.path.exists(tracker(args.pretrained_checkpoint)):
        yield problem(args, "pretrained_checkpoint", f"holds no checkpoint (no {checkpoint_names.TRACKER})", "FOLDER")


RULES = (
    check_data_source,
    check_object_storage,
    check_build_index_only,
    check_data_files,
    check_tokenizer,
    check_packages,
    check_folders,
)
