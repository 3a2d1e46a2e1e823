"""The FP8 kernels against their plain twins: in Triton's interpreter on the CPU, compiled on a GPU.

The interpreter rounds to FP8 by rules of its own: on the CPU the values are ones that FP8 holds, and the test is of everything else. How
the device rounds is tested on a GPU.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fp8 import cublaslt, gemm
from megatron.core.fp8.formats import E4M3, E5M2, LARGEST, amax_of, scale_for
from megatron.core.fp8.quantize import (
    MX_BLOCKS,
    ROW_BLOCKS,
    SQUARE_BLOCKS,
    TENSOR,
    Operand,
    Quantized,
    _filled_up,
    quantize_blocks,
    quantize_blocks_plain,
    quantize_tensor,
    quantize_tensor_plain,
)

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions.kernels import quantize as kernels
from megatron.core.fusions.kernels import quantize_blocks as block_kernels
from megatron.core.fusions.kernels import scaled_mm
from tests.guarded_memory import guarded, surrounded

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
SIZES = st.integers(1, 300)
FORMATS = st.sampled_from([E4M3, E5M2])
NOTHING = (None, None)
KINDS = [(TENSOR, TENSOR), (ROW_BLOCKS, SQUARE_BLOCKS), (ROW_BLOCKS, ROW_BLOCKS)]


def values(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    if not ON_GPU:  # no digits beyond the format's, also where a block's scale is made for another number
        x = torch.where(x.abs() < 2.0**-4, 0.0, x).to(dtype).float()
    return (x * 2.0 ** (seed % 7 - 3)).bfloat16().to(device.current_device())


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert found is not None and expected is not None
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.booleans())
def test_one_scale_that_is_given(m: int, k: int, dtype: torch.dtype, seed: int, strided: bool) -> None:
    x = values(m, 2 * k if strided else k, dtype, seed)[:, :k]
    scale = scale_for(amax_of(x).view(1), LARGEST[dtype])
    amax, expected_amax = (torch.full((1,), 0.5, device=x.device) for _ in range(2))
    expected = quantize_tensor_plain(x, scale, dtype, amax=expected_amax)
    found, inverse = kernels.quantize_tensor(x, dtype, scale, scale.reciprocal(), None, amax, True, True, NOTHING)
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert torch.equal(amax, expected_amax) and torch.equal(inverse, scale.reciprocal())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("sizes", [(256, 256), (144, 272)])  # whole in tiles, and not
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """In the tiles that hold it, and nothing else changes: most tiles are spared the bounds."""
    x = values(*sizes, dtype, 1)
    scale = scale_for(amax_of(x).view(1), LARGEST[dtype])
    x[130, 5], x[2, 200] = 2.0**20, -(2.0**20)
    amax = torch.zeros(1, device=x.device)
    expected = quantize_tensor_plain(x, scale, dtype)
    found, _ = kernels.quantize_tensor(x, dtype, scale, scale.reciprocal(), None, amax, True, True, NOTHING)
    assert same(found[0], expected[0]) and same(found[1], expected[1])
    assert found[0] is not None and [float(found[0][place]) for place in ((130, 5), (2, 200))] == [LARGEST[dtype], -LARGEST[dtype]]
    assert float(amax) == 2.0**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(16, 2048), (13, 1500)])
def test_the_largest_magnitude(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    x = torch.randn(sizes).to(dtype).to(device.current_device())
    x[11, 1400] = -9.0
    assert kernels.largest_magnitude(x).tolist() == [9.0]
    for bad in (torch.inf, torch.nan):
        x[3, 7] = bad
        assert kernels.largest_magnitude(x).isinf().all()


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.sampled_from([(True, True), (True, False), (False, True)]))
def test_one_scale_from_the_tensor(m: int, k: int, dtype: torch.dtype, seed: int, wanted: tuple[bool, bool]) -> None:
    x = values(m, k, dtype, seed)
    scale = scale_for(amax_of(x).view(1), LARGEST[dtype])
    expected = quantize_tensor_plain(x, scale, dtype)
    found, inverse = kernels.quantize_tensor(x, dtype, None, None, amax_of(x).view(1), None, *wanted, NOTHING)
    for result, plain, is_wanted in zip(found, expected, wanted, strict=True):
        assert same(result, plain) if is_wanted else result is None
    assert torch.equal(inverse, scale.reciprocal())


@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.sampled_from([ROW_BLOCKS, SQUARE_BLOCKS]))
def test_blocks(m: int, k: int, dtype: torch.dtype, seed: int, kind: str) -> None:
    x = values(m, k, dtype, seed)
    x[m // 2] *= 64.0  # blocks of several scales
    found, inverses = block_kernels.quantize_blocks(x, dtype, kind, True, True, NOTHING, NOTHING)
    for data, inverse, plain in zip(found, inverses, (quantize_blocks_plain(y, dtype, kind) for y in (x, _filled_up(x))), strict=True):
        assert same(data, plain.data)
        assert inverse is not None and torch.equal(inverse, plain.inverse)
        if kind == ROW_BLOCKS and min(inverse.shape) > 1:
            assert inverse.stride(0) == 1, "cuBLAS reads the scales of all rows of a block at once"


@pytest.mark.parametrize("sizes", [(144, 256), (131, 256), (128, 272), (128, 130)])  # whole in tiles one way, and not the other
@pytest.mark.parametrize("kind", [TENSOR, ROW_BLOCKS, SQUARE_BLOCKS, MX_BLOCKS])
def test_nothing_beyond_a_tensor_is_read_or_written(sizes: tuple[int, int], kind: str) -> None:
    plain = values(*sizes, E4M3, 3)
    x, amax, scale = surrounded(plain), torch.zeros(1, device=plain.device), scale_for(amax_of(plain).view(1), LARGEST[E4M3])
    with guarded():
        if kind == TENSOR:
            found, _ = kernels.quantize_tensor(x, E4M3, scale, scale.reciprocal(), None, amax, True, True, NOTHING)
        else:
            found, inverses = block_kernels.quantize_blocks(x, E4M3, kind, True, True, NOTHING, NOTHING)
    if kind == TENSOR:
        expected = quantize_tensor_plain(plain, scale, E4M3)
        assert torch.equal(amax, amax_of(plain).view(1))
    else:
        operands = [quantize_blocks_plain(y, E4M3, kind) for y in (plain, _filled_up(plain).contiguous())]
        expected = operands[0].data, operands[1].data
        assert all(inverse is not None and torch.equal(inverse, one.inverse) for inverse, one in zip(inverses, operands, strict=True))
    assert same(found[0], expected[0]) and same(found[1], expected[1])


@pytest.mark.parametrize("sizes", [(13, 1024), (16, 1500), (1, 1), (5, 2048)])
def test_the_largest_magnitude_is_of_the_tensor_alone(sizes: tuple[int, int]) -> None:
    x = torch.ones(sizes, dtype=torch.bfloat16, device=device.current_device())
    x[-1, -1] = -2.0
    assert kernels.largest_magnitude(surrounded(x)).tolist() == [2.0]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given_as", [torch.bfloat16, torch.float32])
def test_scales_of_any_magnitude(dtype: torch.dtype, given_as: torch.dtype) -> None:
    """Of every mantissa of bf16 about the formats' largest, of numbers at both ends of fp32, and of zeros."""
    mantissas = 1.0 + torch.arange(128) / 128
    amaxes = torch.stack([mantissas * 2.0**power for power in (-133, -126, -65, -64, -63, -1, 0, 8, 15, 126, 127)]).view(-1, 1)
    x = torch.cat([amaxes, torch.zeros(5, 1)]).repeat(1, 16).to(given_as).to(device.current_device())
    x[:, 3:] = 0.0
    _, (inverse, _) = block_kernels.quantize_blocks(x, dtype, ROW_BLOCKS, True, False, NOTHING, NOTHING)
    assert inverse is not None and torch.equal(inverse, quantize_blocks_plain(x, dtype, ROW_BLOCKS).inverse)


