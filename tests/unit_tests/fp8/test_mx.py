"""The mxfp8 recipe as on a GPU that has it: kernels in Triton's interpreter, and a double of the library that reads
scales as its documentation says and refuses what it would.

Values are ones that FP8 holds where the interpreter rounds: it does by rules of its own (test_kernels.py).
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fp8 import cublaslt, gemm, mx_check, mx_scales, quantize
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.linear import Fp8Linear
from megatron.core.fp8.quantize import (
    MX_BLOCK,
    MX_BLOCKS,
    SQUARE_BLOCKS,
    Operand,
    Quantized,
    _filled_up,
    quantize_blocks,
    quantize_blocks_plain,
)
from megatron.core.fp8.settings import Fp8Settings

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import mx_scales as scale_kernels
from megatron.core.fusions.kernels import quantize_blocks as block_kernels
from megatron.core.fusions.kernels import scaled_mm

HAS_RECIPE = device.has_accelerator() and device.compute_capability() >= (10, 0)
pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
on_the_cpu = pytest.mark.skipif(device.has_accelerator(), reason="the library's double computes on a CPU")
SIZES = st.integers(1, 150)
FORMATS = st.sampled_from([E4M3, E5M2])
NOTHING = (None, None)
Read = Callable[[torch.Tensor, int, int], torch.Tensor]


def there(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device.current_device())


# --- scales as the library reads them ---


@given(st.integers(1, 300), st.integers(1, 11))
def test_tiles_hold_each_scale_where_the_library_looks_for_it(rows: int, blocks: int) -> None:
    scales = torch.arange(1, rows * blocks + 1).view(rows, blocks)
    tiles = mx_scales.tiled(scales)
    across = -(-blocks // 4)
    assert tiles.shape == (-(-rows // 128) * across * 512,)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    in_tile = row % 128 % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert torch.equal(tiles[(row // 128 * across + column // 4) * 512 + in_tile], scales)
    assert int((tiles == 0).sum()) == len(tiles) - rows * blocks, "the rest is filled up with zeros"
    assert torch.equal(mx_scales.untiled(tiles, rows, blocks), scales)


def test_each_power_of_two_has_its_byte() -> None:
    powers = torch.arange(-127, 128).double().exp2().float()
    found = mx_scales.exponents(powers)
    assert found.tolist() == list(range(255))
    assert torch.equal(found.view(torch.float8_e8m0fnu).float(), powers)
    assert torch.equal(found, powers.to(torch.float8_e8m0fnu).view(torch.uint8))


def test_scales_beyond_the_ends() -> None:
    assert mx_scales.exponents(torch.tensor([0.0, 2.0**-149, 2.0**-128, 2.0**-127])).tolist() == [0] * 4, "2 ** -127"
    nan = mx_scales.exponents(torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan]))
    assert nan.tolist() == [255] * 4 and nan.view(torch.float8_e8m0fnu).float().isnan().all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 11), st.integers(0, 10**6), st.booleans())
def test_the_kernel_of_tiles(rows: int, blocks: int, seed: int, turned: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-127, 128, (blocks, rows) if turned else (rows, blocks), generator=generator).double().exp2().float()
    scales.view(-1)[0] = torch.inf
    scales = there(scales.t() if turned else scales)
    assert torch.equal(scale_kernels.tiles(scales).view(torch.float8_e8m0fnu).view(torch.uint8), tiles_of(scales))


def tiles_of(scales: torch.Tensor) -> torch.Tensor:
    return mx_scales.cublas_scales_plain(scales).view(torch.uint8)


# --- quantization ---


def values(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """fp32 that each format holds under each block's scale, of many magnitudes; rows and columns of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    x = torch.where(x.abs() < 2.0**-4, 0.0, x).to(dtype).float()
    x[seed % m] *= 16.0
    x[:, seed % k] /= 16.0
    x[(seed + 1) % m] = 0.0
    return x


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def by_kernel(x: torch.Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True) -> Quantized:
    data, inverses = block_kernels.quantize_blocks(x, dtype, MX_BLOCKS, rows, columns, NOTHING, NOTHING)
    made = [None if part is None or inverse is None else Operand(part, inverse, MX_BLOCKS) for part, inverse in zip(data, inverses)]
    return Quantized(*made)


