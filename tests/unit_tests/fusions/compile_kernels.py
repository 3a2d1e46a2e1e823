"""Compiles what the wrappers of megatron/core/fusions/kernels launch, for GPUs of a compute capability (90, say), where there need be none:
python -m tests.unit_tests.fusions.compile_kernels 90, without TRITON_INTERPRET; `90 front`: no machine code. For test_kernels_compile.py.

The wrappers get tensors on the CPU, and nothing is launched: what they return is garbage. Each call of the tables goes through Triton's
front end, which is where most mistakes are found and takes a twentieth of a second. Machine code, which takes ten times that, is made of
the first call with a kernel's tile, that is with its integers among the constants and the options of its launch: what it needs of shared
memory follows from them, and whether ptxas takes it. So a table's first call with a tile is one where nothing is left out.

Prints a line of JSON before each call: what it is; and one after it: what was made (shared memory in bytes, null where no machine code
was), and what went wrong. The compiler's parts that are not Python say between them, on stderr, what its exceptions leave out.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron.core.fp8.formats import E4M3, E5M2
from megatron.core.fp8.grouped import room_for
from megatron.core.fp8.quantize import MX_BLOCKS, ROW_BLOCKS, SQUARE_BLOCKS, TENSOR, Operand, quantize_blocks_plain
from megatron.core.fusions.kernels import (
    adam,
    cross_entropy,
    embedding,
    mx_scales,
    norm,
    permute,
    probe,
    quantize,
    quantize_blocks,
    quantize_groups,
    rope,
    router,
    scaled_grouped_mm,
    scaled_mm,
    swiglu,
    swiglu_quantize,
    swiglu_quantize_blocks,
    swiglu_quantize_groups,
)

Calls = Iterator[Callable[[], Any]]
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
YES_NO = (True, False)
NOTHING = (None, None)
WHOLE, PART = (256, 1024), (201, 145)  # sizes: of whole tiles; odd ones
ONE = torch.ones(1)
# of FP8 with one scale: format, size, (the scale or an amax that it follows from), the amax to raise
SCALES: tuple[tuple[torch.dtype, tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None], torch.Tensor | None], ...] = (
    (E4M3, WHOLE, (ONE, None), ONE),
    (E5M2, PART, (ONE, None), None),
    (E4M3, WHOLE, (None, ONE), None),
    (E5M2, PART, (None, ONE), None),
)


# --- what each wrapper is called with ---
# Sizes matter where a wrapper derives a tile from them, and where Triton makes kernels of their own: for multiples of 16, and for 1,
# which is a constant of the compiler's and no tensor.


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def leaf(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return zeros(*shape, dtype=dtype).requires_grad_()


def both_ways(wrapper: Callable, *args: Any, differentiated: tuple[int, ...] = (0,), **settings: Any) -> None:
    """Forward, and backward from those of its outputs."""
    outputs = wrapper(*args, **settings)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    chosen = [outputs[place] for place in differentiated]
    torch.autograd.backward(chosen, [torch.zeros_like(output) for output in chosen])


def adam_update() -> Calls:
    for size, grad, target, scaled, decoupled in (
        (4096, FP32, BF16, True, True),
        (5000, FP32, None, False, True),
        (4096, BF16, BF16, False, True),
        (5000, FP16, FP16, True, False),
    ):
        yield partial(
            adam.update, zeros(size, dtype=FP32), zeros(size, dtype=grad), (zeros(size, dtype=FP32), zeros(size, dtype=FP32)),
            None if target is None else zeros(size, dtype=target), corrections=torch.ones(2), grad_scale=ONE[0] if scaled else None,
            found_inf=torch.zeros(()), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decoupled=decoupled,
        )  # fmt: skip


def cross_entropy_statistics() -> Calls:
    for dtype, (rows, columns), with_sum in (
        (BF16, (3, 50304), True),
        (BF16, (3, 50304), False),
        (FP32, (1, 2), True),
        (FP64, (3, 77), True),
    ):
        logits = zeros(rows, columns, dtype=dtype)
        yield partial(cross_entropy.statistics, logits, torch.zeros(rows, dtype=torch.int64), columns - 1, with_sum)


def cross_entropy_gradient() -> Calls:
    for dtype, (rows, columns), smoothing in ((BF16, (3, 50304), 0.1), (BF16, (3, 77), 0.0), (FP32, (1, 2), 0.1), (FP64, (3, 77), 0.1)):
        logits, numbers = zeros(rows, columns, dtype=dtype), zeros(rows, dtype=torch.promote_types(dtype, FP32))
        target = torch.zeros(rows, dtype=torch.int64)
        yield partial(cross_entropy.gradient, logits, target, numbers, numbers, logits, columns - 1, columns - 1, smoothing)


def embedding_add_rows() -> Calls:
    for table, grad, columns, tokens in ((FP32, BF16, 1024, 32), (FP32, FP32, 77, 1), (BF16, BF16, 1024, 7)):
        yield partial(embedding.add_rows, zeros(50, columns, dtype=table), torch.arange(tokens), zeros(tokens, columns, dtype=grad))


def norms() -> Calls:
    for dtype, rows, columns, rms, zero_centered in (
        (BF16, 1057, 64, True, False),
        (BF16, 4, 16384, False, False),
        (FP16, 3, 77, False, True),
        (FP32, 1, 4096, True, True),
        (FP64, 3, 77, False, False),
    ):
        x, weight, bias = leaf(rows, columns, dtype=dtype), leaf(columns, dtype=dtype), None if rms else leaf(columns, dtype=dtype)
        yield partial(both_ways, norm.norm, x, weight, bias, 1e-5, rms=rms, zero_centered=zero_centered)


def norms_of_sums() -> Calls:
    for dtype, rows, columns, rms, parts, differentiated in (
        (BF16, 4, 4096, True, 1, (0, 1)),
        (BF16, 3, 77, True, 0, (0, 1)),
        (BF16, 4, 16384, False, 2, (0, 1)),
        (FP16, 3, 77, False, 2, (0,)),
        (FP32, 1, 4096, True, 1, (0, 1)),
    ):
        added = leaf(rows, columns, dtype=dtype) if parts else None, leaf(columns, dtype=dtype) if parts == 2 else None
        weight, bias = leaf(columns, dtype=dtype), None if rms else leaf(columns, dtype=dtype)
        x = leaf(rows, columns, dtype=dtype)
        yield partial(both_ways, norm.norm_of_sum, x, added, weight, bias, 1e-5, rms=rms, differentiated=differentiated)


def take_rows() -> Calls:
    for dtype, (rows, columns), taken in ((BF16, (7, 4101), 16), (FP16, (16, 1024), 1), (FP32, (1, 77), 3)):
        yield partial(permute.take_rows, zeros(rows, columns, dtype=dtype), torch.zeros(taken, dtype=torch.int64))


def sum_rows() -> Calls:
    for dtype, (rows, columns), copies in ((BF16, (7, 4101), 8), (FP16, (16, 1024), 2), (FP32, (1, 77), 1), (FP64, (7, 77), 2)):
        yield partial(permute.sum_rows, zeros(rows, columns, dtype=dtype), torch.zeros(3, copies, dtype=torch.int64))


def probes() -> Calls:
    def probe_in_vain() -> None:
        with contextlib.suppress(RuntimeError):  # that nothing was doubled
            probe.probe()

    yield probe_in_vain


def largest_magnitude() -> Calls:
    for dtype, size in ((BF16, WHOLE), (BF16, PART), (FP32, PART), (FP16, (1, 1024))):
        yield partial(quantize.largest_magnitude, zeros(*size, dtype=dtype))


def quantize_tensor() -> Calls:
    for rows, columns in product(YES_NO, YES_NO):
        for dtype, size, (scale, found), amax in SCALES:
            yield partial(quantize.quantize_tensor, zeros(*size), dtype, scale, scale, found, amax, rows, columns, NOTHING)
    for source, size in ((FP16, PART), (FP32, PART), (BF16, (1, 16))):
        yield partial(quantize.quantize_tensor, zeros(*size, dtype=source), E4M3, None, None, ONE, None, True, True, NOTHING)


def quantize_in_blocks() -> Calls:
    for kind in (ROW_BLOCKS, SQUARE_BLOCKS, MX_BLOCKS):
        for rows, columns in ((True, True), (True, False), (False, True)):
            yield partial(quantize_blocks.quantize_blocks, zeros(*WHOLE), E4M3, kind, rows, columns, NOTHING, NOTHING)
        for source, size in ((FP16, PART), (FP32, PART), (BF16, (1, 16))):
            yield partial(quantize_blocks.quantize_blocks, zeros(*size, dtype=source), E5M2, kind, True, True, NOTHING, NOTHING)
        yield partial(quantize_blocks.quantize_blocks, zeros(*PART), E5M2, kind, True, False, NOTHING, NOTHING)


def counts(groups: int) -> torch.Tensor:
    return torch.zeros(groups, dtype=torch.int64)


def quantize_grouped() -> Calls:
    for rows, columns in ((True, True), (True, False), (False, True)):
        for (dtype, (n, k), (scale, found), amax), groups in zip(SCALES, (8, 1, 8, 1), strict=True):
            out_rows = zeros(n, k, dtype=dtype) if rows else None
            out_columns = zeros(room_for(n, groups) * k, dtype=dtype) if columns else None
            x = zeros(n, k)
            yield partial(quantize_groups.quantize_groups, x, counts(groups), dtype, scale, scale, found, amax, out_rows, out_columns)


def quantize_grouped_row_blocks() -> Calls:
    for rows, columns in ((True, True), (True, False), (False, True)):
        for dtype, size, groups in ((E4M3, WHOLE, 8), (E5M2, PART, 1)):
            yield partial(quantize_groups.quantize_row_blocks, zeros(*size), counts(groups), dtype, rows, columns)


def angles(length: int, half: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(length, 1, 1, half, dtype=dtype), zeros(length, 1, 1, half, dtype=dtype)


def turn() -> Calls:
    for dtype, batch, heads, width, half, interleaved, back in (
        (BF16, 1, 32, 128, 64, False, False),
        (BF16, 2, 3, 80, 20, True, True),
        (FP16, 2, 1, 64, 32, True, False),
        (FP32, 2, 3, 64, 16, False, True),
        (FP64, 2, 3, 64, 16, False, True),
    ):
        yield partial(rope.turn, zeros(4, batch, heads, width, dtype=dtype), *angles(4, half, dtype), interleaved, back)


def split_turns() -> Iterator[tuple[torch.Tensor, int, int, tuple[torch.Tensor, torch.Tensor], bool]]:
    """(packed, heads of a group, width, (cos, sin), interleaved)"""
    for dtype, batch, groups, each, width, half, interleaved in (
        (BF16, 1, 8, 4, 128, 64, False),
        (BF16, 2, 1, 3, 80, 20, True),
        (FP32, 2, 2, 1, 64, 16, False),
        (FP16, 1, 16, 1, 64, 32, False),
    ):
        packed = zeros(4, batch, groups, (each + 2) * width, dtype=dtype)
        yield packed, each, width, angles(4, half, dtype), interleaved


def split_and_turn() -> Calls:
    for packed, each, _, (cos, sin), interleaved in split_turns():
        yield partial(rope.split_and_turn, packed, each, cos, sin, interleaved)


def turn_back_and_join() -> Calls:
    for packed, each, width, (cos, sin), interleaved in split_turns():
        groups = packed.shape[2]
        grads = [zeros(*packed.shape[:2], heads, width, dtype=packed.dtype) for heads in (groups * each, groups, groups)]
        yield partial(rope.turn_back_and_join, grads, packed, cos, sin, interleaved)


def route() -> Calls:
    for dtype, (tokens, experts), topk, score_function, pre_softmax, factor, differentiated in (
        (FP32, (100, 8), 2, "softmax", False, None, (0,)),
        (FP32, (128, 64), 6, "softmax", True, 2.5, (0, 2)),
        (BF16, (1, 256), 8, "sigmoid", False, 2.5, (0, 2)),
        (FP32, (100, 60), 1, "sigmoid", False, None, (0,)),
        (FP64, (100, 16), 1, "softmax", True, None, (2,)),
        (BF16, (16, 1024), 1, "softmax", False, None, (0, 2)),
        (FP32, (5, 1), 1, "softmax", False, None, (0,)),
    ):
        yield partial(
            both_ways, router.route, leaf(tokens, experts, dtype=dtype), topk, score_function=score_function, pre_softmax=pre_softmax,
            scaling_factor=factor, with_scores=2 in differentiated, differentiated=differentiated,
        )  # fmt: skip


def grouped_rows_product() -> Calls:
    for dtype, out_dtype, (rows, n, k), groups in (
        (E4M3, BF16, (300, 256, 512), 64),
        (E5M2, BF16, (37, 144, 160), 1),
        (E5M2, FP32, (256, 512, 128), 64),
    ):
        a, b = zeros(rows, k, dtype=dtype), zeros(groups, n, k, dtype=E4M3)
        yield partial(scaled_grouped_mm.rows_product, a, ONE, b, ONE, counts(groups), out_dtype)


def grouped_weight_grads() -> Calls:
    for dtype, out_dtype, (m, n), groups, add in (
        (E4M3, FP32, (384, 256), 64, True),
        (E5M2, FP32, (144, 160), 1, True),
        (E5M2, BF16, (128, 512), 64, False),
    ):
        a, b = (zeros(room_for(64, groups) * size, dtype=kind) for size, kind in ((m, dtype), (n, E4M3)))
        out = zeros(groups, m, n, dtype=out_dtype)
        yield partial(scaled_grouped_mm.weight_grads, a, ONE, b, ONE, counts(groups), out, add)


def operand(rows: int, depth: int, dtype: torch.dtype, kind: str) -> Operand:
    if kind == TENSOR:
        return Operand(zeros(rows, depth, dtype=dtype), ONE, TENSOR)
    return quantize_blocks_plain(zeros(rows, depth), dtype, kind)


def mm_product() -> Calls:
    for (kind_a, kind_b), dtype, out_dtype, (m, n, k), add in (
        ((ROW_BLOCKS, ROW_BLOCKS), E5M2, FP32, (256, 512, 384), True),
        ((ROW_BLOCKS, ROW_BLOCKS), E4M3, BF16, (201, 145, 16), False),
        ((TENSOR, TENSOR), E4M3, BF16, (256, 512, 384), False),
        ((TENSOR, TENSOR), E5M2, FP32, (201, 145, 160), True),
        ((ROW_BLOCKS, SQUARE_BLOCKS), E4M3, BF16, (256, 512, 384), False),
        ((ROW_BLOCKS, SQUARE_BLOCKS), E5M2, BF16, (1, 145, 160), False),
        ((MX_BLOCKS, MX_BLOCKS), E4M3, BF16, (256, 512, 384), False),
        ((MX_BLOCKS, MX_BLOCKS), E5M2, FP32, (201, 145, 16), True),
    ):
        a, b = operand(m, k, dtype, kind_a), operand(n, k, E4M3, kind_b)
        yield partial(scaled_mm.product, a, b, out_dtype, zeros(m, n, dtype=out_dtype) if add else None, add=add)


def scales_in_tiles() -> Calls:
    yield partial(mx_scales.tiles, zeros(256, 8, dtype=FP32))
    yield partial(mx_scales.tiles, quantize_blocks.inverses_of_blocks(zeros(1, 1), 201, 5))
    yield partial(mx_scales.tiles, zeros(1, 1, dtype=FP32))


def swiglus() -> Calls:
    for dtype, (rows, columns), weights in (
        (BF16, (3, 4096), None),
        (BF16, (3, 77), FP32),
        (BF16, (1, 1024), BF16),
        (FP16, (3, 77), None),
        (FP32, (3, 77), FP32),
        (FP64, (3, 77), FP64),
    ):
        scale = None if weights is None else leaf(rows, dtype=weights)
        yield partial(both_ways, swiglu.swiglu, leaf(rows, 2 * columns, dtype=dtype), scale)


def swiglu_forward() -> Calls:
    yield partial(swiglu.forward, zeros(3, 8192))


def swiglu_backward_with_out() -> Calls:
    for dtype, (rows, columns) in ((BF16, (3, 4096)), (FP32, (3, 77))):
        yield partial(swiglu.backward, zeros(rows, 2 * columns, dtype=dtype), zeros(rows, columns, dtype=dtype), with_out=True)


def swiglu_quantize_forward() -> Calls:
    for (m, n), weights in (((16, 1024), FP32), ((3, 80), BF16), ((16, 1024), None), ((1, 80), None)):
        for known, recorded in ((True, True), (True, False), (False, True)):
            yield partial(
                swiglu_quantize.forward, zeros(m, 2 * n), E4M3, ONE if known else None, ONE if recorded else None,
                None if weights is None else zeros(m, dtype=weights),
            )  # fmt: skip


def swiglu_quantize_backward() -> Calls:
    for (m, n), dtype in (((32, 256), E4M3), ((1, 80), E5M2)):
        for known, recorded in ((True, True), (True, False), (False, True)):
            yield partial(
                swiglu_quantize.backward, zeros(m, 2 * n), zeros(m, n), E4M3, ONE, dtype, ONE if known else None, ONE if recorded else None
            )


def swiglu_quantize_blocks_forward() -> Calls:
    for m, n in ((16, 256), (3, 128)):
        yield partial(swiglu_quantize_blocks.forward, zeros(m, 2 * n), E4M3)


def swiglu_quantize_blocks_backward() -> Calls:
    for (m, n), dtype in (((256, 256), E4M3), ((3, 128), E5M2), ((1, 128), E5M2)):
        yield partial(swiglu_quantize_blocks.backward, zeros(m, 2 * n), zeros(m, n), E4M3, dtype)


def swiglu_quantize_groups_backward() -> Calls:
    for (n, m), dtype, weights, groups in (((100, 256), E4M3, FP32, 8), ((1, 80), E5M2, BF16, 1)):
        for known, recorded in ((True, True), (True, False), (False, True)):
            yield partial(
                swiglu_quantize_groups.backward, zeros(n, 2 * m), zeros(n, dtype=weights), zeros(n, m), counts(groups), E4M3, ONE, dtype,
                ONE if known else None, ONE if recorded else None,
            )  # fmt: skip


CASES: dict[str, Callable[[], Calls]] = {
    "adam.update": adam_update,
    "cross_entropy.statistics": cross_entropy_statistics,
    "cross_entropy.gradient": cross_entropy_gradient,
    "embedding.add_rows": embedding_add_rows,
    "mx_scales.tiles": scales_in_tiles,
    "norm.norm": norms,
    "norm.norm_of_sum": norms_of_sums,
    "permute.take_rows": take_rows,
    "permute.sum_rows": sum_rows,
    "probe.probe": probes,
    "quantize.largest_magnitude": largest_magnitude,
    "quantize.quantize_tensor": quantize_tensor,
    "quantize_blocks.quantize_blocks": quantize_in_blocks,
    "quantize_groups.quantize_groups": quantize_grouped,
    "quantize_groups.quantize_row_blocks": quantize_grouped_row_blocks,
    "rope.turn": turn,
    "rope.split_and_turn": split_and_turn,
    "rope.turn_back_and_join": turn_back_and_join,
    "router.route": route,
    "scaled_grouped_mm.rows_product": grouped_rows_product,
    "scaled_grouped_mm.weight_grads": grouped_weight_grads,
    "scaled_mm.product": mm_product,
    "swiglu.swiglu": swiglus,
    "swiglu.forward": swiglu_forward,
    "swiglu.backward": swiglu_backward_with_out,
    "swiglu_quantize.forward": swiglu_quantize_forward,
    "swiglu_quantize.backward": swiglu_quantize_backward,
    "swiglu_quantize_blocks.forward": swiglu_quantize_blocks_forward,
    "swiglu_quantize_blocks.backward": swiglu_quantize_blocks_backward,
    "swiglu_quantize_groups.backward": swiglu_quantize_groups_backward,
}


# --- compiling ---


def described(value: Any) -> str:
    if isinstance(value, partial):
        words = [described(word) for word in value.args] + [f"{name}={described(word)}" for name, word in value.keywords.items()]
        return f"{described(value.func)}({', '.join(words)})"
    if isinstance(value, Operand):
        return f"{value.kind!r} {described(value.data)}"
    if isinstance(value, torch.Tensor):
        return f"{described(value.dtype)}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.__name__ if callable(value) else repr(value)


def messages_of(error: BaseException) -> str:
    """Of an error and its causes, the innermost last."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "\n".join(found)


