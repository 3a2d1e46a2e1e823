"""Recompute changes memory and nothing else: losses, gradients and random states are those of a run without it, to the bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import RecomputedOutput, checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.distributed import run_on_ranks

VOCAB, SEQ = 32, 8
FORMS: dict[str, dict[str, Any]] = {
    "uniform 1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},  # 3 layers: 2 and 1
    "block 2": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "all parts": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "num_query_groups": 2, "add_bias_linear": False}


def build(dropout=0.1, **settings) -> GPTModel:
    config = TransformerConfig(
        num_layers=3, hidden_size=32, num_attention_heads=4, hidden_dropout=dropout, attention_dropout=dropout, **settings
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ, share_embeddings_and_output_weights=True)


def batch(step=0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], torch.arange(SEQ).expand(2, -1), ids[:, 1:]


def random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), device.get_rng_state(), *get_cuda_rng_tracker().get_states().values()]


def run(model: GPTModel, micro_batches=2) -> dict[str, torch.Tensor]:
    """Losses, gradients and random states after a step of accumulation, the states between forward and backward among them."""
    model_parallel_cuda_manual_seed(5)
    ddp: Any = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    ddp.zero_grad_buffer()
    found: dict[str, torch.Tensor] = {}
    for step in range(micro_batches):
        ids, positions, labels = batch(step)
        loss = ddp(ids, positions, None, labels=labels)
        found |= {f"state {step} {i}": state for i, state in enumerate(random_states())}
        loss.mean().backward()
        found[f"loss {step}"] = loss.detach()
    ddp.finish_grad_sync()
    found |= {f"state at the end {i}": state for i, state in enumerate(random_states())}
    return found | {name: param.main_grad.clone() for name, param in model.named_parameters()}  # type: ignore[attr-defined]


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert not differing, differing


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("direct", [False, True])
def test_equal_to_the_bit(form, dropout, direct):
    settings = {"dropout": dropout, "gradient_accumulation_fusion": direct}
    expected = run(build(**settings))
    assert_same(expected, run(build(**settings, **FORMS[form])))
    assert all(grad.any() for name, grad in expected.items() if name.endswith(("weight", "bias")) and "linear" in name)


@pytest.mark.parametrize("form", ["uniform 2", "all parts"])
@pytest.mark.parametrize(
    "settings",
    [LLAMA, {"bf16": True}, {"apply_residual_connection_post_layernorm": True}],
    ids=["llama", "bf16", "post-norm residual"],
)
def test_equal_to_the_bit_in_other_models(form, settings):
    def made(**more):
        model = build(**settings, **more)
        return model.bfloat16() if settings.get("bf16") else model

    assert_same(run(made()), run(made(**FORMS[form])))


def saved_bytes(form: dict[str, Any]) -> int:
    """Bytes that autograd keeps for the backward, each memory counted once; freed ones count 0."""
    model = build(**form)
    model_parallel_cuda_manual_seed(5)
    ids, positions, labels = batch()
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, positions, None, labels=labels)
    del loss
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    sizes = {s.data_ptr(): s.nbytes() for s in kept.values() if s.nbytes() and s.data_ptr() not in weights}
    return sum(sizes.values())


def test_less_is_kept():
    kept = {name: saved_bytes(form) for name, form in {"none": {}, **FORMS}.items()}
    assert kept["uniform 2"] < kept["uniform 1"] < kept["block 2"] < kept["none"]
    for name in ("core_attn", "mlp", "layernorm"):
        assert kept["all parts"] < kept[name] < kept["none"], name


def test_nothing_is_recomputed_in_evaluation():
    model = build(**FORMS["uniform 1"]).eval()
    calls = []
    model.decoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids, positions, labels = batch()
    model(ids, positions, None, labels=labels).mean().backward()
    assert len(calls) == 1
    model.train()
    model(ids, positions, None, labels=labels).mean().backward()
    assert len(calls) == 3


@pytest.mark.parametrize("form", ["uniform 1", "all parts"])
def test_parameters_learn_behind_a_frozen_embedding(form):
    """The first layer's input needs no gradient then; its weights do."""
    results = []
    for settings in ({}, FORMS[form]):
        model = build(**settings)
        model.embedding.requires_grad_(False)
        results.append(run(_with_gradients(model)))
    assert_same(*results)
    assert results[0]["decoder.layers.0.mlp.linear_fc1.weight"].any()


def _with_gradients(model: GPTModel) -> GPTModel:
    for param in model.parameters():
        if not param.requires_grad:
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    return model


def test_random_states_are_put_back_when_the_second_run_raises():
    model_parallel_cuda_manual_seed(5)
    calls = []

    def function(x):
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("second run")
        return F.dropout(x, 0.5)

    x = torch.ones(8, requires_grad=True)
    out = checkpoint(function, False, x)
    before = random_states()
    with pytest.raises(KeyError, match="second run"):
        out.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, random_states(), strict=True))


def test_a_recomputed_output_is_freed_in_between():
    x = torch.randn(16, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    owner = RecomputedOutput()
    out = owner.run(torch.tanh, x)
    result = out * weight
    owner.free_until_backward_of(result)
    assert out.untyped_storage().nbytes() == 0
    result.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.tanh(x.detach())) and out.untyped_storage().nbytes() == 64
    with torch.no_grad():
        kept = RecomputedOutput()
        assert kept.run(torch.tanh, x).untyped_storage().nbytes() == 64 and not kept.active


def _on_two_ranks(form, sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    expected = run(build(**layout))
    assert_same(expected, run(build(**layout, **FORMS[form])))
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    return torch.rand(4), inside


@pytest.mark.parametrize(("form", "sequence_parallel"), [("uniform 2", True), ("uniform 2", False), ("all parts", True)])
def test_equal_to_the_bit_on_two_tensor_parallel_ranks(form, sequence_parallel):
    """And dropout still differs between the ranks inside what is split, and agrees outside."""
    (outside, inside), (other_outside, other_inside) = run_on_ranks(2, _on_two_ranks, form, sequence_parallel)
    assert torch.equal(outside, other_outside) and not torch.equal(inside, other_inside)
