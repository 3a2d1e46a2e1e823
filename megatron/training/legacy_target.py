"""A checkpoint of the legacy `torch` format for any parallel sizes, written by one process, a tensor in memory at a time.

Names and order are those of legacy_checkpoint_writer.py, what each rank holds follows from the sharding records of the whole model.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.dist_checkpointing.integrity import sync_folder, write_checksums
from megatron.core.export.torch_file import TorchFile
from megatron.core.export.weights import Slab
from megatron.core.tensor_parallel.param_sharding import (
    ParamRecord,
    ParamSharding,
    buffer_table,
    build_param_table,
    local_pieces,
    local_shape,
)
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.training.checkpoint_names import LegacyFile, legacy_files
from megatron.training.legacy_checkpoint_writer import FileEntry, file_entries
from megatron.training.legacy_checkpoints import MODEL_FILE
from megatron.training.model_of_checkpoint import whole_model
from megatron.training.source_layout import SourceLayout, with_stored_rows

WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Model = dict[tuple[str, tuple[int, ...]], Any]


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of the ranks that are to load it."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


def size_problems(sizes: Sizes, flags: Mapping[str, Any]) -> list[str]:
    """All that is wrong with the sizes for a model of `flags` (complete ones, hf_configs.flags_of_checkpoint), in words."""
    experts, groups = flags["num_experts"], flags["num_query_groups"] if flags["group_query_attention"] else None
    shared = flags["moe_shared_expert_intermediate_size"] if experts else None
    divided = [
        ("tensor", name, value)
        for name, value in (
            ("num_attention_heads", flags["num_attention_heads"]),
            ("num_query_groups", groups),
            ("ffn_hidden_size", flags["ffn_hidden_size"]),
            ("moe_ffn_hidden_size", flags["moe_ffn_hidden_size"] if experts else None),
            ("moe_shared_expert_intermediate_size", shared),
        )
    ]
    divided += [("pipeline", "num_layers", flags["num_layers"]), ("expert", "num_experts", experts)]
    found = []
    for kind in ("tensor", "pipeline", "expert"):
        size, flag = getattr(sizes, kind), f"--target-{kind}-parallel-size"
        if size < 1:
            found.append(f"{flag} {size}: must be at least 1")
        elif kind == "expert" and size > 1 and not experts:
            found.append(f"{flag} {size}: the model has no experts (works: 1)")
        else:
            found += [
                f"{flag} {size}: {name} {value} is no multiple of it (works: {_divisors(value)})"
                for of, name, value in divided
                if of == kind and value and value % size
            ]
    return found


def _divisors(value: int) -> str:
    found = [number for number in range(1, value + 1) if value % number == 0]
    return ", ".join(map(str, found[:6])) + (", ..." if len(found) > 6 else "")


def padded_rows(saved: Mapping[str, Any], sizes: Sizes, stored: int, vocab: int | None) -> int | None:
    """Rows of the vocabulary with the padding of these sizes; None where they depend on the number of tokens and that is not known.

    stored: rows that there are, padded for the sizes of `saved`; vocab: how many of them are tokens.
    """
    every = int(saved.get("make_vocab_size_divisible_by") or 128)
    if vocab is not None:
        return vocab_size_with_padding(vocab, every, sizes.tensor)
    fewest = stored - every * int(saved.get("tensor_model_parallel_size") or 1) + 1
    possible = {vocab_size_with_padding(count, every, sizes.tensor) for count in (max(1, fewest), stored)}
    return possible.pop() if len(possible) == 1 else None


def target_arguments(saved: Mapping[str, Any], sizes: Sizes, rows: int) -> dict[str, Any]:
    """A checkpoint's arguments with the layout that its files are for."""
    world = lcm(sizes.tensor, sizes.tensor * sizes.expert) * sizes.pipeline
    return {
        **saved,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.tensor,
        "context_parallel_size": 1,
        "world_size": world,
        "data_parallel_size": world // (sizes.tensor * sizes.pipeline),
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "sequence_parallel": bool(saved.get("sequence_parallel")) and sizes.tensor > 1,
        "transformer_impl": "local",  # it says how the files' tensors are named
        "ckpt_format": "torch",
        "padded_vocab_size": rows,
    }


@dataclass(frozen=True)
class _Part:
    """What one file has of a tensor."""

    file: TorchFile
    name: str
    sharding: ParamSharding
    tensor_rank: int


