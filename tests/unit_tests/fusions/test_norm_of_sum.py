"""The norm that makes the residual stream's sums, by kernels: against its parts one by one, and against the plain twin in fp64."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add
from megatron.core.fusions.fused_layer_norm import NOTHING_ADDED, norm, norm_of_sum, norm_plain

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import norm as norm_kernels

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
# of the largest number, to what fp64 finds
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
EPS = 1e-5
Results = tuple[list[torch.Tensor], list[torch.Tensor]]


@contextlib.contextmanager
def kernels_that_round() -> Iterator[None]:
    """Kernels run, on a CPU too, where the interpreter rounds to bf16 as a GPU does instead of cutting."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return cut(values, source, target, mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    with mock.patch.object(kernels, "interpreted", True), mock.patch.object(interpreter, "_convert_float", convert):
        yield


def by_parts(x: torch.Tensor, added: Any, weight: Any, bias: Any, **kind: bool) -> tuple[torch.Tensor, torch.Tensor]:
    total = x if added[0] is None else bias_dropout_add(added, x, 0.0, True)
    return norm(total, weight, bias, EPS, **kind), total


def plainly(x: torch.Tensor, added: Any, weight: Any, bias: Any, **kind: bool) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum((part for part in added if part is not None), x)
    return norm_plain(total, weight, bias, EPS, **kind), total


