"""Choices, weights, balance losses and capacity against references written out token by token, and faults that users reported."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.aux_loss_scale import MoEAuxLossAutoScaler, balance_loss_scale
from megatron.core.transformer.moe.settings import moe_layer_pattern
from megatron.training.config.converters import moe_freq_type
from tests.unit_tests.transformer.moe.moe_layers import EXPERTS, HIDDEN, moe_config, moe_layer, router, tokens

DOUBLE = torch.float64


def logits_of(count: int, experts: int = EXPERTS, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, experts, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def scores_by_hand(row: list[float], kind: str) -> list[float]:
    if kind == "softmax":
        return [math.exp(x) / sum(map(math.exp, row)) for x in row]
    return [1 / (1 + math.exp(-x)) if kind == "sigmoid" else math.sqrt(math.log1p(math.exp(x))) for x in row]


def route_by_hand(row: list[float], topk: int, kind: str, pre_softmax: bool, groups: Any, bias: list[float] | None) -> dict[int, float]:
    """Expert -> weight of one token."""
    scores = scores_by_hand(row, kind)
    ranking = [s + b for s, b in zip(scores, bias)] if bias else scores if kind != "softmax" or pre_softmax else row
    allowed = set(range(len(row)))
    if groups:
        number, keep = groups
        size = len(row) // number
        parts = [range(g * size, (g + 1) * size) for g in range(number)]
        best = sorted(parts, key=lambda part: -sum(sorted((ranking[e] for e in part), reverse=True)[: topk // keep]))[:keep]
        allowed = {expert for part in best for expert in part}
    chosen = sorted(allowed, key=lambda e: -ranking[e])[:topk]
    if kind == "softmax" and pre_softmax:
        return {e: scores[e] for e in chosen}
    values = {e: math.exp(row[e]) if kind == "softmax" else scores[e] for e in chosen}
    total = sum(values.values()) if topk > 1 else 1.0
    return {e: value / total for e, value in values.items()}


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("groups", [None, (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights_are_those_of_a_loop_over_tokens(kind: str, pre_softmax: bool, groups: Any, biased: bool) -> None:
    if biased and kind == "softmax":
        return
    x, topk = logits_of(12, 8), 4
    bias = torch.linspace(-0.5, 0.5, 8, dtype=DOUBLE) if biased else None
    number, keep = groups or (None, None)
    indices, weights = routing.route(
        x, topk, score_function=kind, pre_softmax=pre_softmax, num_groups=number, group_topk=keep, scaling_factor=2.5, expert_bias=bias
    )
    for row, chosen, values in zip(x.tolist(), indices.tolist(), weights.tolist()):
        expected = route_by_hand(row, topk, kind, pre_softmax, groups, bias.tolist() if bias is not None else None)
        assert dict(zip(chosen, values)) == pytest.approx({e: 2.5 * w for e, w in expected.items()}, rel=1e-12)


def test_log_scores_are_the_logarithms_of_the_scores() -> None:
    x = torch.linspace(-60, 60, 50, dtype=DOUBLE).requires_grad_()
    for kind in ("sigmoid", "sqrtsoftplus"):
        logs = routing.log_scores(x, kind)
        torch.testing.assert_close(logs, routing.scores_of(x, kind).log(), rtol=1e-9, atol=1e-9)
        (grad,) = torch.autograd.grad(logs.sum(), x)
        assert grad.isfinite().all() and (grad[:5] > 0.4).all()


def loss_by_hand(x: torch.Tensor, chosen: list[list[int]], kind: str, topk: int) -> float:
    """E / (K T^2) sum_e P_e f_e."""
    scores = [scores_by_hand(row, kind) for row in x.tolist()]
    normal = [[s / sum(row) for s in row] for row in scores]
    experts, count = x.shape[1], x.shape[0]
    total = sum(sum(row[e] for row in normal) * sum(e in c for c in chosen) for e in range(experts))
    return experts * total / (topk * count**2)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_balance_losses_use_the_gates_own_scores(kind: str, loss: str) -> None:
    """seq_aux_loss with a sigmoid gate took softmax scores."""
    gate = router(moe_router_load_balancing_type=loss, moe_aux_loss_coeff=1.0, moe_router_score_function=kind)
    x = logits_of(6, EXPERTS).view(3, 2, EXPERTS)
    _, routing_map = gate.routing(x.requires_grad_())
    chosen = [row.nonzero().flatten().tolist() for row in routing_map]
    flat = x.detach().flatten(0, 1)
    expected = loss_by_hand(flat, chosen, kind, 2)
    if loss == "seq_aux_loss":
        expected = sum(loss_by_hand(flat[sample::2], chosen[sample::2], kind, 2) for sample in (0, 1)) / 2
    (found,) = gate.step.losses.values()
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_z_loss_is_the_mean_square_of_the_log_sum() -> None:
    gate = router(moe_z_loss_coeff=1e-3)
    x = logits_of(6).view(3, 2, EXPERTS)
    gate.routing(x.requires_grad_())
    expected = sum(math.log(sum(map(math.exp, row))) ** 2 for row in x.flatten(0, 1).tolist()) / 6
    assert float(gate.step.losses["z_loss"]) == pytest.approx(expected, rel=1e-12)


def test_tiny_sigmoid_scores_cannot_escape_the_balance_loss() -> None:
    """An epsilon in the normalisation of scores let a router shrink them, and its loss, to zero."""
    gate = router(
        moe_router_score_function="sigmoid", moe_aux_loss_coeff=1.0, params_dtype=torch.float32, moe_router_load_balancing_type="aux_loss"
    )
    x = (-60 + 0.1 * logits_of(64)).float().view(32, 2, EXPERTS).requires_grad_()
    scores = routing.normalized_scores(x, "sigmoid")
    torch.testing.assert_close(scores.sum(dim=-1), torch.ones(32, 2))
    probs, _ = gate.routing(x)
    assert 0.9 < float(gate.step.losses["load_balancing_loss"]) < 1.5
    probs.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().max() > 1e-5


def test_the_expert_bias_never_enters_the_weights() -> None:
    """Weights won back by subtracting the bias lost tiny scores."""
    scores = torch.tensor([[1e-8, 3e-8, 1e-7, 2e-8]])
    x, bias = (scores / (1 - scores)).log(), torch.tensor([12.0, 0.0, 12.0, 0.0])
    indices, weights = routing.route(x, 2, score_function="sigmoid", scaling_factor=2.5, expert_bias=bias)
    assert sorted(indices[0].tolist()) == [0, 2] and (weights > 0).all() and float(weights.sum()) == pytest.approx(2.5, rel=1e-6)
    by_expert = dict(zip(indices[0].tolist(), weights[0].tolist()))
    assert by_expert[2] / by_expert[0] == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss"])
def test_padding_to_capacity_leaves_the_balance_loss_alone(loss: str) -> None:
    """A routing map that was padded to capacity looked balanced: the loss was always 1."""
    found = []
    for pad in (False, True):
        gate = router(
            moe_router_topk=1,
            moe_router_pre_softmax=True,
            moe_router_load_balancing_type=loss,
            moe_aux_loss_coeff=1.0,
            moe_token_dispatcher_type="alltoall",
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=pad,
        )
        x = torch.zeros(16, 1, EXPERTS, dtype=DOUBLE)
        x[..., 0] = 4.0
        gate.routing(x.requires_grad_())
        found.append(float(next(iter(gate.step.losses.values()))))
    assert found[0] == found[1] > 3.0


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_capacity_above_the_number_of_tokens_drops_nothing(policy: str, count: int) -> None:
    """It crashed the choice of the tokens that stay."""
    for pad in (False, True):
        layer = moe_layer(
            moe_config(
                moe_expert_capacity_factor=8.0,
                moe_token_drop_policy=policy,
                moe_token_dispatcher_type="alltoall",
                moe_pad_expert_input_to_capacity=pad,
            )
        )
        plain = moe_layer(moe_config())
        x = tokens(count, 1)
        torch.testing.assert_close(layer(x)[0], plain(x)[0])


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_stays_within_capacity(policy: str) -> None:
    probs = torch.tensor([[0.1, 0.9], [0.4, 0.0], [0.3, 0.5], [0.2, 0.5]])
    kept = routing.within_capacity(probs, probs > 0, 2, policy)
    by_expert = [column.nonzero().flatten().tolist() for column in kept.t()]
    assert by_expert == ([[1, 2], [0, 2]] if policy == "probs" else [[0, 1], [0, 2]])
    assert routing.capacity_of(16, 2, 4, 1.25) == 10 and routing.capacity_of(16, 2, 64, 0.5) == 1 and routing.capacity_of(3, 2, 2, 9.0) == 3


@pytest.mark.parametrize("options", [{}, {"moe_expert_capacity_factor": 1.0}, {"moe_router_load_balancing_type": "sinkhorn"}])
def test_padding_tokens_change_nothing_for_real_ones(options: dict[str, Any]) -> None:
    """Padding took the experts' capacity and entered the balance loss."""
    real = tokens(10, 1)
    losses = {} if options.get("moe_router_load_balancing_type") else {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 1.0}
    found = []
    for padding in (0, 40):
        layer = moe_layer(moe_config(**options, **losses))
        x = torch.cat([real, tokens(40, 1, seed=9)[:padding]]).requires_grad_()
        mask = (torch.arange(10 + padding) >= 10).unsqueeze(0) if padding else None
        out, _ = layer(x, padding_mask=mask)
        out[:10].sum().backward()
        assert x.grad is not None and out[10:].abs().sum() == 0
        found.append([out[:10], layer.router.weight.grad, layer.router.step.tokens_per_expert, *layer.router.step.losses.values()])
    for left, right in zip(*found):
        torch.testing.assert_close(left, right)