class LegacyWriter:
    """The files of a new checkpoint in the empty `folder`, at full size; `write` puts the tensors in.

    contents: what every file holds beside the model; its `args` must be a Namespace of `target_arguments`. rows: of the vocabulary;
    dtype_of: a key's type. Raises OSError as the file system does.
    """

    def __init__(self, folder: Path, contents: Mapping[str, Any], rows: int, dtype_of: Callable[[str], torch.dtype]) -> None:
        self.folder, self.rows = folder, rows
        saved = vars(contents["args"])
        model = whole_model(saved, rows)
        self.records = {**build_param_table(model), **buffer_table(model)}
        self.entries = list(file_entries(model))
        self.layout = SourceLayout.of(saved)
        self.files: list[TorchFile] = []
        self._parts: dict[tuple[str, tuple[int, ...]], list[_Part]] = {}
        self._dtype_of = dtype_of
        for rank in legacy_files(self.layout.tensor, self.layout.pipeline, self.layout.expert, self.layout.expert_tensor):
            self._begin(rank, contents)

    def _begin(self, rank: LegacyFile, contents: Mapping[str, Any]) -> None:
        announced: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {}
        members = []
        for name, entry in self._entries_of(rank):
            record = self.records.get(entry.owner or "")
            if record is None:
                announced[name] = None if entry.value is None else (tuple(entry.value.shape), entry.value.dtype)
                continue
            sharding = with_stored_rows(replace(record.sharding, experts=None), self.rows)
            announced[name] = (local_shape(sharding, self.layout.tensor), self._dtype_of(record.key))
            members.append((name, _offset(record, entry), record.key, sharding))
        (self.folder / rank.name).mkdir()
        file = TorchFile(self.folder / rank.name / MODEL_FILE, contents, "model", announced)
        self.files.append(file)
        for name, offset, key, sharding in members:
            self._parts.setdefault((key, offset), []).append(_Part(file, name, sharding, rank.tensor))

    def _entries_of(self, rank: LegacyFile) -> Iterator[tuple[str, FileEntry]]:
        """(name in the rank's file, entry of the whole model), in the order of the file."""
        layers = self.layout.layers(rank.stage, 0)
        local = self.layout.local_experts
        experts = range(rank.expert * local, rank.expert * local + local)
        begun = False  # what comes before the layers is the first stage's, what comes after them the last one's
        for entry in self.entries:
            layer = re.match(r"decoder\.layers\.(\d+)\.", entry.name)
            if layer is not None:
                begun = True
                expert = re.search(r"\.experts\.local_experts\.(\d+)\.", entry.name)
                number = entry.expert if expert is None else int(expert[1])
                if int(layer[1]) not in layers or (number is not None and number not in experts):
                    continue
                name = f"decoder.layers.{int(layer[1]) - layers.start}.{entry.name[layer.end() :]}"
                if expert is not None:
                    name = name.replace(f".local_experts.{expert[1]}.", f".local_experts.{int(expert[1]) - experts.start}.", 1)
                elif number is not None:
                    name = name.removesuffix(str(number)) + str(number - experts.start)
                yield name, entry
            elif self.layout.is_last(rank.stage, 0) if begun else self.layout.is_first(rank.stage, 0):
                if entry.name == "output_layer._extra_state" and OUTPUT not in self.records and rank.stage > 0:
                    yield OUTPUT, next(other for other in self.entries if other.name == WORDS)  # a tied weight's other copy
                yield entry.name, entry

    def write(self, slab: Slab, tensor: torch.Tensor) -> None:
        """The whole of one tensor (of one layer, expert), to every file that has a part of it."""
        for part in self._parts[slab.key, slab.offset]:
            own = _part_of(tensor, part.sharding, part.tensor_rank, self.layout.tensor)
            part.file.write(part.name, own.to(part.file.dtypes[part.name]))

    def finish(self) -> None:
        """Put everything on the disk, and checksums beside it."""
        for file in self.files:
            file.finish()
            sync_folder(file.path.parent)
        write_checksums(self.folder, {})
        sync_folder(self.folder)


def _offset(record: ParamRecord, entry: FileEntry) -> tuple[int, ...]:
    """Of an entry's tensor, on the leading dimensions that a checkpoint has it under."""
    experts = record.sharding.experts
    expert = () if experts is None else (experts.first + (entry.expert or 0),)
    return (*((record.layer,) if record.stacked else ()), *expert)  # type: ignore[return-value]


def _part_of(tensor: torch.Tensor, sharding: ParamSharding, rank: int, size: int) -> torch.Tensor:
    """A tensor rank's part, without a copy where it is one piece. Rows beyond the tensor's, padding of a vocabulary, are 0."""
    if not sharding.is_split:
        return tensor
    assert sharding.split_dim is not None
    pieces = []
    for start, _, length in local_pieces(sharding, rank, size):
        start = min(start, tensor.shape[sharding.split_dim])
        there = tensor.narrow(sharding.split_dim, start, min(length, tensor.shape[sharding.split_dim] - start))
        short = length - there.shape[sharding.split_dim]
        assert not short or (sharding.logical_size is not None and sharding.split_dim == 0), f"{short} rows too few"
        pieces.append(F.pad(there, (0, 0) * (there.dim() - 1) + (0, short)) if short else there)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=sharding.split_dim)