def assert_same(found: Operand | None, plain: Operand) -> None:
    assert found is not None and same(found.data, plain.data)
    assert torch.equal(found.inverse, plain.inverse)
    assert min(plain.inverse.shape) == 1 or found.inverse.stride() == plain.inverse.stride()


@settings(max_examples=30, deadline=None)
@given(
    SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from(["whole", "part", "turned"]), st.sampled_from([(True, True), (True, False), (False, True)]),
)  # fmt: skip
def test_blocks(m: int, k: int, dtype: torch.dtype, seed: int, given_as: torch.dtype, lies: str, wanted: tuple[bool, bool]) -> None:
    whole = there(values(m, k, dtype, seed).to(given_as))
    x = {"whole": whole, "part": torch.cat([whole, whole], dim=1)[:, :k], "turned": whole.t().contiguous().t()}[lies]
    found = by_kernel(x, dtype, *wanted)
    for operand, is_wanted, source in zip(found, wanted, (x, _filled_up(x).contiguous()), strict=True):
        if is_wanted:
            assert_same(operand, quantize_blocks_plain(source, dtype, MX_BLOCKS))
        else:
            assert operand is None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: 1 / 0 and 0 * inf are meant
@settings(max_examples=20, deadline=None)
@given(SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.sampled_from([torch.inf, -torch.inf, torch.nan]))
def test_a_block_that_is_not_finite_has_no_scale_and_others_are_as_before(
    m: int, k: int, dtype: torch.dtype, seed: int, bad: float
) -> None:
    """That the data are NaN is tested on a GPU: the interpreter makes a number of NaN when it casts."""
    x = there(values(m, k, dtype, seed).bfloat16())
    x[(seed + 2) % m, (seed + 3) % k] = bad
    found = by_kernel(x, dtype)
    for operand, source in zip(found, (x, _filled_up(x).contiguous()), strict=True):
        plain = quantize_blocks_plain(source, dtype, MX_BLOCKS)
        assert operand is not None and torch.equal(operand.inverse, plain.inverse) and int(plain.inverse.isinf().sum()) == 1
        good = plain.value().isfinite()
        assert torch.equal(operand.value()[good], plain.value()[good]) and not good.all()
        bytes_of_it = mx_scales.untiled(tiles_of(operand.inverse), *operand.inverse.shape)
        assert torch.equal(bytes_of_it == 255, plain.inverse.isinf()), "NaN for the library"


@pytest.mark.parametrize("shape", [(0, 48), (1, 16)])
def test_a_tensor_without_rows_and_one_of_a_row(shape: tuple[int, int]) -> None:
    x = torch.ones(shape, dtype=torch.bfloat16, device=device.current_device())
    rows, columns = quantize_blocks(x, E4M3, MX_BLOCKS)
    assert rows is not None and columns is not None
    assert torch.equal(rows.value(), x.float()) and torch.equal(columns.value()[:, : shape[0]], x.t().float())
    weight = quantize_blocks_plain(torch.ones(32, shape[1], device=x.device), E4M3, MX_BLOCKS)
    assert torch.equal(gemm.product(rows, weight, torch.float32), torch.full((shape[0], 32), float(shape[1]), device=x.device))
    total = torch.ones(shape[1], shape[1], device=x.device)
    gemm.write_product(total, columns, columns, add=True)
    assert torch.equal(total, torch.full_like(total, 1.0 + shape[0]))


def test_over_an_earlier_result() -> None:
    x, y = (there(values(40, 80, E4M3, seed).bfloat16()) for seed in (1, 2))
    first, fresh = by_kernel(x, E4M3), by_kernel(y, E4M3)
    data, inverses = [tuple(part and part[place] for part in first) for place in (0, 1)]
    block_kernels.quantize_blocks(y, E4M3, MX_BLOCKS, True, True, data, inverses)  # type: ignore[arg-type]
    for found, expected in zip(first, fresh, strict=True):
        assert expected is not None
        assert_same(found, expected)


