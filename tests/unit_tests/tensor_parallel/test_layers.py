"""Linears and the embedding: alone against torch, and split over two ranks against whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.param_sharding import local_part
from tests.distributed import run_on_ranks

INIT = init_method_normal(1.0)


def config(**extra):
    return ModelParallelConfig(params_dtype=torch.float64, **extra)


def test_gradients_of_the_linear():
    torch.manual_seed(0)
    layer = ColumnParallelLinear(4, 6, config=config(), init_method=INIT)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: layer(x, weight=w)[0], (x, layer.weight))
    out, bias = layer(x)
    assert bias is None and torch.equal(out, F.linear(x, layer.weight, layer.bias))


def test_skipped_bias_comes_back():
    layer = RowParallelLinear(4, 6, config=config(), init_method=INIT, bias=True, input_is_parallel=True, skip_bias_add=True)
    out, bias = layer(torch.ones(1, 1, 4, dtype=torch.float64))
    assert bias is layer.bias and torch.equal(out, F.linear(torch.ones(1, 1, 4, dtype=torch.float64), layer.weight))


def test_frozen_weight_gets_no_gradient():
    layer = ColumnParallelLinear(4, 6, config=config(gradient_accumulation_fusion=True), init_method=INIT)
    layer.weight.requires_grad_(False)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.weight.main_grad_filled = False
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    layer(x)[0].sum().backward()
    assert not layer.weight.main_grad_filled and layer.weight.grad is None and x.grad is not None


def test_messages():
    layer = ColumnParallelLinear(4, 6, config=config(), init_method=INIT, skip_weight_param_allocation=True, bias=False)
    with pytest.raises(ValueError, match="pass forward a weight"):
        layer(torch.ones(1, 1, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected"):
        layer(torch.ones(1, 1, 4, dtype=torch.float64), weight=torch.ones(4, 6))
    table = VocabParallelEmbedding(8, 4, init_method=INIT, config=config())
    with pytest.raises(ValueError, match="token ids from 0 to 8 in a batch, but the model's vocabulary is 0 to 7"):
        table(torch.tensor([0, 8]))


def _net(tp, sequence_parallel):
    """embedding -> column (gate and up) -> row; returns output and gradients with what each is a part of."""
    if tp > 1:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    settings = config(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    torch.manual_seed(5)
    scatter = {"reduce_scatter_embeddings": sequence_parallel}
    table = VocabParallelEmbedding(12, 4, init_method=INIT, config=settings, **scatter)
    column = ColumnParallelLinear(4, 16, config=settings, init_method=INIT, segments=(("gate", 8), ("up", 8)))
    row = RowParallelLinear(8, 4, config=settings, init_method=INIT, bias=True, input_is_parallel=True, skip_bias_add=False)
    torch.manual_seed(6)
    ids, weight = torch.randint(0, 12, (6, 2)), torch.randn(6, 2, 4, dtype=torch.float64)
    gate, up = column(table(ids))[0].chunk(2, dim=-1)
    out = row(gate * up)[0]
    if sequence_parallel:
        weight = weight.chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    (out * weight).sum().backward()
    params: dict[str, Any] = {
        f"{name}.{kind}": param for name, layer in (("t", table), ("c", column), ("r", row)) for kind, param in layer.named_parameters()
    }
    return out.detach(), {name: (param.detach(), param.grad, param.sharding) for name, param in params.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(sequence_parallel):
    out, params = _net(1, False)
    ranks = run_on_ranks(2, _net, 2, sequence_parallel)
    got = torch.cat([rank[0] for rank in ranks]) if sequence_parallel else ranks[0][0]
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    for name, (value, grad, _) in params.items():
        partial = sum(rank[1][name][1] for rank in ranks)
        for index, rank in enumerate(ranks):
            part, part_grad, sharding = rank[1][name]
            assert torch.equal(part, local_part(value, sharding, index, 2)), f"initial {name} depends on the split"
            summed = partial if "tp" in sharding.grad_partial else part_grad
            torch.testing.assert_close(summed, local_part(grad, sharding, index, 2), rtol=1e-12, atol=1e-12)