def test_balance_loss_gradient_is_that_of_the_loss_times_the_schedules_scale() -> None:
    for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):  # one sequence: the three are one
        gate = router(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.1)
        x = tokens(12, 1)
        MoEAuxLossAutoScaler.set_loss_scale(0.5)
        try:
            probs, _ = gate(x)
            (probs * 0).sum().backward()
        finally:
            MoEAuxLossAutoScaler.set_loss_scale(1.0)
        weight = gate.weight.detach().clone().requires_grad_()
        x2 = (x @ weight.t()).flatten(0, 1)
        chosen = x2.detach().topk(2).indices
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        loss = EXPERTS / (2 * 12**2) * (x2.softmax(-1).sum(0) * counts).sum()
        (expected,) = torch.autograd.grad(0.05 * loss, weight)
        torch.testing.assert_close(gate.weight.grad, expected, rtol=1e-12, atol=0)


def test_per_token_losses_are_weighted_by_the_tokens_that_count() -> None:
    plain, weighted = (router(moe_aux_loss_coeff=0.1, calculate_per_token_loss=per_token) for per_token in (False, True))
    for gate in (plain, weighted):
        probs, _ = gate(tokens(12, 1), None, torch.tensor(7) if gate is weighted else None)
        (probs * 0).sum().backward()
    assert plain.weight.grad is not None
    torch.testing.assert_close(weighted.weight.grad, 7 * plain.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("per_token", "loss_scale", "expected"), [(False, None, 2 / 4), (True, None, 1.0), (False, 8.0, 8 * 2 / 4), (True, 8.0, 8.0)]
)
def test_the_schedules_scale(per_token: bool, loss_scale: float | None, expected: float) -> None:
    """Means over micro batches, and over context-parallel ranks that each hold a part; or sums, to be divided by the tokens at the end."""
    config = moe_config(calculate_per_token_loss=per_token)
    config.context_parallel_size = 2
    config.grad_scale_func = None if loss_scale is None else lambda loss: loss * loss_scale
    assert float(balance_loss_scale(config, 4, torch.ones(()))) == expected


