"""SwiGLU MLPs in FP8: the one function against linears and activation one by one."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device
from megatron.core.fp8 import swiglu_mlp
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.model import Fp8Steps, use_fp8
from megatron.core.fp8.quantize import ROW_BLOCKS, Operand
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import quantize_blocks, swiglu_quantize, swiglu_quantize_blocks
from tests.guarded_memory import guarded, surrounded

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
STEPS = 3 if ON_GPU else 2  # the interpreter takes seconds for one


def build(recipe: str, width: int | None = None) -> Any:
    width = width or (256 if recipe == "blockwise" else 176)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=width, num_attention_heads=4, bf16=True, fp8="hybrid", fp8_recipe=recipe,
        fp8_amax_history_len=2, add_bias_linear=False, gated_linear_unit=True, activation_func=F.silu, bias_activation_fusion=True,
    )  # fmt: skip
    torch.manual_seed(1)
    mlp = MLP(config, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    use_fp8(mlp, config, 1)
    return mlp


def steps_of(recipe: str, fused: bool) -> tuple[list[torch.Tensor], int]:
    """Outputs, gradients and scales of STEPS steps of two micro batches; how often the function ran."""
    mlp = build(recipe)
    steps, found = Fp8Steps([mlp], ProcessGroupCollection()), []
    generator = torch.Generator().manual_seed(2)
    with mock.patch.object(swiglu_mlp, "takes", side_effect=swiglu_mlp.takes if fused else lambda *_: False):
        with mock.patch.object(swiglu_mlp, "swiglu_mlp", side_effect=swiglu_mlp.swiglu_mlp) as ran:
            for _ in range(STEPS):
                for _ in range(2):
                    x, grad = (torch.randn(40, 1, 64, generator=generator).bfloat16().to(device.current_device()) for _ in range(2))
                    x.requires_grad_()
                    mlp.zero_grad()
                    out, _ = mlp(x)
                    out.backward(grad * 1e-3)
                    found += [out.detach(), x.grad, mlp.linear_fc1.weight.grad, mlp.linear_fc2.weight.grad]
                if steps.scaling is not None:
                    found.append(steps.scaling.amax.clone())
                steps.end_step()
    return found, ran.call_count


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_is_what_the_parts_compute(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)
    (together, ran), (apart, none) = steps_of(recipe, True), steps_of(recipe, False)
    assert (ran, none) == (2 * STEPS, 0)
    for found, expected in zip(together, apart, strict=True):
        # bf16 is rounded once or twice on the way, which now and then moves a number to the next of FP8
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 2e-3, error


@pytest.mark.parametrize(("m", "n"), [(1, 128), (40, 256), (128, 128), (250, 128)])
def test_backward_with_blocks(m: int, n: int) -> None:
    """What the parts give, but for a few numbers that are rounded to bf16's next one first."""
    generator = torch.Generator().manual_seed(m)
    x, grad = ((torch.randn(m, k, generator=generator) * 2).bfloat16().to(device.current_device()) for k in (2 * n + 16, n + 16))
    x[m // 2] *= 4.0
    grad[:, 3] *= 1e-4
    x, grad = x[:, : 2 * n], grad[:, :n]
    out, gradient = swiglu_quantize_blocks.backward(x, grad, E4M3, E5M2)
    gate, up, dy = x[:, :n].float(), x[:, n:].float(), grad.float()
    sigmoid = gate.sigmoid()
    both = torch.cat([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], dim=1).bfloat16()
    _, of_out = quantized((gate * sigmoid * up).bfloat16(), E4M3)
    for found, expected in zip((out, *gradient), (of_out, *quantized(both, E5M2)), strict=True):
        assert found is not None and found.data.shape == expected.data.shape and found.inverse.shape == expected.inverse.shape
        assert (found.inverse != expected.inverse).float().mean() < 0.02
        # the interpreter does not round to bf16, it cuts off: half of the numbers are others
        assert (found.data.view(torch.uint8) != expected.data.view(torch.uint8)).float().mean() < (0.005 if ON_GPU else 0.05)


def quantized(x: torch.Tensor, dtype: torch.dtype) -> list[Operand]:
    """x with blocks of 1 x 128: rows, columns."""
    made = quantize_blocks.quantize_blocks(x, dtype, ROW_BLOCKS, True, True, (None, None), (None, None))
    return [Operand(data, inverse, ROW_BLOCKS) for data, inverse in zip(*made, strict=True) if data is not None and inverse is not None]


def test_what_is_too_large_becomes_the_largest() -> None:
    """Of forward's and backward's results, in tiles that hold something beyond the format, and in no other."""
    x = torch.zeros(64, 2 * 1024, dtype=torch.bfloat16, device=device.current_device())
    x[40:, :1024], x[40:, 1024:] = 64.0, 4.0  # SwiGLU gives 256, its gradients are 4 and 64
    grad, one, amax = torch.ones_like(x[:, :1024]), torch.ones(1, device=x.device), torch.zeros(1, device=x.device)
    for inverse, out, gate, up in ((1.0, 256.0, 4.0, 64.0), (2.0**-4, 448.0, 64.0, 448.0), (2.0**-20, 448.0, 448.0, 448.0)):
        scale = one * inverse
        rows = swiglu_quantize.forward(x, E4M3, scale, amax)
        again, grad_rows, grad_columns = swiglu_quantize.backward(x, grad, E4M3, scale, E4M3, scale, amax)
        assert grad_columns is not None
        expected = torch.zeros(64, 3, device=x.device)
        expected[40:] = torch.tensor([out, gate, up])
        for column in (0, 600, 1023):
            assert torch.equal(rows[:, column].float(), expected[:, 0]) and torch.equal(again[column].float(), expected[:, 0])
            for place, wanted in ((column, expected[:, 1]), (column + 1024, expected[:, 2])):
                assert torch.equal(grad_rows[:, place].float(), wanted) and torch.equal(grad_columns[place].float(), wanted)
    assert float(amax) == 256.0


@pytest.mark.parametrize(("m", "n"), [(20, 512), (33, 128), (32, 144), (1, 16)])
@pytest.mark.parametrize("known", [True, False])
def test_nothing_beyond_the_tensors_is_read_or_written(m: int, n: int, known: bool) -> None:
    """Tiles that are not whole give what those of tensors with zeros behind them give."""
    generator = torch.Generator().manual_seed(m)
    x, grad = (torch.randn(m, width, generator=generator).bfloat16().to(device.current_device()) for width in (2 * n, n))
    tall, wide = -(-m // 32) * 32, -(-n // 512) * 512
    halves = [F.pad(half, (0, wide - n, 0, tall - m)) for half in (*x.split(n, dim=1), grad)]
    one, results = torch.ones(1, device=x.device), list[list[torch.Tensor]]()
    inverse = one if known else None
    for given, dy in ((surrounded(x), surrounded(grad)), (torch.cat(halves[:2], dim=1), halves[2])):
        amax, amax_of_grad = torch.zeros_like(one), torch.zeros_like(one)
        with guarded():
            out = swiglu_quantize.forward(given, E4M3, inverse, amax)
            again, rows, columns = swiglu_quantize.backward(given, dy, E4M3, one, E5M2, inverse, amax_of_grad)
        width = dy.shape[1]
        halves_of = [*rows.split(width, dim=1), *(() if columns is None else columns.split(width))]
        results.append([amax[None], amax_of_grad[None], out, again, *halves_of])
    for found, whole in zip(*results, strict=True):
        assert torch.equal(found.float(), whole[: found.shape[0], : found.shape[1]].float())


@pytest.mark.parametrize("m", [20, 130])
def test_nothing_beyond_the_tensors_is_read_or_written_with_blocks(m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    x, grad = (torch.randn(m, width, generator=generator).bfloat16().to(device.current_device()) for width in (256, 128))
    results = list[list[torch.Tensor]]()
    for given, dy in ((surrounded(x), surrounded(grad)), (F.pad(x, (0, 0, 0, -m % 128)), F.pad(grad, (0, 0, 0, -m % 128)))):
        with guarded():
            out, gradient = swiglu_quantize_blocks.backward(given, dy, E4M3, E5M2)
            found = [*swiglu_quantize_blocks.forward(given, E4M3), out.data, out.inverse]
        assert gradient.rows is not None and gradient.columns is not None
        results.append([*found, *gradient.rows[:2], *gradient.columns[:2]])
    for one, whole in zip(*results, strict=True):
        assert torch.equal(one.float(), whole[: one.shape[0], : one.shape[1]].float())


def test_blocks_that_are_not_whole_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)
    mlp, x = build("blockwise"), torch.ones(2, 64, dtype=torch.bfloat16, device=device.current_device())
    assert swiglu_mlp.takes(mlp.linear_fc1, mlp.linear_fc2, x)
    mlp = build("blockwise", 176)
    assert not swiglu_mlp.takes(mlp.linear_fc1, mlp.linear_fc2, x)


def test_it_waits_for_weights_that_come_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its linears are not called, so none of their hooks is."""
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)
    mlp, waits = build("delayed"), mock.Mock()
    for weight in mlp.parameters():
        weight.wait_until_gathered = waits
    mlp(torch.ones(16, 1, 64, dtype=torch.bfloat16, device=device.current_device()))
    assert waits.call_count == 2


@pytest.mark.parametrize(("graphs", "late"), [("none", True), ("local", False)])
def test_weights_are_quantized_at_their_first_use_where_they_come_late(graphs: str, late: bool) -> None:
    """A graph would leave out what was not due when it was recorded; under graphs weights are gathered at once."""
    mlp = build("delayed")
    mlp.ddp_config, mlp.config.cuda_graph_impl = SimpleNamespace(overlap_param_gather=True), graphs
    assert Fp8Steps([mlp], ProcessGroupCollection()).quantizes_late is late
