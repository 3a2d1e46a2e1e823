"""Every fast path against its plain twin, outputs and gradients, in float64 (and bf16 where the precision inside matters)."""

import pytest
import torch

from megatron.core.fusions import fused_rope
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add, bias_dropout_add_plain
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl, bias_gelu_plain
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, bias_swiglu_plain
from megatron.core.fusions.fused_layer_norm import norm, norm_plain
from megatron.core.fusions.fused_rope import apply_rotary_plain, fused_apply_rotary, fused_split_and_rotate
from tests.operations import CountedOperations


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
    freqs = angles_of(5, width, interleaved)
    strided = rand(5, 2, 3, 12)[..., :8]  # as a slice of the projection
    compare(lambda t: fused_apply_rotary(t, freqs, interleaved), lambda t: apply_rotary_plain(t, freqs, interleaved), strided)


def angles_of(length, width, interleaved=False):
    angles = torch.outer(torch.arange(float(length)), torch.rand(width // 2))
    return (angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1))[:, None, None, :].double()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize(("groups", "heads_per_group"), [(1, 1), (3, 1), (1, 4), (2, 3)])
def test_rope_of_a_projection(interleaved, width, groups, heads_per_group):
    freqs = angles_of(5, width, interleaved)

    def plain(packed):
        query, key, value = packed.split([8 * heads_per_group, 8, 8], dim=-1)
        query = query.reshape(5, 2, groups * heads_per_group, 8)
        return apply_rotary_plain(query, freqs, interleaved), apply_rotary_plain(key, freqs, interleaved), value

    def fused(packed):
        parts = fused_split_and_rotate(packed, freqs, heads_per_group, interleaved)
        storages = {part.untyped_storage().data_ptr() for part in (packed, *parts)}
        assert all(part.is_contiguous() for part in parts) and len(storages) == 4
        return parts

    mixed = rand(5, 2, groups, (heads_per_group + 2) * 8)
    for swapped in ((0, 0), (0, 1)):  # gradients that lie as the outputs do, and otherwise

        def joined(function, swapped=swapped):
            return lambda x: torch.cat([part.transpose(*swapped).flatten() for part in function(x)])

        compare(joined(fused), joined(plain), mixed)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_rope_of_a_projection_with_expanded_and_missing_gradients(unused):
    freqs = angles_of(5, 8)
    packed = rand(5, 2, 3, 4 * 8).requires_grad_()
    again = packed.detach().clone().requires_grad_()
    query, key, value = again.split([16, 8, 8], dim=-1)
    plain = (apply_rotary_plain(query.reshape(5, 2, 6, 8), freqs, False), apply_rotary_plain(key, freqs, False), value)
    for parts in (fused_split_and_rotate(packed, freqs, 2, False), plain):
        torch.stack([part.sum() for n, part in enumerate(parts) if n != unused]).sum().backward()
    torch.testing.assert_close(packed.grad, again.grad, rtol=1e-12, atol=1e-12)


def test_cosines_are_made_once_for_the_layers_that_share_angles():
    freqs, t = angles_of(5, 8), rand(5, 2, 3, 8)
    with CountedOperations() as seen:
        first, _ = (fused_apply_rotary(t, freqs, False) for _ in range(2))
        fused_split_and_rotate(rand(5, 2, 3, 32), freqs, 2, False)
        assert seen.counts["cos"] == seen.counts["sin"] == 1
        fused_apply_rotary(t, freqs, False, 1.5)
        fused_apply_rotary(t.float(), freqs, False)
        fused_apply_rotary(t, freqs, True)
        assert seen.counts["cos"] == 4
        assert torch.equal(fused_apply_rotary(t, freqs.clone(), False), first) and seen.counts["cos"] == 5
        assert torch.equal(fused_apply_rotary(t, freqs, False), first)
        freqs.mul_(2.0)  # as a graph's static tensor is written over
        torch.testing.assert_close(fused_apply_rotary(t, freqs, False), apply_rotary_plain(t, freqs, False))


def test_cosines_are_forgotten_with_their_angles():
    before = len(fused_rope._made)
    freqs = angles_of(5, 8)
    fused_apply_rotary(rand(5, 2, 3, 8), freqs, False)
    assert len(fused_rope._made) == before + 1
    del freqs
    assert len(fused_rope._made) == before


def test_cosines_of_inference_mode_are_not_kept_for_training():
    freqs, t = angles_of(5, 8), rand(5, 2, 3, 8).requires_grad_()
    with torch.inference_mode():
        made_inside = angles_of(5, 8)
        for angles in (freqs, made_inside):
            fused_apply_rotary(t, angles, False)
    for angles in (freqs, made_inside):
        fused_apply_rotary(t, angles, False).sum().backward()


def test_what_is_recorded_makes_its_own_cosines(monkeypatch):
    """Neither does a recording take what was there before, nor does anyone else take what a recording made."""
    freqs, t = angles_of(5, 8), rand(5, 2, 3, 8)
    with CountedOperations() as seen:
        fused_apply_rotary(t, freqs, False)
        with monkeypatch.context() as patch:
            patch.setattr(fused_rope.device, "is_recording", lambda tensor: True)
            fused_apply_rotary(t, freqs, False)
            fused_apply_rotary(t, freqs, True)
            assert seen.counts["cos"] == 3
        fused_apply_rotary(t, freqs, False)
        assert seen.counts["cos"] == 3
        fused_apply_rotary(t, freqs, True)
        assert seen.counts["cos"] == 4


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
