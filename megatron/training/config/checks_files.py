"""Files and packages that flags name: said when the command line is read, not when a loader first trips over them."""

import os
import re
from collections.abc import Iterator

from megatron.core import optional_imports
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import Args, name_of, problem

DATA_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# tokenizer type -> (flags it needs, package it needs)
TOKENIZERS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "GPT2BPETokenizer": (("vocab_file", "merge_file"), "tokenizers"),
    "SentencePieceTokenizer": (("tokenizer_model",), "sentencepiece"),
    "GPTSentencePieceTokenizer": (("tokenizer_model",), "sentencepiece"),
    "Llama2Tokenizer": (("tokenizer_model",), "sentencepiece"),
    "HuggingFaceTokenizer": (("tokenizer_model",), "transformers"),
    "TikTokenizer": (("tokenizer_model",), "tiktoken"),
    "NullTokenizer": (("vocab_size",), None),
}
TRACKER = "latest_checkpointed_iteration.txt"


def is_remote(path: str) -> bool:
    return re.match(r"[a-z0-9]+://", path) is not None


def check_data_source(args: Args) -> Iterator[Problem]:
    given = [dest for dest in DATA_LISTS if getattr(args, dest) is not None]
    if not given and not args.mock_data:
        yield Problem("--data-path", None, "is required (or --mock-data)", "--data-path PREFIX, where PREFIX.bin and PREFIX.idx exist")
    if args.mock_data and given:
        yield problem(args, given[0], "excludes --mock-data: give one of them", "--mock-data")
    if "data_path" in given and len(given) > 1:
        yield problem(args, given[1], "excludes --data-path: one blend that is split, or one per split", "--data-path")
    if args.split is not None:
        if given and "data_path" not in given and args.provenance.get("split") != "derived":
            yield problem(args, "split", f"needs --data-path; {name_of(given[0])} is not divided", "leave it out")
        parts = re.split(r"[,/]", args.split)
        try:
            weights = [float(part) for part in parts]
        except ValueError:
            weights = []
        if not 1 <= len(weights) <= 3 or not all(0 <= w < float("inf") for w in weights) or not sum(weights):
            yield problem(args, "split", "must be up to three numbers, not negative and not all 0, separated by commas", "90,5,5")


def check_data_files(args: Args) -> Iterator[Problem]:
    for dest in DATA_LISTS:
        values = getattr(args, dest)
        if values is None or args.mock_data:
            continue
        if not values:
            yield problem(args, dest, "takes at least one prefix", "PREFIX")
            continue
        prefixes = values
        numbers = [_number(value) for value in values]
        if any(number is not None for number in numbers):
            weights, prefixes = [w for w in numbers[::2] if w is not None], values[1::2]
            if 2 * len(weights) != len(values) or any(number is not None for number in numbers[1::2]):
                yield problem(args, dest, "must be prefixes alone, or a weight before each prefix", "0.7 PREFIX 0.3 PREFIX")
                continue
            if any(not 0 <= w < float("inf") for w in weights) or not sum(weights):
                yield problem(args, dest, "weights must not be negative, nor all 0", "0.7 PREFIX 0.3 PREFIX")
        for prefix in prefixes:
            missing = [prefix + end for end in (".bin", ".idx") if not is_remote(prefix) and not os.path.isfile(prefix + end)]
            if missing:
                suffixed = prefix.endswith((".bin", ".idx"))
                hint = f"{name_of(dest)} {prefix[:-4]}" if suffixed else "a prefix that tools/preprocess_data.py wrote"
                yield Problem(name_of(dest), prefix, f"no file {' and no file '.join(missing)}", hint)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_tokenizer(args: Args) -> Iterator[Problem]:
    kind = args.tokenizer_type
    if kind is None:
        if not (args.use_checkpoint_args and not args.checkpoint_args_applied):
            yield problem(args, "tokenizer_type", "is required", "NullTokenizer --vocab-size 1024")
        return
    if kind not in TOKENIZERS:
        return
    needs, package = TOKENIZERS[kind]
    for dest in needs:
        value = getattr(args, dest)
        if value is None:
            yield problem(args, dest, f"is required with --tokenizer-type {kind}", 1024 if dest == "vocab_size" else "FILE")
            continue
        if dest == "vocab_size" or is_remote(value):
            continue
        if kind == "HuggingFaceTokenizer" and os.path.exists(value):
            package = "tokenizers"
        elif not os.path.exists(value) and (kind != "HuggingFaceTokenizer" or value.startswith((".", "/", "~"))):  # else a name at the hub
            yield problem(args, dest, "no such file", "FILE")
    if package and not optional_imports.available(package):
        yield problem(args, "tokenizer_type", f"needs the package {package}", f"after {optional_imports.INSTALL_COMMAND[package]}")
    if args.vocab_extra_ids and kind != "SentencePieceTokenizer":
        yield problem(args, "vocab_extra_ids", f"is for SentencePieceTokenizer, not for {kind}", 0)
    if args.special_tokens and kind not in ("HuggingFaceTokenizer", "TikTokenizer"):
        yield problem(args, "special_tokens", f"is for HuggingFaceTokenizer and TikTokenizer, not for {kind}", "leave it out")
    if args.padded_vocab_size and args.vocab_size and args.padded_vocab_size < args.vocab_size:
        yield problem(args, "padded_vocab_size", f"must be at least --vocab-size {args.vocab_size}", args.vocab_size)


def check_packages(args: Args) -> Iterator[Problem]:
    for dest, package in (("tensorboard_dir", "tensorboard"), ("wandb_project", "wandb")):
        if getattr(args, dest) and not optional_imports.available(package):
            yield problem(args, dest, f"needs the package {package}", f"{optional_imports.INSTALL_COMMAND[package]}, or leave it out")


def check_folders(args: Args) -> Iterator[Problem]:
    for dest in ("save", "load", "tensorboard_dir", "wandb_save_dir", "data_cache_path"):
        path = getattr(args, dest)
        if path is not None and not is_remote(path) and os.path.exists(path) and not os.path.isdir(path):
            yield problem(args, dest, "must be a folder, and is a file", "FOLDER")
    if args.metrics_file is not None and os.path.isdir(args.metrics_file):
        yield problem(args, "metrics_file", "must be a file, and is a folder", os.path.join(args.metrics_file, "metrics.jsonl"))
    if args.load is not None and args.exit_on_missing_checkpoint and not is_remote(args.load):
        wanted = TRACKER if args.ckpt_step is None else f"iter_{args.ckpt_step:07d}"
        if not os.path.exists(os.path.join(args.load, wanted)):
            yield problem(args, "load", f"holds no checkpoint (no {wanted}), and --exit-on-missing-checkpoint was given", "FOLDER")


RULES = (check_data_source, check_data_files, check_tokenizer, check_packages, check_folders)