# --- Triton's product ---


def operand(rows: int, k: int, dtype: torch.dtype, seed: int) -> Operand:
    return quantize_blocks_plain(there(values(rows, k, dtype, seed)), dtype, MX_BLOCKS)


@settings(max_examples=15, deadline=None)
@given(SIZES, SIZES, SIZES, FORMATS, st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_tritons_product(m: int, n: int, k: int, dtype: torch.dtype, seed: int, out_dtype: torch.dtype) -> None:
    a, b = operand(m, k, dtype, seed), operand(n, k, E4M3, seed + 1)
    expected = gemm.product_plain(a, b, torch.float32)
    size = gemm.product_plain(Operand(a.data.float().abs(), a.inverse, MX_BLOCKS), b._replace(data=b.data.float().abs()), torch.float32)
    tolerance = 2.0**-7 if out_dtype is torch.bfloat16 else 2e-3 if device.has_accelerator() else 1e-6

    def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert found.dtype is out_dtype and bool(((found.float() - wanted).abs() <= tolerance * (size + 3.0)).all())

    close(scaled_mm.product(a, b, out_dtype), expected)
    out = torch.full((m, n), 3.0, dtype=out_dtype, device=a.data.device)
    assert scaled_mm.product(a, b, out_dtype, out, add=True) is out
    close(out, expected + 3.0)


def test_blocks_of_32_times_others_are_nobodys_product() -> None:
    a, b = operand(32, 128, E4M3, 1), quantize_blocks_plain(there(values(32, 128, E4M3, 2)), E4M3, SQUARE_BLOCKS)
    assert not gemm._cublas_takes(a, b)
    with pytest.raises(AssertionError):
        scaled_mm.product(a, b, torch.float32)


# --- the library's product, by a double ---


class Library:
    """torch._scaled_mm for blocks of 32. read(tiles, rows, blocks) -> what it takes for the scales."""

    def __init__(self, read: Read = mx_scales.untiled) -> None:
        self.read, self.calls, self.failure = read, 0, ""

    def value(self, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        (rows, k), blocks = data.shape, -(-data.shape[1] // 32)
        if scales.dtype is not torch.float8_e8m0fnu or not scales.is_contiguous():
            raise ValueError("scales of 1 x 32 are contiguous and e8m0")
        if scales.numel() != -(-rows // 128) * 128 * -(-blocks // 4) * 4 or not data.is_contiguous():
            raise ValueError("scales are of whole tiles, data contiguous along k")
        wide = self.read(scales.view(torch.uint8), rows, blocks).view(torch.float8_e8m0fnu).float()
        return data.float() * wide.repeat_interleave(32, dim=1)[:, :k]

    def product(
        self, left: torch.Tensor, right: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:  # fmt: skip
        self.calls += 1
        if self.failure:
            raise RuntimeError(self.failure)
        if use_fast_accum or left.shape[1] % 32 or right.shape[1] % 16 or not len(left):
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        if left.dtype is right.dtype is E5M2:
            raise RuntimeError("no product of e5m2 and e5m2")
        return (self.value(left, scale_a) @ self.value(right.t(), scale_b).t()).to(out_dtype)

    def into(
        self, left: Any, right: Any, scale_a: Any, scale_b: Any, bias: Any, scale: Any, out_dtype: Any, fast: bool, *, out: Any
    ) -> Any:
        assert bias is None and scale is None and out.dtype is out_dtype
        return out.copy_(self.product(left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A GPU that has the recipe: tensors count as its, Triton's kernels are interpreted but for quantization, whose rounding is not."""
    import torch.distributed.tensor  # walks over all operators of torch as it is imported, so before one is replaced

    double = Library()
    monkeypatch.setattr(torch, "_scaled_mm", double.product)
    monkeypatch.setattr(torch.ops.aten._scaled_mm, "out", double.into)
    monkeypatch.setattr(device, "on_accelerator", lambda tensor: True)
    monkeypatch.setattr(kernels, "compiles", lambda: True)
    monkeypatch.setattr(quantize, "kernels_run_on", lambda tensor: False)
    for cached in (gemm.cublas_works, mx_check.mx_problem):
        monkeypatch.setattr(gemm if cached is gemm.cublas_works else mx_check, cached.__name__, cached.__wrapped__)
    return double


@on_the_cpu
@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((64, 32, 64), True),
        ((7, 16, 32), True),
        ((130, 144, 160), True),
        ((64, 32, 48), False),
        ((64, 40, 64), False),
        ((0, 32, 64), False),
    ],
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_what_the_library_takes(library: Library, sizes: tuple[int, int, int], taken: bool, out_dtype: torch.dtype) -> None:
    (m, n, k), tolerance = sizes, 1e-6 if out_dtype is torch.float32 else 2.0**-7
    a, b = operand(max(m, 1), k, E5M2, 1), operand(n, k, E4M3, 2)
    a = Operand(a.data[:m], a.inverse[:m], MX_BLOCKS)
    assert gemm.cublas_works(MX_BLOCKS, MX_BLOCKS, out_dtype)
    tried, expected = library.calls, gemm.product_plain(a, b, torch.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gemm, "cublas_works", lambda *kinds: True)
        found = gemm.product(a, b, out_dtype)
        assert library.calls == tried + taken
        out = torch.empty(m, n, dtype=out_dtype)
        assert gemm.product(a, b, out_dtype, out=out, fast=True) is out and torch.equal(out, found)
        torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=1e-6 * float(expected.abs().sum()))


def _misread(order: tuple[int, ...]) -> Read:
    def read(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
        down, across = -(-rows // 128), -(-blocks // 4)
        return tiles.view(down, across, 32, 4, 4).permute(order).reshape(down * 128, across * 4)[:rows, :blocks]

    return read


def _tiles_by_columns(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    turned = tiles.view(-(-blocks // 4), -(-rows // 128), 512).transpose(0, 1)
    return mx_scales.untiled(turned.reshape(-1), rows, blocks)


def _without_the_last(dim: int) -> Read:
    def read(tiles: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
        return mx_scales.untiled(tiles, rows, blocks).index_fill(dim, torch.tensor((rows, blocks)[dim] - 1), 0)

    return read


MISREADINGS: dict[str, Read] = {
    "as they lie": lambda tiles, rows, blocks: tiles[: rows * blocks].view(rows, blocks),
    "lanes for quarters": _misread((0, 2, 3, 1, 4)),
    "quarters for blocks": _misread((0, 4, 2, 1, 3)),
    "tiles by columns": _tiles_by_columns,
    "one power too high": lambda tiles, rows, blocks: mx_scales.untiled(tiles, rows, blocks) + 1,
    "without scales": lambda tiles, rows, blocks: torch.full((rows, blocks), 127, dtype=torch.uint8),
    "not the last row's": _without_the_last(0),
    "not the last block's": _without_the_last(1),
}


@on_the_cpu
@pytest.mark.parametrize("name", MISREADINGS)
def test_a_library_that_reads_scales_otherwise_is_found_out(library: Library, caplog: pytest.LogCaptureFixture, name: str) -> None:
    library.read = MISREADINGS[name]
    with caplog.at_level(logging.WARNING):
        assert not gemm.cublas_works(MX_BLOCKS, MX_BLOCKS, torch.bfloat16)
    assert "1 x 32 times 1 x 32 (results differ" in caplog.text and "Triton does" in caplog.text


@on_the_cpu
def test_where_the_library_refuses_triton_computes(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.failure = "no e8m0 here"
    a, b = operand(40, 64, E5M2, 1), operand(32, 64, E4M3, 2)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(gemm.product(a, b, torch.float32), gemm.product_plain(a, b, torch.float32), rtol=1e-5, atol=1e-4)
    assert "RuntimeError: no e8m0 here" in caplog.text
    assert mx_check.mx_problem() is None, "right, if slower"


# --- the check at start ---


@on_the_cpu
def test_a_device_that_computes_the_recipe_passes(library: Library) -> None:
    assert mx_check.mx_problem() is None and library.calls


@on_the_cpu
def test_wrong_products_are_found_out(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    right = scaled_mm.product

    def wrong_in_half_blocks(a: Operand, b: Operand, *more: Any, **others: Any) -> torch.Tensor:
        return right(a, b, *more, **others).mul_(0.9 if a.data.shape[1] % MX_BLOCK else 1.0)

    monkeypatch.setattr(scaled_mm, "product", wrong_in_half_blocks)
    problem = mx_check.mx_problem() or ""
    assert "a product of torch.float8_e5m2 (72, 80) times (48, 80) to torch.bfloat16: results differ by 0.1" in problem


@on_the_cpu
@pytest.mark.parametrize("part", Quantized._fields)
@pytest.mark.parametrize("wrong", ["number", "scale", "nan"])
def test_wrong_quantization_is_found_out(library: Library, monkeypatch: pytest.MonkeyPatch, part: str, wrong: str) -> None:
    def quantize_wrongly(x: torch.Tensor, dtype: torch.dtype, kind: str) -> Quantized:
        made = quantize_blocks(x, dtype, kind)
        operand = getattr(made, part)
        if wrong == "scale":
            operand.inverse[3, 2] *= 2.0
        elif wrong == "number":
            operand.data.view(torch.uint8)[5, 6] ^= 1
        else:
            operand.data.copy_(operand.data.float().nan_to_num(nan=0.0).to(dtype))
        return made

    monkeypatch.setattr(mx_check, "quantize_blocks", quantize_wrongly)
    assert f"float8_e4m3fn in {part} are not those of the rule" in (mx_check.mx_problem() or "")


@on_the_cpu
def test_a_compiler_that_fails_is_a_problem(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*operands: Any, **more: Any) -> torch.Tensor:
        raise AssertionError("no such instruction\nof ptxas")

    monkeypatch.setattr(scaled_mm, "product", fails)
    assert mx_check.mx_problem() == "AssertionError: no such instruction"


@pytest.mark.skipif(not HAS_RECIPE, reason="needs a GPU of compute capability 10.0")
def test_this_gpu_computes_the_recipe() -> None:
    assert mx_check.mx_problem() is None
    assert all(gemm.cublas_works(MX_BLOCKS, MX_BLOCKS, dtype) for dtype in (torch.bfloat16, torch.float32))


# --- a linear ---


def _linear_steps(tokens: int) -> list[torch.Tensor]:
    """Outputs and input gradients of two micro batches, and the weight's gradient in fp32."""
    torch.manual_seed(5)
    weight: Any = torch.nn.Parameter(torch.randn(96, 64).mul(0.1).bfloat16())
    weight.main_grad, weight.main_grad_filled = torch.empty(96, 64), False
    linear, found = Fp8Linear(Fp8Settings("mxfp8", hybrid=True), weight), []
    for _ in range(2):
        x = torch.randn(tokens, 1, 64).bfloat16().requires_grad_()
        out = linear(x, None, fuse_weight_grad=True, reduce_input_grad=False, sequence_parallel=False, group=None, training=True)
        out.backward(torch.randn_like(out) * 1e-4)
        assert x.grad is not None
        found += [out.detach(), x.grad]
    return [*found, weight.main_grad]


@on_the_cpu
@pytest.mark.parametrize("tokens", [64, 24])
def test_a_linear_on_a_gpu_computes_what_the_emulation_does(request: pytest.FixtureRequest, tokens: int) -> None:
    """Also with tokens that fill no block, whose weight gradients Triton computes. cuBLASLt is not asked to add."""
    emulated = _linear_steps(tokens)
    library = request.getfixturevalue("library")
    found = _linear_steps(tokens)
    assert library.calls and not cublaslt.works(MX_BLOCKS, MX_BLOCKS, torch.float32)
    for one, other in zip(found, emulated, strict=True):
        tolerance = 1e-5 if one.dtype is torch.float32 else 2.0**-7
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))