def operand(rows: int, k: int, kind: str, dtype: torch.dtype, seed: int) -> Operand:
    x = values(rows, k, dtype, seed)
    if kind != TENSOR:
        return quantize_blocks_plain(x, dtype, kind)
    scale = scale_for(amax_of(x).view(1), LARGEST[dtype])
    data, _ = quantize_tensor_plain(x, scale, dtype, columns=False)
    assert data is not None
    return Operand(data, scale.reciprocal(), TENSOR)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("sizes", [(1, 16, 16), (130, 272, 144), (132, 144, 656), (256, 512, 384)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_products(kinds: tuple[str, str], sizes: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    (m, n, k), tolerance = sizes, 1e-5 if out_dtype is torch.float32 else 2.0**-7
    a, b = operand(m, k, kinds[0], E5M2, 1), operand(n, k, kinds[1], E4M3, 2)
    expected = gemm.product_plain(a, b, torch.float32)
    atol = (2e-3 if ON_GPU else 1e-5) * float(expected.abs().max())  # tensor cores keep about 14 bits between promotions
    found = scaled_mm.product(a, b, out_dtype)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=atol)
    there = torch.full((m, n), 3.0, dtype=out_dtype, device=found.device)
    assert scaled_mm.product(a, b, out_dtype, there, add=True) is there
    torch.testing.assert_close(there.float(), expected + 3.0, rtol=tolerance, atol=atol)
    main_grad = torch.full((m, n), 3.0, device=found.device)
    gemm.write_product(main_grad, a, b, add=True)
    torch.testing.assert_close(main_grad, expected + 3.0, rtol=1e-5, atol=atol)
    torch.testing.assert_close(gemm.product(a, b, out_dtype).float(), expected, rtol=tolerance, atol=atol)
    torch.testing.assert_close(gemm.product(a, b, out_dtype, out=there).float(), expected, rtol=tolerance, atol=atol)


@pytest.mark.parametrize(
    ("kinds", "sizes", "taken"),
    [
        ((TENSOR, TENSOR), (1, 16, 16), True),
        ((TENSOR, TENSOR), (1, 16, 24), False),
        ((TENSOR, TENSOR), (1, 24, 16), False),
        ((ROW_BLOCKS, ROW_BLOCKS), (4, 16, 144), True),
        ((ROW_BLOCKS, ROW_BLOCKS), (6, 16, 512), False),
        ((ROW_BLOCKS, SQUARE_BLOCKS), (4, 16, 496), True),
        ((ROW_BLOCKS, SQUARE_BLOCKS), (4, 16, 256), False),
        ((ROW_BLOCKS, SQUARE_BLOCKS), (4, 16, 384), False),
        ((TENSOR, TENSOR), (0, 16, 16), False),
        ((TENSOR, TENSOR), (16, 16, 0), False),
        ((ROW_BLOCKS, ROW_BLOCKS), (16, 16, 0), False),
    ],
)
def test_what_cublas_is_asked_for(kinds: tuple[str, str], sizes: tuple[int, int, int], taken: bool) -> None:
    """It reads scales by fours: of 1 x 128 those of rows, of 128 x 128 those of blocks along k. Of nothing it is not asked."""
    m, n, k = sizes
    a, b = operand(m, k, kinds[0], E4M3, 1), operand(n, k, kinds[1], E4M3, 2)
    assert gemm._cublas_takes(a, b) is taken


def test_cublaslt_is_not_tried_with_blocks_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "trial", lambda *kinds: pytest.fail("it was tried"))
    assert not cublaslt.works.__wrapped__(MX_BLOCKS, MX_BLOCKS, torch.float32)


@pytest.mark.parametrize(
    ("kind", "out_dtype", "how", "asked"),
    [
        (TENSOR, torch.bfloat16, "written", "cublaslt"),
        (TENSOR, torch.bfloat16, "fast", "torch"),
        (ROW_BLOCKS, torch.bfloat16, "fast", "cublaslt"),
        (ROW_BLOCKS, torch.float32, "added", "cublaslt adds"),
        (ROW_BLOCKS, torch.bfloat16, "added", "cublaslt"),
    ],
)
def test_who_is_asked_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kind: str, out_dtype: torch.dtype, how: str, asked: str) -> None:
    """torch for fast sums of one scale, which cuBLASLt is not told of; cuBLASLt adds to fp32 alone."""
    calls = []

    def by_cublaslt(out: torch.Tensor, a: Operand, b: Operand, *, add: bool) -> None:
        calls.append("cublaslt adds" if add else "cublaslt")
        out.copy_(gemm.product_plain(a, b, out.dtype) + (out if add else 0.0))

    def by_torch(a: Operand, b: Operand, dtype: torch.dtype, out: torch.Tensor | None, fast: bool) -> torch.Tensor:
        calls.append("torch")
        return gemm.product_plain(a, b, dtype)

    monkeypatch.setattr(device, "on_accelerator", lambda tensor: True)
    for place, name, stand_in in (
        (cublaslt, "works", lambda *kinds: True), (gemm, "cublas_works", lambda *kinds: True),
        (cublaslt, "write_product", by_cublaslt), (gemm, "_cublas", by_torch),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, stand_in)
    a, b = operand(16, 48, kind, E5M2, 1), operand(32, 48, kind, E4M3, 2)
    expected = gemm.product_plain(a, b, torch.float32)
    if how == "added":
        found = torch.full((16, 32), 3.0, dtype=out_dtype, device=expected.device)
        gemm.write_product(found, a, b, add=True)
        found -= 3.0
    else:
        found = gemm.product(a, b, out_dtype, fast=how == "fast")
    assert calls == [asked]
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-6, atol=2.0**-6 * float(expected.abs().max()))


