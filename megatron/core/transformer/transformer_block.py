"""The stack of layers that one pipeline stage (one chunk of it) holds."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, _pp_rank, layers_of_stage
from megatron.core.utils import get_pg_rank, get_pg_size


@dataclass
class TransformerBlockSubmodules:
    layer_specs: list[ModuleSpec] | None = None
    layer_norm: Any = None


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Number of layers of this stage (its chunk `vp_stage`)."""
    return len(layers_of_stage(config, _pp_rank(pp_rank), vp_stage))


class TransformerBlock(MegatronModule):
    """forward: [s, b, h] -> [s, b, h], with the final norm in the last stage. `spec`: one layer's spec for all, or a block's submodules.

    A stage that does not begin the pipeline takes its input from `set_input_tensor`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules | ModuleSpec,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = default_pg_collection(pg_collection)
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.input_tensor: torch.Tensor | None = None
        stage = layers_of_stage(config, get_pg_rank(self.pg_collection.pp), vp_stage)
        if get_pg_size(self.pg_collection.pp) != config.pipeline_model_parallel_size:
            raise ValueError(
                f"the pipeline group has {get_pg_size(self.pg_collection.pp)} ranks but config.pipeline_model_parallel_size is "
                f"{config.pipeline_model_parallel_size}"
            )
        submodules = block_submodules(spec, len(stage))
        assert submodules.layer_specs is not None
        self.layers = torch.nn.ModuleList(
            build_module(layer, config=config, layer_number=index + 1, pg_collection=self.pg_collection, vp_stage=vp_stage)
            for index, layer in enumerate(submodules.layer_specs)
        )
        contexts = [getattr(layer.submodules, "precision_context", None) for layer in submodules.layer_specs]
        self._precision = next((context for context in contexts if context is not None), None)
        self.final_layernorm = None
        if post_process and post_layer_norm:
            norm = submodules.layer_norm or FusedLayerNorm
            self.final_layernorm = build_module(norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def has_final_layernorm_in_this_stage(self) -> bool:
        return self.final_layernorm is not None

    def _precision_of(self, layer_number: int | None) -> AbstractContextManager:
        """For the layer, counted from 1 over the whole model; None: for what surrounds them all."""
        return nullcontext() if self._precision is None else self._precision(self.config, layer_number, self.pg_collection)

    def _checkpoint(self, run: Callable, *args: Any) -> Any:
        if self._precision is not None and getattr(self.config, "fp8", None):
            from megatron.core.extensions.transformer_engine import te_checkpoint

            return te_checkpoint(run, False, get_cuda_rng_tracker, self.pg_collection.tp, *args)
        return checkpoint(run, False, *args)

    def set_input_tensor(self, input_tensor: torch.Tensor) -> None:
        self.input_tensor = input_tensor

    def _runs(self) -> list[tuple[int, int, bool]]:
        """(first layer, layer after the last, run again in the backward pass) over this chunk's layers."""
        config, total = self.config, len(self.layers)
        if config.recompute_granularity != "full" or not self.training:
            return [(0, total, False)]
        step = config.recompute_num_layers
        assert step is not None
        if config.recompute_method == "uniform":
            return [(first, min(first + step, total), True) for first in range(0, total, step)]
        return [(layer, layer + 1, layer < step) for layer in range(total)]

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        attention_bias: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **layer_arguments: Any,
    ) -> torch.Tensor:
        hidden = hidden_states if self.pre_process else self.input_tensor
        assert hidden is not None, "a stage after the first needs set_input_tensor"
        layer_arguments = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": rotary_pos_emb,
            "attention_bias": attention_bias,
            "inference_context": inference_context,
            "packed_seq_params": packed_seq_params,
            **layer_arguments,
        }

        def run_of(first: int, last: int) -> Callable:
            def run(hidden: torch.Tensor, context: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
                for index in range(first, last):
                    layer: Any = self.layers[index]
                    with self._precision_of(layer.layer_number):
                        hidden, context = layer(hidden, context=context, **layer_arguments)
                return hidden, context

            return run

        with self._precision_of(None):
            for first, last, recomputed in self._runs():
                run = run_of(first, last)
                hidden, context = self._checkpoint(run, hidden, context) if recomputed else run(hidden, context)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def block_submodules(spec: TransformerBlockSubmodules | ModuleSpec, num_layers: int) -> TransformerBlockSubmodules:
    """The block's parts: as given, or the one layer's spec for every layer."""
    if isinstance(spec, TransformerBlockSubmodules):
        if spec.layer_specs is None or len(spec.layer_specs) != num_layers:
            raise ValueError(f"the block's spec lists {len(spec.layer_specs or [])} layers, but this stage has {num_layers}")
        return spec
    module = get_module(spec)
    if issubclass(module, TransformerBlock):
        return block_submodules(spec.submodules, num_layers)
    if issubclass(module, TransformerLayer) or hasattr(spec.submodules, "sharded_state_dict_keys_map"):
        return TransformerBlockSubmodules([spec] * num_layers)
    raise ValueError(
        f"TransformerBlock cannot be built from a spec of {module.__name__}; give a layer's spec or TransformerBlockSubmodules"
    )
