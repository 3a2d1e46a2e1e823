#!/usr/bin/env python3
"""JSON lines to token datasets: text in, `<output-prefix>_<key>_document.bin/.idx` and a .meta.json out.

One process reads lines and writes ids, `--workers` processes tokenize batches of lines in between. The order is that of the input,
memory does not grow with it, and the result does not depend on the number of workers. The files get their final names at the very end;
until then they are in `<output-prefix>.partial`, from where `--resume` goes on after a kill. Torch-free.
"""

import argparse
import inspect
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.preparation.interruption import Stopped, catch_stop_signals
from megatron.core.datasets.preparation.prepare import SHARD_BYTES, Job, count_rates, prepare, say_on_stderr
from megatron.core.datasets.preparation.records import TextRules
from megatron.core.datasets.preparation.text_input import find_files
from megatron.core.datasets.preparation.workers import default_workers, kill_workers
from megatron.core.tokenizers import build_tokenizer
from megatron.training.argument_utils import add_section
from megatron.training.config.data import TokenizerFlags

TOKENIZER_FLAGS = tuple(name for name in inspect.signature(build_tokenizer).parameters if name in TokenizerFlags.__dataclass_fields__)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_argument_group("input")
    files = "files of JSON lines (.jsonl, .json, .ndjson, each also .gz or .zst), or quoted patterns of them, in sorted order; - = stdin"
    group.add_argument("--input", required=True, nargs="+", help=files)
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take text from; each gives a pair of its own")
    group.add_argument("--split-sentences", action="store_true", help="store each sentence as a sequence of its own (nltk's Punkt)")
    group.add_argument("--lang", default="english", help="language of the sentence model")
    group.add_argument("--keep-newlines", action="store_true", help="with --split-sentences: keep the white space between sentences")
    policy = "what to do with a record that cannot be used: end and say path:line and why, or list it in <output-prefix>.rejected.txt"
    group.add_argument("--on-bad-record", choices=["fail", "skip"], default="fail", help=policy)
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="path of the pair, without the suffix")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group = parser.add_argument_group("run")
    group.add_argument("--workers", type=int, help="tokenizing processes (default: the cores)")
    group.add_argument("--resume", action="store_true", help="go on where a killed run stopped; starts one where there is none")
    shard = "MB of text between two safe points for --resume (default: %(default)s)"
    group.add_argument("--shard-megabytes", type=float, default=SHARD_BYTES / 2**20, help=shard)
    group.add_argument("--partitions", type=int, default=1, help="accepted for compatibility: input is streamed to all workers")
    group.add_argument("--keep-sequential-samples", action="store_true", help="accepted for compatibility: the order is always kept")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between progress lines, which come once a second at most")
    group = parser.add_argument_group("how many workers are best")
    find = "write nothing: tokenize the first documents with each number of workers, and say which was fastest"
    group.add_argument("--find-optimal-num-workers", action="store_true", help=find)
    group.add_argument("--workers-to-check", type=int, nargs="+", default=[16, 32, 64], help="numbers of workers to try")
    group.add_argument("--max-documents", type=int, default=100000, help="documents to try each of them with")
    add_section(parser, TokenizerFlags, TOKENIZER_FLAGS)
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    args.workers = default_workers() if args.workers is None else args.workers
    try:
        check(args)
        args.files = find_files(args.input)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for flags that contradict themselves or each other."""
    for name in ("workers", "partitions", "log_interval", "max_documents"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if min(args.workers_to_check) < 1:
        raise ValueError(f"--workers-to-check {min(args.workers_to_check)} must be at least 1")
    if not 0 < args.shard_megabytes < 1e6:
        raise ValueError(f"--shard-megabytes {args.shard_megabytes} must be above 0, 64 is usual")
    if args.keep_newlines and not args.split_sentences:
        raise ValueError("--keep-newlines has a meaning only with --split-sentences")
    if duplicates := sorted({key for key in args.json_keys if args.json_keys.count(key) > 1}):
        raise ValueError(f"--json-keys {' '.join(duplicates)} given twice")
    if unfit := [key for key in args.json_keys if "/" in key or "\0" in key]:
        raise ValueError(f"--json-keys {' '.join(unfit)}: the key is part of the output's name, so it must not hold a slash")
    if args.tokenizer_type is None:
        raise ValueError("the following argument is required: --tokenizer-type")
    folder = Path(args.output_prefix).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--output-prefix {args.output_prefix}: the folder {folder} does not exist")


def job_of(args: argparse.Namespace) -> Job:
    """Builds the tokenizer. Raises ValueError."""
    given = {name: getattr(args, name) for name in TOKENIZER_FLAGS}
    defaults = {field: TokenizerFlags.__dataclass_fields__[field].default for field in given}
    return Job(
        files=args.files,
        output_prefix=args.output_prefix,
        tokenizer=build_tokenizer(**given),
        rules=TextRules(tuple(args.json_keys), args.append_eod, args.split_sentences, args.lang, args.keep_newlines),
        tokenizer_flags={name: value for name, value in given.items() if value != defaults[name]},
        on_bad_record=args.on_bad_record,
        workers=args.workers,
        resume=args.resume,
        shard_bytes=int(args.shard_megabytes * 2**20),
        log_interval=args.log_interval,
    )


def find_optimal_num_workers(job: Job, workers_to_check: list[int], max_documents: int) -> None:
    say_on_stderr(f"{default_workers()} cores may be used; the first {max_documents} documents with each number of workers:")
    found = []
    for workers, rates, per_second in count_rates(job, workers_to_check, max_documents):
        found.append((per_second, workers))
        say_on_stderr(f"  --workers {workers}: {rates}")
    print(f"fastest: --workers {max(found)[1]}")


def main() -> None:
    args = parse_args()
    catch_stop_signals()
    try:
        job = job_of(args)
        if args.find_optimal_num_workers:
            find_optimal_num_workers(job, args.workers_to_check, args.max_documents)
        else:
            prepare(job)
        return
    except (ValueError, RuntimeError, OSError) as error:
        message, notes = str(error), getattr(error, "__notes__", [])
    except Stopped as error:
        message, notes = f"stopped by {error}, nothing is written", getattr(error, "__notes__", [])
    say_on_stderr(f"error: {message}" + "".join(f"; {note}" for note in notes))
    kill_workers()
    os._exit(1)  # without waiting for the pool, which may be in any state


if __name__ == "__main__":
    main()
