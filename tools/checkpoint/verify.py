"""What is in a checkpoint, and whether it is whole: `python tools/checkpoint/verify.py DIR [--ckpt-step N] [--values]`.

One process, no GPU, no torchrun. DIR is a --save folder (the tracker or --ckpt-step says which checkpoint) or one checkpoint's. Reads every
byte against its checksum. Ends with 1 and the file's name when one is damaged, or, with --values, when a number is not finite.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.integrity import CHECKSUMS_FILE, damaged_files, read_checksums
from megatron.training.checkpoint_names import RELEASE, TRACKER, iteration_of
from megatron.training.checkpointing import find_checkpoint

OPTIMIZER = "optimizer.state."
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts", "seq_length")
WRITERS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "world_size", "params_dtype")
RUN = ("tokenizer_type", "padded_vocab_size", "consumed_train_samples", "train_iters", "optimizer")


def find(directory: str, step: int | None) -> Path:
    """The folder of the checkpoint that is meant."""
    given = Path(directory)
    if step is None and (iteration_of(given.resolve()) is not None or given.resolve().name == RELEASE):
        return given
    folder = find_checkpoint(directory, step)
    if folder is None:
        raise CheckpointError(f"{directory} holds no checkpoint: {TRACKER} is not there; name one with --ckpt-step N")
    return folder


def group_of(key: str) -> str:
    """`weights`, or the name of the optimizer's state that a key belongs to."""
    return f"optimizer {key.removeprefix(OPTIMIZER).partition('.')[0]}" if key.startswith(OPTIMIZER) else "weights"


def optimizer_kind(keys: set[str], common: dict[str, Any]) -> str:
    if not any(key.startswith("optimizer.") for key in keys):
        return "none"
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if any(key.startswith("optimizer.distributed.") for key in keys):
        return f"distributed, by buckets ({kind or 'kind not stated'})"
    return f"distributed, {kind}" if kind else "plain"


def elements(tensor: ShardedTensor) -> int:
    return torch.Size(tensor.global_shape).numel()


def show_groups(tensors: dict[str, ShardedTensor]) -> Iterator[str]:
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for key, tensor in tensors.items():
        groups.setdefault((group_of(key), tensor.dtype), []).append(elements(tensor))
    for (name, dtype), sizes in sorted(groups.items(), key=lambda item: (item[0][0] != "weights", str(item[0]))):
        stored = sum(sizes) * dtype.itemsize / 1e6
        yield f"  {name:<24}{len(sizes):>5} tensors {sum(sizes):>16,} numbers  {str(dtype).removeprefix('torch.'):<9}{stored:>12,.1f} MB"


def describe(folder: Path) -> Iterator[str]:
    """The report of a torch_dist checkpoint, line by line."""
    tensors = dist_checkpointing.load_tensors_metadata(folder)
    common = dist_checkpointing.load_common_state_dict(folder)
    saved = vars(common["args"]) if "args" in common else {}
    iteration, version = (common.get(name, "not stated") for name in ("iteration", "checkpoint_version"))
    yield f"format      torch_dist, iteration {iteration}, version {version}"
    for title, names in (("model", SHAPE), ("written at", WRITERS), ("run", RUN)):
        found = [f"{name} {saved[name]}" for name in names if saved.get(name) is not None]
        yield f"{title:<12}{', '.join(found) or 'not stated'}"
    total = sum(elements(tensor) for key, tensor in tensors.items() if group_of(key) == "weights" and not key.startswith("optimizer."))
    yield f"parameters  {total:,}"
    yield f"optimizer   {optimizer_kind(set(tensors), common)}"
    yield "contents"
    yield from show_groups(tensors)
    yield "weights"
    for key, tensor in tensors.items():
        if group_of(key) == "weights":
            yield f"  {key:<60} {tuple(tensor.global_shape)} {str(tensor.dtype).removeprefix('torch.')}"


def not_finite(folder: Path) -> Iterator[str]:
    """A line for each tensor with NaN or infinite numbers; one tensor at a time is in memory."""
    for key, tensor in dist_checkpointing.load_tensors_metadata(folder).items():
        if tensor.dtype.is_floating_point:
            tensor.init_data("cpu")
            values = dist_checkpointing.load({key: tensor}, folder)[key]
            values = values.float() if values.dtype.itemsize == 1 else values
            nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
            if nan or infinite:
                yield f"  {key}: {nan} NaN, {infinite} infinite of {values.numel()}"


def verify(folder: Path, with_values: bool) -> bool:
    """Print the report; whether all is well."""
    print(f"checkpoint  {folder}")
    damaged = damaged_files(folder)
    sums = read_checksums(folder)
    if sums is None:
        print(f"checksums   none ({CHECKSUMS_FILE} is not there: written by another program)")
    elif not damaged:
        print(f"checksums   {len(sums)} files, {sum(value.size for value in sums.values()):,} bytes: all as written")
    for problem in damaged:
        print(f"DAMAGED     {problem}")
    if damaged:
        return False
    if not (folder / "metadata.json").exists() and any(folder.glob("mp_rank_*")):
        print("format      torch (legacy): one file a rank; its contents are not listed here")
        return True
    for line in describe(folder):
        print(line)
    if not with_values:
        return True
    found = list(not_finite(folder))
    print("values      " + ("all are finite" if not found else "not finite:"))
    for line in found:
        print(line)
    return not found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is in a checkpoint, and whether it is whole.")
    parser.add_argument("directory", metavar="DIR", help="a --save folder, or the folder of one checkpoint")
    parser.add_argument("--ckpt-step", type=int, help="iteration; default: the last one")
    parser.add_argument("--values", action="store_true", help="also look for numbers that are NaN or infinite")
    given = parser.parse_args(argv)
    try:
        return 0 if verify(find(given.directory, given.ckpt_step), given.values) else 1
    except (CheckpointError, OSError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
