"""Products of FP8 operands of several groups, an expert's rows each, that lie one after the other: `rows` [n, k] sorted by group.

The gradient of a group's matrix contracts over its rows, whose number may be any. So what is transposed is so group by group, each filled
up with zeros to a multiple of 16 rows: `columns` has the blocks [k, filled rows] of all groups, one after the other. No row is added to
what the model computes, and the memory's size is known without the numbers of rows, which are on the device: 15 more for each group.

Rows times matrices: by torch's grouped product where it takes the two formats and gives the right result, found out once; else by Triton,
or group by group, with many rows for each. torch's takes e4m3 alone on Hopper: gradients in e5m2 go the other ways. Gradients of matrices:
by Triton where they add to what is there, else group by group: torch's takes no group without rows there, and gives bf16. The functions
ending in `_plain` are the twins of the kernels, and what runs on a CPU.
"""

import logging
from functools import cache
from typing import NamedTuple

import torch

from megatron.core import device
from megatron.core.fp8.formats import E4M3, LARGEST, amax_of, round_to, scale_for
from megatron.core.fp8.gemm import product
from megatron.core.fp8.quantize import TENSOR, Operand, padded
from megatron.core.fp8.settings import ALIGNMENT
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.transformer.moe.token_dispatcher import TokenCounts

logger = logging.getLogger(__name__)
ROWS_FOR_A_CHIP = 512  # with more, on average, a group's product is thought to fill a GPU by itself: cuBLAS's, which is the faster one


class Grouped(NamedTuple):
    """FP8 with one scale: rows [n, k]; columns, flat, each group's transposed; their inverse scale [1]."""

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    inverse: torch.Tensor

    def row_operand(self) -> Operand:
        assert self.rows is not None
        return Operand(self.rows, self.inverse, TENSOR)

    def by_group(self, counts: list[int], k: int) -> list[Operand]:
        """Each group's [k, filled rows]."""
        assert self.columns is not None
        sizes = [k * padded(rows) for rows in counts]
        parts = self.columns[: sum(sizes)].split(sizes)
        return [Operand(part.view(k, padded(rows)), self.inverse, TENSOR) for part, rows in zip(parts, counts, strict=True)]


def room_for(rows: int, groups: int) -> int:
    """Rows that fill up `rows` rows of `groups` groups, at most."""
    return rows + groups * (ALIGNMENT - 1)


# --- quantization ---