@pytest.mark.skipif(not ON_GPU, reason="Triton's interpreter turns NaN into a number when it casts to FP8")
def test_what_is_not_finite_becomes_nan() -> None:
    x = torch.ones(16, 32, device=device.current_device(), dtype=torch.bfloat16)
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    one, amax = torch.ones(1, device=x.device), torch.zeros(1, device=x.device)
    for dtype in (E4M3, E5M2):
        found, _ = kernels.quantize_tensor(x, dtype, one, one, None, amax, True, True, NOTHING)
        for data, bad in zip(found, (~x.isfinite(), ~x.isfinite().t()), strict=True):
            assert data is not None and torch.equal(data.float().isnan(), bad)
        assert amax.isinf().all()
        for kind in (ROW_BLOCKS, SQUARE_BLOCKS, MX_BLOCKS):
            (blocks, _), (inverse, _) = block_kernels.quantize_blocks(x, dtype, kind, True, False, NOTHING, NOTHING)
            assert blocks is not None and inverse is not None
            assert Operand(blocks, inverse, kind).value()[~x.isfinite()].isnan().all()


@pytest.mark.skipif(not ON_GPU, reason="there is cuBLAS on a GPU alone")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", KINDS)
def test_cublas_takes(kinds: tuple[str, str], out_dtype: torch.dtype) -> None:
    if kinds != (TENSOR, TENSOR) and device.compute_capability() != (9, 0):
        pytest.skip("blocks of 128 are Hopper's")
    assert gemm.cublas_works(*kinds, out_dtype)


