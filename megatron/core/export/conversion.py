"""Weights from a Hugging Face folder into a checkpoint and back, a layer at a time, by the table in hf_families.py.

Neither direction has more in memory than the tensors that make up one of ours (reading a checkpoint: one layer).
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.export import hf_configs
from megatron.core.export.hf_configs import ConversionError, Flags
from megatron.core.export.hf_families import FAMILIES, Family, Piece, family_of_config, family_of_flags, pieces, sizes_of
from megatron.core.export.joins import Sizes
from megatron.core.export.safetensors_files import SafetensorsFolder, SafetensorsWriter, one_dtype
from megatron.core.export.weights import AnySlab, Slab, Weights, arguments_in, listed, read, together
from megatron.core.tokenizers.build import vocab_size_with_padding
from megatron.core.tokenizers.null_tokenizer import NullTokenizer

CONFIG = "config.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)
LARGEST_FILE = 5 * 10**9  # bytes, as transformers divides
CONTENT_METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ConversionError where there is none that can be read."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConversionError(f"{folder} has no readable {CONFIG}: {error}") from None
    if not isinstance(config, dict):
        raise ConversionError(f"{folder / CONFIG} holds no object")
    if config.get("quantization_config"):
        raise ConversionError(f"{folder / CONFIG}: a quantized model is not converted: save its weights in bf16 or fp32")
    return config


def copy_companions(source: Path, target: Path) -> list[str]:
    """Tokenizer and generation settings; the names that were copied."""
    found = sorted({path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()})
    for path in found:
        shutil.copyfile(path, target / path.name)
    return [path.name for path in found]


# --- Hugging Face -> checkpoint ---


class HFModel:
    """A folder's model: its family, flags, sizes, and the tensors that the table says it must have.

    untie: a tied model's head becomes a tensor of its own, a copy of its embedding. Raises ConversionError for a family or a setting that
    is not converted, and for tensors that are missing, of another shape than config.json says, or unknown to the table. left_out: names of
    tensors that are known and have no place in our model.
    """

    def __init__(self, folder: str | os.PathLike[str], untie: bool = False) -> None:
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self.family = family_of_config(self.config)
        self.flags = self.family.to_flags(self.config)
        self.head_is_embedding = not self.flags["untie_embeddings_and_output_weights"]
        if untie:
            self.flags["untie_embeddings_and_output_weights"] = True
        vocab = self.config.get("vocab_size")
        if not isinstance(vocab, int) or vocab < 1:
            raise ConversionError(f"{self.folder / CONFIG}: vocab_size is {vocab!r}, it must be the number of rows of the embedding")
        self.vocab: int = vocab
        self.sizes = sizes_of(self.flags, vocab, vocab_size_with_padding(vocab))
        self.files = SafetensorsFolder(self.folder)
        self.pieces = list(pieces(self.family, self.flags, self.sizes))
        self._check_tensors()

    def find(self, name: str) -> str:
        """The name that the folder has for a tensor of the table: some files leave the model's prefix out."""
        if name == "lm_head.weight" and self.head_is_embedding:
            name = self.family.ends[0].names[0]
        prefix = self.family.optional_prefix
        short = name.removeprefix(prefix)
        return short if prefix and name not in self.files.file_of and short in self.files.file_of else name

    def read(self, name: str) -> torch.Tensor:
        return self.files.read(self.find(name))

    def read_piece(self, piece: Piece) -> torch.Tensor:
        """One of our tensors."""
        return piece.join.to_core([self.read(name) for name in piece.names], self.sizes)

    def dtype(self) -> torch.dtype:
        """Of the weights, the one of most precision where they differ."""
        return one_dtype(self.files.dtype(self.find(name)) for piece in self.pieces if not piece.fp32 for name in piece.names)

    def _check_tensors(self) -> None:
        wanted = {self.find(name): shape for piece in self.pieces for name, shape in hf_shapes(piece, self.sizes).items()}
        there = set(self.files.file_of)
        if missing := wanted.keys() - there:
            hint = "; if the head is the embedding, config.json must say tie_word_embeddings" if "lm_head.weight" in missing else ""
            raise ConversionError(f"{self.folder} lacks tensors of a {self.family.model_type} model{hint}:{listed(missing)}")
        wrong = [
            f"{name} is {list(self.files.shape(name))}, {CONFIG} says {list(shape)}"
            for name, shape in wanted.items()
            if self.files.shape(name) != shape
        ]
        if wrong:
            raise ConversionError(f"{self.folder} has tensors of another shape:{listed(wrong)}")
        self.left_out = self._of_later_layers(there - wanted.keys())
        unknown = {name for name in there - wanted.keys() - self.left_out if not name.endswith(self.family.ignored)}
        if "lm_head.weight" in unknown and self.head_is_embedding:
            self._check_tied_head()
            unknown.remove("lm_head.weight")
        if unknown:
            raise ConversionError(f"{self.folder} has tensors that a {self.family.model_type} model of ours does not:{listed(unknown)}")

    def _of_later_layers(self, names: set[str]) -> set[str]:
        """Of DeepSeek-V3's layers behind its last, which predict tokens further ahead and which transformers leaves out too."""
        if not self.config.get("num_nextn_predict_layers"):
            return set()
        layers = range(self.flags["num_layers"], self.flags["num_layers"] + self.config["num_nextn_predict_layers"])
        return {name for name in names if any(name.startswith(self.family.layers_at.format(l=layer)) for layer in layers)}

    def _check_tied_head(self) -> None:
        if not torch.equal(self.files.read("lm_head.weight"), self.read("lm_head.weight")):
            raise ConversionError(
                f"{self.folder}: {CONFIG} says tie_word_embeddings, but lm_head.weight is not the embedding: "
                'which one is meant? Set "tie_word_embeddings": false to keep both'
            )


