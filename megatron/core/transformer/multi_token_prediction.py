"""Multi-token prediction (DeepSeek-V3, section 2.2): layers behind the last one that predict tokens further ahead, for training alone.

Depth k (from 1) sees at position i the hidden state of depth k - 1 (depth 0: the model's, after its final norm) and the embedding of token
i + k, and predicts token i + k + 1 through the model's own output layer. Checkpoint keys, a contract: mtp.layers.N. (from 0) enorm, hnorm,
eh_proj (columns: embedding, hidden state), transformer_layer.* and final_layernorm.

The loss is lambda / D times the sum over depths of each one's mean; a depth's mean is over the micro batch's tokens that count, all
context-parallel ranks together. With calculate_per_token_loss every token weighs what one of the model's own loss does, times lambda / D:
a depth's sum is divided by the number of these tokens in the global batch, whatever a rank has of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.context_parallel.sequence_split import packed_positions_of_rank, sequence_order
from megatron.core.packed_seq_params import Document, PackedSeqParams, packed_documents
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.mappings import (
    gather_first_dim,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.aux_loss_scale import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import Group, get_pg_rank, get_pg_size


@dataclass
class MultiTokenPredictionLayerSubmodules:
    enorm: Any = None
    hnorm: Any = None
    eh_proj: Any = None
    transformer_layer: Any = None
    layer_norm: Any = None


@dataclass
class MultiTokenPredictionBlockSubmodules:
    layer_specs: list[ModuleSpec] | None = None


# --- the shift ---


def shifted(tensors: list[torch.Tensor], packed_seq_params: PackedSeqParams | None = None, cp_group: Group = None) -> list[torch.Tensor]:
    """Each [b, s] tensor with the next token's value at every position, 0 where a sequence ends; of integers, or of weights of tokens.

    Sequences of a packed batch are shifted by themselves, padding not counted. With several ranks in `cp_group` s are this rank's tokens:
    the neighbours of their borders come from the other ranks.
    """
    rank, size = get_pg_rank(cp_group), get_pg_size(cp_group)
    length = tensors[0].shape[1] * size
    documents = (Document(0, length, length),) if packed_seq_params is None else packed_documents(packed_seq_params)
    where = tensors[0].device
    inside = torch.zeros(length, dtype=torch.bool, device=where)
    for document in documents:
        inside[document.start : document.start + max(document.length - 1, 0)] = True
    own = packed_positions_of_rank(documents, rank, size, where)

    def shift(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor
        if size > 1:
            order = sequence_order(tuple(documents), tuple(range(size)), size, where)
            whole = gather_first_dim(tensor.t().contiguous(), cp_group).index_select(0, order).t()
        following = torch.cat([whole[:, 1:], whole[:, :1]], dim=1)
        return torch.where(inside, following, torch.zeros_like(following)).index_select(1, own)

    return [shift(tensor) for tensor in tensors]


# --- the layers ---


class MultiTokenPredictionLayer(MegatronModule):
    """One depth. forward: hidden states and embeddings [s, b, h] -> [s, b, h], after its final norm. `depth` counts from 1."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionLayerSubmodules,
        depth: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = groups = default_pg_collection(pg_collection)
        norm: dict[str, Any] = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm = build_module(submodules.enorm, **norm)
        self.hnorm = build_module(submodules.hnorm, **norm)
        self.eh_proj = build_module(
            submodules.eh_proj,
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="mtp_eh_proj",
            pg_collection=groups,
        )
        self.transformer_layer = build_module(
            submodules.transformer_layer,
            config=config,
            layer_number=config.num_layers + depth,  # behind all others, in logs too
            pg_collection=groups,
            vp_stage=vp_stage,
            add_layer_offset=False,
        )
        self.final_layernorm = build_module(submodules.layer_norm, **norm)

    def forward(self, hidden_states: torch.Tensor, embeddings: torch.Tensor, **layer_arguments: Any) -> torch.Tensor:
        def run(hidden_states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1)
            joined, _ = self.eh_proj(both)
            joined = gather_from_tensor_model_parallel_region(joined, group=self.pg_collection.tp)
            if self.config.sequence_parallel:
                joined = scatter_to_sequence_parallel_region(joined, group=self.pg_collection.tp)
            output, _ = self.transformer_layer(joined, **layer_arguments)
            return output

        recomputed = self.training and self.config.recompute_granularity == "full"
        output = checkpoint(run, False, hidden_states, embeddings) if recomputed else run(hidden_states, embeddings)
        return self.final_layernorm(output)


