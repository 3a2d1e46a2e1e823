"""Whether a Hugging Face folder and a checkpoint of ours are the same model: the hidden states after each layer, and the logits.

Each model is run by its own code (transformers', and megatron.core's GPTModel with the arguments that the checkpoint holds), a layer of
each at a time: in memory are two layers, with the first and the last one the embeddings and heads too. Each goes on from its own hidden
states, so that the logits are those of the whole models. In fp32; weights that were rounded on the way are compared with the others
rounded as well, so what is judged is the conversion, not the precision.
"""

import argparse
import copy
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import leaves, map_leaves
from megatron.core.export.conversion import HFModel, dtype_of
from megatron.core.export.hf_configs import ConversionError, Flags, flags_of_checkpoint
from megatron.core.export.weights import Weights, arguments_in
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optional_imports import require
from megatron.core.transformer.attention_masks import is_window_layer
from megatron.core.transformer.moe.settings import moe_layer_pattern
from megatron.training.model_of_checkpoint import args_of_checkpoint, gpt_model

TOLERANCE = 1e-4  # of the largest absolute difference over the largest value
SMALLEST_SCALE = 1e-6  # below it, rounding is all there is
TOKENS = 48
SMALL_VOCAB = 8  # of a layer without the embedding


@dataclass(frozen=True)
class Difference:
    """`largest` absolute difference of two tensors whose largest value is `scale`."""

    where: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        return self.largest / max(SMALLEST_SCALE, self.scale)

    @classmethod
    def of(cls, where: str, ours: torch.Tensor, theirs: torch.Tensor) -> "Difference":
        largest = (ours - theirs).abs().max().item()
        return cls(where, float("inf") if largest != largest else largest, theirs.abs().max().item())


def compare(hf_folder: Path, checkpoint: Weights, tokens: torch.Tensor | None = None) -> list[Difference]:
    """By layer, and last of the logits. tokens [b, s]; default: 48 drawn ones. Needs transformers."""
    theirs = TheirLayers(hf_folder)
    ours = OurLayers(checkpoint, theirs.model.vocab)
    theirs.dtype = ours.dtype
    if tokens is None:
        length = min(TOKENS, theirs.model.flags["max_position_embeddings"])
        tokens = torch.randint(theirs.model.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    mine = other = None
    found = []
    logits: tuple[Any, Any] = (None, None)
    with torch.no_grad():
        for layer in range(theirs.model.flags["num_layers"]):
            mine, my_logits = ours.run(layer, tokens, mine)
            other, their_logits = theirs.run(layer, tokens, other)
            logits = my_logits, their_logits
            if my_logits is None:
                found.append(Difference.of(f"layer {layer}", mine, other))
    return [*found, Difference.of("logits", *logits)]


def report(differences: list[Difference]) -> str:
    """One line. Raises ConversionError that lists what differs by more than TOLERANCE."""
    wrong = [item for item in differences if not item.relative <= TOLERANCE]
    if wrong:
        lines = "".join(f"\n  {item.where}: {item.largest:.2e}, the largest value being {item.scale:.2e}" for item in wrong[:8])
        rule = f"the two models differ by more than {TOLERANCE} of the largest value"
        raise ConversionError(f"{rule} (--no-verify writes what was converted nonetheless):{lines}")
    layers = max((item.relative for item in differences[:-1]), default=0.0)
    return (
        f"compared with transformers: logits differ by at most {differences[-1].largest:.1e} (the largest is {differences[-1].scale:.1f}), "
        f"{len(differences) - 1} layers' hidden states by at most {layers:.1e} of the largest"
    )


class TheirLayers:
    """transformers' model, a layer at a time: its own class with a config.json of one layer and that layer's weights."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self.package = require("transformers", "the comparison of logits (or give --no-verify)")
        self.package.logging.disable_progress_bar()  # one for each layer
        self.model = HFModel(folder)
        self.dtype: torch.dtype | None = None  # that both models' weights are rounded to

    def run(self, layer: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [b, s, h] after the layer, with the last one the logits [b, s, vocab]."""
        last = layer == self.model.flags["num_layers"] - 1
        model = self._one_layer(layer, whole_vocabulary=layer == 0 or last)
        inside = self.model.family.layers_at.format(l=0).rstrip(".")
        seen: list[torch.Tensor] = []
        model.get_submodule(inside).register_forward_hook(lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0]))
        output = model(input_ids=tokens, use_cache=False) if hidden is None else model(inputs_embeds=hidden, use_cache=False)
        return seen[0], output.logits if last else None

    def _one_layer(self, layer: int, whole_vocabulary: bool) -> Any:
        model, family = self.model, self.model.family
        config = copy.deepcopy(model.config)
        config[{"gpt2": "n_layer"}.get(family.model_type, "num_hidden_layers")] = 1
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][layer : layer + 1]
        elif config.get("use_sliding_window"):
            config["max_window_layers"] = 0 if layer >= config.get("max_window_layers", 28) else 1
        if model.flags["num_experts"]:
            moe = moe_layer_pattern(model.flags["moe_layer_freq"], model.flags["num_layers"])[layer]
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": [] if moe else [0], "first_k_dense_replace": int(not moe)}
        if not whole_vocabulary:
            config["vocab_size"] = SMALL_VOCAB
        config = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
        made = self.package.AutoConfig.for_model(**config)
        weights = self._weights(layer, None if whole_vocabulary else SMALL_VOCAB)
        kind = getattr(self.package, family.architecture)
        return kind.from_pretrained(None, config=made, state_dict=weights, dtype=torch.float32, attn_implementation="eager").eval()

    def _weights(self, layer: int, vocab: int | None) -> dict[str, torch.Tensor]:
        family, found = self.model.family, {}
        for piece in self.model.pieces:
            if piece.layer not in (None, layer):
                continue
            for name in piece.names:
                there = name.replace(family.layers_at.format(l=layer), family.layers_at.format(l=0), 1) if piece.layer is not None else name
                rows_are_tokens = piece.shape[0] == self.model.sizes.padded_vocab and piece.layer is None
                if rows_are_tokens and vocab is not None:
                    found[there] = torch.zeros(vocab, *piece.shape[1:])
                    continue
                tensor = self.model.read(name)
                found[there] = (tensor if self.dtype is None else tensor.to(dtype_of(piece, self.dtype))).float()
        if layer > 0 and "transformer.wpe.weight" in found:  # GPT-2 adds positions to whatever goes in
            found["transformer.wpe.weight"] = torch.zeros_like(found["transformer.wpe.weight"])
        return found


