"""The feed-forward half of a layer as a mixture of experts."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import local_experts
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import Dispatched, build_dispatcher
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank, get_pg_size


@dataclass
class MoESubmodules:
    experts: Any = None
    shared_experts: Any = None
    router: Any = TopKRouter


class BaseMoELayer(MegatronModule):
    """What a transformer layer knows its MoE half by; holds the experts of this rank and the groups.

    Raises ValueError where the config's sizes are not those of the groups.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int | None = None, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config)
        self.pg_collection = groups = default_pg_collection(pg_collection)
        if config.num_moe_experts is None:
            raise ValueError("MoELayer: config.num_moe_experts is None; give the number of experts, such as 8")
        for name, group, size in (
            ("expert_model_parallel_size", groups.ep, config.expert_model_parallel_size),
            ("expert_tensor_parallel_size", groups.expt_tp, config.expert_tensor_parallel_size),
        ):
            if get_pg_size(group) != size:
                raise ValueError(f"the group of {name} has {get_pg_size(group)} ranks but the config's is {size}")
        self.layer_number = layer_number
        held = local_experts(config, groups)
        assert held.count is not None
        self.num_local_experts = held.count
        self.local_expert_indices = list(range(held.first, held.first + held.count))
        self.ep_group = groups.ep
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel and get_pg_rank(groups.tp) != get_pg_rank(groups.expt_tp):
            raise ValueError("tensor parallelism without sequence parallelism: the groups tp and expt_tp must be the same ranks")

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number


class MoELayer(BaseMoELayer):
    """Router, dispatch, experts, combine, plus shared experts. forward: [s, b, h] -> ([s, b, h], None).

    `padding_mask` [b, s] (True: padding; of this context-parallel rank's positions, all tensor-parallel ranks'): these tokens go to no
    routed expert. `loss_tokens`: see TopKRouter.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(config, layer_number, pg_collection)
        if submodules is None or submodules.experts is None:
            raise ValueError("MoELayer needs submodules.experts; get_moe_module_spec makes them")
        groups = self.pg_collection
        self.router = build_module(submodules.router, config=config, pg_collection=groups, is_mtp_layer=is_mtp_layer)
        if layer_number is not None:
            self.router.set_layer_number(layer_number)
        self.token_dispatcher = build_dispatcher(self.num_local_experts, self.local_expert_indices, config, groups)
        self.experts = build_module(submodules.experts, self.num_local_experts, config, pg_collection=groups)
        self.shared_experts = None
        if config.moe_shared_expert_intermediate_size:
            if submodules.shared_experts is None:
                raise ValueError("config.moe_shared_expert_intermediate_size is given, but the layer's spec has no shared_experts")
            self.shared_experts = build_module(submodules.shared_experts, config=config, pg_collection=groups)
        self.recomputed = config.moe_layer_recompute or config.recomputes("moe")

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        self.router.set_layer_number(layer_number)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
        loss_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        if intermediate_tensors is not None:
            raise ValueError("MoELayer: intermediate_tensors is not built yet; leave it out")
        padding = self._own_padding(hidden_states, padding_mask)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            return self._run(hidden, padding, loss_tokens)

        recomputed = self.training and self.recomputed
        return checkpoint(run, False, hidden_states) if recomputed else run(hidden_states), None

    def _run(self, hidden: torch.Tensor, padding: torch.Tensor | None, loss_tokens: torch.Tensor | None) -> torch.Tensor:
        probs, routing_map = self.route(hidden, padding, loss_tokens)
        shared: list[torch.Tensor] = []

        def compute_shared() -> None:
            if self.shared_experts is not None:
                shared.append(self.shared_experts_compute(hidden))

        overlap = self.config.moe_shared_expert_overlap
        dispatched = self.token_dispatcher.dispatch(
            hidden.flatten(0, 1), probs, routing_map, has_padding=padding is not None, beside=compute_shared if overlap else None
        )
        output = self.combine(dispatched, self.routed_experts_compute(dispatched)).view_as(hidden)
        if not overlap:
            compute_shared()
        return output + shared[0] if shared else output

    def _own_padding(self, hidden: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor | None:
        """[b, s] of the tokens that the tensor-parallel ranks share -> [s, b] of this rank's."""
        if padding_mask is None:
            return None
        mask, length = padding_mask.t(), hidden.shape[0]
        if mask.shape[0] != length:
            mask = mask.narrow(0, get_pg_rank(self.pg_collection.tp) * length, length)
        if tuple(mask.shape) != tuple(hidden.shape[:2]):
            raise ValueError(f"padding_mask has the shape {tuple(padding_mask.shape)}, but hidden states [s, b, h] {tuple(hidden.shape)}")
        return mask.contiguous()

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None, loss_tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [s b, E], choice [s b, E]); here padding_mask is [s, b]."""
        return self.router(hidden_states, padding_mask, loss_tokens)

    def routed_experts_compute(self, dispatched: Dispatched) -> torch.Tensor:
        return self.experts(dispatched.tokens, dispatched.counts, dispatched.probs)[0]

    def combine(self, dispatched: Dispatched, output: torch.Tensor) -> torch.Tensor:
        """[s b, h]: each token's sum over its experts."""
        return dispatched.back(output)

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self.shared_experts is not None
        if self.training and self.config.recomputes("shared_experts"):
            return checkpoint(self.shared_experts, False, hidden_states)
        return self.shared_experts(hidden_states)
