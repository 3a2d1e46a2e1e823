"""SwiGLU between two FP8 products with scales of 1 x 128: forward and backward in one pass each, which hand over quantized what the
products take (with one scale: swiglu_quantize.py).

Forward gives the second product's input. Backward takes that input's gradient, and gives the gradient of SwiGLU's input, both ways, and
SwiGLU's output once more, transposed. All three of a tile would not fit a program's registers: three programs that follow each other make
one each, and read what they share out of the cache. Plain twin: SwiGLU, rounded to its input's dtype, then quantize_blocks.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fp8.formats import LARGEST
from megatron.core.fp8.quantize import BLOCK, ROW_BLOCKS, Operand, Quantized, padded
from megatron.core.fusions.kernels.fp8_tiles import inverse_of_bits, load_fours, size_of, store_part
from megatron.core.fusions.kernels.quantize import in_fours
from megatron.core.fusions.kernels.quantize_blocks import LANE, in_format, inverses_of_blocks, scales_along, store_block_tile
from megatron.core.fusions.kernels.swiglu_quantize import gradients_of, output_of

FORWARD_TALL, FORWARD_WARPS = 16, 4  # rows and warps of a program
BACKWARD_LAUNCH = {"num_warps": 8, "maxnreg": 128}  # with fewer registers it spills
_OUTPUT, _GATE, _UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # what a program of the backward pass makes


@triton.jit
def swiglu_quantize_blocks_forward(
    x, out, inverse, rows, columns, stride, LARGEST: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    top, block = tl.program_id(0).to(tl.int64) * TALL, tl.program_id(1).to(tl.int64)
    row, column = tl.arange(0, TALL), tl.arange(0, BLOCK)
    left = (rows - top).to(tl.int32)
    value = output_of(x + top * stride + block * BLOCK, x, row, column, left, BLOCK, stride, columns, False, WHOLE)
    scales = scales_along(size_of(value), 1, LARGEST)
    tl.store(inverse + block * rows + top + row, inverse_of_bits(scales), mask=row < left)
    place, inside = row[:, None] * columns + column[None, :], (row < left)[:, None]
    store_part(out + top * columns + block * BLOCK, in_format(value, scales, LARGEST), place, inside, WHOLE)


@triton.jit
def _made_of(gate, up, grad, MADE: tl.constexpr):
    """What is MADE of one row of each four; of up and grad what it needs."""
    out, of_gate, of_up = gradients_of(gate, up, grad)
    if MADE == _OUTPUT:
        return out
    elif MADE == _UP:
        return of_up
    else:
        return of_gate


@triton.jit
def _make(
    x, grad, out_rows, out_columns, row_inverse, column_inverse, rows, columns, quads, stride, grad_stride, half, row_stride, column_stride,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, MADE: tl.constexpr,
):  # fmt: skip
    """A tile of what is MADE; pointers to where it begins; half: how far behind the gate the other half of x is."""
    gate = load_fours(x, rows, columns, stride, WHOLE, BLOCK // 4, BLOCK, LANE)
    up, dy = gate, gate
    if MADE != _UP:
        up = load_fours(x + half, rows, columns, stride, WHOLE, BLOCK // 4, BLOCK, LANE)
    if MADE != _OUTPUT:
        dy = load_fours(grad, rows, columns, grad_stride, WHOLE, BLOCK // 4, BLOCK, LANE)
    made = (
        _made_of(gate[0], up[0], dy[0], MADE), _made_of(gate[1], up[1], dy[1], MADE),
        _made_of(gate[2], up[2], dy[2], MADE), _made_of(gate[3], up[3], dy[3], MADE),
    )  # fmt: skip
    store_block_tile(
        made, out_rows, out_columns, row_inverse, column_inverse, rows, columns, rows, quads, row_stride, column_stride,
        LARGEST, MADE != _OUTPUT, True, BLOCK, WHOLE,
    )  # fmt: skip


@triton.jit
def swiglu_quantize_blocks_backward(
    x, grad, out_columns, out_inverse, grad_rows, row_inverse, grad_columns, column_inverse, m, n, quads, stride, grad_stride,
    LARGEST_OUT: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    down, across = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, column = down * BLOCK, across * BLOCK
    rows, columns, left = (m - row).to(tl.int32), (n - column).to(tl.int32), (quads - down * (BLOCK // 4)).to(tl.int32)
    x += row * stride + column
    grad += row * grad_stride + column
    grad_rows += row * (2 * n) + column
    row_inverse += across * m + row
    turned = column * quads + down * (BLOCK // 4)
    if tl.program_id(0) == 0:
        _make(
            x, grad, grad_rows, out_columns + turned, row_inverse, out_inverse + down * n + column, rows, columns, left,
            stride, grad_stride, n, 2 * n, quads, LARGEST_OUT, BLOCK, WHOLE, _OUTPUT,
        )  # fmt: skip
    elif tl.program_id(0) == 1:
        _make(
            x, grad, grad_rows, grad_columns + turned, row_inverse, column_inverse + down * (2 * n) + column, rows, columns, left,
            stride, grad_stride, n, 2 * n, quads, LARGEST, BLOCK, WHOLE, _GATE,
        )  # fmt: skip
    else:
        _make(
            x, grad, grad_rows + n, grad_columns + turned + n.to(tl.int64) * quads, row_inverse + (n // BLOCK).to(tl.int64) * m,
            column_inverse + down * (2 * n) + n + column, rows, columns, left, stride, grad_stride, n, 2 * n, quads,
            LARGEST, BLOCK, WHOLE, _UP,
        )  # fmt: skip


def forward(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, 2n] contiguous in its last dim -> ([m, n] with a scale for 1 x 128, the inverse scales); n a multiple of 128."""
    rows, columns = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, columns, dtype=dtype, device=x.device)
    inverse = inverses_of_blocks(x, rows, columns // BLOCK)
    swiglu_quantize_blocks_forward[(triton.cdiv(rows, FORWARD_TALL), columns // BLOCK)](
        x,
        out,
        inverse,
        rows,
        columns,
        x.stride(0),
        LARGEST=LARGEST[dtype],
        TALL=FORWARD_TALL,
        BLOCK=BLOCK,
        WHOLE=rows % FORWARD_TALL == 0,
        num_warps=FORWARD_WARPS,
    )
    return out, inverse


def backward(x: torch.Tensor, grad: torch.Tensor, out_dtype: torch.dtype, dtype: torch.dtype) -> tuple[Operand, Quantized]:
    """x [m, 2n], grad [m, n] of the output, both contiguous in the last dim -> (the output in out_dtype transposed [n, padded m]; the
    gradient of x in `dtype`, rows [m, 2n] and columns [2n, padded m]); n a multiple of 128."""
    m, n, filled = x.shape[0], x.shape[1] // 2, padded(x.shape[0])
    down, across = triton.cdiv(filled, BLOCK), n // BLOCK
    out, columns = x.new_empty(n, filled, dtype=out_dtype), x.new_empty(2 * n, filled, dtype=dtype)
    rows = x.new_empty(m, 2 * n, dtype=dtype)
    of_out, of_columns, of_rows = inverses_of_blocks(x, n, down), inverses_of_blocks(x, 2 * n, down), inverses_of_blocks(x, m, 2 * across)
    swiglu_quantize_blocks_backward[(3, down, across)](
        x, grad, in_fours(out), of_out, rows, of_rows, in_fours(columns), of_columns, m, n, filled // 4, x.stride(0), grad.stride(0),
        LARGEST_OUT=LARGEST[out_dtype], LARGEST=LARGEST[dtype], BLOCK=BLOCK, WHOLE=m % BLOCK == 0, **BACKWARD_LAUNCH,
    )  # fmt: skip
    gradient = Quantized(Operand(rows, of_rows, ROW_BLOCKS), Operand(columns, of_columns, ROW_BLOCKS))
    return Operand(out, of_out, ROW_BLOCKS), gradient
