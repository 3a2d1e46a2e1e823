"""Times of FP8 products and of quantization at the shapes of llama8L on a GPU, against bf16: `python tools/benchmark/fp8.py`.

Printed: for each linear of a layer (8192 tokens) its three products in bf16, by torch._scaled_mm and by the Triton kernel, with one scale a
tensor and with blocks, in ms and TFLOP/s; a weight gradient that adds to fp32, by several ways; quantization in ms and GB/s. `experts`: the
products of experts' linears, each way that there is. `host`: what asking for a product takes the host, in microseconds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command_line import check_there_are_gpus

from megatron.core.fp8 import cublaslt, gemm, grouped
from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.quantize import ROW_BLOCKS, SQUARE_BLOCKS, TENSOR, Operand, quantize_blocks, quantize_tensor, quantized_rows
from megatron.core.tensor_parallel.weight_grad import write_grouped_weight_grad
from megatron.core.transformer.moe.token_dispatcher import TokenCounts

TOKENS = 8192
LINEARS = {"qkv": (6144, 4096), "proj": (4096, 4096), "fc1": (28672, 4096), "fc2": (4096, 14336)}  # outputs, inputs


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def report(name: str, time: float, flops: float = 0.0, bytes_moved: float = 0.0) -> None:
    rate = f"{flops / time / 1e9:7.0f} TFLOP/s" if flops else f"{bytes_moved / time / 1e6:7.0f} GB/s"
    print(f"{name:64s} {time:8.3f} ms {rate}", flush=True)


def attempt(name: str, run: Callable[[], object], flops: float = 0.0, bytes_moved: float = 0.0) -> None:
    try:
        report(name, milliseconds(run), flops, bytes_moved)
    except Exception as error:  # what a device does not take is a result too
        print(f"{name:64s} {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)


def products() -> None:
    from megatron.core.fusions.kernels import scaled_mm

    for name, (n, k) in LINEARS.items():
        flops = 2.0 * TOKENS * n * k
        for what, (rows, columns, depth) in {"forward": (TOKENS, n, k), "dgrad": (TOKENS, k, n), "wgrad": (n, k, TOKENS)}.items():
            a, b = torch.randn(rows, depth, device="cuda").bfloat16(), torch.randn(columns, depth, device="cuda").bfloat16()
            attempt(f"{name} {what} bf16", partial(torch.mm, a, b.t()), flops)
            left_dtype = E4M3 if what == "forward" else E5M2
            out_dtype = torch.float32 if what == "wgrad" else torch.bfloat16
            kinds = [(TENSOR, TENSOR), (ROW_BLOCKS, ROW_BLOCKS if what == "wgrad" else SQUARE_BLOCKS)]
            for kind_a, kind_b in kinds:
                left, right = quantized_rows(a, left_dtype, kind_a), quantized_rows(b, E4M3, kind_b)
                label = f"{name} {what} {kind_a} x {kind_b} -> {str(out_dtype).removeprefix('torch.')}"
                out = torch.zeros(rows, columns, device="cuda", dtype=out_dtype)
                for fast in (True, False):
                    sums = ", fast sums" if fast else ""
                    attempt(f"{label}, cuBLAS{sums}", partial(gemm._cublas, left, right, out.dtype, out, fast), flops)
                attempt(f"{label}, Triton", partial(scaled_mm.product, left, right, out.dtype, out), flops)
                if what == "wgrad":
                    _accumulate(label, left, right, out, flops)
            del a, b


def _accumulate(label: str, left: Operand, right: Operand, out: torch.Tensor, flops: float) -> None:
    from megatron.core.fusions.kernels import scaled_mm

    attempt(f"{label}, fp32 and add", lambda: out.add_(gemm._cublas(left, right, torch.float32)), flops)
    attempt(f"{label}, bf16 and add", lambda: out.add_(gemm._cublas(left, right, torch.bfloat16)), flops)
    attempt(f"{label}, cuBLASLt adds", partial(cublaslt.write_product, out, left, right, add=True), flops)
    attempt(f"{label}, Triton adds", lambda: scaled_mm.product(left, right, torch.float32, out, add=True), flops)


def quantization() -> None:
    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    for width in (4096, 14336, 28672):
        x = torch.randn(TOKENS, width, device="cuda").bfloat16()
        size = x.numel()
        delayed = partial(quantize_tensor, x, E4M3, scale=one, inverse=one, amax=amax)
        attempt(f"delayed, {width} wide", delayed, bytes_moved=4 * size)
        attempt(f"delayed, {width} wide, rows alone", partial(delayed, columns=False), bytes_moved=3 * size)
        attempt(f"tensorwise, {width} wide", partial(quantize_tensor, x, E5M2), bytes_moved=6 * size)
        attempt(f"1 x 128, {width} wide", partial(quantize_blocks, x, E4M3, ROW_BLOCKS), bytes_moved=4 * size)
        attempt(f"128 x 128, {width} wide", partial(quantize_blocks, x, E4M3, SQUARE_BLOCKS), bytes_moved=4 * size)
        attempt(f"copy, {width} wide", x.clone, bytes_moved=4 * size)


def tiles() -> None:
    """The kernels by the shape of what a program takes; each shape is compiled."""
    from megatron.core.fusions.kernels import quantize, swiglu_quantize

    one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
    x = torch.randn(TOKENS, 14336, device="cuda").bfloat16()
    hidden = torch.randn(TOKENS, 28672, device="cuda").bfloat16()
    size = x.numel()
    for tile in ((64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 256, 16), (256, 128, 16)):
        quantize.TILE = tile
        attempt(f"quantize {tile}", partial(quantize_tensor, x, E4M3, scale=one, inverse=one, amax=amax), bytes_moved=4 * size)
    for programs in ((32, 128, 8, 64), (32, 128, 4, 112), (64, 128, 8, 112), (64, 64, 8, 64), (32, 64, 4, 72)):
        swiglu_quantize.BACKWARD_TILE = programs
        back = partial(swiglu_quantize.backward, hidden, x, E4M3, one, E5M2, one, amax)
        attempt(f"SwiGLU backward {programs}", back, bytes_moved=11 * size)
    for tile in ((8, 512, 4), (8, 512, 8), (8, 1024, 8)):
        swiglu_quantize.FORWARD_TILE = tile
        attempt(f"SwiGLU forward {tile}", partial(swiglu_quantize.forward, hidden, E4M3, one, amax), bytes_moved=5 * size)


def experts() -> None:
    """A linear's products for the experts of moe8x (16384 rows of 8), and for many small ones, each way that there is."""
    for rows, count, name, (n, k) in (
        (16384, 8, "fc1", (14336, 2048)),
        (16384, 8, "fc2", (2048, 7168)),
        (16384, 64, "fc1 of 64", (2816, 2048)),
        (16384, 64, "fc2 of 64", (2048, 1408)),
    ):
        uneven = torch.rand(count, generator=torch.Generator().manual_seed(1)) + 0.5
        sizes = (uneven / uneven.sum() * rows).long()
        sizes[-1] += rows - sizes.sum()
        counts = TokenCounts(sizes.to("cuda"), sizes.tolist())
        flops = 2.0 * rows * n * k
        weight = torch.randn(count, n, k, device="cuda").bfloat16()
        one = torch.ones(1, device="cuda")
        matrices = Operand(weight.to(E4M3), one, TENSOR), Operand(weight.transpose(1, 2).contiguous().to(E4M3), one, TENSOR)
        x, dy = torch.randn(rows, k, device="cuda").bfloat16(), torch.randn(rows, n, device="cuda").bfloat16()
        _products_of_rows(f"{name} forward", x, weight.transpose(1, 2), matrices[0], counts, (E4M3,), flops)
        _products_of_rows(f"{name} dgrad", dy, weight, matrices[1], counts, (E5M2, E4M3), flops)
        if name.startswith("fc1"):
            _swiglu_of_experts(f"{name} SwiGLU", dy, counts)
        _gradients_of_experts(f"{name} wgrad", dy, x, counts, torch.zeros(count, n, k, device="cuda"), flops)


