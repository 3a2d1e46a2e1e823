"""Linear layers in FP8: against products of the dequantized tensors, over steps, evaluation, recompute and tensor-parallel ranks."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.fp8 import model
from megatron.core.fp8.model import Fp8Steps, fp8_linears, recipe_problem, use_fp8
from megatron.core.fp8.quantize import Operand
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT
from megatron.core.fp8.settings import RECIPES
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.tensor_parallel.weight_grad import put_off_weight_grads, write_weight_grad
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import ranks

pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
TOO_OLD = device.has_accelerator() and device.compute_capability() < (10, 0)
needs_blackwell = pytest.mark.skipif(TOO_OLD, reason="mxfp8 is emulated on CPUs, and refused on GPUs below compute capability 10.0")
ALL_RECIPES = [pytest.param(recipe, marks=needs_blackwell if recipe == "mxfp8" else ()) for recipe in RECIPES]
HIDDEN, FFN, LENGTH = 64, 160, 24  # a number of tokens that is no multiple of 16
BF16 = 2.0**-7
SUMS = 2e-3 if device.has_accelerator() else 1e-5  # tensor cores keep about 14 bits between promotions


def config_of(recipe: str = "delayed", **more: Any) -> TransformerConfig:
    settings = {"fp8": "hybrid", "fp8_recipe": recipe, "bf16": True, "gradient_accumulation_fusion": True, **more}
    return TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, **settings)


class Pair(torch.nn.Module):
    """A column-parallel linear, a square, a row-parallel linear."""

    def __init__(self, config: TransformerConfig, tp: Any = None, ffn: int = FFN) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = config
        groups = ProcessGroupCollection(tp=tp)
        common: dict[str, Any] = {"config": config, "init_method": lambda w: torch.nn.init.normal_(w, 0, 0.1), "bias": True}
        self.fc1 = ColumnParallelLinear(HIDDEN, ffn, gather_output=False, pg_collection=groups, **common)
        self.fc2 = RowParallelLinear(ffn, HIDDEN, input_is_parallel=True, skip_bias_add=False, pg_collection=groups, **common)
        use_fp8(self, config, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x)[0].square())[0]


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(LENGTH, 1, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    x, grad = (t.to(device.current_device()) for t in (x, grad))
    return x, grad * 1e-4  # as small as gradients of a mean are


def wide_gradient() -> torch.Tensor:
    return torch.randn(LENGTH, 1, FFN).bfloat16().to(device.current_device())


def value(operand: Operand | None) -> torch.Tensor:
    assert operand is not None
    return operand.value()


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = BF16) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("fused", [True, False])
def test_products_of_the_dequantized_tensors(recipe: str, fused: bool) -> None:
    layer = Pair(config_of(recipe)).fc1
    weight: Any = layer.weight
    if fused:
        weight.main_grad, weight.main_grad_filled = torch.full_like(weight, 7.0, dtype=torch.float32), False
    x, grad = tensors()[0], wide_gradient() * 1e-4
    x.requires_grad_()
    out, _ = layer(x)
    out.backward(grad)
    assert x.grad is not None and layer.bias.grad is not None
    quantize = {"record": False, "rows": True, "columns": True}
    x_rows, x_columns = layer.fp8.quantize(INPUT, x.detach()[:, 0], **quantize)
    w_rows, w_columns = layer.fp8.quantize(WEIGHT, weight.detach(), **quantize)
    dy_rows, dy_columns = layer.fp8.quantize(GRADIENT, grad[:, 0], **quantize)
    assert dy_rows.data.dtype is torch.float8_e5m2 and x_rows.data.dtype is w_rows.data.dtype is torch.float8_e4m3fn
    close(out[:, 0], value(x_rows) @ value(w_rows).t())
    close(x.grad[:, 0], value(dy_rows) @ value(w_columns).t())
    found = weight.main_grad if fused else weight.grad
    close(found, value(dy_columns) @ value(x_columns).t(), SUMS if fused else BF16)
    close(layer.bias.grad, grad[:, 0].float().sum(0))
    turned = torch.nn.functional.pad(grad[:, 0].t(), (0, 8))
    for operand, original in ((x_rows, x.detach()[:, 0]), (w_rows, weight.detach()), (dy_columns, turned)):
        mantissa = 2.0**-3 if operand is dy_columns else 2.0**-4
        torch.testing.assert_close(value(operand), original.float(), rtol=mantissa, atol=1e-2 * float(original.abs().max()))


def test_later_micro_batches_add() -> None:
    layer = Pair(config_of("tensorwise")).fc1
    weight: Any = layer.weight
    weight.main_grad, weight.main_grad_filled = torch.empty_like(weight, dtype=torch.float32), False
    whole = torch.zeros_like(weight, dtype=torch.float32)
    queue: list[Any] = []
    for seed in range(3):
        x, _ = tensors(seed)
        grad = wide_gradient()
        with put_off_weight_grads(queue):  # as zero-bubble does
            layer(x)[0].backward(grad)
        assert len(queue) == 1
        write_weight_grad(*queue.pop())
        quantized = [layer.fp8.quantize(role, t[:, 0], record=False, rows=False, columns=True)[1] for role, t in ((2, grad), (0, x))]
        whole += value(quantized[0]) @ value(quantized[1]).t()
    close(weight.main_grad, whole, SUMS)


def test_weight_gradients_in_bf16_on_request() -> None:
    layer = Pair(config_of("delayed", fp8_wgrad=False)).fc1
    x, grad = tensors()[0], wide_gradient()
    layer(x)[0].backward(grad)
    assert torch.equal(layer.weight.grad, grad[:, 0].t().mm(x[:, 0]))


def run(model: Pair, seed: int, through_checkpoint: bool = False) -> list[torch.Tensor]:
    """Output and gradients for one batch."""
    x, grad = tensors(seed)
    x.requires_grad_()
    model.zero_grad()
    out = checkpoint(model, False, x) if through_checkpoint else model(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(param.grad for param in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recompute_changes_no_bit_and_no_scale(recipe: str) -> None:
    found = []
    for through_checkpoint in (False, True):
        model = Pair(config_of(recipe))
        steps = Fp8Steps([model], ProcessGroupCollection())
        results = []
        for seed in range(3):
            results += run(model, seed, through_checkpoint)
            steps.end_step()
        found.append(results + ([steps.scaling.scale, steps.scaling.history] if steps.scaling else []))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_evaluation_uses_the_scales_and_leaves_no_trace() -> None:
    model = Pair(config_of())
    steps = Fp8Steps([model], ProcessGroupCollection())
    run(model, 0)
    steps.end_step()
    assert steps.scaling is not None
    before = [tensor.clone() for tensor in (steps.scaling.amax, steps.scaling.scale, steps.scaling.history)]
    model.eval()
    with torch.no_grad():
        first = model(tensors(1)[0] * 100)
    assert all(torch.equal(*pair) for pair in zip(before, (steps.scaling.amax, steps.scaling.scale, steps.scaling.history), strict=True))
    model.train()
    with torch.no_grad():
        assert torch.equal(model(tensors(1)[0] * 100), first)
    assert steps.scaling.amax[INPUT] > 100 * before[0][INPUT], "training counts"


def test_scales_follow_the_steps() -> None:
    model = Pair(config_of())
    steps = Fp8Steps([model], ProcessGroupCollection())
    x, _ = tensors()
    model.fc1.weight.main_grad = torch.empty_like(model.fc1.weight, dtype=torch.float32)  # type: ignore[attr-defined]
    for factor in (1.0, 8.0, 8.0):
        model.fc1.weight.main_grad_filled = False  # type: ignore[attr-defined]
        model(x * factor).sum().backward()
        steps.end_step()
    found = model.fc1.fp8.scaling
    amax = float(x.abs().max()) * 8
    assert float(found.history[0, INPUT]) == amax and float(found.scale[INPUT]) == 2.0 ** int(torch.tensor(448 / amax).log2().floor())
    assert float(found.history[0, WEIGHT]) == float(model.fc1.weight.detach().abs().max())


def test_a_weight_is_quantized_once_an_epoch_and_stays_in_its_place() -> None:
    model = Pair(config_of("tensorwise"))
    linear, weight = model.fc1.fp8, model.fc1.weight
    steps = Fp8Steps([model], ProcessGroupCollection())
    first = linear.weight_operands()
    place, before = first.rows.data.data_ptr(), first.rows.data.clone()
    with torch.no_grad():
        weight.data.zero_()  # as a kernel writes it: the parameter's version stays
    assert linear.weight_operands() is first and torch.equal(first.rows.data.float(), before.float())
    steps.end_step()
    assert not first.rows.data.float().any() and not first.columns.data.float().any() and first.rows.data.data_ptr() == place
    with torch.no_grad():
        weight.fill_(1.0)  # a checkpoint that is loaded
    assert value(linear.weight_operands().rows).eq(1).all() and value(linear.weight_operands().columns).eq(1).all()


def test_which_layers_and_which_linears() -> None:
    layers: dict[str, Any] = {"num_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4, "bf16": True, "fp8": "e4m3"}
    config = TransformerConfig(**layers, first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1)
    found = []
    for number in range(1, 5):
        part = torch.nn.ModuleList([ColumnParallelLinear(HIDDEN, 32, config=config, init_method=torch.nn.init.zeros_)])
        use_fp8(part, config, number)
        found.append(part[0].fp8 is not None)
    assert found == [False, False, True, False]
    with pytest.raises(ValueError, match=r"multiples of 16: 0 \(40, 64\)"):
        odd = torch.nn.ModuleList([ColumnParallelLinear(HIDDEN, 40, config=config, init_method=torch.nn.init.zeros_)])
        use_fp8(odd, config, 3)
    foreign = torch.nn.Linear(HIDDEN, HIDDEN)
    foreign.fp8 = False  # type: ignore[assignment]  # as Transformer Engine's modules have it
    use_fp8(foreign, config, 3)
    assert not list(fp8_linears(torch.nn.ModuleList([foreign]))) and [name for name, _ in fp8_linears(part)] == []


def _on_two_ranks(recipe: str, sequence_parallel: bool) -> list[torch.Tensor]:
    """Of three steps: the outputs (whole), this rank's gradients, and the scales."""
    tp = dist.group.WORLD if dist.get_world_size() > 1 else None
    size, rank = (2, dist.get_rank()) if tp else (1, 0)
    config = config_of(
        recipe, tensor_model_parallel_size=size, sequence_parallel=sequence_parallel and size > 1, gradient_accumulation_fusion=False
    )
    model = Pair(config, tp)
    steps = Fp8Steps([model], ProcessGroupCollection(tp=tp, tp_dp_cp=tp))
    found = []
    for seed in range(3):
        x, grad = tensors(seed)
        if config.sequence_parallel:
            x, grad = (t.chunk(2)[rank].contiguous() for t in (x, grad))
        x.requires_grad_()
        out = model(x)
        out.backward(grad)
        steps.end_step()
        parts = [out.detach(), x.grad]
        if config.sequence_parallel:
            parts = [torch.cat([torch.zeros_like(t)] * rank + [t] + [torch.zeros_like(t)] * (1 - rank)) for t in parts]
            for part in parts:
                dist.all_reduce(part)
        found += parts
    assert model.fc1.weight.grad is not None and model.fc2.weight.grad is not None
    shards = [model.fc1.weight.grad, model.fc2.weight.grad.t().contiguous()]
    if size > 1:
        shards = [torch.cat([torch.zeros_like(t)] * rank + [t] + [torch.zeros_like(t)] * (1 - rank)) for t in shards]
        for shard in shards:
            dist.all_reduce(shard)
    return found + shards + ([steps.scaling.scale, steps.scaling.history] if steps.scaling else [])


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_parallel_ranks_compute_what_one_does(recipe: str, sequence_parallel: bool) -> None:
    """Each rank's shards have their own scales or blocks (but for delayed scaling, which takes the largest amax over the ranks)."""
    (alone,) = ranks().run(1, _on_two_ranks, recipe, False)
    for split in ranks().run(2, _on_two_ranks, recipe, sequence_parallel):
        states = 2 if recipe == "delayed" else 0
        for found, expected in zip(split[: len(split) - states], alone[: len(alone) - states], strict=True):
            close(found, expected, 2.0**-6)
        if states:
            assert torch.equal(split[-2], alone[-2])
            close(split[-1], alone[-1])


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("mxfp8", (9, 0), r"needs a GPU of compute capability 10.0 \(Blackwell\), and this GPU has 9.0; fp8_recipe blockwise works here"),
        ("mxfp8", (8, 6), "needs a GPU of compute capability 8.9, and this GPU has 8.6; leave fp8 out"),
        ("mxfp8", (10, 0), ""),
        ("delayed", (8, 0), "has 8.0; leave fp8 out"),
        ("delayed", (9, 0), ""),
    ],
)
def test_recipes_that_a_gpu_has_not_are_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], said: str
) -> None:
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    monkeypatch.setattr(device, "device_name", lambda: "this GPU")
    monkeypatch.setattr(model, "mx_problem", lambda: None)
    if not said:
        assert recipe_problem(recipe) is None
        use_fp8(torch.nn.Identity(), config_of(recipe), 1)
        return
    assert re.search(said, recipe_problem(recipe) or "")
    with pytest.raises(ValueError, match=said):
        use_fp8(torch.nn.Identity(), config_of(recipe), 1)


def test_a_gpu_that_computes_mxfp8_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_accelerator", lambda: True)
    monkeypatch.setattr(device, "compute_capability", lambda: (12, 0))
    monkeypatch.setattr(device, "device_name", lambda: "this GPU")
    monkeypatch.setattr(model, "mx_problem", lambda: "a product differs")
    with pytest.raises(
        ValueError, match=r"mxfp8 is not computed rightly here: this GPU has 12\.0, and a product differs; fp8_recipe tensorwise"
    ):
        use_fp8(torch.nn.Identity(), config_of("mxfp8"), 1)
    assert recipe_problem("tensorwise") is None