class Enough(Exception):
    """Raised in the compiler: what was to be tried is done."""


class Compiler:
    """Instead of launching kernels, compiles them."""

    def __init__(self, capability: int, machine_code: bool) -> None:
        self.made: dict[str, int | None] = {}
        self.errors: list[str] = []
        target = GPUTarget("cuda", capability, 32)
        driver.set_active(
            SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0)
        )
        Backend = type(make_backend(target))
        run, add_stages = JITFunction.run, Backend.add_stages
        tiles: set[tuple] = set()
        front_end_alone = False

        def stop(module: Any, metadata: Any) -> None:
            raise Enough

        def add_some_stages(backend: Any, stages: dict[str, Callable], *rest: Any) -> None:
            add_stages(backend, stages, *rest)
            if front_end_alone:
                stages["ttgir"] = stop

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
            nonlocal front_end_alone
            name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
            tile = (name, *sorted((key, value) for key, value in settings.items() if type(value) is int))
            front_end_alone = tile in tiles or not machine_code
            tiles.add(tile)
            try:
                shared = run(kernel, *args, grid=grid, warmup=True, **settings).metadata.shared
                self.made[name] = max(shared, self.made.get(name) or 0)
            except Enough:
                self.made.setdefault(name, None)
            except Exception as error:
                self.errors.append(f"{name}: {messages_of(error)}")

        JITFunction.run, Backend.add_stages = compile_only, add_some_stages

    def compile(self, call: Callable[[], Any]) -> dict[str, Any]:
        self.made, self.errors = {}, []
        try:
            call()
        except Exception as error:
            self.errors.append(messages_of(error))
        return {"made": self.made, "errors": self.errors}


def main() -> None:
    compiler = Compiler(int(sys.argv[1]), machine_code="front" not in sys.argv)
    for name, calls in CASES.items():
        for call in calls():
            print(json.dumps({"case": name, "call": described(call)}), flush=True)
            print("\n" + json.dumps(compiler.compile(call)), flush=True)


if __name__ == "__main__":
    main()
