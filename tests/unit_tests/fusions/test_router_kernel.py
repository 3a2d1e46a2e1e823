"""The router in one kernel against routing.py, alone and in TopKRouter with its balance losses."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import router as router_kernel

pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
# of probabilities and scores, in fp32 at least; then of gradients, rounded to the logits' dtype
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
FUNCTIONS = st.sampled_from([("softmax", False), ("softmax", True), ("sigmoid", False)])


def first_of_the_largest(logits: torch.Tensor, topk: int) -> torch.Tensor:
    """[T, K]: of equal logits the first experts."""
    return logits.argsort(dim=-1, descending=True, stable=True)[:, :topk]


def twin(logits: torch.Tensor, topk: int, function: str, before: bool, factor: float | None) -> tuple[torch.Tensor, ...]:
    chosen = first_of_the_largest(logits.detach(), topk)
    indices, weights = routing.route(logits, topk, score_function=function, pre_softmax=before, scaling_factor=factor, chosen=chosen)
    return *routing.dense(indices, weights, logits.shape[1]), routing.normalized_scores(logits, function)


@settings(max_examples=120, deadline=None)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 70),
    topk=st.integers(1, 9),
    function=FUNCTIONS,
    factor=st.sampled_from([None, 2.5, 0.3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    used=st.sampled_from([(True, False), (False, True), (True, True)]),
    layout=st.sampled_from(["dense", "rows apart", "columns apart"]),
    size=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 5),
)
def test_is_what_the_parts_give(
    tokens: int, experts: int, topk: int, function: Any, factor: Any, dtype: Any, used: Any, layout: str, size: float, seed: int
) -> None:
    topk = min(topk, experts)
    drawn = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, 2 * experts, generator=drawn).mul_(size).to(device.current_device(), dtype)
    logits = {"dense": wide[:, :experts].contiguous(), "rows apart": wide[:, :experts], "columns apart": wide[:, ::2]}[layout]
    grads = [torch.randn(tokens, experts, generator=drawn, dtype=torch.float64).to(logits.device) for _ in range(2)]
    results = []
    with_probs, with_scores = used
    wider = torch.promote_types(dtype, torch.float32)
    for fused in (True, False):
        leaf = (logits if fused else logits.to(wider)).detach().requires_grad_()  # parts would round each loss's gradient
        if fused:
            probs, chosen, scores = router_kernel.route(
                leaf, topk, score_function=function[0], pre_softmax=function[1], scaling_factor=factor, with_scores=with_scores
            )
            assert (scores is None) == (not with_scores)
        else:
            probs, chosen, scores = twin(leaf, topk, function[0], function[1], factor)
        loss = (probs.double() * grads[0]).sum() if with_probs else 0.0
        if with_scores:
            assert scores is not None
            loss = loss + (scores.double() * grads[1]).sum()
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        results.append((probs.detach(), chosen, scores.detach() if with_scores and scores is not None else None, leaf.grad))
    (probs, chosen, scores, grad), (probs2, chosen2, scores2, grad2) = results
    assert torch.equal(chosen, chosen2) and chosen.dtype is torch.bool
    exact = TOLERANCE[torch.float64 if dtype is torch.float64 else torch.float32]
    torch.testing.assert_close(probs, probs2, rtol=exact, atol=exact)
    torch.testing.assert_close(scores, scores2, rtol=exact, atol=exact)
    assert grad is not None and grad.dtype is dtype and grad.shape == logits.shape
    torch.testing.assert_close(grad.to(wider), grad2, rtol=TOLERANCE[dtype], atol=4 * exact)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_each_token_has_its_experts_whatever_the_logits_are(function: str, value: float) -> None:
    """A choice of fewer would make rows of the experts' inputs that nobody fills."""
    logits = torch.full((3, 6), value, device=device.current_device())
    logits[1, 2:4] = torch.tensor([1.0, -1.0])
    for topk in (1, 4, 6):
        chosen = router_kernel.route(
            logits, topk, score_function=function, pre_softmax=function == "softmax", scaling_factor=None, with_scores=False
        )[1]
        assert chosen.sum(dim=1).tolist() == [topk] * 3
    if value != value:
        return
    chosen = router_kernel.route(logits, 3, score_function=function, pre_softmax=False, scaling_factor=None, with_scores=False)[1]
    assert chosen[0].nonzero().flatten().tolist() == [0, 1, 2]  # of equal ones the first


