"""Layers whose norms make the residual stream's sums, with kernels: as those that make them apart; and when they do."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.cuda_graphs import LayerGraphs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import norm as norm_kernels

ON_GPU = device.has_accelerator()
pytestmark = [pytest.mark.gpu] if ON_GPU else []
VOCAB, SEQ, LAYERS = 32, 6, 2
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
    "add_bias_linear": False,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "multi_latent_attention": True}
KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "zero-centred": {"layernorm_zero_centered_gamma": True},
    "experts": {"num_moe_experts": 4, "add_bias_linear": False},
    "latent attention": {**LATENT, "add_bias_linear": False},
    "tokens ahead": {**LLAMA, "mtp_num_layers": 1},
}


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not ON_GPU)


@pytest.fixture
def calls() -> Iterator[mock.Mock]:
    with mock.patch.object(norm_kernels, "norm_of_sum", side_effect=norm_kernels.norm_of_sum) as counted:
        yield counted


def build(kind: str = "llama", fused: bool = True, dtype: torch.dtype = torch.float64, **settings: Any) -> GPTModel:
    model_parallel_cuda_manual_seed(5)
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    settings = {**sizes, **KINDS[kind], "params_dtype": dtype, "bias_dropout_fusion": fused, **settings}
    config = (MLATransformerConfig if kind == "latent attention" else TransformerConfig)(**settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(0)).to(device.current_device())
    return ids[:, :-1], torch.arange(SEQ, device=ids.device).expand(2, -1), ids[:, 1:]


def learn(model: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients."""
    ids, positions, labels = batch()
    loss = model(ids, positions, None, labels=labels)
    loss.mean().backward()
    return {"loss": loss.detach()} | {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_the_same(kind: str, calls: mock.Mock) -> None:
    """Losses to the bit."""
    apart = learn(build(kind, fused=False))
    assert not calls.called
    together = learn(build(kind))
    assert calls.call_count == 2 * (LAYERS + (kind == "tokens ahead"))
    assert torch.equal(together.pop("loss"), apart.pop("loss"))
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-12)
    assert all(grad.any() for name, grad in together.items() if "layernorm" in name)


def test_a_layer_sums_no_gradient_apart() -> None:
    """Its input's gradient comes from one place; two of them, autograd would add."""

    def edges_to_input(fused: bool) -> int:
        x = torch.randn(SEQ, 2, 32, dtype=torch.float64, device=device.current_device()).requires_grad_()
        out, _ = build(fused=fused, dtype=torch.float64).decoder.layers[0](x)
        target, seen, waiting, found = torch.autograd.graph.get_gradient_edge(x).node, set(), [out.grad_fn], 0
        while waiting:
            node = waiting.pop()
            for following, _ in node.next_functions:
                found += following is target
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return found

    assert edges_to_input(True) == 1 < edges_to_input(False)


def replaced_norm(layer: Any) -> None:
    class Other(FusedLayerNorm):
        pass

    layer.pre_mlp_layernorm.__class__ = Other


def replaced_join(layer: Any) -> None:
    layer.mlp_bda = lambda *settings: get_bias_dropout_add(*settings)


def left_out_norm(layer: Any) -> None:
    layer.input_layernorm = IdentityOp()


APART: dict[str, tuple[dict[str, Any], Callable | None]] = {
    "not asked for": ({"fused": False}, None),
    "dropout": ({"hidden_dropout": 0.1}, None),
    "residual after the norm": ({"apply_residual_connection_post_layernorm": True}, None),
    "norms run again": ({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}, None),
    "another norm": ({}, replaced_norm),
    "no norm": ({}, left_out_norm),
    "another join": ({}, replaced_join),
}


@pytest.mark.parametrize("why", APART)
def test_when_sums_are_made_apart(why: str, calls: mock.Mock) -> None:
    options, replace = APART[why]
    model = build(**options)
    for layer in model.decoder.layers if replace else ():
        assert replace is not None
        replace(layer)
    learn(model)
    assert not calls.called


def test_nothing_is_dropped_in_evaluation(calls: mock.Mock) -> None:
    found = learn(build(hidden_dropout=0.1).eval())
    assert calls.call_count == 2 * LAYERS
    assert torch.equal(found["loss"], learn(build(fused=False).eval())["loss"])


AGAIN: dict[str, dict[str, Any]] = {
    "whole layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "attention and mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


@pytest.mark.parametrize("form", AGAIN)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_what_runs_again_gives_the_same_to_the_bit(kind: str, form: str, calls: mock.Mock) -> None:
    expected = learn(build(kind, dtype=torch.float32))
    once = calls.call_count
    found = learn(build(kind, dtype=torch.float32, **AGAIN[form]))
    assert calls.call_count == once * (3 if form == "whole layers" else 2)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_hooks_of_norms_run() -> None:
    """Those that wait for gathered parameters among them."""
    model: Any = build()
    ran: list[int] = []
    for layer in model.decoder.layers:
        layer.pre_mlp_layernorm.register_forward_pre_hook(lambda *_: ran.append(1))
        layer.input_layernorm.register_forward_pre_hook(lambda *_: ran.append(1))
    learn(model)
    assert len(ran) == 2 * LAYERS


@pytest.mark.skipif(ON_GPU, reason="with real graphs: tests/functional/test_on_gpu.py")
def test_graphs_of_layers(monkeypatch: pytest.MonkeyPatch, calls: mock.Mock) -> None:
    def capture(work: Callable[[], None], pool: Any, states: Any = ()) -> Callable[[], None]:
        before = [(param, param.main_grad.clone(), param.main_grad_filled) for param in model.parameters()]
        work()
        for param, grad, filled in before:
            param.main_grad.copy_(grad)
            param.main_grad_filled = filled
        return work

    monkeypatch.setattr(device, "capture_graph", capture)
    monkeypatch.setattr(device, "graph_pool", object)
    monkeypatch.setattr(LayerGraphs, "_pools", {})
    found = []
    graphs: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}
    for settings in ({}, graphs):
        model: Any = build(dtype=torch.float32, **settings)
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        model.zero_grad_buffer()
        losses = [learn(model)["loss"] for _ in range(3)]
        model.finish_grad_sync()
        found.append(losses + [param.main_grad.clone() for param in model.parameters()])
    assert calls.called and all(torch.equal(one, other) for one, other in zip(*found, strict=True))
