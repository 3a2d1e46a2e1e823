"""The real Transformer Engine on one GPU: what its modules do with gradients, masks and FP8, which the stand-in can only claim."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, distributed_data_parallel
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optional_imports import available
from megatron.core.packed_seq_params import packed_seq_params_of
from megatron.core.tensor_parallel import weight_grad
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests import fake_te

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not available("transformer_engine"), reason="Transformer Engine is not installed"),
]
assert fake_te, "imports the real package before torch's cuDNN is loaded"
VOCAB, SEQ = 512, 128
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
RECIPES = ["delayed", "tensorwise", "blockwise"]


def config_of(fp8: str | None = None, **extra: Any) -> TransformerConfig:
    shape: dict[str, Any] = {"num_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512}
    config = TransformerConfig(**shape, hidden_dropout=0.0, attention_dropout=0.0, bf16=True, **{**LLAMA, **extra})
    if fp8 is not None:
        config.fp8, config.fp8_recipe = "hybrid", fp8
    return config


def train(config: TransformerConfig, use_te: bool = True, steps: int = 4) -> tuple[list[float], GPTModel]:
    """Losses of `steps` steps of two micro batches on the same tokens, by plain descent."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te)
    model = GPTModel(config, spec, VOCAB, SEQ, position_embedding_type="rope")
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(1)).cuda()
    positions, losses = torch.arange(SEQ, device="cuda").expand(2, -1), []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        for _ in range(2):
            loss = wrapped(ids[:, :-1], positions, None, labels=ids[:, 1:]).mean()
            loss.backward()
        wrapped.finish_grad_sync()
        losses.append(loss.item())
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(0.02 * param.main_grad)  # type: ignore[attr-defined]
    return losses, model


@pytest.mark.parametrize("settings", [{}, MOE, {"gradient_accumulation_fusion": True}, {"layernorm_zero_centered_gamma": True}])
def test_it_trains_as_the_local_backend_does(settings: dict) -> None:
    (local, _), (other, _) = train(config_of(**settings), False), train(config_of(**settings))
    assert local[-1] < local[0] - 0.05 and other == pytest.approx(local, rel=3e-3)
    # gradients while the weights are still the same: later, rounding sends a few tokens to other experts
    (_, one), (_, two) = train(config_of(**settings), False, steps=1), train(config_of(**settings), steps=1)
    ours, theirs = one.output_layer.weight.main_grad, two.output_layer.weight.main_grad  # type: ignore[union-attr]
    assert (ours - theirs).norm() < 0.03 * ours.norm()


@pytest.mark.parametrize("settings", [{}, MOE])
def test_the_buffer_hears_of_every_gradient_that_was_added(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine gives autograd no gradient; torch calls the hook of the weight nevertheless."""
    config, written = config_of(gradient_accumulation_fusion=True, **settings), []

    def note(param: Any) -> None:
        written.append(id(param))
        weight_grad.mark_written(param)

    monkeypatch.setattr(distributed_data_parallel, "mark_written", note)
    _, model = train(config, steps=1)
    linears = [name for name, param in model.named_parameters() if getattr(param, "adds_to_main_grad", False)]
    params = dict(model.named_parameters())
    assert len(linears) == (3 * (2 + 2 * 4) if settings else 3 * 4)
    assert {name: written.count(id(params[name])) for name in linears} == dict.fromkeys(linears, 2)


@pytest.mark.parametrize("settings", [{}, MOE])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_near_bf16(recipe: str, settings: dict) -> None:
    plain, _ = train(config_of(**settings), steps=6)
    losses, model = train(config_of(recipe, **settings), steps=6)
    assert losses != plain and losses == pytest.approx(plain, rel=0.03)
    linear: Any = model.decoder.layers[0].self_attention.linear_qkv  # type: ignore[union-attr]
    assert linear.fp8


def test_the_first_and_the_last_layers_stay_in_bf16() -> None:
    for recipe in RECIPES:
        config = config_of(recipe)
        config.first_last_layers_bf16 = True  # type: ignore[attr-defined]
        _, model = train(config, steps=1)
        assert [layer.mlp.linear_fc1.fp8 for layer in model.decoder.layers] == [False, True, False]  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_full_recompute_changes_nothing(recipe: str | None) -> None:
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    plain, _ = train(config_of(recipe))
    assert train(config_of(recipe, **again))[0] == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("masked", ["", "mask", "window", "packed"])
def test_attention_sees_what_the_local_one_sees(kind: AttnMaskType, masked: str) -> None:
    config = config_of(window_size=(32, 16) if masked == "window" else None)
    torch.manual_seed(3)
    shape = (SEQ, 1 if masked == "packed" else 2)
    leaves = [torch.randn(*shape, heads, 64, device="cuda").bfloat16().requires_grad_() for heads in (4, 2, 2)]
    mask = torch.rand(2, 1, SEQ, SEQ, device="cuda") < 0.3 if masked == "mask" else None
    if mask is not None:
        mask[..., 0] = False  # every query sees something
    begins = torch.zeros(1, SEQ, dtype=torch.bool)
    begins[0, 50] = True
    packed = packed_seq_params_of(begins, "cuda") if masked == "packed" else None
    results = []
    for cls in (DotProductAttention, te.TEDotProductAttention):
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = cls(config, 1, kind, "self")(*own, mask, packed_seq_params=packed)
        (out.float() * torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
        results.append([out, *(leaf.grad for leaf in own)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 0.03 * ours.abs().max()


def test_dropout_draws_from_the_tracker() -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    core = te.TEDotProductAttention(config_of(), 1, AttnMaskType.causal, attention_dropout=0.5)
    three = [torch.randn(SEQ, 2, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2)]
    outs = []
    for seed in (5, 5, 6):
        model_parallel_cuda_manual_seed(seed, tp_rank=0, ep_rank=0, etp_rank=0)
        before = torch.cuda.get_rng_state()
        outs.append(core(*three, None))
        assert torch.equal(torch.cuda.get_rng_state(), before)  # the default state is that of others
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_a_linear_can_be_copied() -> None:
    linear: Any = te.TERowParallelLinear(
        64, 32, config=config_of(), init_method=torch.nn.init.normal_, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    ones = torch.ones(16, 64, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(copy.deepcopy(linear)(ones)[0], linear(ones)[0])
