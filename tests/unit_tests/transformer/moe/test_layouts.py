"""A layer on several ranks computes what one process does: outputs, gradients of inputs and of every weight, in float64."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table, local_part
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import finish_router_step
from tests.distributed import run_on_ranks
from tests.unit_tests.transformer.moe.moe_layers import EXPERTS, moe_config, moe_layer, tokens

LENGTH, SAMPLES = 8, 2
Layout = dict[str, int]
TWO: list[Layout] = [
    {"ep": 2},
    {"etp": 2},
    {"tp": 2, "sp": 1, "etp": 2},
    {"tp": 2, "sp": 1, "etp": 1},
    {"tp": 2, "sp": 1, "ep": 2, "etp": 1},
    {"tp": 2, "sp": 0, "etp": 2},
    {"cp": 2, "ep": 2},
    {"cp": 2, "etp": 2},
    {},
]
FOUR: list[Layout] = [
    {"ep": 4},
    {"ep": 2, "etp": 2},
    {"tp": 2, "sp": 1, "ep": 2, "etp": 2},
    {"tp": 2, "sp": 1, "cp": 2, "ep": 4, "etp": 1},
    {"tp": 2, "sp": 1, "cp": 2, "ep": 2, "etp": 2},
]
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.1,
}
SHARED = {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "dropless": {**LOSSES},
    "grouped, shared experts": {**LOSSES, **SHARED, "moe_grouped_gemm": True},
    "no bias, no gate, per token": {**LOSSES, "add_bias_linear": False, "gated_linear_unit": False, "calculate_per_token_loss": True},
    "sigmoid, bias, groups": {
        **LOSSES,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "padding, per token": {**LOSSES, "moe_grouped_gemm": True, "moe_router_pre_softmax": True, "calculate_per_token_loss": True},
    "capacity": {**LOSSES, "moe_expert_capacity_factor": 0.75},
    "capacity, padding, position": {"moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position", "moe_grouped_gemm": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "padded to capacity, overlap, alltoall": {
        **LOSSES,
        **SHARED,
        "moe_grouped_gemm": True,
        "moe_expert_capacity_factor": 0.75,
        "moe_pad_expert_input_to_capacity": True,
        "moe_shared_expert_overlap": True,
    },
    "overlap, alltoall, recomputed": {**LOSSES, **SHARED, "moe_shared_expert_overlap": True, "moe_layer_recompute": True},
}


def micro_batch(number: int, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(hidden states, gradient of the output, padding mask [b, s]) of a data-parallel rank's micro batch."""
    padding = None
    if "padding" in name and "to capacity" not in name:
        padding = torch.arange(LENGTH).expand(SAMPLES, LENGTH) >= torch.tensor([[LENGTH - 3 * number], [LENGTH - 1]])
    return tokens(LENGTH, SAMPLES, seed=number + 1), tokens(LENGTH, SAMPLES, seed=number + 11), padding


