"""A linear layer whose three products are in FP8: x W^T, dy W, dy^T x.

Kept for the backward pass is x in FP8, transposed, and not x itself. Under sequence parallelism x is gathered in bf16, then quantized, and
kept gathered.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.fp8.formats import amax_of
from megatron.core.fp8.gemm import product
from megatron.core.fp8.quantize import MX_BLOCKS, ROW_BLOCKS, SQUARE_BLOCKS, Operand, Quantized, quantize_blocks, quantize_tensor
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT, DelayedScaling, dtype_of
from megatron.core.fp8.settings import Fp8Settings
from megatron.core.tensor_parallel.mappings import gather_first_dim, start_gather_first_dim
from megatron.core.tensor_parallel.weight_grad import weight_grad
from megatron.core.utils import Group, get_pg_size


class Fp8Linear:
    """What a linear has beside its weight: the scales of its tensors, and its weight in FP8.

    The quantized weight is good for a weights epoch: until `outdated` is called (by the optimizer), or until torch sees the weight change
    (a checkpoint that is loaded). It lies in the same memory all the time.
    """

    def __init__(self, settings: Fp8Settings, weight: torch.nn.Parameter) -> None:
        self.settings, self.weight = settings, weight
        self._scaling: DelayedScaling | None = None
        self._quantized: Quantized | None = None
        self._version: tuple[int, int] | None = None

    @property
    def scaling(self) -> DelayedScaling | None:
        """Of delayed scaling; made where the weight is when it is first asked for."""
        if self._scaling is None and self.settings.delayed:
            self._scaling = DelayedScaling(self.settings, 1, self.weight.device)
        return self._scaling

    @scaling.setter
    def scaling(self, state: DelayedScaling) -> None:
        self._scaling = state

    def known_scale(self, role: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(inverse scale [1], amax [1] to raise) of a tensor that delayed scaling has a scale for already."""
        if self.scaling is None or not self.scaling.is_known[role]:
            return None
        return self.scaling.inverse[role : role + 1], self.scaling.amax[role : role + 1]

    def quantize(
        self,
        role: int,
        x: torch.Tensor,
        *,
        record: bool,
        rows: bool,
        columns: bool,
        into: Quantized | None = None,
        found: torch.Tensor | None = None,
    ) -> Quantized:
        """x [m, k] as `role`. record: what delayed scaling sees of it counts for the next step. found [1]: x's largest magnitude."""
        dtype, recipe = dtype_of(self.settings, role), self.settings.recipe
        wanted: dict[str, Any] = {"rows": rows, "columns": columns, "into": into}
        if self.settings.one_scale:
            return quantize_tensor(x, dtype, **self.scale_of(role, x, record, found), **wanted)
        kind = MX_BLOCKS if recipe == "mxfp8" else SQUARE_BLOCKS if role == WEIGHT else ROW_BLOCKS
        return quantize_blocks(x, dtype, kind, **wanted)

    def scale_of(self, role: int, x: torch.Tensor, record: bool, found: torch.Tensor | None = None) -> dict[str, Any]:
        """What quantize_tensor is told of x's scale, of a recipe with one scale. A tensor without rows is no tensor's first."""
        if self.scaling is None:
            return {"found": found}
        if not self.scaling.is_known[role] and x.numel():
            self.scaling.first_scale(role, amax_of(x) if found is None else found)
        one = slice(role, role + 1)
        return {
            "scale": self.scaling.scale[one],
            "inverse": self.scaling.inverse[one],
            "amax": self.scaling.amax[one] if record else None,
        }

    def outdated(self) -> None:
        """The weight is about to be, or was, changed: a new epoch."""
        self._version = None

    @torch.no_grad()
    def weight_operands(self) -> Quantized:
        """rows: W [out, in]; columns: W^T [in, out]. Quantized now unless they are of this epoch."""
        version = (self.weight._version, self.weight.data_ptr())
        if self._quantized is None or self._version != version:
            self._quantized = self.quantize(WEIGHT, self.weight.detach(), record=True, rows=True, columns=True, into=self._quantized)
            self._version = version
        return self._quantized

    def quantize_weight(self) -> None:
        """Now, unless it is of this epoch."""
        self.weight_operands()

    def __call__(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        fuse_weight_grad: bool,
        reduce_input_grad: bool,
        sequence_parallel: bool,
        group: Group,
        training: bool,
    ) -> torch.Tensor:
        """x [s, b, in] -> [s, b, out], as tensor_parallel.layers._Linear. training: what is seen counts for the next scales."""
        alone = get_pg_size(group) == 1
        settings = fuse_weight_grad, reduce_input_grad and not alone, sequence_parallel and not alone, group, training
        return _Fp8Linear.apply(x, self.weight, bias, self, settings, torch.is_grad_enabled())


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, linear: Fp8Linear, settings: tuple, recorded: bool
    ) -> torch.Tensor:
        _, _, sequence_parallel, group, training = settings
        ctx.linear, ctx.settings, ctx.has_bias = linear, settings, bias is not None
        keeps = recorded and ctx.needs_input_grad[1]
        whole = gather_first_dim(x, group) if sequence_parallel else x
        flat = whole.reshape(-1, whole.shape[-1])
        quantized = linear.quantize(INPUT, flat, record=training, rows=True, columns=keeps and linear.settings.wgrad)
        rows, kept = quantized.rows, quantized.columns
        assert rows is not None
        ctx.kept = None if kept is None else (kept.inverse, kept.kind)
        ctx.save_for_backward(x if kept is None and keeps else None if kept is None else kept.data)
        out = product(rows, there(linear.weight_operands().rows), x.dtype, fast=True)
        if bias is not None:
            out += bias
        return out.view(*whole.shape[:-1], out.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        linear, (fuse_weight_grad, reduce_input_grad, sequence_parallel, group, training) = ctx.linear, ctx.settings
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        (saved,) = ctx.saved_tensors
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        gathered, gathering = saved, None
        if needs_weight and ctx.kept is None and sequence_parallel:
            gathered, gathering = start_gather_first_dim(saved, group)
        quantized = linear.quantize(GRADIENT, flat, record=training, rows=needs_input, columns=needs_weight and ctx.kept is not None)
        grad_input, grad_weight, reduced = None, None, None
        if needs_input:
            grad_input = product(there(quantized.rows), there(linear.weight_operands().columns), grad.dtype)
            grad_input = grad_input.view(*grad.shape[:-1], grad_input.shape[-1])
            grad_input, reduced = start_reducing(grad_input, reduce_input_grad, sequence_parallel, group)
        if needs_weight:
            if gathering is not None:
                gathering()
            if ctx.kept is None:
                grad_weight = weight_grad(linear.weight, flat, gathered.reshape(-1, gathered.shape[-1]), fuse_weight_grad)
            else:
                grad_weight = weight_grad(linear.weight, there(quantized.columns), Operand(saved, *ctx.kept), fuse_weight_grad)
        grad_bias = flat.sum(dim=0) if needs_bias and ctx.has_bias else None
        if reduced is not None:
            reduced.wait()
        return grad_input, grad_weight, grad_bias, None, None, None


def there(operand: Operand | None) -> Operand:
    assert operand is not None
    return operand


def start_reducing(grad: torch.Tensor, all_reduce: bool, scatter: bool, group: Group) -> tuple[torch.Tensor, Any]:
    """(this rank's input gradient, what to wait for before it is read)."""
    if scatter:
        part = grad.new_empty(grad.shape[0] // get_pg_size(group), *grad.shape[1:])
        return part, dist.reduce_scatter_tensor(part, grad, group=group, async_op=True)
    return grad, dist.all_reduce(grad, group=group, async_op=True) if all_reduce else None
