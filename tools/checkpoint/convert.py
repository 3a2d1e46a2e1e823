#!/usr/bin/env python3
"""Hugging Face models to checkpoints of ours (Megatron-LM's torch_dist format), and back. One process on the CPU, a layer at a time.

    convert.py --model-type GPT --loader hf --saver core --load-dir HF_FOLDER --save-dir NEW_FOLDER
    convert.py --model-type GPT --loader core --saver hf --load-dir CHECKPOINTS --save-dir NEW_FOLDER

`pretrain_gpt.py --load NEW_FOLDER --finetune --use-checkpoint-args` trains on from the first one; transformers loads the second. Both end
with a comparison of the two models, layer by layer to the logits, and there is no NEW_FOLDER where they differ.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.core.export.conversion import (
    CONFIG,
    LARGEST_FILE,
    CoreModel,
    HFModel,
    checkpoint_flags,
    copy_companions,
    read_config,
    write_checkpoint,
    write_hf,
)
from megatron.core.export.hf_configs import ConversionError, exact_gelu
from megatron.core.export.hf_families import FAMILIES
from megatron.training.arguments import parse_args as parse_training_args
from megatron.training.checkpoint_names import RELEASE, TRACKER, get_checkpoint_name, read_metadata
from tools.checkpoint.compare_logits import compare, report

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HF_FILES = "hf"  # folder beside a converted checkpoint: config.json and tokenizer of where it came from
UNFINISHED = ".unfinished"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
TARGET_SIZES = ("target_tensor_parallel_size", "target_pipeline_parallel_size", "target_expert_parallel_size")


def make_parser() -> argparse.ArgumentParser:
    epilog = f"families of Hugging Face models: {', '.join(FAMILIES)}"
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model-type", default="GPT", choices=["GPT", "mamba"], help="kind of model")
    kinds = "hf: a folder of config.json and safetensors; core: a torch_dist checkpoint, of any layout; torch: a legacy checkpoint"
    parser.add_argument("--loader", required=True, choices=["hf", "core", "torch"], help=kinds)
    parser.add_argument("--saver", required=True, choices=["core", "torch", "hf"], help="the same")
    parser.add_argument("--load-dir", required=True, type=Path, help="folder to read; of core: with the tracker file, or one checkpoint")
    parser.add_argument("--save-dir", required=True, type=Path, help="folder to make; it must be empty or not there")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: as they are)")
    parser.add_argument("--no-verify", action="store_true", help="no comparison of the two models")
    untie = "hf to core: a tied model's head becomes a weight of its own, a copy of its embedding"
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true", help=untie)
    parser.add_argument("--true-vocab-size", type=int, help="core to hf: rows of the embedding that are no padding (default: known)")
    parser.add_argument("--max-shard-size", type=int, default=LARGEST_FILE, help="to hf: bytes of a safetensors file (default 5e9)")
    for dest in TARGET_SIZES:
        parser.add_argument(f"--{dest.replace('_', '-')}", type=int, help="of a legacy checkpoint")
    return parser


def refuse_what_is_not_built(args: argparse.Namespace) -> None:
    """The one place that knows what this tool does not do yet. Raises ConversionError."""
    if args.model_type != "GPT":
        raise ConversionError(f"--model-type {args.model_type} is not built yet; GPT is")
    for side in ("loader", "saver"):
        if getattr(args, side) == "torch":
            raise ConversionError(f"--{side} torch (the legacy format) is not built yet; core (torch_dist) loads in any layout")
    for dest in TARGET_SIZES:
        if getattr(args, dest) is not None:
            raise ConversionError(f"--{dest.replace('_', '-')} shapes the legacy format alone; leave it out: core loads in any layout")
    if {args.loader, args.saver} != {"hf", "core"}:
        raise ConversionError(f"--loader {args.loader} --saver {args.saver}: convert hf to core, or core to hf")


@contextmanager
def new_folder(target: Path, source: Path) -> Iterator[Path]:
    """A folder to write in that gets the name `target` at the end, or is removed when something fails."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"--save-dir {target} is not empty: give a folder that is empty or not there")
    if target.resolve() == source.resolve():
        raise ConversionError(f"--save-dir {target} is --load-dir")
    unfinished = target.with_name(target.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a conversion that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        os.rename(unfinished, target)  # takes the place of an empty folder
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def find_core_checkpoint(folder: Path) -> Path:
    """One checkpoint's folder: `folder` itself, or what its tracker file names."""
    if (folder / "metadata.json").is_file():
        return folder
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise ConversionError(f"--load-dir {folder} is no torch_dist checkpoint, and has no {TRACKER} that names one")
    return Path(get_checkpoint_name(str(folder), *read_metadata(str(tracker))))


def find_source_files(load_dir: Path, checkpoint: Path) -> Path | None:
    """The folder with the config.json and the tokenizer that a checkpoint came from: beside it, or where a run that goes on from it
    has its tokenizer."""
    places = [load_dir / HF_FILES, checkpoint.parent / HF_FILES]
    saved = dist_checkpointing.load_common_state_dict(checkpoint).get("args")
    if getattr(saved, "tokenizer_type", None) == "HuggingFaceTokenizer" and saved.tokenizer_model:
        places.append(Path(saved.tokenizer_model))
    return next((place for place in places if (place / CONFIG).is_file()), None)


def checkpoint_arguments(model: HFModel, tokenizer: Path | None) -> argparse.Namespace:
    """The arguments of a training of this model that gives nothing else, as its checkpoints would have them."""
    args = parse_training_args(argv=[])
    values: dict[str, Any] = checkpoint_flags(model)
    if tokenizer is not None:
        values |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer)}
    unknown = [dest for dest in values if not hasattr(args, dest)]
    for dest in unknown:  # flags of what is not built: at their plain values
        del values[dest]
    vars(args).update(values)
    # a padded vocabulary follows from the layout that loads it
    args.provenance = dict.fromkeys(values, "command line") | {"padded_vocab_size": "derived"}
    args.consumed_train_samples = args.consumed_valid_samples = args.skipped_train_samples = args.iteration = 0
    return plain_namespace(vars(args))


