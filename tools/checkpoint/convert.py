#!/usr/bin/env python3
"""Checkpoints of ours and Hugging Face models into each other. One process on the CPU, a layer at a time.

    convert.py --model-type GPT --loader hf --saver core --load-dir HF_FOLDER --save-dir NEW_FOLDER
    convert.py --model-type GPT --loader core --saver hf --load-dir CHECKPOINTS --save-dir NEW_FOLDER
    convert.py --model-type GPT --loader hf --saver torch --target-tensor-parallel-size 2 --load-dir HF_FOLDER --save-dir NEW_FOLDER

hf: a folder of transformers; core: torch_dist, which any layout loads; torch: Megatron-LM's legacy format, with a file for each rank of the
target sizes. `pretrain_gpt.py --load NEW_FOLDER --finetune --use-checkpoint-args` trains on from a checkpoint. Each run ends with a
comparison, with transformers layer by layer to the logits, of two checkpoints bit by bit, and there is no NEW_FOLDER where they differ.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.core.export.conversion import (
    CONFIG,
    LARGEST_FILE,
    CoreModel,
    HFModel,
    checkpoint_flags,
    copy_companions,
    read_config,
    vocabulary,
    write_hf,
    write_torch_dist,
)
from megatron.core.export.hf_configs import ConversionError, exact_gelu, flags_of_checkpoint
from megatron.core.export.hf_families import FAMILIES
from megatron.core.export.weights import TorchDistWeights, Weights, arguments_in, read, slabs_of, together
from megatron.training.arguments import parse_args as parse_training_args
from megatron.training.checkpoint_formats import format_of
from megatron.training.checkpoint_names import RELEASE, TRACKER, get_checkpoint_name, iteration_of, read_metadata
from megatron.training.legacy_target import LegacyWriter, Sizes, padded_rows, size_problems, target_arguments
from megatron.training.legacy_weights import LegacyWeights
from megatron.training.model_of_checkpoint import whole_model
from tools.checkpoint.compare_logits import compare, report

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HF_FILES = "hf"  # folder beside a converted checkpoint: config.json and tokenizer of where it came from
UNFINISHED = ".unfinished"
FORMATS = {"core": "torch_dist", "torch": "torch"}
WORDS = "embedding.word_embeddings.weight"
VOCABULARY = (WORDS, "output_layer.weight")
# of a checkpoint's common state what belongs to no layout and no optimizer
KEPT = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far", "opt_param_scheduler", "data_order")
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
    parser.add_argument("--load-dir", required=True, type=Path, help="folder to read; of checkpoints: with the tracker file, or one")
    parser.add_argument("--save-dir", required=True, type=Path, help="folder to make; it must be empty or not there")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: as they are)")
    parser.add_argument("--no-verify", action="store_true", help="no comparison of the two models")
    untie = "from hf: a tied model's head becomes a weight of its own, a copy of its embedding"
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true", help=untie)
    parser.add_argument("--true-vocab-size", type=int, help="of a checkpoint: rows of its embedding that are no padding (default: known)")
    parser.add_argument("--max-shard-size", type=int, default=LARGEST_FILE, help="to hf: bytes of a safetensors file (default 5e9)")
    for dest in TARGET_SIZES:
        parser.add_argument(f"--{dest.replace('_', '-')}", type=int, help="to torch: ranks that are to load it (default 1)")
    return parser


def check_words(args: argparse.Namespace) -> None:
    """What cannot be asked for. Raises ConversionError."""
    if args.model_type != "GPT":
        raise ConversionError(f"--model-type {args.model_type} is not built yet; GPT is")
    if args.loader == args.saver != "torch":
        raise ConversionError(f"--loader {args.loader} --saver {args.saver}: there is nothing to convert")
    given = [f"--{dest.replace('_', '-')}" for dest in TARGET_SIZES if getattr(args, dest) is not None]
    if given and args.saver != "torch":
        verb = "shapes" if len(given) == 1 else "shape"
        raise ConversionError(f"{', '.join(given)} {verb} the legacy format alone (--saver torch): what core has, any layout loads")
    if args.untie_embeddings_and_output_weights and args.loader != "hf":
        raise ConversionError("--untie-embeddings-and-output-weights is for --loader hf")
    if not args.load_dir.is_dir():
        raise ConversionError(f"--load-dir {args.load_dir} is no folder")


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


def open_weights(folder: Path, kind: str) -> Weights:
    """A checkpoint of `folder`: itself, or what its tracker file names."""
    found, wanted = format_of(folder), FORMATS[kind]
    if found is None and (folder / TRACKER).is_file():
        folder = Path(get_checkpoint_name(str(folder), *read_metadata(str(folder / TRACKER))))
        found = format_of(folder)
    if found is None and not folder.is_dir():
        raise ConversionError(f"{folder} is not there, and {TRACKER} names it")
    if found is None:
        raise ConversionError(f"--load-dir {folder} is no {wanted} checkpoint, and has no {TRACKER} that names one")
    if found != wanted:
        other = next((kind for kind, name in FORMATS.items() if name == found), None)
        raise ConversionError(f"{folder} is in the format {found}" + (f": give --loader {other}" if other else ", which is not read"))
    return TorchDistWeights(folder) if kind == "core" else LegacyWeights(folder)


def find_source_files(load_dir: Path, weights: Weights) -> Path | None:
    """The folder with the config.json and the tokenizer that a checkpoint came from: beside it, or where a run that goes on from it
    has its tokenizer."""
    places = [load_dir / HF_FILES, weights.folder.parent / HF_FILES]
    saved: Any = weights.common.get("args")
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


@dataclass
class Source:
    """What a checkpoint is to be made of.

    contents: beside the weights; slabs, read: its tensors, and how to read some of them; dtype_of: the type that a key's gets; rows: of the
    vocabulary, `vocab` of them tokens (None: not known); companions: a folder whose config.json and tokenizer come along.
    """

    name: str
    contents: dict[str, Any]
    slabs: list[Any]
    read: Callable[[list[Any]], list[torch.Tensor]]
    dtype_of: Callable[[str], torch.dtype]
    rows: int
    vocab: int | None
    companions: Path | None
    sums: dict[Any, bytes] | None = None  # key and offset -> of the bits that were taken; None: nobody will ask
    kept: int | None = None  # rows of the vocabulary that the target has too, others being padding; None: all

    @property
    def saved(self) -> dict[str, Any]:
        return vars(self.contents["args"])

    def take(self, slabs: list[Any]) -> list[torch.Tensor]:
        """Read tensors, of the type that they are written in."""
        tensors = [tensor.to(self.dtype_of(slab.key)) for slab, tensor in zip(slabs, self.read(slabs), strict=True)]
        for slab, tensor in zip(slabs, tensors, strict=True):
            if self.sums is not None and (slab.key, slab.offset) not in self.sums:
                self.sums[slab.key, slab.offset] = self.sum_of(slab.key, tensor)
        return tensors

    def sum_of(self, key: str, tensor: torch.Tensor) -> bytes:
        """A checksum of its bits."""
        rows = tensor[: self.kept] if key in VOCABULARY else tensor
        return sha256(rows.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def hf_source(args: argparse.Namespace) -> Source:
    model = HFModel(args.load_dir, args.untie_embeddings_and_output_weights)
    has_tokenizer = any((args.load_dir / name).is_file() for name in TOKENIZERS)
    saved = checkpoint_arguments(model, (args.save_dir / HF_FILES).resolve() if has_tokenizer else None)
    dtype, fp32 = DTYPES.get(args.dtype) or model.dtype(), {piece.key for piece in model.pieces if piece.fp32}
    contents = {"args": saved, "checkpoint_version": 3.0, "iteration": 0, "num_floating_point_operations_so_far": 0}
    if exact_gelu(model.flags):
        print("WARNING: the model has the exact GELU: train on with --no-bias-gelu-fusion, else it becomes the tanh approximation")
    if model.left_out:
        print(f"WARNING: {len(model.left_out)} tensors of layers for multi-token prediction are left out: {min(model.left_out)}, ...")
    print(f"{model.family.model_type}, {model.flags['num_layers']} layers, {len(model.files.file_of)} tensors")
    return Source(
        RELEASE,
        contents,
        model.pieces,
        lambda pieces: [model.read_piece(piece) for piece in pieces],
        lambda key: torch.float32 if key in fp32 else dtype,
        model.sizes.padded_vocab,
        model.vocab,
        args.load_dir,
    )


def own_source(args: argparse.Namespace, weights: Weights) -> Source:
    saved = arguments_in(weights)
    contents = {name: weights.common[name] for name in KEPT if name in weights.common} | {"args": plain_namespace(saved)}
    flags_of_checkpoint(saved)  # which says what is missing
    if WORDS not in weights.tensors:
        raise ConversionError(f"{weights.folder} lacks {WORDS}")
    rows = weights.tensors[WORDS].global_shape[0]
    slabs = slabs_of(weights, whole_model(saved, rows))
    vocab = args.true_vocab_size or vocabulary(saved)
    if vocab is not None and vocab > rows:
        raise ConversionError(f"{weights.folder}: the embedding has {rows} rows, fewer than the vocabulary of {vocab}")

    def dtype_of(key: str) -> torch.dtype:
        stored = weights.tensors[key].dtype
        return stored if key.endswith("expert_bias") else DTYPES.get(args.dtype, stored)

    print(f"{weights.folder.name}, {saved['num_layers']} layers, {len(weights.tensors)} tensors")
    print("optimizer state is not converted; training of any layout loads both formats itself")
    name = weights.folder.name if iteration_of(weights.folder) is not None else RELEASE
    files = find_source_files(args.load_dir, weights)
    sums: dict[Any, bytes] | None = None if args.no_verify else {}
    return Source(name, contents, slabs, lambda some: read(weights, some), dtype_of, rows, vocab, files, sums)


def prepare_target(args: argparse.Namespace, source: Source) -> Callable[[Path], None]:
    """What writes a checkpoint into a folder. Raises ConversionError with all that is wrong with the target sizes."""
    if args.saver == "core":
        source.contents["args"] = plain_namespace({**source.saved, "ckpt_format": FORMATS["core"]})
        return lambda folder: write_torch_dist(folder, source.contents, source.slabs, lambda slab: source.take([slab])[0], source.dtype_of)
    sizes = Sizes(*(1 if getattr(args, dest) is None else getattr(args, dest) for dest in TARGET_SIZES))
    if problems := size_problems(sizes, flags_of_checkpoint(source.saved)):
        raise ConversionError("\n  ".join(["the target sizes do not fit the model:", *problems]) if len(problems) > 1 else problems[0])
    rows = padded_rows(source.saved, sizes, source.rows, source.vocab)
    if rows is None:
        raise ConversionError(
            f"how many of the {source.rows} rows of the embedding are tokens is not known, and --target-tensor-parallel-size "
            f"{sizes.tensor} pads them to another number: give --true-vocab-size with the tokenizer's number of ids"
        )
    source.contents["args"], source.kept = plain_namespace(target_arguments(source.saved, sizes, rows)), min(rows, source.rows)

    def write(folder: Path) -> None:
        writer = LegacyWriter(folder, source.contents, rows, source.dtype_of)
        for batch in together(source.slabs):
            put(writer, source, batch)
        writer.finish()

    return write


def put(writer: LegacyWriter, source: Source, batch: list[Any]) -> None:
    """A function of its own, so that nothing of these tensors is left when the next are read."""
    for slab, tensor in zip(batch, source.take(batch), strict=True):
        writer.write(slab, tensor)


def to_checkpoint(args: argparse.Namespace) -> None:
    source = hf_source(args) if args.loader == "hf" else own_source(args, open_weights(args.load_dir, args.loader))
    write = prepare_target(args, source)
    with new_folder(args.save_dir, args.load_dir) as folder:
        (folder / source.name).mkdir()
        if source.companions is not None:
            (folder / HF_FILES).mkdir()
            shutil.copyfile(source.companions / CONFIG, folder / HF_FILES / CONFIG)
            copy_companions(source.companions, folder / HF_FILES)
        write(folder / source.name)
        iteration = iteration_of(source.name)
        (folder / TRACKER).write_text(RELEASE if iteration is None else str(iteration))
        if args.no_verify:
            print("not compared (--no-verify)")
        else:
            written = open_weights(folder / source.name, args.saver)
            print(report(compare(args.load_dir, written)) if args.loader == "hf" else read_back(source, written))


def read_back(source: Source, written: Weights) -> str:
    """Whether a checkpoint that was written has the bits of its source, in words. Raises ConversionError where it has not."""
    assert source.sums is not None
    stored = slabs_of(written, whole_model(arguments_in(written), written.tensors[WORDS].global_shape[0]))
    wrong = {key for key, _ in {(slab.key, slab.offset) for slab in stored} ^ source.sums.keys()}
    for batch in together(stored):
        wrong |= differing(source, written, batch)
    if wrong:
        listed = ", ".join(sorted(wrong)[:8])
        raise ConversionError(f"what was written is not what was read (--no-verify writes it nonetheless): {listed}")
    return f"read back: {len(stored)} tensors, all bits are the source's"


def differing(source: Source, written: Weights, batch: list[Any]) -> set[str]:
    assert source.sums is not None
    wrong = set()
    for slab, found in zip(batch, read(written, batch), strict=True):
        padding = found[source.kept :] if slab.key in VOCABULARY and source.kept is not None else found[:0]
        if source.sum_of(slab.key, found) != source.sums.get((slab.key, slab.offset)) or padding.any():
            wrong.add(slab.key)
    return wrong


def to_hf(args: argparse.Namespace) -> None:
    weights = open_weights(args.load_dir, args.loader)
    source = find_source_files(args.load_dir, weights)
    model = CoreModel(weights, None if source is None else read_config(source), args.true_vocab_size)
    with new_folder(args.save_dir, args.load_dir) as folder:
        write_hf(model, folder, DTYPES.get(args.dtype) or model.dtype(), args.max_shard_size)
        if source is not None:
            copy_companions(source, folder)
        else:
            print(f"no {HF_FILES}/{CONFIG} beside the checkpoint: {CONFIG} is made from its arguments, and there is no tokenizer")
        print(f"{model.family.model_type}, {model.flags['num_layers']} layers")
        print("not compared (--no-verify)" if args.no_verify else report(compare(folder, weights)))


def convert(args: argparse.Namespace) -> None:
    check_words(args)
    (to_hf if args.saver == "hf" else to_checkpoint)(args)
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