def _products_of_rows(
    label: str, x: torch.Tensor, weight: torch.Tensor, matrices: Operand, counts: TokenCounts, formats: tuple, flops: float
) -> None:
    offsets = counts.on_device.cumsum(0).to(torch.int32)
    attempt(f"{label} bf16", partial(torch.nn.functional.grouped_mm, x, weight, offs=offsets), flops)
    for dtype in formats:
        one, amax = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")
        quantize = partial(grouped.quantize_groups, x, counts, dtype, scale=one, inverse=one, amax=amax)
        attempt(f"{label} {dtype} quantized both ways", quantize, bytes_moved=4 * x.numel())
        data = quantize().rows
        assert data is not None
        rows = Operand(data, one, TENSOR)
        for fast in (True, False):
            sums = ", fast sums" if fast else ""
            attempt(f"{label} {dtype} by torch{sums}", partial(grouped.by_torch, rows, matrices, counts, fast), flops)
            attempt(f"{label} {dtype} by group{sums}", partial(grouped.by_group, rows, matrices, counts, x.dtype, fast), flops)
        attempt(f"{label} {dtype} by Triton", partial(grouped.by_triton, rows, matrices, counts, x.dtype), flops)


def _swiglu_of_experts(label: str, hidden: torch.Tensor, counts: TokenCounts) -> None:
    from megatron.core.fusions.kernels import swiglu_quantize, swiglu_quantize_groups

    rows, width = hidden.shape[0], hidden.shape[1] // 2
    one, amax, weights = torch.ones(1, device="cuda"), torch.zeros(1, device="cuda"), torch.rand(rows, device="cuda")
    grad = torch.randn(rows, width, device="cuda").bfloat16()
    attempt(f"{label} forward", partial(swiglu_quantize.forward, hidden, E4M3, one, amax, weights), bytes_moved=5 * grad.numel())
    for tile in ((64, 64, 4), (64, 64, 8), (32, 64, 4), (64, 32, 4), (128, 32, 4)):
        swiglu_quantize_groups.TILE = tile
        back = partial(swiglu_quantize_groups.backward, hidden, weights, grad, counts.on_device, E4M3, one, E5M2, one, amax)
        attempt(f"{label} backward {tile}", back, bytes_moved=11 * grad.numel())


