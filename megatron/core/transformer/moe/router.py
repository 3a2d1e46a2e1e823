"""The gate: which experts each token goes to, the balance losses of that choice, and the counts that logs and the expert bias want."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.layers import empty_parameter
from megatron.core.tensor_parallel.mappings import all_reduce, gather_first_dim
from megatron.core.tensor_parallel.param_sharding import declare, replicated
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.aux_loss_scale import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.settings import balance_coefficients, balances_by
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import Group, get_pg_rank, get_pg_size

# Balance loss or "z_loss" -> its name in the logs, which is Megatron's.
LOGGED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
MOST_FUSED = 1024  # experts that are one tile of the router's kernel
ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class RouterStep:
    """What a router saw in a step, on the device: this rank's part of it.

    losses: name in the logs -> sum over micro batches, without coefficients. tokens_per_expert [E]: choices, before any are dropped.
    """

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens_per_expert: torch.Tensor | None = None
    microbatches: int = 0


class Router(MegatronModule):
    """The gate's weight [E, h]. It is drawn like other weights, and the same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config)
        if is_mtp_layer:
            raise ValueError("Router: is_mtp_layer is not built yet; leave it out")
        self.pg_collection = default_pg_collection(pg_collection)
        assert config.num_moe_experts is not None and config.init_method is not None
        self.num_experts, self.topk = config.num_moe_experts, config.moe_router_topk
        split_tokens = config.sequence_parallel and get_pg_size(self.pg_collection.tp) > 1
        sharding = replicated((self.num_experts, config.hidden_size), grad_partial=("tp",) if split_tokens else ())
        self.weight = empty_parameter(sharding, config, 1)
        declare(self.weight, sharding, config.init_method)
        # The ranks that share a micro batch, each with tokens of its own.
        self.microbatch_group: Group = self.pg_collection.tp_cp if split_tokens else self.pg_collection.cp
        self.replicas_group: Group = self.pg_collection.tp_dp_cp if split_tokens else self.pg_collection.dp_cp
        self.layer_number: int | None = None

    def set_layer_number(self, layer_number: int) -> None:
        """Over the whole model, from 1."""
        self.layer_number = layer_number

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[.., h] -> logits [.., E], in config.moe_router_dtype where that is given."""
        dtype = ROUTER_DTYPES[self.config.moe_router_dtype] or input.dtype
        return F.linear(input.to(dtype), self.weight.to(dtype))


class TopKRouter(Router):
    """forward: [s, b, h], padding mask [s, b] (True: padding) -> (weights [s b, E], in fp32 at least, and the choice [s b, E] bool).

    Tokens of padding go nowhere, take no capacity and enter no loss. In training, while gradients are recorded (so once a micro batch,
    however often it is recomputed), the losses of config.moe_router_load_balancing_type and the z-loss join the backward pass, and the
    step's numbers are noted in `step`, which `finish_step` closes.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, is_mtp_layer: bool = False) -> None:
        super().__init__(config, pg_collection, is_mtp_layer)
        self.losses = balance_coefficients(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
        self.sinkhorn = balances_by(config.moe_router_load_balancing_type, "sinkhorn")
        self.step, self.last_step = RouterStep(), RouterStep()
        self._global_counts: torch.Tensor | None = None  # [E + 1]: choices by expert, tokens; of all ranks, this step so far
        self.expert_bias: torch.Tensor | None
        if config.moe_router_enable_expert_bias:
            bias = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
            bias.sharding = replicated(bias)  # type: ignore[attr-defined]
            self.register_buffer("expert_bias", bias)
        else:
            self.expert_bias = None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The bias moves with the module but stays in fp32: its steps are lost in half precision."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None:
            moved = bias.to(self.expert_bias.device)
            moved.sharding = replicated(moved)  # type: ignore[attr-defined]
            self.expert_bias = moved
        return self

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, loss_tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`loss_tokens`: tokens of the whole micro batch that count in the loss (0-d), for config.calculate_per_token_loss."""
        logits = self.gating(self.apply_input_jitter(input))
        return self.routing(logits, padding_mask, loss_tokens)

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        """Times uniform(1 - eps, 1 + eps) in training (Switch Transformer)."""
        eps = self.config.moe_input_jitter_eps
        if not eps or not self.training:
            return input
        with get_cuda_rng_tracker().fork() if self.config.sequence_parallel else nullcontext():
            return input * torch.empty_like(input).uniform_(1.0 - eps, 1.0 + eps)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None, loss_tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, choice) of logits [s, b, E]."""
        config = self.config
        flat = logits.flatten(0, 1)
        padding = None if padding_mask is None else padding_mask.flatten()
        learns = self.training and torch.is_grad_enabled()
        scores: torch.Tensor | None = None
        if self._fuses(flat):
            from megatron.core.fusions.kernels import router as kernel

            probs, routing_map, scores = kernel.route(
                flat,
                self.topk,
                score_function=config.moe_router_score_function,
                pre_softmax=config.moe_router_pre_softmax,
                scaling_factor=config.moe_router_topk_scaling_factor,
                with_scores=learns and bool(self.losses),
            )
            probs, routing_map = routing.without_padding(probs, routing_map, padding)
        else:
            probs, routing_map = routing.dense(*self._choice(flat, padding), self.num_experts, padding)
        if learns:
            aux_loss = self._balance(logits, routing_map, padding_mask, loss_tokens, scores)
            if aux_loss is not None and aux_loss.requires_grad:
                probs = MoEAuxLossAutoScaler.apply(probs, aux_loss)
        if config.moe_expert_capacity_factor is not None:
            routing_map = self._drop(probs, routing_map, padding)
            probs = probs * routing_map
        return probs, routing_map

    def _fuses(self, flat: torch.Tensor) -> bool:
        """Whether one kernel does it (config.moe_router_fusion): softmax or sigmoid, and experts by the largest logits alone."""
        config = self.config
        return (
            config.moe_router_fusion
            and not self.sinkhorn
            and config.moe_router_score_function in ("softmax", "sigmoid")
            and config.moe_router_group_topk is None
            and self.expert_bias is None
            and not config.moe_router_force_load_balancing
            and self.num_experts <= MOST_FUSED
            and kernels_run_on(flat)
        )

    def _choice(self, flat: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(indices, weights) [T, K] of logits [T, E]."""
        config = self.config
        if self.sinkhorn:
            return self.sinkhorn_load_balancing(flat, padding)
        return routing.route(
            flat,
            self.topk,
            score_function=config.moe_router_score_function,
            pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            expert_bias=self.expert_bias,
            chosen=self._round_robin(flat) if config.moe_router_force_load_balancing else None,
        )

    def _round_robin(self, flat: torch.Tensor) -> torch.Tensor:
        """--moe-router-force-load-balancing: token t takes the next top-k experts, whatever the gate says. For measuring speed."""
        first = torch.arange(flat.shape[0], device=flat.device).unsqueeze(1) * self.topk
        return (first + torch.arange(self.topk, device=flat.device)) % self.num_experts

    def sinkhorn_load_balancing(self, flat: torch.Tensor, padding: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """In training the choice is sinkhorn's over all tokens of the micro batch; the weights are sigmoid (top-1) or softmax scores."""
        x = routing.widened(flat)
        choice = x.detach()
        if self.training:
            everyone = self._gathered(choice)
            if padding is None:
                balanced = routing.sinkhorn(everyone)
            else:
                real = ~self._gathered(padding.to(torch.uint8)).bool()
                balanced = torch.zeros_like(everyone)
                balanced[real] = routing.sinkhorn(everyone[real])
            rows = flat.shape[0]
            choice = balanced.narrow(0, get_pg_rank(self.microbatch_group) * rows, rows)
        indices = routing.choose(choice, self.topk)
        scores = x.sigmoid() if self.topk == 1 else x.softmax(dim=-1)
        factor = self.config.moe_router_topk_scaling_factor
        return indices, scores.gather(-1, indices) * (1.0 if factor is None else factor)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks of the micro batch."""
        return x if get_pg_size(self.microbatch_group) == 1 else gather_first_dim(x, self.microbatch_group)

    def _summed(self, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        """Over the ranks of the micro batch (or `group`), in a new tensor: a caller's own counts stay its own."""
        group = self.microbatch_group if group is None else group
        return x if get_pg_size(group) == 1 else all_reduce(x, group)

    # Balance losses

    def _balance(
        self,
        logits: torch.Tensor,
        routing_map: torch.Tensor,
        padding: torch.Tensor | None,
        loss_tokens: torch.Tensor | None,
        scores: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Note the step's counts; the sum of the losses times their coefficients, this rank's part, to run backward from.

        scores: the normalized ones [s b, E], where they are at hand.
        """
        config, by_token = self.config, routing_map.view(*logits.shape)
        counts = by_token.sum(dim=0)  # [b, E]
        self._note_counts(counts.sum(dim=0))
        if not self.losses and not config.moe_z_loss_coeff:
            return None
        # tokens of a sequence, over the ranks of the micro batch: a number, or [b] where some are padding
        length: int | torch.Tensor = logits.shape[0] * get_pg_size(self.microbatch_group)
        if padding is not None:
            both = self._summed(torch.cat([counts, (~padding).sum(dim=0).unsqueeze(1)], dim=1))
            counts, length = both[:, :-1], both[:, -1]
        elif self.losses:
            counts = self._summed(counts)
        tokens = length * logits.shape[1] if isinstance(length, int) else length.sum()
        if scores is None:
            scores = routing.normalized_scores(logits, config.moe_router_score_function)
        scores = scores.view(*logits.shape)
        if padding is not None:
            scores = scores.masked_fill(padding.unsqueeze(-1), 0.0)
        total: torch.Tensor | None = None
        for kind, coefficient in self.losses.items():
            if kind == "seq_aux_loss":
                loss = routing.sequence_loss(scores, counts, length, self.topk)
            elif kind == "aux_loss":
                loss = routing.switch_loss(scores.flatten(0, 1), counts.sum(dim=0), tokens, self.topk)
            else:
                loss = self._global_aux_loss(scores, counts.sum(dim=0), tokens)
            total = self._with(total, kind, loss, coefficient)
        if config.moe_z_loss_coeff:
            loss = self.apply_z_loss(logits, tokens, padding)
            total = self._with(total, "z_loss", loss, config.moe_z_loss_coeff)
        assert total is not None
        if config.calculate_per_token_loss:  # the step's gradient is divided by its tokens at the end: weighted by this micro batch's
            total = total * (tokens if loss_tokens is None else loss_tokens.to(total.dtype))
        return total

    def _with(self, total: torch.Tensor | None, kind: str, loss: torch.Tensor, coefficient: float) -> torch.Tensor:
        name, losses = LOGGED_AS[kind], self.step.losses
        losses[name] = losses[name] + loss.detach() if name in losses else loss.detach()
        return loss * coefficient if total is None else total + loss * coefficient

    def apply_z_loss(self, logits: torch.Tensor, num_tokens: torch.Tensor | int, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        flat = None if padding_mask is None else padding_mask.flatten()
        return routing.z_loss(logits.flatten(0, 1), num_tokens, flat)

    def _global_aux_loss(self, scores: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor | int) -> torch.Tensor:
        """With the choices of all data-parallel ranks and of the step's micro batches up to this one."""
        here = torch.cat([counts, torch.as_tensor(tokens, device=counts.device, dtype=counts.dtype).reshape(1)])
        everyone = self._summed(here, self.pg_collection.dp) if get_pg_size(self.pg_collection.dp) > 1 else here
        so_far = everyone if self._global_counts is None else self._global_counts + everyone
        self._global_counts = so_far
        return routing.global_loss(scores.flatten(0, 1), tokens, so_far[:-1], so_far[-1], self.topk)

    def reset_global_aux_loss_tracker(self) -> None:
        self._global_counts = None

    # Capacity

    def _drop(self, probs: torch.Tensor, routing_map: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        """The choice within the experts' capacity, which the whole micro batch shares."""
        config, group = self.config, self.microbatch_group
        assert config.moe_expert_capacity_factor is not None
        shape = (self.topk, self.num_experts, config.moe_expert_capacity_factor)
        capacity: int | torch.Tensor
        if padding is None:
            capacity = routing.capacity_of(probs.shape[0] * get_pg_size(group), *shape)
        else:
            capacity = routing.capacity_tensor(self._summed((~padding).sum()), *shape)
        rows = probs.shape[0]
        everyone = self._gathered(routing_map.to(torch.uint8)).bool()
        kept = routing.within_capacity(self._gathered(probs.detach()), everyone, capacity, config.moe_token_drop_policy)
        return kept.narrow(0, get_pg_rank(group) * rows, rows)

    # A step's numbers

    def _note_counts(self, counts: torch.Tensor) -> None:
        step = self.step
        step.tokens_per_expert = counts if step.tokens_per_expert is None else step.tokens_per_expert + counts
        step.microbatches += 1

    def finish_step(self) -> RouterStep:
        """Close the step: its numbers are `last_step` from here on, and the next step begins with none."""
        self.last_step, self.step = self.step, RouterStep()
        self.reset_global_aux_loss_tracker()
        return self.last_step


def routers_of(model: Any) -> list[TopKRouter]:
    """The routers of a list of (wrapped) model chunks, in their order."""
    return [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]


@torch.no_grad()
def finish_router_step(model: Any, pg_collection: ProcessGroupCollection) -> None:
    """After a step's last backward: close it in every router, and move expert biases towards balance.

    bias += moe_router_bias_update_rate * sign(mean choices - choices) by expert (Wang et al. 2024, auxiliary-loss-free balancing), of
    all tokens of all ranks; one collective for all layers.
    """
    routers = routers_of(model)
    steps = [router.finish_step() for router in routers]
    biased = [(router, step.tokens_per_expert) for router, step in zip(routers, steps) if router.expert_bias is not None]
    seen = [(router, counts) for router, counts in biased if counts is not None]
    if not seen:
        return
    counts = torch.stack([counts for _, counts in seen]).to(torch.int64)
    group = seen[0][0].replicas_group
    if get_pg_size(group) > 1:
        dist.all_reduce(counts, group=group)
    # E * n_e against the sum: the comparison with the mean in whole numbers, so that no rounding decides a sign
    direction = (counts.sum(dim=1, keepdim=True) - counts * counts.shape[1]).sign()
    for (router, _), row in zip(seen, direction):
        assert router.expert_bias is not None
        router.expert_bias.add_(row.to(torch.float32), alpha=router.config.moe_router_bias_update_rate)
