"""The layer on one process: against a loop over tokens, sequential against grouped experts, shared experts, what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.param_sharding import build_param_table, count_parameters
from megatron.core.transformer.moe import grouped_gemm
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.settings import DISPATCHER_TYPES
from megatron.core.transformer.moe.token_dispatcher import DISPATCHERS, TokenCounts
from megatron.training import model_size
from megatron.training.argument_utils import build_parser
from megatron.training.arguments import core_transformer_config_from_args
from tests.unit_tests.training.lines import TINY, checked
from tests.unit_tests.transformer.moe.moe_layers import moe_config, moe_layer, tokens


def output_by_hand(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, from a sequential layer's weights."""
    config, flat = layer.config, x.flatten(0, 1)
    probs, routing_map = layer.route(x)
    rows = []
    for token in range(flat.shape[0]):
        total = torch.zeros_like(flat[0])
        for expert in routing_map[token].nonzero().flatten().tolist():
            mlp = layer.experts.local_experts[expert]
            inner = F.linear(flat[token], mlp.linear_fc1.weight, mlp.linear_fc1.bias)
            inner = F.silu(inner[:12]) * inner[12:] if config.gated_linear_unit else F.silu(inner)
            total = total + probs[token, expert] * F.linear(inner, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
        rows.append(total)
    out = torch.stack(rows).view_as(x)
    if layer.shared_experts is not None:
        shared = layer.shared_experts
        inner = F.linear(x, shared.linear_fc1.weight, shared.linear_fc1.bias)
        size = inner.shape[-1] // 2
        value = F.linear(F.silu(inner[..., :size]) * inner[..., size:], shared.linear_fc2.weight, shared.linear_fc2.bias)
        out = out + value * torch.sigmoid(F.linear(x, shared.gate_weight))
    return out


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_bias_linear": False, "gated_linear_unit": False, "moe_router_topk": 4},
        {"moe_shared_expert_intermediate_size": 6, "moe_shared_expert_gate": True},
        {"moe_expert_capacity_factor": 0.6},
    ],
)
def test_a_layer_is_a_loop_over_tokens(dispatcher: str, options: dict[str, Any]) -> None:
    x, grad = tokens(), tokens(seed=2)
    plain = moe_layer(moe_config(**options))
    expected = output_by_hand(plain, x)
    expected.backward(grad)
    for grouped in (False, True):
        layer = moe_layer(moe_config(**options, moe_token_dispatcher_type=dispatcher, moe_grouped_gemm=grouped))
        assert isinstance(layer.experts, GroupedMLP if grouped else SequentialMLP)
        out, _ = layer(x)
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
        out.backward(grad)
        theirs: dict[str, list[torch.Tensor]] = {}
        for record in build_param_table(plain).values():
            theirs.setdefault(record.key, []).append(gradient_of(record.param))
        for record in build_param_table(layer).values():
            parts = theirs[record.key]
            whole = torch.stack(parts) if record.sharding.expert_dims else parts[(record.place or (0,))[-1]]
            torch.testing.assert_close(gradient_of(record.param), whole, rtol=1e-10, atol=1e-12)


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """0 where the reference, which visits no expert without tokens, has none."""
    return torch.zeros_like(param) if param.grad is None else param.grad


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    for grouped in (False, True):
        layer = moe_layer(moe_config(moe_grouped_gemm=grouped))
        layer.router.weight.data[2:] = 0.0
        layer.router.weight.data[:2] = 0.0
        x = tokens().abs()
        layer.router.weight.data[0] = 5.0
        layer.router.weight.data[1] = 4.0
        layer(x)[0].sum().backward()
        for name, param in layer.experts.named_parameters():
            assert param.grad is not None, name
        grads = [p.grad for n, p in layer.experts.named_parameters() if "fc1.weight" in n]
        last = grads[0][2:] if grouped else torch.stack(grads[2:])  # type: ignore[arg-type,index]
        assert last.abs().sum() == 0


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("main_dtype", [torch.float64, torch.float32])
def test_grouped_weight_gradients_go_into_the_buffer(filled: bool, main_dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, dtype=torch.float64)
    counts = TokenCounts(torch.tensor([2, 0, 4]))
    weight: Any = torch.nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
    out = grouped_gemm.grouped_linear(x, weight, counts)
    (expected,) = torch.autograd.grad(out.square().sum(), weight)
    weight.main_grad, weight.main_grad_filled = torch.ones(3, 4, 5, dtype=main_dtype), filled
    said = []
    weight.grad_ready = lambda: said.append(True)
    grouped_gemm.grouped_linear(x, weight, counts, True).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, (expected + filled).to(main_dtype))
    assert weight.grad is None and weight.main_grad_filled and said == [True]


def test_a_bf16_layer_weighs_by_fp32_scores() -> None:
    layer = moe_layer(moe_config(params_dtype=torch.bfloat16, moe_grouped_gemm=True))
    out, _ = layer(tokens().bfloat16())
    assert out.dtype is torch.bfloat16
    exact = moe_layer(moe_config(moe_grouped_gemm=True))
    torch.testing.assert_close(out.double(), exact(tokens())[0], rtol=0.1, atol=0.1)


def test_models_of_dense_and_moe_layers() -> None:
    config = moe_config(num_layers=3, moe_layer_freq=[0, 1, 0], hidden_dropout=0.0, attention_dropout=0.0)
    model: Any = GPTModel(config, get_gpt_decoder_block_spec(config, False), 32, 8)
    assert [layer.is_moe_layer for layer in model.decoder.layers] == [False, True, False]
    assert model.decoder.layers[1].mlp.router.layer_number == 2
    keys = {record.key for record in build_param_table(model).values()}
    assert {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"} <= keys
    assert "decoder.layers.1.mlp.experts.experts.linear_fc2.weight" in keys
    ids = torch.arange(8).view(1, 8)
    model(ids, ids, None, labels=ids, padding_mask=ids > 5).sum().backward()
    assert int(model.decoder.layers[1].mlp.router.step.tokens_per_expert.sum()) == 6 * 2


@pytest.mark.parametrize("more", ["", "--swiglu --disable-bias-linear --moe-shared-expert-gate --moe-shared-expert-intermediate-size 24"])
def test_check_config_counts_the_models_parameters(more: str) -> None:
    line = f"--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq ([0]*1+[1]*3) {more}"
    args = checked([*TINY, *line.split()])
    config = core_transformer_config_from_args(args)
    model = GPTModel(config, get_gpt_decoder_block_spec(config, False), 128, 32, share_embeddings_and_output_weights=True)
    counted = sum(model_size.parameters_of_layers(args)) + (model_size.embedding_parameters(args) or 0)
    assert counted == count_parameters(model) == sum(param.numel() for param in model.parameters())


def test_refusals() -> None:
    with pytest.raises(ValueError, match="the group of expert_model_parallel_size has 1 ranks but the config's is 2"):
        moe_layer(moe_config(expert_model_parallel_size=2))
    with pytest.raises(ValueError, match=r"needs submodules\.experts"):
        MoELayer(moe_config())
    with pytest.raises(ValueError, match="padding_mask has the shape"):
        moe_layer(moe_config())(tokens(8, 2), padding_mask=torch.zeros(3, 8, dtype=torch.bool))


def test_dispatchers_are_offered_as_they_are_built():
    assert (*DISPATCHERS, "flex") == DISPATCHER_TYPES
    (action,) = (action for action in build_parser()._actions if action.dest == "moe_token_dispatcher_type")
    assert action.choices is None or set(action.choices) == set(DISPATCHER_TYPES)
    assert "not yet" not in str(action.help)