@pytest.mark.skipif(not ON_GPU, reason="there is cuBLASLt on a GPU alone")
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", KINDS)
def test_cublaslt_is_torchs_product(kinds: tuple[str, str], out_dtype: torch.dtype) -> None:
    """Of many sizes, which have kernels of their own, where matrices begin at 16 bytes and at 256; the same by a second stream."""
    if kinds != (TENSOR, TENSOR) and device.compute_capability() != (9, 0):
        pytest.skip("blocks of 128 are Hopper's")
    assert cublaslt.works(*kinds, out_dtype)
    for m, n, k in ((4, 16, 512), (128, 272, 512), (1152, 528, 1024), (384, 2048, 4096), (256, 144, 16 if kinds[1] == TENSOR else 4096)):
        a, b = operand(m, k, kinds[0], E5M2, 1), operand(n, k, kinds[1], E4M3, 2)
        for beside in (0, 16):  # bytes that a and the result begin behind
            moved = a.data.new_empty(m * k + beside)[beside:].view(m, k)
            moved.copy_(a.data)
            a = a._replace(data=moved)
            expected, room = gemm._cublas(a, b, out_dtype), torch.full((m * n + beside,), 3.0, dtype=out_dtype, device=moved.device)
            found = room[beside:].view(m, n)
            cublaslt.write_product(found, a, b, add=False)
            close = partial(torch.testing.assert_close, rtol=2.0**-7, atol=1e-3 * float(expected.float().abs().max()))
            close(found, expected)
            assert bool((room[:beside] == 3.0).all())
            if out_dtype is torch.float32:
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                    cublaslt.write_product(found, a, b, add=True)
                torch.cuda.synchronize()
                close(found, 2 * expected)


def test_a_result_over_an_earlier_one() -> None:
    def places(pair: Quantized) -> list[int]:
        return [tensor.data_ptr() for part in pair if part is not None for tensor in part[:2]]

    for make in (partial(quantize_tensor, dtype=E4M3), partial(quantize_blocks, dtype=E4M3, kind=SQUARE_BLOCKS)):
        first: Quantized = make(values(64, 48, E4M3, 1))
        before = places(first)
        second, fresh = make(values(64, 48, E4M3, 2), into=first), make(values(64, 48, E4M3, 2))
        assert len(before) == 4 and places(second) == before
        for found, expected in zip(second, fresh, strict=True):
            assert found is not None and expected is not None
            assert same(found.data, expected.data) and torch.equal(found.inverse, expected.inverse)