def test_negative_and_positive_zero_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, 0.0]], device=device.current_device())
    chosen = router_kernel.route(logits, 2, score_function="softmax", pre_softmax=False, scaling_factor=None, with_scores=False)[1]
    assert chosen.tolist() == [[True, True, False, False]]


# In the router

EXPERTS, HIDDEN = 6, 8


def built(**more: Any) -> TopKRouter:
    given_settings: dict[str, Any] = {"moe_router_topk": 2, "moe_aux_loss_coeff": 0.1, **more}
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, add_bias_linear=False, **given_settings
    )
    router = TopKRouter(config)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4)))
    return router.to(device.current_device())


def run(monkeypatch: pytest.MonkeyPatch, kernel: bool, tokens: int = 5, padded: bool = False, **more: Any) -> tuple[list[Any], int]:
    """(probs, map, losses noted, gradients), calls of the kernel."""
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    calls = mock.Mock(side_effect=router_kernel.route)
    monkeypatch.setattr(router_kernel, "route", calls)
    router = built(moe_router_fusion=kernel, **more)
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 2, HIDDEN, generator=drawn).to(device.current_device()).requires_grad_()
    padding = None
    if padded:
        padding = torch.zeros(tokens, 2, dtype=torch.bool, device=x.device)
        padding[3:, 0] = True
    probs, chosen = router(x, padding)
    (probs * torch.randn(probs.shape, generator=drawn).to(probs.device)).sum().backward()
    monkeypatch.setattr(router_kernel, "route", calls.side_effect)
    losses = {name: loss.clone() for name, loss in router.step.losses.items()}
    return [probs.detach(), chosen, losses, router.step.tokens_per_expert, x.grad, router.weight.grad], calls.call_count


FUSED: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax over all": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid, scaled": {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    "sigmoid of one": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "losses": {
        "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
        "moe_z_loss_coeff": 0.01,
    },
    "sigmoid with a loss by sequence": {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "seq_aux_loss"},
    "z-loss alone": {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.01},
    "capacity, of what it gives": {"moe_expert_capacity_factor": 1.0},
    "fp64": {"moe_router_dtype": "fp64"},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_router_learns_the_same(monkeypatch: pytest.MonkeyPatch, name: str, padded: bool) -> None:
    (fused, calls), (plain, none) = (run(monkeypatch, on, padded=padded, **FUSED[name]) for on in (True, False))
    assert (calls, none) == (1, 0)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


PLAIN: dict[str, dict[str, Any]] = {
    "groups": {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
    "expert bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "another function": {"moe_router_score_function": "sqrtsoftplus"},
    "experts in turn": {"moe_router_force_load_balancing": True},
    "no tokens": {"tokens": 0},
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_the_kernel_does_not_do_goes_as_without_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (fused, calls), (plain, _) = (run(monkeypatch, on, **PLAIN[name]) for on in (True, False))
    assert calls == 0
    torch.testing.assert_close(fused, plain, rtol=0, atol=0)


def test_more_experts_than_a_tile_go_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert router_module.MOST_FUSED == router_kernel.MOST_EXPERTS
    monkeypatch.setattr(router_module, "MOST_FUSED", EXPERTS - 1)
    assert run(monkeypatch, True)[1] == 0


def test_scores_are_made_only_for_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    asked: list[bool] = []

    def noted(*args: Any, **more: Any) -> Any:
        asked.append(more["with_scores"])
        return router_kernel._Router.apply(args[0], args[1], False, False, 1.0, more["with_scores"])

    monkeypatch.setattr(router_kernel, "route", noted)
    monkeypatch.setattr(routing, "normalized_scores", mock.Mock(side_effect=AssertionError("scores made twice")))
    router, x = built(moe_router_fusion=True), torch.randn(3, 2, HIDDEN, device=device.current_device())
    router(x)
    with torch.no_grad():
        router(x)
    router.eval()(x)
    built(moe_router_fusion=True, moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)(x)
    assert asked == [True, False, False, False]
