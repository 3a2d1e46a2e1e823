"""Kernels of a block against their plain twin: output, logsumexp, dQ, dK, dV from a softmax over more than the block."""

import warnings
from typing import Any

import pytest
import torch

from megatron.core.context_parallel import block_attention
from megatron.core.context_parallel.block_attention import BOUNDS, attend, attend_backward, choose_kernel, is_sound, self_check
from megatron.core.transformer.enums import AttnBackend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_per_group", [1, 4])
def test_gradients_of_the_cpu_kernel(dtype, heads_per_group):
    """dQ of a fused backend was wrong by as much as its size in some layouts."""
    errors = self_check("cpu_flash", "cpu", dtype, 16, heads_per_group, tokens=48)
    assert len(errors) == 6 and all(error <= BOUNDS[dtype] for error in errors.values()), errors
    assert all(error <= BOUNDS[dtype] for error in self_check("plain", "cpu", dtype, 16, heads_per_group, tokens=48).values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kernel", ["cudnn", "flash", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "heads_per_group"), [(64, 1), (128, 4)])
def test_gradients_of_gpu_kernels(kernel, dtype, width, heads_per_group):
    errors = self_check(kernel, "cuda", dtype, width, heads_per_group, tokens=256)
    assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


def test_the_twin_is_autograd_of_the_definition_and_goes_by_rows(monkeypatch):
    monkeypatch.setattr(block_attention.device, "BLOCK_ELEMENTS", {"cpu": 7 * 4 * 3})  # blocks of 3 queries
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 5, dtype=torch.float64, requires_grad=True) for heads, tokens in ((4, 8), (2, 7), (2, 7))
    )
    hidden = torch.rand(8, 7) < 0.4
    hidden[2] = True
    keys, values = (t.repeat_interleave(2, dim=1) for t in (key, value))
    scores = (0.3 * query @ keys.transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    nothing = hidden.all(-1, keepdim=True)  # of these queries the gradient of softmax itself is NaN
    safe = (0.3 * query @ keys.transpose(-1, -2)).masked_fill(hidden & ~nothing, float("-inf"))
    expected = safe.softmax(dim=-1).masked_fill(nothing, 0.0) @ values
    grad = torch.randn_like(expected)
    expected.backward(grad)
    plain: Any = tuple(t.detach() for t in (query, key, value))
    out, lse = attend(plain[0], plain[1], plain[2], "masked", hidden, 0.3, "plain")
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    assert (lse[:, :, 2] == float("-inf")).all()
    torch.testing.assert_close(lse, scores.logsumexp(dim=-1).detach(), rtol=1e-12, atol=1e-12)
    grads = attend_backward(grad, plain[0], plain[1], plain[2], out, lse, "masked", hidden, 0.3, "plain")
    torch.testing.assert_close(list(grads), [t.grad for t in (query, key, value)], rtol=1e-12, atol=1e-12)


def test_a_kernel_that_fails_its_self_check_is_not_used(monkeypatch):
    def wrong(*arguments):
        dq, dk, dv = attend_backward(*arguments)
        return (dq * (1.5 if arguments[-1] == "cpu_flash" else 1.0), dk, dv)

    where, key = torch.device("cpu"), torch.zeros(1, 2, 4, 24)
    monkeypatch.setattr(block_attention, "attend_backward", wrong)
    is_sound.cache_clear()
    with pytest.warns(UserWarning, match=r"attention kernel cpu_flash is not used: errors .*dQ"):
        assert not is_sound("cpu_flash", where, torch.float32, 24, 1)
    is_sound.cache_clear()
    with pytest.warns(UserWarning, match="cudnn is not used, it does not run"):
        assert not is_sound("cudnn", where, torch.bfloat16, 24, 1)
    is_sound.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_kernel(AttnBackend.auto, key, key) == "cpu_flash" and choose_kernel(AttnBackend.unfused, key, key) == "plain"


def test_the_gpu_kernels_have_the_arguments_that_are_given():
    """They cannot run here; their schemas are the same on every build of torch."""
    names = {
        name: [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
        for name in (
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
        )
    }
    start = ["grad_out", "query", "key", "value", "out", "logsumexp"]
    lengths = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    seeds = ["philox_seed", "philox_offset"]
    tokens = ["query", "key", "value"]
    assert list(names.values()) == [
        [*tokens, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"],
        [*start, *seeds, "attn_bias", *lengths, "scale"],
        [*tokens, "dropout_p", "is_causal", "return_debug_mask", "scale"],
        [*start, *lengths, *seeds, "scale"],
    ]