def quantize_groups_plain(
    x: torch.Tensor, counts: list[int], scale: torch.Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """x [n, k] -> (rows [n, k], columns [room * k], zeros behind the last group)."""
    out_rows = round_to(x, scale, dtype)
    out_columns = None
    if columns:
        out_columns = torch.zeros(room_for(x.shape[0], len(counts)) * x.shape[1], dtype=dtype, device=x.device)
        places = Grouped(None, out_columns, scale).by_group(counts, x.shape[1])
        for part, place in zip(out_rows.split(counts), places, strict=True):
            place.data[:, : part.shape[0]] = part.t()
    return out_rows if rows else None, out_columns


def quantize_groups(
    x: torch.Tensor,
    counts: TokenCounts,
    dtype: torch.dtype,
    *,
    scale: torch.Tensor | None = None,
    inverse: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    found: torch.Tensor | None = None,
    rows: bool = True,
    columns: bool = True,
    into: Grouped | None = None,
) -> Grouped:
    """x [n, k] with one scale, as quantize.quantize_tensor; the counts' sum is n. Where there are kernels nothing waits for the device.

    into: an earlier result of the same counts, to be overwritten; it has what is wanted.
    """
    if not rows and not columns:
        return Grouped(None, None, torch.ones(1, device=x.device))
    if kernels_run_on(x):
        return _quantize_by_kernel(x, counts.on_device, dtype, (scale, inverse, amax, found), rows, columns, into)
    if amax is not None:
        amax.copy_(torch.maximum(amax, amax_of(x)))
    if scale is None:
        scale = scale_for(amax_of(x).view(1) if found is None else found.view(1), LARGEST[dtype])
        inverse = scale.reciprocal()
    assert inverse is not None
    made = Grouped(*quantize_groups_plain(x, counts.tolist(), scale, dtype, rows, columns), inverse)
    if into is None:
        return made
    for new, old in zip(made, into, strict=True):
        if new is not None and old is not None and new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return into


def _quantize_by_kernel(
    x: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype, scales: tuple, rows: bool, columns: bool, into: Grouped | None
) -> Grouped:
    from megatron.core.fusions.kernels import quantize, quantize_groups

    scale, inverse, amax, found = scales
    if scale is None:
        found = quantize.largest_magnitude(x) if found is None else found
        inverse = None if into is None else into.inverse
    n, k = x.shape
    out_rows, out_columns = (None, None) if into is None else into[:2]
    if rows and out_rows is None:
        out_rows = torch.empty(n, k, dtype=dtype, device=x.device)
    if columns and out_columns is None:
        out_columns = torch.empty(room_for(n, counts.shape[0]) * k, dtype=dtype, device=x.device)
    out_rows, out_columns = out_rows if rows else None, out_columns if columns else None
    inverse = quantize_groups.quantize_groups(x, counts, dtype, scale, inverse, found, amax, out_rows, out_columns)
    return Grouped(out_rows, out_columns, inverse)


# --- rows times their group's matrix ---


def rows_product_plain(rows: Operand, matrices: Operand, counts: list[int], out_dtype: torch.dtype) -> torch.Tensor:
    parts = zip(rows.value().split(counts), matrices.value().unbind(0), strict=True)
    return torch.cat([part.mm(matrix.t()) for part, matrix in parts]).to(out_dtype)


def rows_product(
    rows: Operand, matrices: Operand, counts: TokenCounts, out_dtype: torch.dtype, *, fast: bool = False, counts_are_here: bool = False
) -> torch.Tensor:
    """rows [n, k] times its group's matrix, of [groups, m, k], transposed -> [n, m]. Both with one scale. fast: as gemm.product's.

    counts_are_here: the host may read them without waiting long."""
    if not rows.data.shape[0]:
        return torch.empty(0, matrices.data.shape[1], dtype=out_dtype, device=rows.data.device)
    if not device.on_accelerator(rows.data):
        return rows_product_plain(rows, matrices, counts.tolist(), out_dtype)
    if out_dtype is torch.bfloat16 and grouped_product_works(rows.data.dtype, matrices.data.dtype):
        return by_torch(rows, matrices, counts, fast)
    alone = counts_are_here and rows.data.shape[0] >= ROWS_FOR_A_CHIP * matrices.data.shape[0]
    if not alone and kernels_run_on(rows.data):
        return by_triton(rows, matrices, counts, out_dtype)
    return by_group(rows, matrices, counts, out_dtype, fast)


def by_torch(rows: Operand, matrices: Operand, counts: TokenCounts, fast: bool) -> torch.Tensor:
    """In bf16. A scale of the whole is one for each row, and for each row of a matrix."""
    of_rows = rows.inverse.expand(rows.data.shape[0]).contiguous()
    of_matrices = matrices.inverse.expand(matrices.data.shape[:2]).contiguous()
    offsets = counts.on_device.cumsum(0).to(torch.int32)
    return torch._scaled_grouped_mm(
        rows.data, matrices.data.transpose(1, 2), of_rows, of_matrices, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def by_triton(rows: Operand, matrices: Operand, counts: TokenCounts, out_dtype: torch.dtype) -> torch.Tensor:
    from megatron.core.fusions.kernels import scaled_grouped_mm

    return scaled_grouped_mm.rows_product(rows.data, rows.inverse, matrices.data, matrices.inverse, counts.on_device, out_dtype)


def by_group(rows: Operand, matrices: Operand, counts: TokenCounts, out_dtype: torch.dtype, fast: bool) -> torch.Tensor:
    """A product for each; the host reads the counts."""
    sizes = counts.tolist()
    out = torch.empty(rows.data.shape[0], matrices.data.shape[1], dtype=out_dtype, device=rows.data.device)
    for part, data, matrix in zip(out.split(sizes), rows.data.split(sizes), matrices.data.unbind(0), strict=True):
        if len(part):
            product(Operand(data, rows.inverse, TENSOR), Operand(matrix, matrices.inverse, TENSOR), out_dtype, out=part, fast=fast)
    return out


@cache
def grouped_product_works(dtype_rows: torch.dtype, dtype_matrices: torch.dtype) -> bool:
    """Whether torch multiplies groups of these formats on this device, and rightly: found out once, said once where it does not."""
    generator = torch.Generator("cpu").manual_seed(1)
    where, sizes = device.current_device(), [0, 37, 0, 300, 1, 0]  # empty groups and odd ones, at the ends too
    x, w = (torch.randn(*shape, generator=generator).to(where) for shape in ((sum(sizes), 512), (len(sizes), 384, 512)))
    half, two = (torch.full((1,), value, device=where) for value in (0.5, 2.0))
    rows, matrices = Operand(x.to(dtype_rows), half, TENSOR), Operand(w.to(dtype_matrices), two, TENSOR)
    counts = TokenCounts(torch.tensor(sizes, device=where), sizes)
    try:
        found = by_torch(rows, matrices, counts, fast=False).float()
        expected = rows_product_plain(rows, matrices, sizes, torch.float32)
        error = float((found - expected).abs().max() / expected.abs().max())
        reason = "" if error < 2e-2 else f"results differ by {error:.3g} of the largest"
    except (AttributeError, RuntimeError, ValueError, NotImplementedError) as failure:
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
    if reason:
        level = logging.WARNING if dtype_rows is E4M3 else logging.INFO  # that e5m2 is not taken is the rule on Hopper
        logger.log(level, "torch does not multiply groups in %s and %s (%s): another product does", dtype_rows, dtype_matrices, reason)
    return not reason


# --- the gradient of each group's matrix ---


def weight_grads_plain(left: list[Operand], right: list[Operand], out: torch.Tensor, add: bool) -> None:
    """out[group] becomes, or is raised by, left [m, filled rows] times right [n, filled rows] transposed."""
    for part, one, other in zip(out.unbind(0), left, right, strict=True):
        found = one.value().mm(other.value().t())
        part.add_(found) if add else part.copy_(found)


def weight_grads(left: Grouped, right: Grouped, counts: TokenCounts, out: torch.Tensor, *, add: bool) -> None:
    """out [groups, m, n], contiguous: as weight_grads_plain, of the columns of `left` and `right`."""
    assert left.columns is not None and right.columns is not None
    if device.on_accelerator(out) and left.columns.numel():
        if add and kernels_run_on(out):
            weight_grads_by_triton(left, right, counts, out, add)
        else:
            weight_grads_by_group(left, right, counts, out, add)
        return
    sizes = counts.tolist()
    weight_grads_plain(left.by_group(sizes, out.shape[1]), right.by_group(sizes, out.shape[2]), out, add)


def weight_grads_by_triton(left: Grouped, right: Grouped, counts: TokenCounts, out: torch.Tensor, add: bool) -> None:
    """One call; a sum is added where it is made."""
    from megatron.core.fusions.kernels import scaled_grouped_mm

    assert left.columns is not None and right.columns is not None
    scaled_grouped_mm.weight_grads(left.columns, left.inverse, right.columns, right.inverse, counts.on_device, out, add)


def weight_grads_by_group(left: Grouped, right: Grouped, counts: TokenCounts, out: torch.Tensor, add: bool) -> None:
    """A product for each, then a sum; the host reads the counts."""
    sizes = counts.tolist()
    blocks = zip(left.by_group(sizes, out.shape[1]), right.by_group(sizes, out.shape[2]), sizes, strict=True)
    for part, (one, other, rows) in zip(out.unbind(0), blocks, strict=True):
        if not rows:
            if not add:
                part.zero_()
        elif add:
            part.add_(product(one, other, out.dtype))
        else:
            product(one, other, out.dtype, out=part)
