#!/usr/bin/env python3
"""Look into token datasets.

    verify    is the pair whole, are these the bytes that were written, are its ids those of this tokenizer
    stats     numbers of documents and tokens, and how long documents are, as a table and as a PNG
    document  the ids of one document, with a tokenizer its text too
    sample    one training sample as the trainers see it: tokens, text, labels, loss mask, positions, document boundaries

All but `sample` are torch-free.
"""

import argparse
import dataclasses
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preparation.interruption import Stopped, catch_stop_signals
from megatron.core.datasets.preparation.progress import counted
from megatron.core.datasets.preparation.statistics import Histogram, document_lengths, draw_histogram, summary_lines
from megatron.core.datasets.preparation.verification import Expected, verify
from megatron.core.tokenizers import build_tokenizer
from megatron.training.argument_utils import add_section
from megatron.training.config import SECTIONS
from megatron.training.config.data import TokenizerFlags

TOKENIZER_FLAGS = tuple(name for name in inspect.signature(build_tokenizer).parameters if name in TokenizerFlags.__dataclass_fields__)
SAMPLE_FLAGS = (
    "data_path",
    "split",
    "data_cache_path",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "mid_level_dataset_surplus",
    "seq_length",
    "seed",
)
SPLITS = ("train", "valid", "test")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="check structure, checksums and ids", allow_abbrev=False)
    command.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a pair, without the suffix")
    command.add_argument("--multimodal", action="store_true", help="the pairs store a mode for each sequence")
    add_section(command, TokenizerFlags, TOKENIZER_FLAGS)
    command = commands.add_parser("stats", help="counts and lengths", allow_abbrev=False)
    command.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path of a pair, without the suffix")
    command.add_argument("--histogram", metavar="PNG", help="draw the lengths of documents into this file (needs matplotlib)")
    command = commands.add_parser("document", help="print one document", allow_abbrev=False)
    command.add_argument("prefix", metavar="PREFIX", help="path of a pair, without the suffix")
    command.add_argument("number", metavar="K", type=int, help="which, from 0 on; negative counts from the end")
    add_section(command, TokenizerFlags, TOKENIZER_FLAGS)
    command = commands.add_parser("sample", help="print one training sample", allow_abbrev=False)
    command.add_argument("number", metavar="K", type=int, help="which, from 0 on, in the order of training")
    asked = "samples that the trainer asks for, which decide the order: --train-iters times --global-batch-size (default: one epoch)"
    command.add_argument("--num-samples", type=int, help=asked)
    command.add_argument("--split-name", choices=SPLITS, default="train", help="of which split")
    command.add_argument("--rows", type=int, default=64, help="positions to print, 0 = all (default: %(default)s)")
    for section in SECTIONS:
        if any(field.name in SAMPLE_FLAGS for field in dataclasses.fields(section)):
            add_section(command, section, SAMPLE_FLAGS)
    add_section(command, TokenizerFlags, TOKENIZER_FLAGS)
    return parser.parse_args(argv)


def tokenizer_of(args: argparse.Namespace, required: str = "") -> Any:
    """The tokenizer that the flags name; None where they name none and nothing requires one."""
    if args.tokenizer_type is None:
        if required:
            raise ValueError(f"--tokenizer-type is required: {required}")
        return None
    return build_tokenizer(**{name: getattr(args, name) for name in TOKENIZER_FLAGS})


def run_verify(args: argparse.Namespace) -> int:
    tokenizer = tokenizer_of(args)
    expected = Expected("--vocab-size", args.vocab_size)
    if tokenizer is not None:
        expected = Expected(f"--tokenizer-type {args.tokenizer_type}", tokenizer.vocab_size, tokenizer.fingerprint)
    bad = 0
    for prefix in args.prefixes:
        report = verify(prefix, expected, args.multimodal)
        print(f"{prefix}: {counted(len(report.problems), 'problem') if report.problems else 'good'}")
        for line in report.facts:
            print(f"  {line}")
        for line in report.problems:
            print(f"  PROBLEM {line}")
        bad += bool(report.problems)
    return 1 if bad else 0


def run_stats(args: argparse.Namespace) -> int:
    all_lengths = []
    for prefix in args.prefixes:
        dataset = IndexedDataset(prefix)
        all_lengths.append(document_lengths(dataset))
        print(prefix)
        for line in summary_lines(dataset, all_lengths[-1]) + Histogram.of(all_lengths[-1]).lines():
            print(f"  {line}")
    if args.histogram:
        import numpy as np

        title = ", ".join(Path(prefix).name for prefix in args.prefixes[:3]) + (", ..." if len(args.prefixes) > 3 else "")
        draw_histogram(Histogram.of(np.concatenate(all_lengths)), title, args.histogram)
        print(f"histogram: {args.histogram}")
    return 0


def run_document(args: argparse.Namespace) -> int:
    dataset = IndexedDataset(args.prefix)
    tokenizer = tokenizer_of(args)
    count = len(dataset.document_indices) - 1
    if not -count <= args.number < count:
        raise ValueError(f"{args.prefix}: document {args.number}, there are {count}, from 0 to {count - 1}")
    number = args.number % count
    begin, end = (int(boundary) for boundary in dataset.document_indices[number : number + 2])
    sequences = [ids.tolist() for ids in dataset[begin:end]]
    print(f"{args.prefix}: document {number} of {count}, {len(sequences)} sequences, {sum(map(len, sequences))} tokens")
    for place, ids in enumerate(sequences):
        head = f"sequence {begin + place}: " if len(sequences) > 1 else ""
        print(f"{head}ids {' '.join(map(str, ids))}")
        if tokenizer is not None:
            check_ids(args.prefix, ids, tokenizer)
            print(f"{head}text {tokenizer.detokenize(ids)}")
    return 0


def check_ids(prefix: str, ids: list[int], tokenizer: Any) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        rule = f"the tokenizer knows 0 to {tokenizer.vocab_size - 1}: it is not the one that made them"
        raise ValueError(f"{prefix}: ids {min(ids)} to {max(ids)}, {rule}")


def run_sample(args: argparse.Namespace) -> int:
    if not args.data_path:
        raise ValueError("--data-path is required: the prefix of a pair, or a blend, as given to the trainers")
    if not args.seq_length or args.seq_length < 1:
        raise ValueError(f"--seq-length {args.seq_length} must be at least 1, the one of the training run")
    tokenizer = tokenizer_of(args, "samples are cut and masked at its end-of-document id")
    # these import torch
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.preparation.training_sample import sample_lines
    from megatron.core.datasets.utils import Split, get_blend_from_list

    with tempfile.TemporaryDirectory() as throwaway:  # nothing is written beside the data
        config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=get_blend_from_list(args.data_path),
            split=args.split or "969,30,1",
            path_to_cache=args.data_cache_path or throwaway,
            tokenizer=tokenizer,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus,
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
            create_attention_mask=False,
            vocab_size=tokenizer.vocab_size,
        )
        for line in sample_lines(config, Split[args.split_name], args.num_samples, args.number, args.rows):
            print(line)
    return 0


def main() -> int:
    args = parse_args()
    catch_stop_signals()
    try:
        return {"verify": run_verify, "stats": run_stats, "document": run_document, "sample": run_sample}[args.command](args)
    except BrokenPipeError:  # `| head`
        os._exit(0)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except Stopped as error:
        print(f"error: stopped by {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
