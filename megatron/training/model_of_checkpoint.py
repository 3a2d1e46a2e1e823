"""The model that a checkpoint's arguments describe, built without a command line: whole and without memory, or a stage of it to run."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.arguments import apply_checkpoint_args, core_transformer_config_from_args, parse_args


def args_of_checkpoint(saved: Mapping[str, Any]) -> argparse.Namespace:
    """Arguments of one process with the checkpoint's model, in fp32, by the local backend, without dropout and without initial values."""
    args = parse_args(argv=[])
    apply_checkpoint_args(args, saved)
    vars(args).update(hidden_dropout=0.0, attention_dropout=0.0, transformer_impl="local")
    vars(args).update(use_cpu_initialization=True, perform_initialization=False)
    args.bias_gelu_fusion = saved.get("bias_gelu_fusion", True)  # says which GELU it was
    args.moe_grouped_gemm = bool(saved.get("moe_grouped_gemm"))  # says how files of the `torch` format name experts
    return args


def gpt_model(args: argparse.Namespace, rows: int, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """A pipeline stage with all of `args`' layers. rows: of the vocabulary, with padding."""
    config = core_transformer_config_from_args(args)
    config.logical_vocab_size = rows
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        rows,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    ).eval()


class _NoMemory(TorchFunctionMode):
    """Whatever device a tensor is asked for on: it has a shape and no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return function(*args, **kwargs)


def whole_model(saved: Mapping[str, Any], rows: int) -> GPTModel:
    """All of a checkpoint's model, for its parameters' names, shapes and sharding records; on the meta device."""
    with _NoMemory(), torch.device("meta"):
        return gpt_model(args_of_checkpoint(saved), rows)
