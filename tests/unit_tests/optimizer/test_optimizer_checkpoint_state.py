"""What checkpoints are made of, on a real model: names, shapes and that the tensors are the optimizer's own."""

from types import SimpleNamespace

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig


def build(tied, dtype=torch.float32, fused=False):
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
        params_dtype=dtype, bf16=dtype == torch.bfloat16, gradient_accumulation_fusion=fused,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, 8, share_embeddings_and_output_weights=tied)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model.to(dtype))
    settings = OptimizerConfig(lr=1e-2, weight_decay=0.1, bf16=dtype == torch.bfloat16)
    return ddp, get_megatron_optimizer(settings, [ddp])


def step(ddp, optimizer):
    tokens = torch.arange(16).view(2, 8)
    ddp.zero_grad_buffer()
    loss = ddp(tokens, torch.arange(8).expand(2, 8), None, labels=tokens + 1).mean()
    loss.backward()
    finalize_model_grads([ddp])
    return loss.item(), optimizer.step()[1].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_sharded_state_covers_every_parameter_once(tied, dtype):
    ddp, optimizer = build(tied, dtype)
    step(ddp, optimizer)
    found = list(optimizer.model_sharded_state())
    assert len(found) == len(optimizer.params) == len(list(ddp.parameters()))
    assert len({(record.key, record.layer) for record, _ in found}) == len(found)
    keys = {record.key for record, _ in found}
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in keys and ("output_layer.weight" in keys) is not tied
    for record, tensors in found:
        assert set(tensors) == {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if dtype == torch.bfloat16 else set())
        assert all(tensor.shape == record.param.shape and tensor.dtype == torch.float32 for tensor in tensors.values())
    record, tensors = found[0]
    tensors["exp_avg"].fill_(3.0)
    entry = next(entry for entry in optimizer.params if entry.model_param is record.param)
    assert (optimizer.state[entry.main_param]["exp_avg"] == 3.0).all()
    with pytest.raises(ValueError, match="dp_reshardable"):
        list(optimizer.model_sharded_state("dp_reshardable"))


@pytest.mark.parametrize("tied", [True, False])
def test_direct_weight_gradients_train_as_autograd_does(tied):
    plain, fused = build(tied), build(tied, fused=True)
    for _ in range(5):
        assert step(*fused) == pytest.approx(step(*plain), rel=1e-5)
    assert step(*fused)[0] < step(*build(tied))[0] * 0.9


def test_weight_decay_groups_of_a_gpt():
    _, optimizer = build(tied=False)
    decayed = {entry.name for entry in optimizer.params[: len(optimizer.param_groups[0]["params"])]}
    names = {entry.name for entry in optimizer.params}
    assert decayed == {name for name in names if name.endswith(".weight") and "norm" not in name}
    assert SimpleNamespace(**optimizer.param_groups[1]).weight_decay == 0.0
