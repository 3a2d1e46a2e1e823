"""FP8 products of several groups: kernels against their plain twins, in Triton's interpreter on the CPU (which rounds to FP8 by rules of
its own: values there are ones that FP8 holds), compiled on a GPU; and torch's grouped product against the same twin there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fp8 import grouped
from megatron.core.fp8.formats import E4M3, E5M2, LARGEST, amax_of, scale_for
from megatron.core.fp8.grouped import Grouped, quantize_groups
from megatron.core.fp8.quantize import TENSOR, Operand, padded
from megatron.core.transformer.moe.token_dispatcher import TokenCounts

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
FORMATS = st.sampled_from([E4M3, E5M2])
# empty groups, odd ones, some of more than a tile, none with a row at all
SIZES = st.lists(st.one_of(st.just(0), st.integers(1, 40), st.integers(100, 300)), min_size=1, max_size=20)
SUMS = 2e-3 if ON_GPU else 1e-5  # tensor cores keep about 14 bits between promotions


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)


def values(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if not ON_GPU:
        x = torch.where(x.abs() < 2.0**-4, 0.0, x).to(dtype).float()
    return (x * 2.0 ** (seed % 7 - 3)).bfloat16().to(device.current_device())


def counts_of(sizes: list[int]) -> TokenCounts:
    return TokenCounts(torch.tensor(sizes, device=device.current_device()))


def plain(x: torch.Tensor, sizes: list[int], scale: torch.Tensor, dtype: torch.dtype) -> Grouped:
    return Grouped(*grouped.quantize_groups_plain(x, sizes, scale, dtype, True, True), scale.reciprocal())


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def same_blocks(found: Grouped, expected: Grouped, sizes: list[int], k: int) -> bool:
    return all(same(*(block.data for block in pair)) for pair in zip(*(g.by_group(sizes, k) for g in (found, expected)), strict=True))


@settings(max_examples=20 if ON_GPU else 8, deadline=None)
@given(SIZES, st.integers(1, 12), FORMATS, st.integers(0, 10**6), st.booleans(), st.booleans())
def test_quantized_group_by_group(sizes: list[int], units: int, dtype: torch.dtype, seed: int, known: bool, strided: bool) -> None:
    """As they lie: what a tensor's kernel makes; transposed: each group by itself, zeros behind it."""
    n, k = sum(sizes), 16 * units
    x = values(n, 2 * k if strided else k, dtype=dtype, seed=seed)[:, :k]
    scale = scale_for(amax_of(x).view(1), LARGEST[dtype])
    amax = torch.full((1,), 0.5, device=x.device)
    more: dict[str, Any] = {"scale": scale, "inverse": scale.reciprocal(), "amax": amax} if known else {}
    found, expected = quantize_groups(x, counts_of(sizes), dtype, **more), plain(x, sizes, scale, dtype)
    assert found.rows is not None and expected.rows is not None and same(found.rows, expected.rows)
    assert same_blocks(found, expected, sizes, k) and torch.equal(found.inverse, scale.reciprocal())
    if known:
        assert float(amax) == max(0.5, float(amax_of(x)))
    for block, part in zip(found.by_group(sizes, k), x.split(sizes), strict=True):
        assert block.data.shape == (k, padded(len(part))) and not block.data[:, len(part) :].float().any()
        torch.testing.assert_close(block.value()[:, : len(part)].t(), part.float(), rtol=2.0**-3, atol=1e-2 * float(amax_of(x)))
    for rows in (False, True):
        half = quantize_groups(x, counts_of(sizes), dtype, **more, rows=rows, columns=not rows)
        assert (half.rows is None) != rows and (half.columns is None) == rows
        assert rows or same_blocks(half, expected, sizes, k)


def operands(sizes: list[int], k: int, m: int, dtype: torch.dtype, seed: int) -> tuple[Operand, Operand]:
    """Rows and matrices."""
    x, w = values(sum(sizes), k, dtype=dtype, seed=seed), values(len(sizes), m, k, seed=seed + 1)
    half, two = (torch.full((1,), value, device=x.device) for value in (0.5, 2.0))
    return Operand(x.to(dtype), half, TENSOR), Operand(w.to(E4M3), two, TENSOR)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if found.dtype is torch.float32 else 2.0**-7
    atol = SUMS * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=atol)


WAYS: list[Callable[..., torch.Tensor]] = [
    lambda a, b, counts: grouped.rows_product(a, b, counts, torch.bfloat16),
    lambda a, b, counts: grouped.by_group(a, b, counts, torch.bfloat16, fast=False),
    lambda a, b, counts: grouped.by_triton(a, b, counts, torch.bfloat16),
    lambda a, b, counts: grouped.by_triton(a, b, counts, torch.float32),
]


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(1, 12), st.integers(1, 18), FORMATS, st.integers(0, 10**6), st.sampled_from(WAYS))
def test_rows_times_their_groups_matrix(
    sizes: list[int], units: int, outputs: int, dtype: torch.dtype, seed: int, way: Callable[..., torch.Tensor]
) -> None:
    sizes = sizes if sum(sizes) or way is WAYS[0] else [0, 1]
    rows, matrices = operands(sizes, 16 * units, 16 * outputs, dtype, seed)
    expected = grouped.rows_product_plain(rows, matrices, sizes, torch.float32)
    close(way(rows, matrices, counts_of(sizes)), expected)


