"""Routed experts in FP8 with scales of blocks (`blockwise`, `mxfp8`): one kernel for all of them against each by itself, in Triton's
interpreter on the CPU (which rounds to FP8 by rules of its own: values there are ones that FP8 holds), compiled on a GPU; products against
float64; what is added and when the host waits. What all recipes have in common: test_experts.py."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fp8 import block_experts, grouped_blocks
from megatron.core.fp8.block_experts import Fp8BlockExperts
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.model import Fp8Steps
from megatron.core.fp8.quantize import BLOCK, ROW_BLOCKS, SQUARE_BLOCKS, Operand, Quantized, padded, quantize_blocks
from megatron.core.fp8.scaling import GRADIENT, INPUT
from megatron.core.fusions import kernels
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.experts import GroupedLinear
from megatron.core.transformer.moe.token_dispatcher import TokenCounts
from tests.unit_tests.fp8.test_experts import (
    EXPERTS,
    HIDDEN,
    SUMS,
    THERE,
    close,
    config_of,
    counts_of,
    gradient,
    layer_of,
    linear_of,
    random,
    step,
    with_buffers,
)

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
OF_BLOCKS = [recipe for recipe in THERE if recipe in ("blockwise", "mxfp8")]
FORMATS = st.sampled_from([E4M3, E5M2])
ROWS = st.one_of(st.just(0), st.just(1), st.integers(2, 40), st.integers(100, 300))


@pytest.fixture
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """bf16, blocks of several scales; on a CPU each with a digit or two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    if not ON_GPU:
        x = torch.where(x.abs() < 2.0**-4, 0.0, x).to(dtype).float()
    x[::7] *= 8.0
    return x.bfloat16().to(device.current_device())


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def each(x: torch.Tensor, sizes: list[int], dtype: torch.dtype) -> list[Quantized]:
    with mock.patch.object(kernels, "interpreted", False):
        return [quantize_blocks(part, dtype, ROW_BLOCKS) for part in x.split(sizes)]


