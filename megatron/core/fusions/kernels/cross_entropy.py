"""Cross-entropy over rows of logits without a wide copy of them: one pass forward, one (in place if wished) backward.

Sums are in fp32 (fp64 for fp64 logits), in one order.
"""

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide

BLOCK = 4096  # columns at a time
LANES, DEPTH = 2048, 4  # of the statistics: columns side by side, and how many of each lane at a time


@triton.jit
def cross_entropy_statistics(
    logits, target, log_norm, picked, row_sum, stride, valid, WITH_SUM: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    # of each lane; combined at the end. A lane rescales its sum once for DEPTH logits: exponentials are what this kernel waits for
    largest = tl.full([LANES], float("-inf"), dtype=WIDE)
    scaled = tl.zeros([LANES], dtype=WIDE)  # sum of exp(x - largest)
    plain = tl.zeros([LANES], dtype=WIDE)
    for start in range(0, valid, DEPTH * LANES):
        inside = start + column < valid
        x = tl.load(logits + row * stride + start + column, mask=inside, other=float("-inf")).to(WIDE)
        higher = tl.maximum(largest, tl.max(x, axis=0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        scaled = scaled * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[None, :]), axis=0)
        largest = higher
        if WITH_SUM:
            plain += tl.sum(tl.where(inside, x, 0.0), axis=0)
    top = tl.max(largest, axis=0)
    # a NaN among the logits must come out, and a maximum may hide it: it is in `scaled`
    total = tl.sum(scaled * tl.exp(largest - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(log_norm + row, top + tl.log(total))
    place = tl.load(target + row)
    found = (place >= 0) & (place < valid)
    tl.store(picked + row, tl.load(logits + row * stride + place, mask=found, other=0.0).to(WIDE))
    if WITH_SUM:
        tl.store(row_sum + row, tl.sum(plain, axis=0))


@triton.jit
def cross_entropy_gradient(
    logits,
    target,
    log_norm,
    scale,
    out,
    stride,
    out_stride,
    columns,
    valid,
    SMOOTHING: tl.constexpr,
    UNIFORM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    norm = tl.load(log_norm + row)
    factor = tl.load(scale + row)
    place = tl.load(target + row)
    x = tl.load(logits + row * stride + column, mask=column < valid, other=float("-inf")).to(WIDE)
    grad = tl.exp(x - norm) - UNIFORM
    grad -= tl.where(column == place, 1.0, 0.0).to(WIDE) * (1.0 - SMOOTHING)
    grad = tl.where(column < valid, grad * factor, 0.0)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)


def statistics(logits: torch.Tensor, target: torch.Tensor, valid: int, with_sum: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of logits [n, columns] (rows contiguous), over its first `valid` (> 0) columns: logsumexp, the logit at target [n] (0
    where the target is not among them) and, with `with_sum`, the sum (else 0)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.shape[0]
    log_norm, picked = (torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(2))
    row_sum = torch.zeros(rows, dtype=dtype, device=logits.device)
    lanes = min(LANES, triton.next_power_of_2(valid))
    cross_entropy_statistics[(rows,)](
        logits, target, log_norm, picked, row_sum, logits.stride(0), valid, WITH_SUM=with_sum, WIDE=wide(logits), LANES=lanes, DEPTH=DEPTH,
        num_warps=8,
    )  # fmt: skip
    return log_norm, picked, row_sum


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    log_norm: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    valid: int,
    total: int,
    smoothing: float,
) -> None:
    """out [n, columns] = scale [n] times (softmax - smoothing / total - (1 - smoothing) at target); 0 beyond `valid`. out may be logits."""
    rows, columns = logits.shape
    block = min(BLOCK, triton.next_power_of_2(columns))
    cross_entropy_gradient[(rows, triton.cdiv(columns, block))](
        logits, target, log_norm, scale, out, logits.stride(0), out.stride(0), columns, valid,
        SMOOTHING=smoothing, UNIFORM=smoothing / total,
        WIDE=wide(logits), BLOCK=block, num_warps=8,
    )  # fmt: skip
