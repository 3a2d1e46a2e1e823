"""What is in a checkpoint, and whether it is whole: `python tools/checkpoint/verify.py DIR [--ckpt-step N] [--values]`.

One process, no GPU, no torchrun. DIR is a --save folder (the tracker or --ckpt-step says which checkpoint) or one checkpoint's. Reads every
byte against its checksum. Ends with 1 and the file's name when one is damaged, or, with --values, when a number is not finite.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.integrity import CHECKSUMS_FILE, damaged_files, read_checksums
from megatron.core.dist_checkpointing.safe_pickle import load_torch
from megatron.training.checkpoint_formats import format_of
from megatron.training.checkpoint_names import RELEASE, TRACKER, iteration_of
from megatron.training.checkpointing import find_checkpoint
from megatron.training.dcp_checkpoints import DcpCheckpoint
from megatron.training.legacy_checkpoints import MODEL_FILE, OPTIMIZER_FILE

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


def group_in_state_dict(key: str) -> str:
    """The same of a key that is a path in a nested state dict (torch, torch_dcp)."""
    top, *rest = key.split(".")
    names = [name for name in rest if not name.isdigit() and name not in ("optimizer", "state")]
    return "weights" if top.startswith("model") else " ".join([top, *names[-1:]])


def optimizer_kind(keys: set[str], common: dict[str, Any]) -> str:
    if not any(key.startswith("optimizer.") for key in keys):
        return "none"
    kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if any(key.startswith("optimizer.distributed.") for key in keys):
        return f"distributed, by buckets ({kind or 'kind not stated'})"
    return f"distributed, {kind}" if kind else "plain"


def elements(tensor: ShardedTensor) -> int:
    return torch.Size(tensor.global_shape).numel()


def show_groups(tensors: Iterable[tuple[str, torch.dtype, int]]) -> Iterator[str]:
    """tensors: group, dtype and number of elements of each."""
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for group, dtype, size in tensors:
        groups.setdefault((group, dtype), []).append(size)
    for (name, dtype), sizes in sorted(groups.items(), key=lambda item: (item[0][0] != "weights", str(item[0]))):
        stored = sum(sizes) * dtype.itemsize / 1e6
        yield f"  {name:<24}{len(sizes):>5} tensors {sum(sizes):>16,} numbers  {str(dtype).removeprefix('torch.'):<9}{stored:>12,.1f} MB"


def show_origin(name: str, common: dict[str, Any]) -> Iterator[str]:
    """Format, and what the stored arguments say."""
    saved = vars(common["args"]) if "args" in common else {}
    iteration, version = (common.get(name, "not stated") for name in ("iteration", "checkpoint_version"))
    yield f"format      {name}, iteration {iteration}, version {version}"
    for title, names in (("model", SHAPE), ("written at", WRITERS), ("run", RUN)):
        found = [f"{name} {saved[name]}" for name in names if saved.get(name) is not None]
        yield f"{title:<12}{', '.join(found) or 'not stated'}"


def describe(folder: Path) -> Iterator[str]:
    """The report of a torch_dist checkpoint, line by line."""
    tensors = dist_checkpointing.load_tensors_metadata(folder)
    common = dist_checkpointing.load_common_state_dict(folder)
    yield from show_origin("torch_dist", common)
    total = sum(elements(tensor) for key, tensor in tensors.items() if group_of(key) == "weights" and not key.startswith("optimizer."))
    yield f"parameters  {total:,}"
    yield f"optimizer   {optimizer_kind(set(tensors), common)}"
    yield "contents"
    yield from show_groups((group_of(key), tensor.dtype, elements(tensor)) for key, tensor in tensors.items())
    yield "weights"
    for key, tensor in tensors.items():
        if group_of(key) == "weights":
            yield f"  {key:<60} {tuple(tensor.global_shape)} {str(tensor.dtype).removeprefix('torch.')}"


def tensors_within(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Path and tensor of all in a nested state dict."""
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_within(item, f"{path}.{key}" if path else str(key))


def legacy_files(folder: Path) -> Iterator[Any]:
    """The state dict of each model-parallel rank; tensors are read when they are used."""
    for path in sorted(folder.glob(f"*/{MODEL_FILE}")):
        yield load_torch(str(path), mmap=True)


def describe_legacy(folder: Path) -> Iterator[str]:
    """The report of a checkpoint of the `torch` format: its tensors are those of the ranks' files, copies among them."""
    files = list(legacy_files(folder))
    yield from show_origin("torch (legacy)", files[0])
    yield f"contents, of {len(files)} model-parallel ranks' files"
    found = [named for file in files for named in tensors_within(file, "")]
    yield from show_groups((group_in_state_dict(path), tensor.dtype, tensor.numel()) for path, tensor in found)
    if list(folder.glob(f"*/{OPTIMIZER_FILE}")):
        yield f"  the distributed optimizer's state is in {OPTIMIZER_FILE} beside each"


def describe_dcp(folder: Path) -> Iterator[str]:
    """The report of a checkpoint of the `torch_dcp` format."""
    checkpoint = DcpCheckpoint(folder)
    yield from show_origin("torch_dcp", checkpoint.common())
    yield "contents"
    stored = checkpoint.tensors().items()
    yield from show_groups((group_in_state_dict(key), tensor.dtype, elements(tensor)) for key, tensor in stored)


def stored_values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Key and values of each tensor of floating-point numbers; one at a time is in memory."""
    form = format_of(folder)
    if form == "torch":
        for file in legacy_files(folder):
            yield from tensors_within(file, "")
        return
    dcp = DcpCheckpoint(folder) if form == "torch_dcp" else None
    for key, tensor in (dcp.tensors() if dcp else dist_checkpointing.load_tensors_metadata(folder)).items():
        if tensor.dtype.is_floating_point:
            tensor.init_data("cpu")
            yield key, dcp.values(key) if dcp else dist_checkpointing.load({key: tensor}, folder)[key]


def not_finite(folder: Path) -> Iterator[str]:
    """A line for each tensor with NaN or infinite numbers."""
    for key, values in stored_values(folder):
        if values.is_floating_point():
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
    for line in {"torch": describe_legacy, "torch_dcp": describe_dcp}.get(format_of(folder) or "", describe)(folder):
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