class MultiTokenPredictionBlock(MegatronModule):
    """All depths, in the last stage. `losses`: of the last micro batch in training, by depth [sum over tokens, tokens] of this rank."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: MultiTokenPredictionBlockSubmodules | ModuleSpec,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = default_pg_collection(pg_collection)
        submodules = spec.submodules if isinstance(spec, ModuleSpec) else spec
        specs = submodules.layer_specs or []
        if len(specs) != config.mtp_num_layers:
            raise ValueError(
                f"the spec for multi-token prediction has {len(specs)} layers, but config.mtp_num_layers is {config.mtp_num_layers}"
            )
        self.layers = torch.nn.ModuleList(
            build_module(layer, config=config, depth=depth, pg_collection=self.pg_collection, vp_stage=vp_stage)
            for depth, layer in enumerate(specs, 1)
        )
        self.losses: list[torch.Tensor] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        labels: torch.Tensor,
        loss_mask: torch.Tensor | None,
        embed: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        token_losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        packed_seq_params: PackedSeqParams | None = None,
        **layer_arguments: Any,
    ) -> torch.Tensor:
        """`hidden_states` [s, b, h] unchanged, with the losses of all depths joined to their backward pass.

        input_ids, position_ids, labels, loss_mask [b, s] as the model got them (no mask: all count). embed(ids, positions) -> [s, b, h];
        token_losses(hidden, labels) -> [b, s].
        """
        cp = self.pg_collection.cp
        mask = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask
        ids, positions = input_ids, torch.zeros_like(input_ids) if position_ids is None else position_ids
        hidden, total, self.losses = hidden_states, None, []
        for layer in self.layers:
            ids, positions, labels, mask = shifted([ids, positions, labels, mask], packed_seq_params, cp)
            embeddings = embed(ids, None if position_ids is None else positions)
            hidden = layer(hidden, embeddings, packed_seq_params=packed_seq_params, **layer_arguments)
            losses, counts = token_losses(hidden, labels), mask.to(torch.promote_types(mask.dtype, torch.float32))
            # where, not a product: the loss of a token that does not count may be infinite
            summed, tokens = torch.where(counts > 0, losses * counts, 0.0).sum(), counts.sum()
            self.losses.append(torch.stack([summed.detach(), tokens.to(summed.dtype)]))
            if not self.config.calculate_per_token_loss:
                summed = summed / self._of_all_ranks(tokens).clamp(min=1)
            total = summed if total is None else total + summed
        assert total is not None and self.config.mtp_num_layers
        # its gradient is scaled as that of experts' balance losses is: both are sums over the ranks that share a micro batch
        return MoEAuxLossAutoScaler.apply(hidden_states, total * (self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers))

    def _of_all_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        if get_pg_size(self.pg_collection.cp) == 1:
            return tokens
        tokens = tokens.detach().clone()
        dist.all_reduce(tokens, group=self.pg_collection.cp)
        return tokens


def mtp_reports(model: Any) -> dict[str, torch.Tensor]:
    """Name in the log -> [sum of losses, tokens] of the (unwrapped) model's last micro batch; nothing where it has no such layers."""
    block = getattr(model, "mtp", None)
    return {} if block is None else {f"mtp_{depth} loss": pair for depth, pair in enumerate(block.losses, 1)}