def _gradients_of_experts(label: str, dy: torch.Tensor, x: torch.Tensor, counts: TokenCounts, out: torch.Tensor, flops: float) -> None:
    one = torch.ones(1, device="cuda")
    left, right = (grouped.quantize_groups(t, counts, dtype, scale=one, inverse=one) for t, dtype in ((dy, E5M2), (x, E4M3)))
    weight = torch.nn.Parameter(torch.empty(out.shape, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = out  # type: ignore[attr-defined]
    parts = list(zip(dy.split(counts.tolist()), x.split(counts.tolist()), strict=True))
    for add in (False, True):
        what = f"{label}{' adding' if add else ''}"

        def in_bf16(add: bool = add) -> None:
            weight.main_grad_filled = add  # type: ignore[attr-defined]
            write_grouped_weight_grad(weight, parts)

        attempt(f"{what} bf16", in_bf16, flops)
        attempt(f"{what} by group", partial(grouped.weight_grads_by_group, left, right, counts, out, add), flops)
        attempt(f"{what} by Triton", partial(grouped.weight_grads_by_triton, left, right, counts, out, add), flops)


def host() -> None:
    """Products so small that the GPU keeps up."""
    for kinds in ((TENSOR, TENSOR), (ROW_BLOCKS, SQUARE_BLOCKS), (ROW_BLOCKS, ROW_BLOCKS)):
        left, right = (quantized_rows(torch.randn(256, 1024, device="cuda").bfloat16(), E4M3, kind) for kind in kinds)
        for out_dtype in (torch.bfloat16, torch.float32):
            out = torch.zeros(256, 256, device="cuda", dtype=out_dtype)
            by_torch = microseconds(partial(gemm._cublas, left, right, out_dtype, out))
            direct = microseconds(partial(cublaslt.write_product, out, left, right, add=False))
            print(f"{kinds} to {out_dtype}: torch {by_torch:.1f} us, cuBLASLt {direct:.1f} us, ratio {direct / by_torch:.2f}", flush=True)


def microseconds(ask: Callable[[], object], repeats: int = 500) -> float:
    """Of the host; fewer calls than wait in a stream's queue."""
    ask()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        ask()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return taken / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("products", "quantization", "tiles", "experts", "host", "all"), nargs="?", default="all")
    part = parser.parse_args().part
    check_there_are_gpus(parser, 1)
    for kinds in ((TENSOR, TENSOR), (ROW_BLOCKS, SQUARE_BLOCKS), (ROW_BLOCKS, ROW_BLOCKS)):
        for out_dtype in (torch.bfloat16, torch.float32):
            works = gemm.cublas_works(*kinds, out_dtype), cublaslt.works(*kinds, out_dtype)
            print(f"{kinds} to {out_dtype}: by torch {works[0]}, by cuBLASLt itself {works[1]}", flush=True)
    for dtype in (E4M3, E5M2):
        print(f"torch multiplies groups in {dtype} and {E4M3}: {grouped.grouped_product_works(dtype, E4M3)}", flush=True)
    if part in ("host", "all"):
        host()
    if part in ("experts", "all"):
        experts()
    if part in ("tiles", "all"):
        tiles()
    if part in ("quantization", "all"):
        quantization()
    if part in ("products", "all"):
        products()


if __name__ == "__main__":
    main()
