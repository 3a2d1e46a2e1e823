"""The dispatcher flex computes what alltoall does; against a stand-in for DeepEP, which is not run here."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import optional_imports, parallel_state
from megatron.core.optional_imports import MissingPackageError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.transformer.moe import flex_dispatcher
from megatron.core.transformer.moe.flex_dispatcher import chosen_experts, chosen_weights, local_choice
from megatron.core.transformer.moe.token_dispatcher import Dispatched, build_dispatcher
from tests.distributed import ranks
from tests.unit_tests.transformer.moe.deep_ep_stand_in import installed
from tests.unit_tests.transformer.moe.moe_layers import HIDDEN, moe_config, moe_layer, tokens
from tests.unit_tests.transformer.moe.test_permutation import random_map

# outputs and gradients of tokens and experts; gradients of weights, which DeepEP brings in fp32. In bf16 sums are rounded more often.
TOLERANCES = {torch.float64: (1e-12, 1e-6), torch.float32: (1e-5, 1e-5), torch.bfloat16: (0.1, 0.1)}
# (experts, most experts of a token, tokens of each rank, in turns)
CASES = [
    (4, 2, (5, 7)),
    (4, 1, (6, 0)),
    (8, 3, (0, 9, 1, 4)),
    (8, 8, (3, 2)),
    (8, 2, (0, 0)),
    (4, 3, (1, 0, 0, 0)),
]


def with_experts(dispatched: Dispatched, weights: torch.Tensor) -> torch.Tensor:
    """[T, h]: each local expert is a matrix of weights [local experts, h, h]."""
    parts = dispatched.tokens.split(dispatched.counts.tolist())
    assert torch.equal(dispatched.counts.on_device, torch.tensor([len(part) for part in parts]))
    out = torch.cat([part @ weight for part, weight in zip(parts, weights)])
    return dispatched.back(out * dispatched.probs.unsqueeze(-1).to(out.dtype))


def outcome(kind: str, case: tuple[int, int, tuple[int, ...]], dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """What a dispatcher of this kind makes of a case that depends on rank and seed alone: the output and all gradients."""
    experts, topk, lengths = case
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ep, etp = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_tensor_parallel_world_size()
    config = moe_config(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_pre_softmax=True,
        params_dtype=dtype,
        moe_token_dispatcher_type=kind,
        expert_model_parallel_size=ep,
        tensor_model_parallel_size=etp,
        sequence_parallel=etp > 1,
    )
    rank, local = torch.distributed.get_rank(), experts // ep
    first = parallel_state.get_expert_model_parallel_rank() * local
    dispatcher = build_dispatcher(local, list(range(first, first + local)), config, groups)
    # ranks of expt_tp have equally many tokens, as sequence parallelism splits them
    length = lengths[rank // etp % len(lengths)]
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(length, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    probs = torch.rand(length, experts, generator=generator).to(wide).requires_grad_()  # which fp32 holds exactly
    routing_map = random_map(length, experts, topk, 100 * seed + rank)
    weights = torch.randn(local, HIDDEN, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    grad = torch.randn(length, HIDDEN, dtype=dtype, generator=generator)
    out = with_experts(dispatcher.dispatch(x, probs, routing_map, has_padding=True), weights)
    assert out.shape == x.shape and out.dtype is dtype
    out.backward(grad)
    assert x.grad is not None and probs.grad is not None and weights.grad is not None
    assert not out[~routing_map.any(dim=1)].any() and not x.grad[~routing_map.any(dim=1)].any()
    return {"output": out.detach(), "tokens": x.grad, "experts": weights.grad, "probs": probs.grad}


def flex_beside_alltoall(ep: int, etp: int, dtypes: list[torch.dtype]) -> tuple[int, list[str]]:
    """(buffers made, kinds of calls made): both are compared in between."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=etp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    with installed() as buffer:
        for seed, case in enumerate(CASES):
            for dtype in dtypes:
                expected, found = (outcome(kind, case, dtype, seed) for kind in ("alltoall", "flex"))
                for name, value in found.items():
                    tolerance = TOLERANCES[dtype][name == "probs"]
                    torch.testing.assert_close(
                        value,
                        expected[name],
                        rtol=tolerance,
                        atol=tolerance,
                        msg=lambda m: f"{case} {dtype} {name}: {m}",  # noqa: B023
                    )
        counted = len(buffer.made), sorted(set(buffer.calls))
    parallel_state.destroy_model_parallel()
    return counted


@pytest.mark.parametrize(("world_size", "ep", "etp"), [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 2), (4, 2, 1)])
def test_flex_computes_what_alltoall_does(world_size: int, ep: int, etp: int) -> None:
    """Some tokens go nowhere, some ranks have no tokens, some get none."""
    for made, calls in ranks().run(world_size, flex_beside_alltoall, ep, etp, list(TOLERANCES)):
        assert calls == ([] if ep == 1 else ["combine", "combine weights", "dispatch", "dispatch again", "layout"])
        assert (made > 0) == (ep > 1)


# --- a whole layer ---

