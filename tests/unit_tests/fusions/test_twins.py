"""Every fast path against its plain twin, outputs and gradients, in float64 (and bf16 where the precision inside matters)."""

import pytest
import torch

from megatron.core.fusions.fused_bias_dropout import bias_dropout_add, bias_dropout_add_plain
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl, bias_gelu_plain
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, bias_swiglu_plain
from megatron.core.fusions.fused_layer_norm import norm, norm_plain
from megatron.core.fusions.fused_rope import apply_rotary_plain, fused_apply_rotary


def compare(fast, plain, *inputs, tolerance=1e-12):
    """Same outputs, and same gradients for a random output gradient."""
    results = []
    for function in (fast, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        torch.manual_seed(0)
        out.backward(torch.randn(out.shape, dtype=torch.float64).to(out.dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm(rms, zero_centered):
    arguments = {"eps": 1e-5, "rms": rms, "zero_centered": zero_centered}
    if rms:
        compare(lambda x, w: norm(x, w, None, **arguments), lambda x, w: norm_plain(x, w, None, **arguments), rand(3, 2, 16), rand(16))
    else:
        compare(
            lambda x, w, b: norm(x, w, b, **arguments), lambda x, w, b: norm_plain(x, w, b, **arguments), rand(3, 2, 16), rand(16), rand(16)
        )


@pytest.mark.parametrize("rms", [False, True])
def test_norm_in_bf16_has_fp32_statistics(rms):
    x = (torch.randn(4, 512) + 30).bfloat16()
    weight, bias = torch.ones(512).bfloat16(), None if rms else torch.zeros(512).bfloat16()
    out = norm(x, weight, bias, 1e-5, rms=rms)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, norm_plain(x, weight, bias, 1e-5, rms=rms), rtol=8e-3, atol=8e-3)


def test_bias_gelu():
    compare(bias_gelu_impl, bias_gelu_plain, rand(3, 2, 8), rand(8))
    compare(lambda x: bias_gelu_impl(x, None), lambda x: bias_gelu_plain(x, None), rand(3, 2, 8))


def test_bias_swiglu():
    compare(bias_swiglu_impl, bias_swiglu_plain, rand(3, 2, 8), rand(8))
    compare(lambda x: bias_swiglu_impl(x, None), lambda x: bias_swiglu_plain(x, None), rand(3, 2, 8))
    with pytest.raises(ValueError, match="fp8_input_store"):
        bias_swiglu_impl(rand(2, 4), None, fp8_input_store=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 6])
def test_rope(interleaved, width):
    angles = torch.outer(torch.arange(5.0), torch.rand(width // 2))
    freqs = (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))[:, None, None, :].double()
    strided = rand(5, 2, 3, 12)[..., :8]  # as a slice of the projection
    compare(lambda t: fused_apply_rotary(t, freqs, interleaved), lambda t: apply_rotary_plain(t, freqs, interleaved), strided)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("prob", "training"), [(0.0, True), (0.4, False), (0.4, True)])
def test_bias_dropout_add(prob, training, with_bias):
    def seeded(function):
        def run(x, residual, *bias):
            torch.manual_seed(3)
            return function((x, bias[0] if bias else None), residual, prob, training)

        return run

    inputs = [rand(3, 2, 8), rand(3, 2, 8)] + ([rand(8)] if with_bias else [])
    compare(seeded(bias_dropout_add), seeded(bias_dropout_add_plain), *inputs)
