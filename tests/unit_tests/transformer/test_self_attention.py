"""SelfAttention from the projection to the core: the fast path of rotary positions against the plain one, and what it does not do."""

import weakref
from typing import Any

import pytest
import torch

from megatron.core import device
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.operations import CountedOperations

S, HEADS, D, VOCAB = 8, 4, 8, 32
KINDS: dict[str, dict[str, Any]] = {
    "one head per group": {},
    "two heads per group": {"num_query_groups": 2},
    "one group, neighbours": {"num_query_groups": 1, "rotary_interleaved": True},
    "biases": {"num_query_groups": 2, "add_qkv_bias": True},
}


def config_of(**settings: Any) -> TransformerConfig:
    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.float64, "add_bias_linear": False, **settings}
    return TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=HEADS, **settings)


def attention(*, fused: bool, **settings: Any) -> SelfAttention:
    torch.manual_seed(3)
    config = config_of(apply_rope_fusion=fused, attention_backend=AttnBackend.unfused, **settings)
    parts = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm).submodules.self_attention.submodules
    return SelfAttention(config, parts, 1, AttnMaskType.causal)


def angles(interleaved: bool = False, percent: float = 1.0) -> torch.Tensor:
    return RotaryEmbedding(D, percent, interleaved)(S)


def run(layer: SelfAttention, positions: Any, batch: int = 2, **more: Any) -> tuple[list[torch.Tensor], CountedOperations]:
    """Output and gradients, and what the backward pass did."""
    x = torch.randn(S, batch, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    out, _ = layer(x, rotary_pos_emb=positions, **more)
    with CountedOperations() as seen:
        (out * torch.arange(out.numel()).view_as(out).sin()).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in (x, *layer.parameters()) if leaf.grad is not None)], seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_of_the_projection_is_made_in_one_piece(kind: str, percent: float, packed: bool) -> None:
    """Autograd's gradient of a split would be a cat of three."""
    ends = torch.tensor([0, 3, S], dtype=torch.int32)
    more: dict[str, Any] = {"batch": 1, "packed_seq_params": PackedSeqParams("thd", ends, ends)} if packed else {}
    positions = angles(KINDS[kind].get("rotary_interleaved", False), percent)
    fast, by_one = run(attention(fused=True, **KINDS[kind]), positions, **more)
    plain, by_autograd = run(attention(fused=False, **KINDS[kind]), positions, **more)
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9)
    assert by_one.counts["cat"] == 0 < by_autograd.counts["cat"]


@pytest.mark.parametrize("settings", [{"qk_layernorm": True}, {"qk_layernorm": True, "num_query_groups": 2}, {}])
def test_what_stands_between_split_and_rotation_goes_the_other_way(settings: dict[str, Any]) -> None:
    """Norms of heads; and other angles for keys than for queries."""
    positions = angles() if settings else (angles(), 2 * angles())
    fast, _ = run(attention(fused=True, **settings), positions)
    plain, _ = run(attention(fused=False, **settings), positions)
    torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_holds_on_to_the_whole_projection(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attention(fused=fused, num_query_groups=2)
    given: list[torch.Tensor] = []
    attend = layer._attend

    def watched(*tensors: Any) -> torch.Tensor:
        given.extend(tensors[:3])
        return attend(*tensors)

    monkeypatch.setattr(layer, "_attend", watched)
    run(layer, angles())
    assert len(given) == 3 and all(t.untyped_storage().nbytes() == t.nbytes for t in given)


@pytest.mark.parametrize(
    "settings", [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {"qk_layernorm": True}]
)
def test_cosines_are_made_once_for_all_layers_and_micro_batches(settings: dict[str, Any]) -> None:
    config = config_of(apply_rope_fusion=True, **settings)
    model = GPTModel(config, get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm), VOCAB, S, position_embedding_type="rope")
    ids = torch.arange(2 * S).view(2, S)
    with torch.inference_mode():  # an evaluation may come first
        model(ids, None, None, labels=ids)
    with CountedOperations() as seen:
        for _ in range(2):
            model(ids, None, None, labels=ids).mean().backward()
    assert seen.counts["cos"] == seen.counts["sin"] == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_angles_that_a_recorded_graph_reads_outlive_another_length(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = RotaryEmbedding(D, 1.0)
    monkeypatch.setattr(device, "is_recording", lambda tensor: recorded)
    alive = [weakref.ref(rotary(S)) for _ in range(2)]
    monkeypatch.setattr(device, "is_recording", lambda tensor: False)
    rotary(S + 1)
    assert [each() is not None for each in alive] == [recorded, recorded]