@pytest.mark.usefixtures("_with_kernels")
@settings(max_examples=10, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(1, 17), FORMATS, st.integers(0, 10**6), st.booleans())
def test_one_kernel_quantizes_what_each_expert_would(sizes: list[int], units: int, dtype: torch.dtype, seed: int, strided: bool) -> None:
    """And as cuBLAS takes it: scales of rows next to each other, without gaps, of whole blocks of rows, at a multiple of 16 bytes."""
    sizes, k = sizes if sum(sizes) else [0, 1, 0], 16 * units
    x = values(sum(sizes), 2 * k if strided else k, dtype=dtype, seed=seed)[:, :k]
    found = grouped_blocks.quantize_row_blocks(x, counts_of(sizes), dtype, rows=True, columns=True)
    for made, alone, size in zip(found, each(x, sizes, dtype), sizes, strict=True):
        for part in made:
            assert part is not None and part.kind == ROW_BLOCKS
            assert part.data.is_contiguous() and part.inverse.t().is_contiguous()
            assert part.data.data_ptr() % 16 == 0 == part.inverse.data_ptr() % 16
        (rows, columns), blocks = made, -(-size // BLOCK)
        assert rows is not None and columns is not None and alone.rows is not None and alone.columns is not None
        assert rows.data.shape == (blocks * BLOCK, k) and rows.inverse.shape == (blocks * BLOCK, -(-k // BLOCK))
        assert same(rows.data[:size], alone.rows.data) and torch.equal(rows.inverse[:size], alone.rows.inverse)
        assert columns.data.shape == (k, blocks * BLOCK) and torch.equal(columns.inverse, alone.columns.inverse)
        assert same(columns.data[:, : padded(size)].contiguous(), alone.columns.data), "no block crosses experts"
        assert not columns.data[:, size:].float().any()
    for rows_too in (False, True):
        half = grouped_blocks.quantize_row_blocks(x, counts_of(sizes), dtype, rows=rows_too, columns=not rows_too)
        for made, one in zip(found, half, strict=True):
            assert (one.rows is None) != rows_too and (one.columns is None) == rows_too
            assert one.columns is None or made.columns is None or same(one.columns.data, made.columns.data)


@settings(max_examples=20, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=6), FORMATS, st.integers(0, 10**6))
def test_rows_beyond_an_experts_own_leave_no_trace(sizes: list[int], dtype: torch.dtype, seed: int) -> None:
    """An operand may have up to 127 more, of whatever is there: NaN here."""
    k, m = 48, 144
    parts = [quantize_blocks(values(size, k, dtype=dtype, seed=seed + number), dtype, ROW_BLOCKS).rows for number, size in enumerate(sizes)]
    matrices = [quantize_blocks(values(m, k, dtype=E4M3, seed=number), E4M3, SQUARE_BLOCKS).rows for number in range(len(sizes))]
    rows = []
    for part, size in zip(parts, sizes, strict=True):
        assert part is not None
        more = -size % BLOCK
        data = torch.cat([part.data.float(), torch.full((more, k), torch.nan, device=part.data.device)]).to(dtype)
        inverse = torch.cat([part.inverse, torch.ones(more, 1, device=data.device)])
        rows.append(Operand(data, inverse.t().contiguous().t(), ROW_BLOCKS))
    expected = [part.value() @ matrix.value().t() for part, matrix in zip(parts, matrices, strict=True)]  # type: ignore[union-attr]
    found = grouped_blocks.rows_product(rows, matrices, sizes, torch.float32)  # type: ignore[arg-type]
    assert found.shape == (sum(sizes), m)
    close(found, torch.cat(expected), SUMS)


def fp8_of(linear: GroupedLinear) -> Fp8BlockExperts:
    assert isinstance(linear.fp8, Fp8BlockExperts)
    return linear.fp8


def check_products(recipe: str, form: str, sizes: list[int], fused: bool, late: bool, seed: int, outputs: int) -> None:
    """A linear's three products against float64's of the dequantized tensors."""
    linear, counts, n = linear_of(config_of(form, fp8_recipe=recipe), outputs), counts_of(sizes), sum(sizes)
    linear.input_is_recomputed, fp8 = late, fp8_of(linear)
    if fused:
        with_buffers(linear)
    gradient_format = E5M2 if form == "hybrid" else E4M3
    x, grad = values(n, HIDDEN, dtype=E4M3, seed=seed).requires_grad_(), values(n, outputs, dtype=gradient_format, seed=seed + 1)
    out = linear(x, counts)
    out.backward(grad)
    assert x.grad is not None and out.shape == (n, outputs) and x.grad.shape == x.shape
    wanted = {"rows": True, "columns": True}
    inputs, grads = (fp8.quantize_rows(role, t, counts, **wanted) for role, t in ((INPUT, x.detach()), (GRADIENT, grad)))
    found = zip(out.detach().split(sizes), x.grad.split(sizes), gradient(linear), strict=True)
    for (y, dx, dw), one, other, matrix, size in zip(found, inputs, grads, fp8.matrices(), sizes, strict=True):
        if not size:
            assert not dw.any()
            continue
        x_rows, dy_rows, w, w_turned = (part.value().double() for part in (one.rows, other.rows, matrix.rows, matrix.columns))  # type: ignore[union-attr]
        x_columns, dy_columns = (part.columns.value().double()[:, :size] for part in (one, other))  # type: ignore[union-attr]
        assert other.rows is not None and other.rows.data.dtype is gradient_format
        close(y, x_rows[:size] @ w.t())
        close(dx, dy_rows[:size] @ w_turned.t())
        close(dw, dy_columns @ x_columns.t(), SUMS if fused else 2.0**-7)


SIZES = st.one_of(
    st.lists(ROWS, min_size=EXPERTS, max_size=EXPERTS), st.sampled_from([[0, 0, 0, 0], [0, 0, 0, 1], [150, 0, 0, 0], [0, 0, 0, 128]])
)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(OF_BLOCKS), st.sampled_from(["hybrid", "e4m3"]), SIZES, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_products_of_the_dequantized_tensors(recipe: str, form: str, sizes: list[int], fused: bool, late: bool, seed: int) -> None:
    """late: the input itself is kept. 144 and 64: an expert's matrix ends within blocks."""
    check_products(recipe, form, sizes, fused, late, seed, outputs=144)


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sizes", [[5, 0, 130, 1], [0, 0, 0, 3]], ids=str)
def test_products_of_what_the_kernel_quantized(sizes: list[int], late: bool) -> None:
    with mock.patch.object(block_experts, "quantize_row_blocks", side_effect=block_experts.quantize_row_blocks) as ran:
        check_products("blockwise", "hybrid", sizes, fused=True, late=late, seed=4, outputs=144)
    assert ran.call_count >= 3 + late


@pytest.mark.parametrize("recipe", OF_BLOCKS)
def test_no_block_of_a_matrix_crosses_experts(recipe: str) -> None:
    """144 rows are a block and an eighth: a matrix of large numbers leaves those beside it alone."""
    linear = linear_of(config_of(fp8_recipe=recipe), 144)
    before = [part.value().clone() for part in (m.columns for m in fp8_of(linear).matrices()) if part is not None]
    with torch.no_grad():
        linear.weight[1] *= 2.0**20
    after = [part.value() for part in (m.columns for m in fp8_of(linear).matrices()) if part is not None]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("recipe", OF_BLOCKS)
def test_weight_gradients_add_up_over_micro_batches(recipe: str) -> None:
    """Where an expert has no tokens nothing changes; what no micro batch gave it tokens for is zero."""
    linear, total = linear_of(config_of(fp8_recipe=recipe)), torch.zeros(EXPERTS, 96, HIDDEN, device=device.current_device())
    for number, sizes in enumerate(([5, 0, 20, 0], [0, 0, 33, 2])):
        x, grad = random(sum(sizes), HIDDEN, seed=number), random(sum(sizes), 96, seed=number + 5)
        alone = linear_of(config_of(fp8_recipe=recipe))
        for one in (linear, alone):
            if one is alone or number == 0:
                with_buffers(one)
            one(x, counts_of(sizes)).backward(grad)
        total += gradient(alone)
        close(gradient(linear), total, SUMS)
    assert not gradient(linear)[1].any() and all(gradient(linear)[expert].any() for expert in (0, 2, 3))


@pytest.mark.parametrize("recipe", OF_BLOCKS)
def test_weight_gradients_in_bf16_on_request(recipe: str) -> None:
    linear, sizes = linear_of(config_of(fp8_wgrad=False, fp8_recipe=recipe)), [5, 0, 20, 7]
    x, grad = random(32, HIDDEN, seed=1), random(32, 96, seed=2)
    linear(x, counts_of(sizes)).backward(grad)
    close(gradient(linear), torch.stack([dy.t() @ part for part, dy in zip(x.split(sizes), grad.split(sizes), strict=True)]))


@pytest.mark.parametrize("recipe", OF_BLOCKS)
@pytest.mark.parametrize("why", ["evaluation", "frozen"])
def test_nothing_is_transposed_that_no_weight_gradient_needs(recipe: str, why: str) -> None:
    linear, x = linear_of(config_of(fp8_recipe=recipe)), random(8, HIDDEN, seed=1).requires_grad_()
    linear.weight.requires_grad_(why != "frozen")
    with mock.patch.object(linear.fp8, "quantize_rows", side_effect=fp8_of(linear).quantize_rows) as quantize:
        with torch.set_grad_enabled(why != "evaluation"):
            out = linear(x, counts_of([5, 0, 1, 2]))
        if out.requires_grad:
            out.sum().backward()
            assert x.grad is not None and linear.weight.grad is None
    assert [call.kwargs["columns"] for call in quantize.call_args_list] == [False] * (1 if why == "evaluation" else 2)


@pytest.mark.parametrize("recipe", OF_BLOCKS)
def test_weights_are_quantized_once_an_epoch_and_stay_in_their_place(recipe: str) -> None:
    layer = layer_of(config_of(fp8_recipe=recipe))
    steps = Fp8Steps([layer], ProcessGroupCollection())
    linear: Any = layer.experts.linear_fc1

    def parts() -> list[Operand]:
        return [part for matrix in linear.fp8.matrices() for part in matrix if part is not None]

    def places() -> list[tuple[int, int]]:
        return [(part.data.data_ptr(), part.inverse.data_ptr()) for part in parts()]

    with mock.patch.object(linear.fp8, "quantize", side_effect=linear.fp8.quantize) as quantize:
        for seed in range(3):
            step(layer, seed)
        assert sum(call.args[1].data_ptr() == linear.weight.data_ptr() for call in quantize.call_args_list) == 1
    before, values_before = places(), parts()[0].value().clone()
    with torch.no_grad():
        linear.weight.data.mul_(0.3)  # as a kernel writes it: the parameter's version stays
    steps.end_step()
    assert places() == before and not torch.equal(parts()[0].value(), values_before)
    close(parts()[0].value(), linear.weight.detach()[0], 2.0**-4)


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize("known", [False, True])
def test_the_counts_are_copied_once_a_layer(known: bool) -> None:
    """Their copy is started before the input is quantized and read after that; both linears and both ways use it."""
    layer, order = layer_of(config_of(fp8_recipe="blockwise")), list[str]()
    sizes = [5, 0, 9, 2]
    counts = TokenCounts(torch.tensor(sizes, device=device.current_device()), sizes if known else None)

    class Copy:
        def __init__(self, tensor: torch.Tensor) -> None:
            order.append("copy")

        def tolist(self) -> list[int]:
            order.append("read")
            return sizes

    from megatron.core.fusions.kernels import quantize_groups

    real = quantize_groups.quantize_row_blocks

    def noted(*arguments: Any) -> Any:
        order.append("quantize")
        return real(*arguments)

    with mock.patch.object(device, "HostCopy", Copy), mock.patch.object(quantize_groups, "quantize_row_blocks", noted):
        x = random(16, HIDDEN, seed=1).requires_grad_()
        out, _ = layer.experts(x, counts, torch.ones(16, device=x.device))
        out.sum().backward()
    assert order == (["quantize"] * 4 if known else ["copy", "quantize", "read", *["quantize"] * 3])
