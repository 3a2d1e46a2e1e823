"""Attention by scaled_dot_product_attention against its plain twin, outputs and gradients in float64."""

from typing import Any

import pytest
import torch

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

S, B, HEADS, D = 7, 2, 4, 8


def attention(backend, mask_type=AttnMaskType.causal, layer_number=3, **extra):
    settings: dict[str, Any] = {"attention_dropout": 0.0, "num_query_groups": 2, **extra}
    config = TransformerConfig(num_layers=4, hidden_size=HEADS * D, num_attention_heads=HEADS, attention_backend=backend, **settings)
    return DotProductAttention(config, layer_number, mask_type, "self")


def tensors(groups=2, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(S, B, heads, D, dtype=torch.float64).to(dtype).requires_grad_() for heads in (HEADS, groups, groups)]


def run(core, mask=None, groups=2, dtype=torch.float64):
    leaves = tensors(groups, dtype)
    out = core(*leaves, mask)
    assert out.shape == (S, B, HEADS * D)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def random_mask(batch=B):
    torch.manual_seed(1)
    mask = torch.rand(batch, 1, S, S) < 0.3
    return mask & ~torch.eye(S, dtype=torch.bool)  # each token sees itself


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.arbitrary])
@pytest.mark.parametrize("masked", [False, True])
def test_twins(groups, mask_type, masked):
    results = [
        run(attention(backend, mask_type, num_query_groups=groups), random_mask() if masked else None, groups)
        for backend in (AttnBackend.auto, AttnBackend.unfused)
    ]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash, AttnBackend.unfused])
def test_a_mask_holds_in_addition_to_causal(backend):
    """Two documents in a row: changing the first must not move the second by a bit."""
    core = attention(backend)
    mask = torch.zeros(1, 1, S, S, dtype=torch.bool)
    mask[:, :, 3:, :3] = True
    query, key, value = (t.detach() for t in tensors())
    before = core(query, key, value, mask)
    key[:3], value[:3] = 5.0, -5.0
    after = core(query, key, value, mask)
    assert torch.equal(before[3:], after[3:]) and not torch.equal(before[:3], after[:3])
    value[-1] = 9.0
    assert torch.equal(core(query, key, value, mask)[:-1], after[:-1]), "the mask replaced the causal one"


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
@pytest.mark.parametrize("layer_number", [1, 3])
def test_query_key_layer_scaling_cancels_out(backend, softmax_scale, layer_number):
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "layer_number": layer_number}
    on = run(attention(backend, apply_query_key_layer_scaling=True, **options))
    torch.testing.assert_close(on, run(attention(backend, **options)), rtol=1e-12, atol=1e-12)


def test_query_key_layer_scaling_keeps_fp16_scores_finite():
    query, key, value = (300 * t.detach().half() for t in tensors())
    plain = attention(AttnBackend.unfused, softmax_scale=1.0, layer_number=16)
    scaled = attention(AttnBackend.unfused, softmax_scale=1.0, layer_number=16, apply_query_key_layer_scaling=True)
    assert not plain(query, key, value, None).isfinite().all() and scaled(query, key, value, None).isfinite().all()


def test_a_query_that_sees_nothing_gets_zeros():
    mask = torch.zeros(1, 1, S, S, dtype=torch.bool)
    mask[:, :, 2] = True
    for backend in (AttnBackend.auto, AttnBackend.unfused):
        out = run(attention(backend, AttnMaskType.arbitrary), mask)
        assert (out[0][2] == 0).all() and all(t.isfinite().all() for t in out)


def test_dropout_comes_from_the_tracker_and_stops_in_evaluation():
    core = attention(AttnBackend.unfused, attention_dropout=0.5)
    outs = []
    for tp_rank in (0, 0, 1):
        model_parallel_cuda_manual_seed(7, tp_rank=tp_rank)
        outs.append(run(core)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    core.eval()
    torch.testing.assert_close(run(core)[0], run(attention(AttnBackend.unfused))[0])


def test_what_no_path_honours_is_refused():
    core = attention(AttnBackend.auto)
    with pytest.raises(ValueError, match="attention_bias"):
        core(*tensors(), None, attention_bias=torch.zeros(1))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuDNN"):
            attention(AttnBackend.fused)