class OurLayers:
    """The checkpoint's model as GPTModel, a layer at a time: a pipeline stage of one layer."""

    def __init__(self, weights: Weights, vocab: int) -> None:
        self.weights, self.vocab = weights, vocab
        saved = arguments_in(weights)
        self.flags: Flags = flags_of_checkpoint(saved)
        self.args = args_of_checkpoint(saved)
        embedding = weights.tensors["embedding.word_embeddings.weight"]
        self.dtype, self.rows = embedding.dtype, embedding.global_shape[0]

    def run(self, layer: int, tokens: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As TheirLayers.run."""
        last = layer == self.flags["num_layers"] - 1
        model = self._one_layer(layer, last)
        if hidden is not None:
            model.set_input_tensor(hidden.transpose(0, 1).contiguous())
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        output = model(tokens, positions, None)
        if last:
            return output, output[..., : self.vocab]
        return output.transpose(0, 1), None

    def _one_layer(self, layer: int, last: bool) -> GPTModel:
        args, flags = argparse.Namespace(**vars(self.args)), self.flags
        args.num_layers = 1
        if flags["num_experts"]:
            moe = moe_layer_pattern(flags["moe_layer_freq"], flags["num_layers"])[layer]
            vars(args).update(moe_layer_freq=1, num_experts=flags["num_experts"] if moe else None)
        if not is_window_layer(flags["window_size"], flags["window_attn_skip_freq"], layer + 1):
            args.window_size = None
        args.window_attn_skip_freq = None
        model = gpt_model(args, self.rows, pre_process=layer == 0, post_process=last)
        self._load(model, layer)
        return model

    def _load(self, model: GPTModel, layer: int) -> None:
        """Fill the parameters in place: what the model calls its only layer is the checkpoint's layer `layer`."""
        number = self.flags["num_layers"]
        stacked = not self.flags["num_experts"] or self.flags["moe_layer_freq"] == 1

        def of_that_layer(shard: Any) -> Any:
            if not shard.key.startswith("decoder.layers."):
                return shard
            rest = slice(1, None)
            if stacked:
                shape, offset = (number, *shard.global_shape[rest]), (layer, *shard.global_offset[rest])
                return replace(shard, global_shape=shape, global_offset=offset, axis_fragmentations=None)
            key = re.sub(r"^decoder\.layers\.", f"decoder.layers.{layer}.", shard.key)
            return replace(
                shard,
                key=key,
                global_shape=shard.global_shape[rest],
                global_offset=shard.global_offset[rest],
                prepend_axis_num=shard.prepend_axis_num - 1,
                axis_fragmentations=None,
            )

        self.weights.load(leaves(map_leaves(of_that_layer, model.sharded_state_dict())))
