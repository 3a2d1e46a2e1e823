"""Routed experts in FP8: against products of the dequantized tensors and experts in fp32, over steps, recompute, ranks, checkpoints."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fp8 import experts as fp8_experts
from megatron.core.fp8.model import Fp8Steps, extra_states, fp8_linears, load_extra_states, use_fp8
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT
from megatron.core.fp8.settings import RECIPES
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import initialize_parameters
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.moe.experts import GroupedLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import TokenCounts
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import ranks

pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
HIDDEN, FFN, EXPERTS = 64, 96, 4
BF16 = 2.0**-7
SUMS = 2e-3 if device.has_accelerator() else 1e-5  # tensor cores keep about 14 bits between promotions
ONE_SCALE = ("delayed", "tensorwise")
THERE = [recipe for recipe in RECIPES if recipe != "mxfp8" or not device.has_accelerator()]  # mxfp8 is emulated on a CPU alone


def config_of(fp8: str | None = "hybrid", **more: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": FFN, "num_moe_experts": EXPERTS,
        "moe_router_topk": 2, "moe_grouped_gemm": True, "bf16": True, "params_dtype": torch.bfloat16, "gated_linear_unit": True,
        "activation_func": F.silu, "add_bias_linear": False, "fp8": fp8, "fp8_amax_history_len": 2, "gradient_accumulation_fusion": True,
    }  # fmt: skip
    return TransformerConfig(**(values | more))


def gradient(linear: GroupedLinear) -> torch.Tensor:
    weight: Any = linear.weight
    found = weight.main_grad if getattr(weight, "main_grad_filled", False) else weight.grad
    assert found is not None
    return found


def layer_of(config: TransformerConfig, groups: ProcessGroupCollection | None = None) -> MoELayer:
    groups = groups or ProcessGroupCollection()
    spec = get_moe_module_spec(False, config.num_moe_experts, config.moe_grouped_gemm)
    layer = build_module(spec, config, layer_number=1, pg_collection=groups)
    for param in layer.parameters():
        param.initializer = lambda tensor: tensor.normal_(0.0, 0.2)
    initialize_parameters(layer, 5)
    use_fp8(layer, config, 1)
    return layer


def with_buffers(module: torch.nn.Module) -> None:
    for param in module.parameters():
        param.main_grad, param.main_grad_filled = torch.full_like(param, torch.nan, dtype=torch.float32), False  # type: ignore[attr-defined]


def linear_of(config: TransformerConfig, outputs: int = FFN) -> GroupedLinear:
    init: dict[str, Any] = {"init_method": lambda w: torch.nn.init.normal_(w, 0, 0.1), "bias": False, "split": "column"}
    torch.manual_seed(3)
    linear = GroupedLinear(EXPERTS, HIDDEN, outputs, config=config, pg_collection=ProcessGroupCollection(), **init)
    weight: Any = linear.weight
    weight.initializer = lambda tensor: tensor.normal_(0.0, 0.2)
    initialize_parameters(linear, 5)
    use_fp8(linear, config, 1)
    return linear


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().to(device.current_device())


def counts_of(sizes: list[int]) -> TokenCounts:
    return TokenCounts(torch.tensor(sizes, device=device.current_device()))


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = BF16) -> None:
    atol = tolerance * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=atol)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 40)), min_size=EXPERTS, max_size=EXPERTS)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.sampled_from(ONE_SCALE), st.sampled_from(["hybrid", "e4m3"]), st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_products_of_the_dequantized_tensors(sizes: list[int], recipe: str, form: str, fused: bool, late: bool, seed: int) -> None:
    """late: the input itself is kept."""
    linear, counts, n = linear_of(config_of(form, fp8_recipe=recipe)), counts_of(sizes), sum(sizes)
    linear.input_is_recomputed = late
    if fused:
        with_buffers(linear)
    x, grad = random(n, HIDDEN, seed=seed).requires_grad_(), random(n, FFN, seed=seed + 1, scale=1e-4)
    out = linear(x, counts)
    out.backward(grad)
    assert x.grad is not None and out.shape == (n, FFN)
    if n == 0:
        assert not gradient(linear).any() and x.grad.shape == (0, HIDDEN)
        assert linear.fp8.scaling is None or linear.fp8.scaling.is_known == [False, True, False], "no scale of nothing"
        return
    quantize = {"record": False, "rows": True, "columns": True}
    inputs, grads = (linear.fp8.quantize_rows(role, t, counts, **quantize) for role, t in ((INPUT, x.detach()), (GRADIENT, grad)))
    assert inputs.rows.dtype is torch.float8_e4m3fn
    assert grads.rows.dtype is (torch.float8_e5m2 if form == "hybrid" else torch.float8_e4m3fn)
    matrices = linear.fp8.matrices()[0].value()
    torch.testing.assert_close(matrices, linear.weight.detach().float(), rtol=2.0**-4, atol=1e-2 * float(matrices.abs().max()))
    x_values, dy_values = (t.rows.float() * t.inverse for t in (inputs, grads))
    parts = list(zip(x_values.split(sizes), dy_values.split(sizes), matrices, strict=True))
    close(out.detach(), torch.cat([part @ matrix.t() for part, _, matrix in parts]))
    close(x.grad, torch.cat([dy @ matrix for _, dy, matrix in parts]))
    close(gradient(linear), torch.stack([dy.t() @ part for part, dy, _ in parts]), SUMS if fused else BF16)


def test_weight_gradients_in_bf16_on_request() -> None:
    linear, sizes = linear_of(config_of(fp8_wgrad=False)), [5, 0, 20, 7]
    x, grad = random(32, HIDDEN, seed=1), random(32, FFN, seed=2)
    linear(x, counts_of(sizes)).backward(grad)
    expected = torch.stack([dy.t() @ part for part, dy in zip(x.split(sizes), grad.split(sizes), strict=True)])
    close(gradient(linear), expected)


def gradients(layer: MoELayer) -> dict[str, torch.Tensor]:
    """Of experts one by one and of the router, whichever module holds them."""
    found: dict[str, torch.Tensor] = {}
    for name, param in layer.named_parameters():
        grad: Any = param.main_grad if getattr(param, "main_grad_filled", False) else param.grad  # type: ignore[attr-defined]
        if "local_experts" in name:
            _, _, expert, linear, kind = name.split(".")
            found[f"experts.{linear}.{kind}.{expert}"] = grad
        elif "experts" in name:
            found |= {f"{name}.{expert}": part for expert, part in enumerate(grad)}
        else:
            found[name] = grad
    return found


def step(layer: MoELayer, seed: int, tokens: int = 24, scale: float = 1.0) -> list[torch.Tensor]:
    x = random(tokens, 1, HIDDEN, seed=seed, scale=scale).requires_grad_()
    out, _ = layer(x)
    out.backward(random(tokens, 1, HIDDEN, seed=seed + 100, scale=1e-4))
    assert x.grad is not None
    return [out.detach(), x.grad]


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("recipe", THERE)
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_a_layer_is_that_of_fp32_but_for_eight_bits(is_grouped: bool, recipe: str, form: str) -> None:
    layers = [layer_of(config_of(fp8, fp8_recipe=recipe, moe_grouped_gemm=is_grouped)) for fp8 in (None, form)]
    layers[0].float()  # the weights of bf16, in fp32
    results = []
    for layer in layers:
        with_buffers(layer)
        x = random(24, 1, HIDDEN, seed=1).to(next(layer.parameters()).dtype).requires_grad_()
        out, _ = layer(x)
        out.backward(random(24, 1, HIDDEN, seed=2, scale=1e-4).to(x.dtype))
        results.append({"out": out.detach(), "x": x.grad, **gradients(layer)})
    names = {name for name, part in layers[1].named_modules() if getattr(part, "fp8", None) is not None}
    assert len(names) == (2 if is_grouped else 2 * EXPERTS)
    plain, quantized = results
    for name, expected in plain.items():
        found = quantized[name]
        assert found is not None and expected is not None and found.shape == expected.shape
        # three or four digits, of products' two factors, one linear after the other
        assert 1e-3 < error(found, expected) < 0.2, name


@pytest.mark.parametrize("recipe", [recipe for recipe in THERE if recipe != "tensorwise"])
def test_sequential_and_grouped_experts_differ_in_scales_alone(recipe: str) -> None:
    """With scales of blocks not even there: the same products of the same numbers, but for the order of sums."""
    tolerance = BF16 if recipe == "delayed" or device.has_accelerator() else SUMS
    configs = [config_of(moe_grouped_gemm=is_grouped, fp8_recipe=recipe, fp8_margin=2) for is_grouped in (True, False)]
    layers = [layer_of(config) for config in configs]  # the margin leaves room: nothing saturates
    steps = [Fp8Steps([layer], ProcessGroupCollection()) for layer in layers]
    for seed in range(3):
        results = []
        for layer, fp8 in zip(layers, steps, strict=True):
            with_buffers(layer)
            results.append(step(layer, seed))
            fp8.end_step()
        for found, expected in zip(*results, strict=True):
            close(found, expected, tolerance)
        for name, expected in gradients(layers[1]).items():
            close(gradients(layers[0])[name], expected, tolerance)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_an_expert_without_tokens_is_no_trouble(is_grouped: bool) -> None:
    """Its weights' gradients are zero, with every recipe."""
    for recipe in THERE:
        layer = layer_of(config_of(moe_grouped_gemm=is_grouped, fp8_recipe=recipe, moe_router_topk=1, moe_router_pre_softmax=True))
        with_buffers(layer)
        results = step(layer, 1, tokens=2)
        assert all(t.isfinite().all() and t.any() for t in results)
        zeros = [not grad.any() for name, grad in gradients(layer).items() if "experts" in name]
        assert 4 <= sum(zeros) <= 6 and all(grad.isfinite().all() for grad in gradients(layer).values())


