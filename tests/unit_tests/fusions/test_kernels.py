"""Triton kernels against their plain twins: in Triton's interpreter on the CPU, compiled on a GPU (`make test-gpu`)."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.fusions.fused_bias_swiglu import SwiGLUActivation, bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.fusions.fused_layer_norm import norm
from megatron.core.fusions.fused_rope import fused_apply_rotary, fused_split_and_rotate
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import fused_optimizers
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe import permutation

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import adam as adam_kernels
from megatron.core.fusions.kernels import embedding as embedding_kernels
from megatron.core.fusions.kernels import norm as norm_kernels
from megatron.core.fusions.kernels import permute as permute_kernels
from megatron.core.fusions.kernels import probe as probe_kernel

pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
# relative, one rounding: the interpreter cuts where the device rounds
ONE_ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# kernels compute inside in fp32 where the twins round in between
TWINS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
DTYPES = st.sampled_from(list(ONE_ROUNDING))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device.current_device())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 70), st.integers(1, 5), st.integers(1, 4), DTYPES, st.booleans())
def test_rows_by_index(n: int, width: int, tokens: int, copies: int, dtype: torch.dtype, strided: bool) -> None:
    x = rand(n, 2 * width if strided else width).to(dtype)[:, :: 2 if strided else 1]
    index = torch.randint(0, n + 1, (tokens, copies), device=x.device)
    taken = permute_kernels.take_rows(x, index.flatten())
    assert torch.equal(taken, permutation.take_rows(x, index.flatten(), False))
    torch.testing.assert_close(
        permute_kernels.sum_rows(x, index), permutation.sum_rows(x, index, False), rtol=ONE_ROUNDING[dtype], atol=1e-7
    )


def test_wide_rows_take_several_programs() -> None:
    x = rand(3, permute_kernels.WIDEST + 5)
    index = torch.tensor([[2, 3], [0, 0]], device=x.device)
    assert torch.equal(permute_kernels.sum_rows(x, index), permutation.sum_rows(x, index, False))
    assert torch.equal(permute_kernels.take_rows(x, index[:, 0]), x[[2, 0]])


def test_a_permutation_with_kernels_is_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    calls = mock.Mock(side_effect=permute_kernels.sum_rows)
    monkeypatch.setattr(permute_kernels, "sum_rows", calls)
    routing_map = rand(6, 4) > -0.4
    rows, most = int(routing_map.sum()), int(routing_map.sum(dim=1).max())
    found = []
    for fused in (False, True):
        row_map = permutation.make_row_map(routing_map, rows, most, fused=fused)
        torch.manual_seed(0)
        x = rand(6, 8).requires_grad_()
        out = permutation.unpermute(permutation.permute(x, row_map) * 2, row_map)
        out.backward(rand(6, 8))
        found.append((out.detach(), x.grad))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)
    assert calls.call_count == 2


def both(monkeypatch: pytest.MonkeyPatch, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[list[torch.Tensor]]:
    """[output, gradients ...] of run(*inputs), with kernels and without, for one random gradient of the output."""
    found = []
    for on in (True, False):
        monkeypatch.setattr(kernels, "interpreted", on and not device.has_accelerator())
        monkeypatch.setattr(kernels, "available", lambda package, on=on: on)
        leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point()) for x in inputs]
        out = run(*leaves)
        generator = torch.Generator(out.device).manual_seed(1)
        grad = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return found


def assert_twins(found: list[list[torch.Tensor]], dtype: torch.dtype) -> None:
    for fast, plain in zip(*found, strict=True):
        assert fast.dtype is plain.dtype and fast.shape == plain.shape
        scale = float(plain.abs().max()) if plain.numel() else 1.0
        torch.testing.assert_close(fast, plain, rtol=TWINS[dtype], atol=TWINS[dtype] * max(scale, 1.0))


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (7, 1, 70), (2, 3, 4100)])
def test_swiglu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, scaled: bool, shape: tuple[int, ...]) -> None:
    x = rand(*shape[:2], 2 * shape[2]).to(dtype)
    if scaled:
        weights = rand(*shape[:2]).to(torch.promote_types(dtype, torch.float32))
        assert_twins(both(monkeypatch, lambda x, w: weighted_bias_swiglu_impl(x, None, w), x, weights), dtype)
    else:
        assert_twins(both(monkeypatch, lambda x: bias_swiglu_impl(x, None), x), dtype)


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "turned"), [(1, 2, 2), (3, 16, 16), (5, 20, 12), (33, 8, 6)])
def test_rope(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, interleaved: bool, heads: int, width: int, turned: int) -> None:
    angles = torch.outer(torch.arange(5.0), torch.rand(turned // 2)).to(device.current_device())
    freqs = (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))[:, None, None, :]
    packed = rand(5, 2, heads * width + 3).to(dtype)  # as in a projection with keys and values behind
    run = lambda x: fused_apply_rotary(x[..., : heads * width].unflatten(-1, (heads, width)), freqs, interleaved)  # noqa: E731
    assert_twins(both(monkeypatch, run, packed), dtype)


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("length", "batch", "groups", "heads_per_group", "half", "rest"),
    [(1, 1, 1, 1, 1, 0), (5, 2, 3, 1, 8, 0), (3, 1, 2, 5, 6, 5), (4, 3, 1, 4, 20, 1), (2, 2, 5, 2, 3, 2)],
)
def test_rope_of_a_projection(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    interleaved: bool,
    length: int,
    batch: int,
    groups: int,
    heads_per_group: int,
    half: int,
    rest: int,
) -> None:
    angles = torch.outer(torch.arange(float(length)), torch.rand(half)).to(device.current_device())
    freqs = (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))[:, None, None, :]
    packed = rand(length, batch, groups, (heads_per_group + 2) * (2 * half + rest)).to(dtype)

    def run(x: torch.Tensor) -> torch.Tensor:
        query, key, value = fused_split_and_rotate(x, freqs, heads_per_group, interleaved)
        return torch.cat([query.transpose(0, 1).flatten(), key.flatten(), value.transpose(1, 2).flatten()])  # gradients in other orders

    assert_twins(both(monkeypatch, run, packed), dtype)


@pytest.mark.parametrize("heads_per_group", [1, 3])
def test_rope_of_more_heads_than_a_program_takes(monkeypatch: pytest.MonkeyPatch, heads_per_group: int) -> None:
    freqs = torch.rand(2, 1, 1, 512, device=device.current_device())  # 8 heads a program
    run = lambda x: torch.cat([part.flatten() for part in fused_split_and_rotate(x, freqs, heads_per_group, True)])  # noqa: E731
    assert_twins(both(monkeypatch, run, rand(2, 1, 11, (heads_per_group + 2) * 512)), torch.float32)


def test_rope_of_gradients_that_are_expanded_strided_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    freqs = torch.rand(4, 1, 1, 6, device=device.current_device())

    def run(x: torch.Tensor) -> torch.Tensor:
        query, _, value = fused_split_and_rotate(x, freqs, 2, False)
        return query.sum() + value.movedim(-1, 0).reshape(-1)[:40].square().sum()

    found = both(monkeypatch, run, rand(4, 2, 3, 4 * 6))
    assert_twins(found, torch.float32)
    assert not found[0][1][..., 12:18].any() and found[0][1][..., 18:].any()  # of the key, which nobody used, and of the value


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 7), (3, 1, 96)])
def test_norm(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rms: bool, zero_centered: bool, shape: tuple[int, ...]) -> None:
    """Of a slice, as head norms get."""
    x, weight, bias = rand(*shape[:-1], shape[-1] + 2).to(dtype), rand(shape[-1]).to(dtype), rand(shape[-1]).to(dtype)
    run = lambda x, w, b=None: norm(x[..., :-2], w, b, 1e-5, rms=rms, zero_centered=zero_centered)  # noqa: E731
    assert_twins(both(monkeypatch, run, x, weight, *([] if rms else [bias])), dtype)


@pytest.mark.parametrize("rms", [False, True])
def test_norm_of_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch, rms: bool) -> None:
    monkeypatch.setattr(norm_kernels, "MOST_PROGRAMS", 3)
    inputs = [rand(10, 4).double(), rand(4).double()] + ([] if rms else [rand(4).double()])
    run = lambda x, w, b=None: norm(x, w, b, 1e-5, rms=rms)  # noqa: E731
    assert_twins(both(monkeypatch, run, *inputs), torch.float64)


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("columns", "valid"), [(1, 1), (7, 5), (100, 100), (4999, 4990), (17001, 16500)])
def test_cross_entropy(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, smoothing: float, columns: int, valid: int) -> None:
    logits = 4 * rand(5, 2, columns)
    labels = torch.randint(0, valid, (5, 2), device=logits.device)
    labels[0, 0] = -100  # ignored
    run = lambda x, y: vocab_parallel_cross_entropy(x * 1, y, smoothing, None, num_valid=valid, consume_logits=True)  # noqa: E731
    assert_twins(both(monkeypatch, run, logits.to(dtype), labels), dtype)


def test_cross_entropy_of_logits_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rand(4, 1, 9)
    logits[1, 0, 3], logits[2, 0, 3], logits[3, 0, :5] = torch.nan, torch.inf, -torch.inf
    labels = torch.full((4, 1), 7, device=logits.device)
    fast, plain = both(monkeypatch, lambda x, y: vocab_parallel_cross_entropy(x, y), logits, labels)
    assert fast[0].isfinite().tolist() == plain[0].isfinite().tolist() == [[True], [False], [False], [True]]
    torch.testing.assert_close(fast[1][[0, 3]], plain[1][[0, 3]])


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_adam(monkeypatch: pytest.MonkeyPatch, decoupled: bool, scaled: bool) -> None:
    """Three updates and a skipped one; parameters of an odd size, a bf16 copy, a bf16 gradient."""
    monkeypatch.setattr(fused_optimizers, "KERNEL_ELEMENTS", 100)
    where = device.current_device()
    found = []
    for on in (True, False):
        monkeypatch.setattr(kernels, "interpreted", on and not device.has_accelerator())
        monkeypatch.setattr(kernels, "available", lambda package, on=on: on)
        torch.manual_seed(5)
        params = [torch.randn(size, device=where) for size in (7, 2 * adam_kernels.BLOCK + 3, 130)]
        targets = [None, torch.zeros(params[1].shape, device=where).bfloat16(), torch.zeros(130, device=where)]
        optimizer = fused_optimizers.FusedAdam([{"params": params, "lr": 1e-2, "weight_decay": 0.1}], (0.9, 0.95), 1e-8, decoupled)
        for skip in (0.0, 1.0, 0.0, 0.0):
            grads = [torch.randn(param.shape, device=where) for param in params]
            scale = torch.tensor(8.0, device=where) if scaled else None
            before = [param.clone() for param in params]
            optimizer.step(grads, scale, torch.tensor(skip, device=where), targets)
            assert (skip == 1.0) == all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
        found.append([*params, *targets[1:], *(state for param in params for state in optimizer.state[param].values())])
    for fast, plain in zip(*found, strict=True):
        tolerance = 2.0**-7 if plain.dtype is torch.bfloat16 else 3e-6
        torch.testing.assert_close(fast, plain, rtol=tolerance, atol=1e-6)


def test_adam_in_parts_is_adam_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts go across groups, one has no elements; each is over when its function is called, and a step counts once."""
    monkeypatch.setattr(fused_optimizers, "KERNEL_ELEMENTS", 100)
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    made = mock.Mock(side_effect=adam_kernels.bias_corrections)
    monkeypatch.setattr(adam_kernels, "bias_corrections", made)
    where, found = device.current_device(), []
    for split in (False, True):
        torch.manual_seed(6)
        params = [torch.randn(size, device=where) for size in (7, 500, 130, 0, 5, 300)]
        targets = [None if number % 2 else torch.zeros_like(param).bfloat16() for number, param in enumerate(params)]
        groups: list[dict[str, Any]] = [{"params": params[:3], "lr": 1e-2, "weight_decay": 0.1}]
        groups.append({"params": params[3:], "lr": 1e-3, "weight_decay": 0.0})
        optimizer = fused_optimizers.FusedAdam(groups, (0.9, 0.95), 1e-8)
        over: list[int] = []
        parts = [([1, 5], partial(over.append, 5)), ([3], None), ([0, 2, 4], partial(over.append, 4))] if split else None
        for skip in (0.0, 1.0, 0.0):
            grads = [torch.randn(param.shape, device=where) for param in params]
            made.reset_mock()
            optimizer.step(grads, torch.tensor(8.0, device=where), torch.tensor(skip, device=where), targets, parts)
            assert made.call_count == 2, "once for each group"
        assert over == ([5, 4] * 3 if split else [])
        assert [group["step"].item() for group in groups] == [2.0, 2.0]
        kept = [target for target in targets if target is not None]
        found.append([*params, *kept, *(state for param in params for state in optimizer.state[param].values())])
    assert all(torch.equal(whole, split) for whole, split in zip(*found, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 600), DTYPES)