def test_sinkhorn_balances_a_lopsided_gate() -> None:
    x = logits_of(64)
    x[:, 0] += 5.0
    balanced = routing.sinkhorn(x)
    torch.testing.assert_close(balanced.sum(dim=1), torch.full((64,), 1 / 64, dtype=DOUBLE), rtol=1e-3, atol=0)
    torch.testing.assert_close(balanced.sum(dim=0), torch.full((EXPERTS,), 1 / EXPERTS, dtype=DOUBLE), rtol=1e-3, atol=0)
    counts = torch.bincount(routing.choose(balanced, 1).flatten(), minlength=EXPERTS)
    assert counts.max() < 24 and torch.bincount(x.argmax(dim=1), minlength=EXPERTS)[0] > 60


def test_force_load_balancing_and_jitter_and_dtype() -> None:
    gate = router(moe_router_force_load_balancing=True)
    _, routing_map = gate(tokens(8, 2))
    assert routing_map.sum(dim=0).tolist() == [8] * EXPERTS and routing_map.sum(dim=1).tolist() == [2] * 16
    gate = router(moe_input_jitter_eps=0.1)
    x = torch.ones(4, 2, HIDDEN, dtype=DOUBLE)
    assert 0.9 <= gate.apply_input_jitter(x).min() < gate.apply_input_jitter(x).max() <= 1.1
    assert torch.equal(gate.eval().apply_input_jitter(x), x)
    gate = router(params_dtype=torch.bfloat16, moe_router_dtype="fp64")
    assert gate.gating(tokens().bfloat16()).dtype is DOUBLE and gate(tokens().bfloat16())[0].dtype is DOUBLE
    assert router(params_dtype=torch.bfloat16)(tokens().bfloat16())[0].dtype is torch.float32