LAYERS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "grouped, recomputed": {"moe_grouped_gemm": True, "moe_layer_recompute": True},
    "padding": {"moe_grouped_gemm": True, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"},
    "capacity": {"moe_expert_capacity_factor": 0.5, "moe_enable_deepep": True},
    "shared experts, one expert": {"moe_shared_expert_intermediate_size": 6, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}


def layer_beside_alltoall(ep: int, tp: int, etp: int) -> int:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    groups, rank = ProcessGroupCollection.use_mpu_process_groups(), torch.distributed.get_rank()
    with installed() as buffer:
        for name, options in LAYERS.items():
            results: list[dict[str, torch.Tensor | None]] = []
            for kind in ("alltoall", "flex"):
                config = moe_config(
                    **{**options, "moe_enable_deepep": kind == "flex" and "moe_enable_deepep" in options},
                    moe_token_dispatcher_type=kind,
                    params_dtype=torch.float32,
                    tensor_model_parallel_size=tp,
                    sequence_parallel=tp > 1,
                    expert_model_parallel_size=ep,
                    expert_tensor_parallel_size=etp,
                )
                layer = moe_layer(config, groups)
                hidden = tokens(4, 2, seed=rank).float().requires_grad_()
                padding = torch.arange(4).expand(2, 4) >= rank if name == "padding" else None  # rank 0 has no token to send
                out, _ = layer(hidden, padding_mask=padding)
                out.backward(tokens(4, 2, seed=10 + rank).float())
                grads = {record.name: record.param.grad for record in build_param_table(layer).values()}
                results.append({"output": out.detach(), "hidden": hidden.grad, **grads})
            for key, expected in results[0].items():
                found = results[1][key]
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name} {key}: {m}")  # noqa: B023
        del layer, out
        gc.collect()
        made, left = len(buffer.made), len(flex_dispatcher._buffers)
    parallel_state.destroy_model_parallel()
    assert left <= made
    return made


@pytest.mark.parametrize(("world_size", "ep", "tp", "etp"), [(2, 2, 1, 1), (4, 4, 2, 1), (4, 2, 2, 2)])
def test_a_layer_with_flex_computes_what_it_does_with_alltoall(world_size: int, ep: int, tp: int, etp: int) -> None:
    assert all(made > 0 for made in ranks().run(world_size, layer_beside_alltoall, ep, tp, etp))


def two_layers() -> tuple[int, int]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with installed() as buffer:
        config = moe_config(moe_token_dispatcher_type="flex", expert_model_parallel_size=2)
        layers = [moe_layer(config, groups) for _ in range(2)]
        assert not buffer.made  # not before tokens are sent
        x = tokens()
        for layer in layers:
            x, _ = layer(x)
        before = len(buffer.made), len(flex_dispatcher._buffers)
    parallel_state.destroy_model_parallel()
    return before


def test_the_layers_of_a_model_share_a_buffer() -> None:
    assert ranks().run(2, two_layers) == [(1, 1), (1, 1)]


# --- on one process ---


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_choices_survive_deepeps_form(length: int, experts: int, most: int, seed: int) -> None:
    """Whatever the map; where top-k is more than the experts too."""
    routing_map = random_map(length, experts, min(most, experts), seed)
    probs = torch.rand(length, experts, requires_grad=True)
    numbers = chosen_experts(routing_map, most)
    assert numbers.dtype is torch.int64 and numbers.shape == (length, most) and numbers.is_contiguous()
    for row, chosen in zip(numbers.tolist(), routing_map):
        expected = chosen.nonzero().flatten().tolist()
        assert row == expected + [-1] * (most - len(expected))
    weights = chosen_weights(probs, numbers)
    assert weights.dtype is torch.float32 and not weights[numbers < 0].any()
    again, back = local_choice(numbers, weights, experts)
    assert torch.equal(again, routing_map) and torch.equal(back, probs * routing_map)
    grad = torch.rand(length, experts)
    back.backward(grad)
    assert probs.grad is not None and torch.equal(probs.grad, grad * routing_map)


REFUSED = [
    ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, "flex does not pad experts' input.*'alltoall' works"),
    (
        {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True},
        "overlap True: needs moe_token_dispatcher_type alltoall",
    ),
    ({"moe_flex_dispatcher_backend": "hybridep"}, "moe_flex_dispatcher_backend 'hybridep': is not built yet; 'deepep' works"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_flex_does_not_do_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with installed(), pytest.raises(ValueError, match=message):
        moe_config(moe_token_dispatcher_type="flex", **options)


def test_without_the_package_flex_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the configuration, and by a layer whose configuration was made where it was there."""
    with installed():
        config = moe_config(moe_token_dispatcher_type="flex")
    monkeypatch.setattr(optional_imports, "available", lambda name: name != "deep_ep")
    with pytest.raises(ValueError, match=r"moe_token_dispatcher_type 'flex': needs the package deep_ep .*; 'alltoall' works"):
        moe_config(moe_token_dispatcher_type="flex")
    with pytest.raises(MissingPackageError, match="moe_token_dispatcher_type flex needs the package deep_ep, which is not installed"):
        build_dispatcher(4, [0, 1, 2, 3], config, ProcessGroupCollection())


def test_a_number_of_ranks_that_deepep_does_not_know_is_refused() -> None:
    with installed() as buffer, pytest.raises(ValueError, match=r"expert_model_parallel_size 3 \(Unsupported.*\); 2, 4 and 8 work, and al"):
        flex_dispatcher._buffer_bytes(buffer, 3, moe_config())