def test_weights_are_quantized_once_an_epoch_and_stay_in_their_place() -> None:
    layer = layer_of(config_of())
    steps = Fp8Steps([layer], ProcessGroupCollection())
    linear: Any = layer.experts.linear_fc1
    with mock.patch.object(fp8_experts, "quantize_groups", side_effect=fp8_experts.quantize_groups) as quantize:
        for seed in range(3):
            step(layer, seed)
        roles = [call.args[0].data_ptr() for call in quantize.call_args_list]
        assert roles.count(linear.weight.data_ptr()) == 1
        places = [(part.data.data_ptr(), part.inverse.data_ptr()) for part in linear.fp8.matrices()]
        with torch.no_grad():
            linear.weight.data.mul_(0.25)  # as a kernel writes it: the parameter's version stays
        before = linear.fp8.matrices()[0].value().clone()
        steps.end_step()
        assert [(part.data.data_ptr(), part.inverse.data_ptr()) for part in linear.fp8.matrices()] == places
        rows, columns = (part.value() for part in linear.fp8.matrices())
        assert torch.equal(rows, columns.transpose(1, 2)) and not torch.equal(rows, before)
        close(rows, linear.weight.detach(), 2.0**-4)


@pytest.mark.parametrize("recipe", THERE)
@pytest.mark.parametrize("way", ["layer", "moe_act"])
def test_recompute_changes_no_bit_and_no_scale(recipe: str, way: str) -> None:
    found: list[list[torch.Tensor]] = []
    for recomputed in (False, True):
        more: dict[str, Any] = {}
        if recomputed and way == "moe_act":
            more = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
        layer = layer_of(config_of(fp8_recipe=recipe, **more))
        steps, results = Fp8Steps([layer], ProcessGroupCollection()), []
        layer.recomputed = recomputed and way == "layer"
        for seed in range(3):
            with_buffers(layer)
            results += [*step(layer, seed), *gradients(layer).values()]
            steps.end_step()
        assert layer.experts.linear_fc2.input_is_recomputed == (recomputed and way == "moe_act")
        found.append(results + ([steps.scaling.scale, steps.scaling.history] if steps.scaling else []))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_uses_the_scales_and_leaves_no_trace() -> None:
    layer = layer_of(config_of())
    steps = Fp8Steps([layer], ProcessGroupCollection())
    step(layer, 1)
    steps.end_step()
    assert steps.scaling is not None
    before = [t.clone() for t in (steps.scaling.amax, steps.scaling.scale, steps.scaling.history)]
    layer.eval()
    with torch.no_grad():
        layer(random(24, 1, HIDDEN, seed=3, scale=100.0))
    assert all(torch.equal(*pair) for pair in zip(before, (steps.scaling.amax, steps.scaling.scale, steps.scaling.history), strict=True))