def test_numbers_are_noted_once_in_training_alone() -> None:
    layer = moe_layer(moe_config(moe_aux_loss_coeff=1.0, moe_layer_recompute=True))
    layer(tokens(8).requires_grad_())[0].sum().backward()
    assert layer.router.step.microbatches == 1 and layer.router.step.tokens_per_expert is not None
    assert int(layer.router.step.tokens_per_expert.sum()) == 8 * 2 * 2
    layer.router.finish_step()
    layer.eval()(tokens())
    with torch.no_grad():
        layer.train()(tokens())
    assert layer.router.step.microbatches == 0 and layer.router.last_step.microbatches == 1


def test_the_expert_bias_stays_in_fp32_and_moves_towards_balance() -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.router import finish_router_step

    layer = moe_layer(moe_config(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid"))
    layer.router.expert_bias.fill_(1.001)
    layer = layer.to(torch.bfloat16)
    assert layer.router.weight.dtype is torch.bfloat16 and layer.router.expert_bias.dtype is torch.float32
    assert layer.router.expert_bias[0] == torch.tensor(1.001)
    layer.router.expert_bias.zero_()
    layer.router.step.tokens_per_expert = torch.tensor([9, 3, 5, 3])
    finish_router_step([layer], ProcessGroupCollection())
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-1e-3, 1e-3, 0.0, 1e-3]))
    assert "router.expert_bias" in layer.state_dict()


@pytest.mark.parametrize(
    ("text", "layers"),
    [("1", [1, 1, 1, 1]), ("2", [1, 0, 1, 0]), ("([0]*1+[1]*3)", [0, 1, 1, 1]), ("[0,1]*2", [0, 1, 0, 1]), ("2*[1, 0]", [1, 0, 1, 0])],
)
def test_layer_frequencies(text: str, layers: list[int]) -> None:
    assert moe_layer_pattern(moe_freq_type(text), 4) == layers


@pytest.mark.parametrize("text", ["0", "-1", "[2]", "[1]*-1+x", "__import__('os').system('true')", "[1]**2", "", "[1]*10**9", "1+1"])
def test_what_is_no_layer_frequency(text: str) -> None:
    with pytest.raises(ValueError):
        moe_layer_pattern(moe_freq_type(text), 4)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(0, 10**6), st.floats(0.1, 3.0))
def test_no_expert_takes_more_than_its_capacity_and_none_is_dropped_below_it(count: int, topk: int, seed: int, factor: float) -> None:
    indices, weights = routing.route(logits_of(count, 6, seed), topk, pre_softmax=True)
    probs, routing_map = routing.dense(indices, weights, 6)
    assert routing_map.sum(dim=1).tolist() == [topk] * count
    capacity = routing.capacity_of(count, topk, 6, factor)
    assert int(routing.capacity_tensor(torch.tensor(count), topk, 6, factor)) == capacity
    for policy in ("probs", "position"):
        kept = routing.within_capacity(probs, routing_map, capacity, policy)
        assert not (kept & ~routing_map).any()
        assert kept.sum(dim=0).tolist() == routing_map.sum(dim=0).clamp(max=capacity).tolist()
