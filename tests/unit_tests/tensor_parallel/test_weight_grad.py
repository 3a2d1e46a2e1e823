"""Gradients written into the buffer equal autograd's, over micro batches and with tied weights."""

import copy
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.weight_grad import add_to_main_grad, write_weight_grad
from megatron.core.transformer.transformer_config import TransformerConfig


def weight(dtype, grad_dtype):
    param: Any = torch.nn.Parameter(torch.zeros(5, 3, dtype=dtype))
    param.main_grad = torch.full((5, 3), 7.0, dtype=grad_dtype)  # what an earlier step left
    param.main_grad_filled = False
    param.calls = 0

    def ready():
        param.calls += 1

    param.grad_ready = ready
    return param


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_first_overwrites_later_add(dtype, grad_dtype):
    param = weight(dtype, grad_dtype)
    grad, inputs = torch.randn(4, 5).to(dtype), torch.randn(4, 3).to(dtype)
    product = (grad.double().t() @ inputs.double()).to(grad_dtype)
    write_weight_grad(param, grad, inputs)
    torch.testing.assert_close(param.main_grad, product, rtol=1e-2, atol=1e-2)
    write_weight_grad(param, grad, inputs)
    add_to_main_grad(param, product.to(dtype))
    torch.testing.assert_close(param.main_grad, 3 * product, rtol=1e-2, atol=3e-2)
    assert param.calls == 3 and param.main_grad_filled


def test_model_with_fusion_equals_autograd():
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        gradient_accumulation_fusion=True,
    )
    fused = GPTModel(config, get_gpt_layer_local_spec(), 64, 16, share_embeddings_and_output_weights=True)
    plain = copy.deepcopy(fused)  # without main_grad the linears leave gradients to autograd
    params: list[Any] = list(fused.parameters())
    for param in params:
        param.main_grad, param.main_grad_filled = torch.full_like(param, torch.nan), False

        def move(param):
            if param.grad is not None:
                add_to_main_grad(param, param.grad)
                param.grad = None

        param.register_post_accumulate_grad_hook(move)
    for seed in range(2):
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(16).expand(2, -1)
        for model in (fused, plain):
            model(ids, positions, None, labels=ids.roll(-1, 1)).sum().backward()
    for got, (name, expected) in zip(params, plain.named_parameters(), strict=True):
        torch.testing.assert_close(got.main_grad, expected.grad, rtol=1e-10, atol=1e-10, msg=name)