@pytest.mark.parametrize(
    ("works", "kernels_run", "here", "rows", "way"),
    [
        (True, True, True, 2048, "by_torch"),
        (False, True, False, 2048, "by_triton"),
        (False, True, True, 2048, "by_group"),
        (False, True, True, 1000, "by_triton"),
        (False, False, False, 1000, "by_group"),
    ],
)
def test_which_way(monkeypatch: pytest.MonkeyPatch, works: bool, kernels_run: bool, here: bool, rows: int, way: str) -> None:
    """The host is not asked for counts that it does not have where there is a way without them."""
    for name in ("by_torch", "by_triton", "by_group"):
        monkeypatch.setattr(grouped, name, lambda *_, name=name: name)
    monkeypatch.setattr(device, "on_accelerator", lambda _: True)
    monkeypatch.setattr(grouped, "grouped_product_works", lambda *_: works)
    monkeypatch.setattr(grouped, "kernels_run_on", lambda _: kernels_run)
    sizes = [rows // 2, rows // 2]
    operand_rows, matrices = operands(sizes, 16, 16, E4M3, 1)
    found: Any = grouped.rows_product(operand_rows, matrices, counts_of(sizes), torch.bfloat16, counts_are_here=here)
    assert found == way


GRADS = [grouped.weight_grads, grouped.weight_grads_by_group, grouped.weight_grads_by_triton]


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(1, 12), st.integers(1, 18), FORMATS, st.integers(0, 10**6), st.sampled_from(GRADS), st.booleans())
def test_matrices_gradients_group_by_group(
    sizes: list[int], units: int, inputs: int, dtype: torch.dtype, seed: int, way: Callable[..., None], add: bool
) -> None:
    """A group without rows: zeros, or what is there."""
    sizes = sizes if sum(sizes) or way is GRADS[0] else [0, 1]
    m, n, scale = 16 * units, 16 * inputs, torch.ones(1, device=device.current_device())
    left = plain(values(sum(sizes), m, dtype=dtype, seed=seed), sizes, scale, dtype)
    right = plain(values(sum(sizes), n, seed=seed + 1), sizes, scale * 2, E4M3)
    there = torch.randn(len(sizes), m, n, device=scale.device) if add else torch.full((len(sizes), m, n), torch.nan, device=scale.device)
    expected = there.clone()
    grouped.weight_grads_plain(left.by_group(sizes, m), right.by_group(sizes, n), expected, add)
    way(left, right, counts_of(sizes), there, add=add)
    close(there, expected)
    assert all(sizes) or add or not there[sizes.index(0)].any()


def test_a_result_over_an_earlier_one() -> None:
    """Weights stay in their place; with a scale that is made from them too."""
    counts = TokenCounts(torch.full((3,), 32, device=device.current_device()), [32] * 3)
    first = quantize_groups(values(96, 48, seed=1), counts, E4M3)
    places = [part.data_ptr() for part in first if part is not None]
    second = quantize_groups(values(96, 48, seed=2), counts, E4M3, into=first)
    fresh = quantize_groups(values(96, 48, seed=2), counts, E4M3)
    assert [part.data_ptr() for part in second if part is not None] == places and len(places) == 3
    assert second.rows is not None and fresh.rows is not None and same(second.rows, fresh.rows)
    assert same_blocks(second, fresh, [32] * 3, 48) and torch.equal(second.inverse, fresh.inverse)


@pytest.mark.skipif(not ON_GPU, reason="there is torch's grouped product on a GPU alone")
@pytest.mark.parametrize("sizes", [[2048] * 8, [0, 1, 4095, 17, 0, 300, 8, 0], [5], [128, 256]], ids=str)
@pytest.mark.parametrize("shape", [(2048, 1024), (1024, 2048), (16, 64)], ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_torchs_grouped_product(sizes: list[int], shape: tuple[int, int], fast: bool) -> None:
    assert grouped.grouped_product_works(E4M3, E4M3)
    rows, matrices = operands(sizes, *shape, E4M3, 3)
    expected = grouped.rows_product_plain(rows, matrices, sizes, torch.float32)
    found = grouped.by_torch(rows, matrices, counts_of(sizes), fast)
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-7, atol=(1e-2 if fast else SUMS) * float(expected.abs().max()))
    assert float((found.float() - expected).norm() / expected.norm()) < 5e-3