def run(function: Callable, inputs: dict[str, torch.Tensor], grads: list[torch.Tensor | None], **kind: bool) -> Results:
    """((normed, sum), gradients) of a function for these gradients of the two; None: of a result that nobody uses."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    added = leaves.get("added"), leaves.get("added_bias")
    out = function(leaves["x"], added, leaves["weight"], leaves.get("bias"), **kind)
    used = [(value, grad) for value, grad in zip(out, grads, strict=True) if grad is not None]
    torch.autograd.backward([value for value, _ in used], [grad.to(value.dtype) for value, grad in used])
    return [value.detach() for value in out], [leaf.grad for leaf in leaves.values() if leaf.grad is not None]


def fused(x: torch.Tensor, added: Any, weight: Any, bias: Any, **kind: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_of_sum(x, added, weight, bias, EPS, **kind)


def rand(*sizes: int, dtype: torch.dtype = torch.float32, apart: int = 0) -> torch.Tensor:
    """apart: 0 for contiguous ones; 1 for rows apart, as a slice of something wider; 2 for numbers apart."""
    wide = torch.randn(*sizes[:-1], max(apart, 1) * sizes[-1] + 3 * apart, device=device.current_device()).to(dtype)
    return wide[..., 3 * apart :: max(apart, 1)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, rms: bool, parts: int, apart: tuple[int, int] = (0, 0)) -> dict[str, torch.Tensor]:
    """parts: 0 x alone, 1 with `added`, 2 with its bias. apart: of x and of `added`."""
    inputs = {"x": rand(*shape, dtype=dtype, apart=apart[0]), "weight": rand(shape[-1], dtype=dtype) + 1}
    inputs |= {} if rms else {"bias": rand(shape[-1], dtype=dtype)}
    inputs |= {"added": rand(*shape, dtype=dtype, apart=apart[1])} if parts else {}
    return inputs | ({"added_bias": rand(shape[-1], dtype=dtype)} if parts == 2 else {})


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 70)), st.sampled_from(list(TOLERANCE)),
    st.booleans(), st.booleans(), st.integers(0, 2), st.tuples(*[st.integers(0, 2)] * 4), st.integers(0, 2**31),
)  # fmt: skip
def test_is_what_its_parts_give(
    shape: Any, dtype: torch.dtype, rms: bool, zero_centered: bool, parts: int, apart: tuple[int, ...], seed: int
) -> None:
    """Results to the bit; gradients within rounding of fp64's."""
    torch.manual_seed(seed)
    kind = {"rms": rms, "zero_centered": zero_centered}
    inputs = drawn(shape, dtype, rms, parts, (apart[0], apart[1]))
    grads: list[torch.Tensor | None] = [rand(*shape, dtype=dtype, apart=each) for each in apart[2:]]
    with kernels_that_round():
        (out, found), (expected, _) = run(fused, inputs, grads, **kind), run(by_parts, inputs, grads, **kind)
    for one, other in zip(out, expected, strict=True):
        assert one.dtype is dtype and torch.equal(one, other)
    wide = {name: value.double() for name, value in (inputs | {"x": out[1]}).items()}
    wide |= {name: torch.zeros_like(value) for name, value in wide.items() if name.startswith("added")}  # the sum is rounded already
    _, exact = run(plainly, wide, [grad.double() for grad in grads if grad is not None], **kind)
    for value, truth in zip(found, exact, strict=True):
        if truth.numel() and (shape[-1] > 2 or rms):  # with two columns LayerNorm's deviation may be as small as rounding
            largest = max(float(truth.abs().max()), 1.0)
            torch.testing.assert_close(value.double(), truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("rms", [False, True])
def test_gradients_are_added_before_they_are_rounded(rms: bool, parts: int) -> None:
    """And the whole is rounded once: it is that of the same numbers in fp32."""
    torch.manual_seed(1)
    inputs = drawn((6, 1, 96), torch.bfloat16, rms, parts)
    grads: list[torch.Tensor | None] = [torch.randn_like(inputs["x"]) for _ in range(2)]
    with kernels_that_round():
        (_, total), (found, *_) = run(fused, inputs, grads, rms=rms)
        in_fp32 = {name: value.float() for name, value in (inputs | {"x": total}).items() if not name.startswith("added")}
        _, (exact, *_) = run(fused, in_fp32, [grad.float() for grad in grads if grad is not None], rms=rms)
    if ON_GPU:  # which may join a product and a sum
        torch.testing.assert_close(found, exact.bfloat16(), rtol=2.0**-8, atol=1e-6)
    else:
        assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("parts", [0, 1, 2])
def test_a_result_that_nobody_uses(unused: int, parts: int) -> None:
    inputs = drawn((3, 2, 7), torch.float64, False, parts)
    grads: list[torch.Tensor | None] = [torch.randn_like(inputs["x"]) for _ in range(2)]
    grads[unused] = None
    with kernels_that_round():
        (_, found), (_, expected) = run(fused, inputs, grads, rms=False), run(by_parts, inputs, grads, rms=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_kernel_each_way() -> None:
    inputs = drawn((3, 2, 7), torch.float32, True, 2)
    grads: list[torch.Tensor | None] = [torch.randn_like(inputs["x"]) for _ in range(2)]
    with kernels_that_round(), mock.patch.object(norm_kernels, "norm_of_sum", side_effect=norm_kernels.norm_of_sum) as calls:
        run(fused, inputs, grads, rms=True)
        assert calls.call_count == 1
        x = inputs["x"].requires_grad_()
        normed, same = norm_of_sum(x, NOTHING_ADDED, inputs["weight"], None, EPS, rms=True)
    assert same.data_ptr() == x.data_ptr() and same.grad_fn is normed.grad_fn  # no copy, and one node takes both gradients


@pytest.mark.parametrize("why", ["another dtype", "another shape", "another bias", "wide"])
def test_what_kernels_do_not_take_goes_by_parts(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    x, added, bias = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(8)
    if why == "another dtype":
        added = added.double()
    elif why == "another shape":
        added = added[:, :1]
    elif why == "another bias":
        bias = bias.double()
    else:
        monkeypatch.setattr("megatron.core.fusions.fused_layer_norm.WIDEST_KERNEL", 7)
    x, added, bias, weight = (value.to(device.current_device()) for value in (x, added, bias, torch.ones(8).to(added.dtype)))
    with kernels_that_round(), mock.patch.object(norm_kernels, "norm_of_sum") as never:
        out = norm_of_sum(x, (added, bias), weight, None, EPS, rms=True)
    assert not never.called and torch.equal(out[1], bias_dropout_add((added, bias), x, 0.0, True))
