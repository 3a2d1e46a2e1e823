"""What only a GPU does: kernels of attention, weight gradients accumulated in fp32, random states of the device."""

import copy
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.weight_grad import write_weight_grad
from megatron.core.transformer import flash_attention_3
from megatron.core.transformer.dot_product_attention import DotProductAttention, attention_plain
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash, AttnBackend.fused, AttnBackend.unfused])
@pytest.mark.parametrize("groups", [2, 8])
def test_attention_kernels_against_fp32(backend, groups):
    """Output and dQ, dK, dV in bf16 within 2% (of the largest value) of the plain twin in fp32."""
    config = TransformerConfig(
        num_layers=1, hidden_size=512, num_attention_heads=8, num_query_groups=groups, attention_dropout=0.0, attention_backend=backend
    )
    core = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    torch.manual_seed(0)
    leaves = [torch.randn(256, 2, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (8, groups, groups)]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    hidden = torch.ones(256, 256, dtype=torch.bool, device="cuda").triu(1)
    query, key, value = (t.permute(1, 2, 0, 3) for t in exact)
    expected = attention_plain(query, key, value, hidden, scale=64**-0.5).permute(2, 0, 1, 3).reshape(256, 2, 512)
    out = core(*leaves, None)
    weight = torch.randn_like(expected)
    (out.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    pairs: list[Any] = [(out, expected), *((leaf.grad, other.grad) for leaf, other in zip(leaves, exact))]
    for got, want in pairs:
        assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.skipif(flash_attention_3.package() is None, reason="needs flash_attn_interface and a Hopper GPU")
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("window", [None, (64, 0), (32, 16)])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_3_against_the_twin(groups, window, mask_type, packed):
    """Output and dQ, dK, dV in bf16 within 2% (of the largest value) of the plain twin in fp32, also of packed documents."""
    counts = torch.tensor([0, 100, 101, 256], dtype=torch.int32, device="cuda")
    more = {"packed_seq_params": PackedSeqParams("thd", counts, counts)} if packed else {}
    torch.manual_seed(0)
    leaves = [torch.randn(256, 1 if packed else 2, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (8, groups, groups)]
    results = []
    for backend, tensors in ((AttnBackend.flash, leaves), (AttnBackend.unfused, [t.detach().float().requires_grad_() for t in leaves])):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=512,
            num_attention_heads=8,
            num_query_groups=groups,
            attention_dropout=0.0,
            attention_backend=backend,
            window_size=window,
        )
        out = DotProductAttention(config, 1, mask_type, "self")(*tensors, None, **more)
        (out.float() * torch.arange(out.numel(), device="cuda").view_as(out).sin()).sum().backward()
        results.append([out, *(t.grad for t in tensors)])
    for got, want in zip(*results, strict=True):
        assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()


def test_weight_gradients_accumulate_in_fp32():
    param: Any = torch.nn.Parameter(torch.zeros(64, 32, device="cuda", dtype=torch.bfloat16))
    param.main_grad, param.main_grad_filled = torch.full((64, 32), 7.0, device="cuda"), False
    total = torch.zeros(64, 32, device="cuda", dtype=torch.float64)
    for _ in range(4):
        grad, inputs = torch.randn(128, 64, device="cuda").bfloat16(), torch.randn(128, 32, device="cuda").bfloat16()
        write_weight_grad(param, grad, inputs)
        total += grad.double().t() @ inputs.double()
    torch.testing.assert_close(param.main_grad.double(), total, rtol=1e-4, atol=1e-3)


def test_loss_in_bf16_against_fp64():
    logits = 4 * torch.randn(512, 2, 5000, device="cuda").bfloat16()
    target = torch.randint(0, 5000, (512, 2), device="cuda")
    leaf = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1, target, consume_logits=True)
    loss.mean().backward()
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact.flatten(0, 1), target.flatten(), reduction="none").view(512, 2)
    expected.mean().backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert leaf.grad is not None and exact.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-2, atol=1e-6)


def test_gpu_equals_cpu():
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, 32, position_embedding_type="rope")
    ids = torch.randint(0, 128, (2, 32))
    assert next(model.parameters()).is_cuda
    loss = model(ids.cuda(), None, None, labels=ids.cuda()).mean()
    loss.backward()
    on_cpu = copy.deepcopy(model).cpu()
    angles = model.rotary_pos_emb(32).cpu()
    hidden = on_cpu.decoder(on_cpu.embedding(ids, None), None, rotary_pos_emb=angles)
    expected = on_cpu.compute_language_model_loss(ids, on_cpu.output_layer(hidden)[0]).mean()
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-4)