def hf_to_core(args: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write into `folder`; the (Hugging Face, checkpoint) folders to compare."""
    model = HFModel(args.load_dir, args.untie_embeddings_and_output_weights)
    companions = folder / HF_FILES
    checkpoint = folder / RELEASE
    companions.mkdir()
    checkpoint.mkdir()
    shutil.copyfile(args.load_dir / CONFIG, companions / CONFIG)
    copied = copy_companions(args.load_dir, companions)
    tokenizer = (args.save_dir / HF_FILES).resolve() if set(copied) & set(TOKENIZERS) else None
    write_checkpoint(model, checkpoint, checkpoint_arguments(model, tokenizer), DTYPES.get(args.dtype) or model.dtype())
    (folder / TRACKER).write_text(RELEASE)
    if exact_gelu(model.flags):
        print("WARNING: the model has the exact GELU: train on with --no-bias-gelu-fusion, else it becomes the tanh approximation")
    print(f"{model.family.model_type}, {model.flags['num_layers']} layers, {len(model.files.file_of)} tensors")
    return args.load_dir, checkpoint


def core_to_hf(args: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write into `folder`; the (Hugging Face, checkpoint) folders to compare."""
    checkpoint = find_core_checkpoint(args.load_dir)
    source = find_source_files(args.load_dir, checkpoint)
    model = CoreModel(checkpoint, None if source is None else read_config(source), args.true_vocab_size)
    write_hf(model, folder, DTYPES.get(args.dtype) or model.dtype(), args.max_shard_size)
    if source is not None:
        copy_companions(source, folder)
    else:
        print(f"no {HF_FILES}/{CONFIG} beside the checkpoint: {CONFIG} is made from its arguments, and there is no tokenizer")
    print(f"{model.family.model_type}, {model.flags['num_layers']} layers")
    return folder, checkpoint


def convert(args: argparse.Namespace) -> None:
    refuse_what_is_not_built(args)
    if not args.load_dir.is_dir():
        raise ConversionError(f"--load-dir {args.load_dir} is no folder")
    with new_folder(args.save_dir, args.load_dir) as folder:
        theirs, ours = (hf_to_core if args.loader == "hf" else core_to_hf)(args, folder)
        if args.no_verify:
            print("not compared (--no-verify)")
        else:
            print(report(compare(theirs, ours)))
    print(f"wrote {args.save_dir}")


def main(argv: list[str] | None = None) -> int:
    try:
        convert(make_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