def test_rows_added_by_id(count: int, table_rows: int, width: int, dtype: torch.dtype) -> None:
    """Ids that come several times, and ids that are left out."""
    wide = torch.promote_types(dtype, torch.float32)
    table, grad = rand(table_rows, width).to(wide), rand(count, width).to(dtype)
    ids = torch.randint(-1, table_rows, (count,), device=table.device)
    plain = table.clone()
    for row, values in zip(ids.tolist(), grad, strict=True):
        if row >= 0:
            plain[row] += values.to(wide)
    embedding_kernels.add_rows(table, ids, grad)
    assert torch.equal(table, plain)


def test_an_embedding_writes_its_gradient_into_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over what another micro batch or a tied head has written, or first of all."""
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    config = ModelParallelConfig(gradient_accumulation_fusion=True)
    layer: Any = VocabParallelEmbedding(11, 6, init_method=torch.nn.init.normal_, config=config)
    ids = torch.tensor([[1, 3], [3, 10]], device=device.current_device())
    (plain,) = torch.autograd.grad(layer(ids).square().sum(), layer.weight)
    layer.weight.main_grad = torch.full_like(layer.weight, 7.0)
    ready = layer.weight.grad_ready = mock.Mock()
    for filled, expected in ((False, plain), (True, 2 * plain)):
        layer.weight.main_grad_filled = filled
        layer(ids).square().sum().backward()
        assert layer.weight.grad is None and layer.weight.main_grad_filled
        torch.testing.assert_close(layer.weight.main_grad, expected)
    assert ready.call_count == 2


def test_without_a_compiler_training_goes_on_without_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = mock.Mock(side_effect=RuntimeError("Failed to find C compiler.\nmore lines"))
    monkeypatch.setattr(probe_kernel, "probe", broken)
    monkeypatch.setattr(kernels.device, "on_accelerator", lambda tensor: True)
    kernels.compiles.cache_clear()
    try:
        assert [kernels.kernels_run_on(torch.ones(2)) for _ in range(3)] == [False] * 3
    finally:
        kernels.compiles.cache_clear()
    assert broken.call_count == 1 and len(caplog.records) == 1
    assert "(RuntimeError: Failed to find C compiler.): going on with torch's operations" in caplog.text


def test_the_probe_sees_a_kernel_that_works() -> None:
    probe_kernel.probe()


@pytest.mark.parametrize("dtype", TWINS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_that_takes_swiglu_over(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, with_bias: bool) -> None:
    """As SwiGLU and linear one by one, to the bit: what is made again in the backward pass is what was there. It is not kept."""
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    monkeypatch.setattr(kernels, "available", lambda package: True)
    config = ModelParallelConfig(params_dtype=dtype, gradient_accumulation_fusion=True)
    found = []
    for activation in (SwiGLUActivation(), None):
        torch.manual_seed(4)
        linear: Any = RowParallelLinear(
            40, 24, config=config, init_method=torch.nn.init.normal_, bias=with_bias, input_is_parallel=True, skip_bias_add=False
        )
        linear.weight.main_grad, linear.weight.main_grad_filled = torch.empty_like(linear.weight), False
        x, grad = rand(5, 2, 80).to(dtype).requires_grad_(), rand(5, 2, 24).to(dtype)
        kept: list[tuple[int, ...]] = []

        def keep(tensor: torch.Tensor, kept: list[tuple[int, ...]] = kept) -> torch.Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = (linear(x, activation) if activation else linear(bias_swiglu_impl(x, None)))[0]
        assert any(shape[-1] == 40 for shape in kept) == (activation is None)
        out.backward(grad)
        found.append([out.detach(), x.grad, linear.weight.main_grad] + ([linear.bias.grad] if with_bias else []))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