def hf_shapes(piece: Piece, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's tensors that make up a piece, found by taking one apart that has no data."""
    parts = piece.join.to_hf(torch.empty(piece.shape, device="meta"), sizes)
    return {name: tuple(part.shape) for name, part in zip(piece.names, parts, strict=True)}


def dtype_of(piece: Piece, weights: torch.dtype) -> torch.dtype:
    return torch.float32 if piece.fp32 else weights


class _UnreadTensor(ShardedTensor):
    """A ShardedTensor whose data is read when it is asked for, each time, and not kept."""

    def __init__(self, slab: Slab, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self._read: Callable[[], torch.Tensor] | None = None
        offset = (*slab.offset, *(0,) * len(slab.shape))
        super().__init__(slab.key, None, dtype, slab.shape, slab.global_shape, offset, None, prepend_axis_num=len(slab.offset))
        self._read = read

    @property  # type: ignore[misc]
    def data(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._read is None else self._read()

    @data.setter
    def data(self, value: torch.Tensor | None) -> None:
        assert value is None, "the data of a tensor that is converted comes from its file"


def write_torch_dist(
    folder: Path,
    contents: Mapping[str, Any],
    slabs: Iterable[AnySlab],
    read_slab: Callable[[AnySlab], torch.Tensor],
    dtype_of: Callable[[str], torch.dtype],
) -> None:
    """A torch_dist checkpoint in the empty folder: `contents` and the slabs, of the type that `dtype_of` has for their key."""

    def reader(slab: AnySlab) -> Callable[[], torch.Tensor]:
        return lambda: read_slab(slab).to(dtype_of(slab.key)).contiguous()

    model = {str(number): _UnreadTensor(slab, dtype_of(slab.key), reader(slab)) for number, slab in enumerate(slabs)}
    dist_checkpointing.save({**contents, "model": model}, folder, content_metadata=CONTENT_METADATA)


# --- checkpoint -> Hugging Face ---


class CoreModel:
    """The model in a checkpoint: its flags, and what config.json and tensors it makes.

    source_config: the config.json that it was made from, if it was; what that says beside the model (token ids) is kept.
    vocab: rows of the embedding that are tokens, where neither that nor the checkpoint says. Raises ConversionError.
    """

    def __init__(self, weights: Weights, source_config: Mapping[str, Any] | None = None, vocab: int | None = None) -> None:
        self.weights, self.folder, self.stored = weights, weights.folder, weights.tensors
        self.saved = arguments_in(weights)
        self.flags = hf_configs.flags_of_checkpoint(self.saved)
        self.family, self.config = self._config(source_config, vocab)
        embedding = self.stored.get("embedding.word_embeddings.weight")
        rows = embedding.global_shape[0] if embedding is not None else 0
        self.sizes = sizes_of(self.flags, self.config["vocab_size"], rows)
        self.pieces = list(pieces(self.family, self.flags, self.sizes))
        self._check_tensors()
        if rows < self.sizes.vocab:
            raise ConversionError(f"{self.folder}: the embedding has {rows} rows, fewer than the vocabulary of {self.sizes.vocab}")

    def _config(self, source: Mapping[str, Any] | None, vocab: int | None) -> tuple[Family, dict[str, Any]]:
        if source is not None and source.get("model_type") in FAMILIES:
            family = FAMILIES[source["model_type"]]
            if not hf_configs.differences(family.to_flags(source), self.flags):
                return family, {**source, **({} if vocab is None else {"vocab_size": vocab})}
        if vocab is None:
            vocab = source["vocab_size"] if source is not None and "vocab_size" in source else self._vocab()
        family, config = family_of_flags(self.flags, vocab)
        kept = ("bos_token_id", "eos_token_id", "pad_token_id")
        return family, {**config, **{name: source[name] for name in kept if source is not None and name in source}}

    def _vocab(self) -> int:
        size = vocabulary(self.saved)
        if size is None:
            raise ConversionError(
                f"{self.folder} does not say how many rows of its embedding are tokens and how many are padding: "
                "give --true-vocab-size with the tokenizer's number of ids"
            )
        return size

    def _check_tensors(self) -> None:
        wanted = {piece.key: piece.global_shape for piece in self.pieces}
        if missing := wanted.keys() - self.stored.keys():
            raise ConversionError(f"{self.folder} lacks tensors of a {self.family.model_type} model:{listed(missing)}")
        wrong = [
            f"{key} is {list(self.stored[key].global_shape)}, its arguments say {list(shape)}"
            for key, shape in wanted.items()
            if self.stored[key].global_shape != shape
        ]
        if wrong:
            raise ConversionError(f"{self.folder} has tensors of another shape:{listed(wrong)}")
        if unknown := self.stored.keys() - wanted.keys():
            raise ConversionError(f"{self.folder} has tensors that a {self.family.model_type} model does not:{listed(unknown)}")

    def dtype(self) -> torch.dtype:
        return one_dtype(self.stored[piece.key].dtype for piece in self.pieces if not piece.fp32)


def vocabulary(saved: Mapping[str, Any]) -> int | None:
    """The tokenizer's number of ids by a checkpoint's arguments, None where they do not say."""
    size = saved.get("vocab_size")
    if size is None:
        return None
    if saved.get("tokenizer_type") == "NullTokenizer":
        pad = saved.get("null_tokenizer_pad_id")
        return NullTokenizer(size, saved.get("null_tokenizer_eod_id"), -1 if pad is None else pad).vocab_size
    return int(size) + int(saved.get("vocab_extra_ids") or 0)


def _write_pieces(model: CoreModel, wanted: list[Piece], writer: SafetensorsWriter) -> None:
    """A function of its own, so that nothing of these tensors is left when the next are read."""
    for piece, tensor in zip(wanted, read(model.weights, wanted), strict=True):
        for name, part in zip(piece.names, piece.join.to_hf(tensor, model.sizes), strict=True):
            writer.write(name, part.to(writer.dtype_of(name)))


def write_hf(model: CoreModel, folder: Path, dtype: torch.dtype, largest_file: int = LARGEST_FILE) -> None:
    """`model` as safetensors and config.json in the empty folder."""
    announced = {name: (shape, dtype_of(piece, dtype)) for piece in model.pieces for name, shape in hf_shapes(piece, model.sizes).items()}
    with SafetensorsWriter(folder, announced, largest_file) as writer:
        for batch in together(model.pieces):
            _write_pieces(model, batch, writer)
    config = {**model.config, "dtype" if "dtype" in model.config else "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def checkpoint_flags(model: HFModel) -> Flags:
    """What a checkpoint's arguments say of a converted model, beside their defaults."""
    config, rope = model.config, model.flags["position_embedding_type"] == "rope"
    return {
        **model.flags,
        "vocab_size": model.vocab,
        "padded_vocab_size": model.sizes.padded_vocab,
        "make_vocab_size_divisible_by": 128,
        "hidden_dropout": float(config.get("resid_pdrop", 0.0)),
        "attention_dropout": float(config.get("attn_pdrop", config.get("attention_dropout", 0.0))),
        "bias_gelu_fusion": not hf_configs.exact_gelu(model.flags),
        "use_rotary_position_embeddings": rope,
        "add_position_embedding": not rope,
    }