@pytest.mark.skipif(not device.has_accelerator(), reason="a CPU waits for nobody")
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_nothing_waits_for_the_device(is_fused: bool, form: str, recipe: str) -> None:
    """But for the counts' one copy, which products group by group read when it has arrived."""
    linear = linear_of(config_of(form, fp8_recipe=recipe))
    for waits in ("default", "error"):  # what is tried once is tried in the first pass
        for batch in range(2):
            if is_fused and batch == 0:
                with_buffers(linear)
            counts = counts_of([5, 0, 100, 7])
            x = random(112, HIDDEN, seed=1).requires_grad_()
            grad = random(112, FFN, seed=2)
            torch.cuda.set_sync_debug_mode(waits)
            try:
                linear(x, counts).backward(grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_which_recipes_quantize_whose_weights() -> None:
    def quantized(**more: Any) -> int:
        return sum(1 for _ in fp8_linears(layer_of(config_of(**more))))

    assert all(quantized(fp8_recipe=recipe) == 2 for recipe in THERE)
    assert all(quantized(fp8_recipe=recipe, moe_grouped_gemm=False) == 2 * EXPERTS for recipe in THERE)
    for recipe in RECIPES:
        with pytest.raises(ValueError, match="moe_ffn_hidden_size 40: gives a rank 40 channels of an expert"):
            config_of(moe_ffn_hidden_size=40, fp8_recipe=recipe)


# --- ranks ---


def _steps_of(recipe: str, is_grouped: bool, tp_only: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Of three steps of two micro batches, one after the other or one a rank: outputs and input gradients, the experts' gradients of the
    last, histories and scales of all linears."""
    size, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD if size > 1 else None
    groups = ProcessGroupCollection(ep=world, tp_ep=world, tp_dp_cp=world)
    config = config_of(
        fp8_recipe=recipe, moe_grouped_gemm=is_grouped, expert_model_parallel_size=size, moe_token_dispatcher_type="alltoall",
        tp_only_amax_red=tp_only, fp8_margin=2,
    )  # fmt: skip
    layer = layer_of(config, groups)
    steps, outputs = Fp8Steps([layer], groups), []
    for number in range(3):
        with_buffers(layer)
        for batch in range(2) if size == 1 else [rank]:
            outputs.append(step(layer, 10 * number + batch, tokens=20 + 5 * batch))
        steps.end_step()
    first = rank * EXPERTS // size
    found = {}
    for name, grad in gradients(layer).items():
        if "experts" in name:
            base, expert = name.rsplit(".", 1)
            found[f"{base}.{int(expert) + first}"] = grad
    states = [t.clone() for t in (steps.scaling.history, steps.scaling.scale)] if steps.scaling else []
    return [t for pair in outputs for t in pair], found, states


@pytest.mark.parametrize(
    ("recipe", "is_grouped", "tp_only"),
    [
        ("delayed", True, False),
        ("delayed", True, True),
        ("delayed", False, False),
        ("tensorwise", True, False),
        ("blockwise", True, False),
    ],
)
def test_two_expert_parallel_ranks_compute_what_one_does(recipe: str, is_grouped: bool, tp_only: bool) -> None:
    """A margin leaves room for what the first step's scales, of the first values that a rank sees, do not know of."""
    (alone,) = ranks().run(1, _steps_of, recipe, is_grouped, tp_only)
    both = ranks().run(2, _steps_of, recipe, is_grouped, tp_only)
    for rank, (outputs, grads, states) in enumerate(both):
        for number in range(3):
            for kind in range(2):
                close(outputs[2 * number + kind], alone[0][4 * number + 2 * rank + kind], 2.0**-6)
        assert len(grads) == EXPERTS and grads.keys() < alone[1].keys()
        for name, grad in grads.items():
            assert error(grad, alone[1][name]) < 2e-2, name
        if states and is_grouped:
            torch.testing.assert_close(states[0], alone[2][0], rtol=0.1, atol=0.0)
            assert torch.equal(states[0], both[0][2][0]) and torch.equal(states[1], both[0][2][1])


def test_who_shares_an_amax() -> None:
    """An expert's with those that hold it; what all ranks of a stage have a part of with all of them."""
    names = ("tp", "tp_ep", "tp_dp_cp", "expt_tp", "expt_dp")
    groups = ProcessGroupCollection(**{name: name for name in names})
    for is_grouped, tp_only, expected in (
        (True, False, [(slice(0, 12), "tp_dp_cp")]),
        (True, True, [(slice(0, 6), "tp"), (slice(6, 12), "tp_ep")]),
        (False, False, [(slice(0, 6), "tp_dp_cp"), (slice(6, 30), "expt_tp"), (slice(6, 30), "expt_dp")]),
        (False, True, [(slice(0, 6), "tp"), (slice(6, 30), "expt_tp")]),
    ):
        layer = layer_of(config_of(moe_grouped_gemm=is_grouped, tp_only_amax_red=tp_only, moe_shared_expert_intermediate_size=32))
        assert Fp8Steps([layer], groups).shared == expected


# --- checkpoints ---


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_scales_in_checkpoints(saved: bool, loaded: bool) -> None:
    """An entry for each expert, whichever module holds it: grouped and sequential experts load each other's."""
    source, target = (layer_of(config_of(moe_grouped_gemm=is_grouped)) for is_grouped in (saved, loaded))
    step(source, 1)
    Fp8Steps([source], ProcessGroupCollection()).end_step()
    entries = extra_states(source, "", ProcessGroupCollection())
    assert len(entries) == 2 * EXPERTS and len({entry.unique_key for entry in entries.values()}) == 2 * EXPERTS
    assert all(entry.global_shape[-1] == EXPERTS for entry in entries.values())
    by_key = {entry.unique_key: entry.data for entry in entries.values()}
    wanted = extra_states(target, "", ProcessGroupCollection())
    assert load_extra_states(target, {name: by_key[entry.unique_key] for name, entry in wanted.items()}) == 0
    kept, taken = ([part.fp8.scaling for _, part in fp8_linears(layer)] for layer in (source, target))
    if saved == loaded:
        assert all(torch.equal(one.scale, other.scale) and torch.equal(one.history, other.history) for one, other in zip(kept, taken))
    elif loaded:  # the largest of all
        for number, state in enumerate(taken):
            assert torch.equal(state.history, torch.stack([other.history for other in kept[number::2]]).amax(0))
            assert torch.equal(state.scale[WEIGHT], torch.stack([other.scale[WEIGHT] for other in kept[number::2]]).amin(0))
    assert load_extra_states(target, {}) == len(taken), "all begin as in a new run"


def test_full_recompute_of_experts_alone() -> None:
    """Through torch's checkpoint, whose first pass records nothing for autograd."""
    linear, sizes = linear_of(config_of("e4m3")), [3, 0, 9, 4]
    x, found = random(16, HIDDEN, seed=1), []
    for recomputed in (False, True):
        linear.zero_grad()
        given = x.clone().requires_grad_()
        run = lambda rows: linear(rows, counts_of(sizes))  # noqa: E731
        out = checkpoint(run, False, given) if recomputed else run(given)
        out.backward(random(16, FFN, seed=2))
        found.append([out.detach(), given.grad, gradient(linear).clone()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