def run(layer: MoELayer, hidden: torch.Tensor, grad: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    output, bias = layer(hidden, padding_mask=padding)
    assert bias is None
    output.backward(grad)
    assert hidden.grad is not None
    return output.detach(), hidden.grad


def whole_gradient(layer: MoELayer, key: str) -> torch.Tensor:
    """Of all experts of one process, [experts, ...], or of a dense parameter."""
    records = [record for record in build_param_table(layer).values() if record.key == key]
    grads = [record.param.grad for record in records]
    assert all(grad is not None for grad in grads)
    return grads[0] if len(grads) == 1 else torch.stack(grads)  # type: ignore[arg-type,return-value]


def own_part(x: torch.Tensor, groups: ProcessGroupCollection, layout: Layout) -> torch.Tensor:
    """[s, ...] of this context- and (under sequence parallelism) tensor-parallel rank."""
    x = x.chunk(layout.get("cp", 1))[groups.cp.rank()]  # type: ignore[union-attr]
    return x.chunk(layout["tp"])[groups.tp.rank()] if layout.get("sp") else x  # type: ignore[union-attr]


def compare(layout: Layout, name: str, settings: dict[str, Any], dispatcher: str) -> None:
    tp, cp, ep, etp = (layout.get(axis, 1) for axis in ("tp", "cp", "ep", "etp"))
    where = f"{layout} {name} {dispatcher}"
    alone = moe_layer(moe_config(**settings, moe_token_dispatcher_type=dispatcher))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = moe_config(
        **settings,
        moe_token_dispatcher_type=dispatcher,
        tensor_model_parallel_size=tp,
        sequence_parallel=bool(layout.get("sp")),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    config.context_parallel_size = cp
    layer = moe_layer(config, groups)
    replicas, me = groups.dp.size(), groups.dp.rank()  # type: ignore[union-attr]
    everyone_counts_globally = "global_aux_loss" in settings.get("moe_router_load_balancing_type", "")
    if everyone_counts_globally and replicas > 1:  # one process cannot look ahead: give it the choices of all micro batches
        counts = sum_of_choices(alone, replicas, name)
        alone.router._global_aux_loss = lambda scores, _, n: global_loss_with(scores, counts, n, alone)  # type: ignore[method-assign]
    expected = [run(alone, *micro_batch(number, name)) for number in range(replicas)][me]
    hidden, grad, padding = micro_batch(me, name)
    if padding is not None:
        padding = padding.chunk(cp, dim=1)[groups.cp.rank()]  # type: ignore[union-attr]
    found = run(layer, own_part(hidden, groups, layout), own_part(grad, groups, layout), padding)
    for what, ours, theirs in zip(("output", "input gradient"), found, expected):
        torch.testing.assert_close(ours, own_part(theirs, groups, layout), rtol=1e-9, atol=1e-12, msg=lambda m: f"{where} {what}: {m}")  # noqa: B023
    for record in build_param_table(layer).values():
        sharding, gradient = record.sharding, record.param.grad
        assert gradient is not None, f"{where} {record.name}"
        gradient = gradient.clone()
        for axis in sharding.grad_partial:
            dist.all_reduce(gradient, group=getattr(groups, axis))
        dist.all_reduce(gradient, group=groups.expt_dp if sharding.is_expert else groups.dp_cp)
        theirs = local_part(whole_gradient(alone, record.key), sharding, *record.param.tp_coordinates)  # type: ignore[attr-defined]
        torch.testing.assert_close(gradient, theirs, rtol=1e-9, atol=1e-12, msg=lambda m: f"{where} {record.name}: {m}")  # noqa: B023
    finish_router_step([alone], ProcessGroupCollection())
    finish_router_step([layer], groups)
    if layer.router.expert_bias is not None:
        assert torch.equal(layer.router.expert_bias, alone.router.expert_bias) and layer.router.expert_bias.abs().sum() > 0


def sum_of_choices(layer: MoELayer, replicas: int, name: str) -> torch.Tensor:
    """[E + 1]: choices and tokens of all data-parallel ranks' micro batches."""
    total = torch.zeros(EXPERTS + 1, dtype=torch.int64)
    for number in range(replicas):
        hidden, _, padding = micro_batch(number, name)
        with torch.no_grad():
            factor, layer.config.moe_expert_capacity_factor = layer.config.moe_expert_capacity_factor, None
            _, routing_map = layer.route(hidden, None if padding is None else padding.t())
            layer.config.moe_expert_capacity_factor = factor
        total[:-1] += routing_map.sum(dim=0)
        total[-1] += hidden.shape[0] * hidden.shape[1] if padding is None else (~padding).sum()
    return total


def global_loss_with(scores: torch.Tensor, counts: torch.Tensor, num_tokens: Any, layer: MoELayer) -> torch.Tensor:
    from megatron.core.transformer.moe.routing import global_loss

    return global_loss(scores.flatten(0, 1), num_tokens, counts[:-1], counts[-1], layer.router.topk)


def on_layouts(layouts: list[Layout]) -> None:
    for layout in layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.get("tp", 1),
            context_parallel_size=layout.get("cp", 1),
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp", 1),
        )
        for name, settings in SETTINGS.items():
            for dispatcher in ("alltoall",) if "alltoall" in name else ("allgather", "alltoall"):
                if not ("position" in name and layout.get("cp", 1) > 1):  # refused by name
                    compare(layout, name, settings, dispatcher)
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("ranks, layouts", [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_a_layer_on_several_ranks_computes_what_one_process_does(ranks: int, layouts: list[Layout]) -> None:
    run_on_ranks(ranks, on_layouts, layouts)
