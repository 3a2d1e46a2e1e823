"""Weight gradients that go straight into the gradient buffer.

A parameter of a model in training carries `main_grad` (a view into the buffer), `main_grad_filled` and, where the buffer wants to know,
`grad_ready`; where it is gathered in the background also `wait_until_gathered`. The first contribution of a step overwrites main_grad,
later ones (micro batches, tied weights) add to it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core import device
from megatron.core.fp8.gemm import product, write_product
from megatron.core.fp8.quantize import Operand

WeightGradQueue = list[tuple[Any, Any, Any]]  # arguments of write_weight_grad
_put_off: WeightGradQueue | None = None  # not of a thread: autograd calls backwards from threads of its own
_noted: list[Any] | None = None  # parameters written while a CUDA graph is recorded


@contextmanager
def put_off_weight_grads(queue: WeightGradQueue) -> Iterator[None]:
    """Within it the linears' weight gradients go to `queue`, to be computed later by `write_weight_grad(*item)` of each: zero-bubble's W.

    Only of weights that have a main_grad; other gradients are computed at once.
    """
    global _put_off
    before, _put_off = _put_off, queue
    try:
        yield
    finally:
        _put_off = before


@contextmanager
def note_written(params: list[Any]) -> Iterator[None]:
    """Within it parameters whose gradient was written are appended to `params` instead of being marked: a recording computes nothing."""
    global _noted
    before, _noted = _noted, params
    try:
        yield
    finally:
        _noted = before


def write_weight_grad(weight: Any, grad_output: torch.Tensor | Operand, inputs: torch.Tensor | Operand) -> None:
    """main_grad (+)= grad_output^T @ inputs. grad_output: [tokens, out], inputs: [tokens, in], of one dtype; main_grad: [out, in].

    One matrix product where the device accumulates into main_grad's dtype, else the plain product followed by a sum. In FP8 both are given
    transposed, as operands [out, tokens] and [in, tokens].
    """
    if _put_off is not None:
        _put_off.append((weight, grad_output, inputs))
        return
    main_grad: torch.Tensor = weight.main_grad
    if isinstance(grad_output, Operand):
        assert isinstance(inputs, Operand)
        write_product(main_grad, grad_output, inputs, add=weight.main_grad_filled)
        mark_written(weight)
        return
    assert not isinstance(inputs, Operand)
    left = grad_output.t()
    if main_grad.dtype == left.dtype:
        if weight.main_grad_filled:
            main_grad.addmm_(left, inputs)
        else:
            torch.mm(left, inputs, out=main_grad)
        mark_written(weight)
    elif device.on_accelerator(main_grad) and main_grad.dtype is torch.float32:
        if weight.main_grad_filled:
            torch.ops.aten.addmm.dtype_out(main_grad, left, inputs, main_grad.dtype, out=main_grad)
        else:
            torch.ops.aten.mm.dtype_out(left, inputs, main_grad.dtype, out=main_grad)
        mark_written(weight)
    else:
        add_to_main_grad(weight, torch.mm(left, inputs))


def weight_grad(weight: Any, grad_output: torch.Tensor | Operand, inputs: torch.Tensor | Operand, fuse: bool) -> torch.Tensor | None:
    """The gradient for autograd to pass on; None where `fuse` and the weight's main_grad let it be written there."""
    if fuse and hasattr(weight, "main_grad"):
        write_weight_grad(weight, grad_output, inputs)
        return None
    if isinstance(grad_output, Operand):
        assert isinstance(inputs, Operand)
        return product(grad_output, inputs, weight.dtype)
    assert not isinstance(inputs, Operand)
    return grad_output.t().mm(inputs)


def add_to_main_grad(param: Any, grad: torch.Tensor) -> None:
    """main_grad (+)= grad, in main_grad's dtype; then say that it is there."""
    if param.main_grad_filled:
        param.main_grad.add_(grad)
    else:
        param.main_grad.copy_(grad)
    mark_written(param)


def write_embedding_grad(weight: Any, ids: torch.Tensor, grad: torch.Tensor) -> None:
    """main_grad[ids[i]] += grad[i] for ids int64 [tokens] that are not below 0, grad [tokens, h], by a Triton kernel."""
    from megatron.core.fusions.kernels import embedding

    if not weight.main_grad_filled:
        weight.main_grad.zero_()
    if ids.numel():
        embedding.add_rows(weight.main_grad, ids, grad)
    mark_written(weight)


def wait_until_gathered(*params: Any) -> None:
    """For who reads parameters without a call of their module: what other ranks updated of them is there for what follows.

    Nothing is to do but with overlap_param_gather, where modules wait just before their forward.
    """
    for param in params:
        wait = getattr(param, "wait_until_gathered", None)
        if wait is not None:
            wait()


def mark_written(param: Any) -> None:
    """A gradient was added to the parameter's main_grad: say so."""
    if _noted is not None:
        _noted.append(param)
        return
    param.main_grad_filled = True
    ready = getattr(param, "grad_ready", None)
    if ready is not None:
        ready()


def write_grouped_weight_grad(weight: Any, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """main_grad [experts, out, in] (+)= each expert's grad_output^T @ inputs. parts: (grad_output [rows, out], inputs [rows, in]) of each.

    A product for each expert that adds into fp32: on an H200 1.6 ms where one grouped product and a sum took 2.2. It is never put off.
    """
    main_grad: torch.Tensor = weight.main_grad
    same = main_grad.dtype == parts[0][0].dtype
    if not same and not (device.on_accelerator(main_grad) and main_grad.dtype is torch.float32):
        add_to_main_grad(weight, torch.stack([grad.t().mm(inputs) for grad, inputs in parts]))
        return
    for part, (grad, inputs) in zip(main_grad.unbind(0), parts, strict=True):
        if not len(grad):
            if not weight.main_grad_filled:
                part.zero_()
        elif same:
            part.addmm_(grad.t(), inputs) if weight.main_grad_filled else torch.mm(grad.t(), inputs, out=part)
        elif weight.main_grad_filled:
            torch.ops.aten.addmm.dtype_out(part, grad.t(), inputs, main_grad.dtype, out=part)
        else:
            torch.ops.aten.mm.dtype_out(grad.t(), inputs, main_grad.dtype, out=part)
    mark_written(weight)
