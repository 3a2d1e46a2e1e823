"""Sliding windows and packed sequences on one rank: by kernels and by the plain twin, against the definition."""

import pytest
import torch

from megatron.core.context_parallel import block_plan
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from tests.unit_tests.context_parallel.test_sequence_split import packed
from tests.unit_tests.transformer.test_attention import HEADS, B, D, S, attention, run, tensors

BACKENDS = [AttnBackend.auto, AttnBackend.flash, AttnBackend.unfused, AttnBackend.local]


@pytest.mark.parametrize("window", [(2, 0), (0, 0), (2, 3), (-1, 2), (3, -1), (50, 50)])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_a_window_counts_keys_beside_the_querys_own(window, mask_type, monkeypatch):
    """Off by one at either end shows here: the same as a mask tensor of what is left + 1 + right wide."""
    monkeypatch.setattr(block_plan, "TILE", 2)
    block_plan.plan_for_ranks.cache_clear()
    query, key = torch.arange(S)[:, None], torch.arange(S)
    left, right = (S if side < 0 else side for side in window)
    hidden = ((key < query - left) | (key > query + right))[None, None]
    expected = run(attention(AttnBackend.unfused, mask_type), hidden)
    for backend in BACKENDS:
        torch.testing.assert_close(run(attention(backend, mask_type, window_size=window)), expected, rtol=1e-10, atol=1e-10)
        more = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.3
        more &= ~torch.eye(S, dtype=torch.bool)
        both = run(attention(AttnBackend.unfused, mask_type), hidden | more)
        torch.testing.assert_close(run(attention(backend, mask_type, window_size=window), more), both, rtol=1e-10, atol=1e-10)
    block_plan.plan_for_ranks.cache_clear()


def test_some_layers_see_everything():
    everything = run(attention(AttnBackend.auto))[0]
    for freq, layer, sees_all in ((2, 2, True), (2, 3, False), ([1, 0, 1, 1], 2, True), ([1, 0, 1, 1], 3, False), (None, 2, False)):
        core = attention(AttnBackend.auto, layer_number=layer, window_size=(1, 0), window_attn_skip_freq=freq)
        assert torch.equal(run(core)[0], everything) == sees_all, (freq, layer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
def test_packed_documents_do_not_see_each_other(backend, mask_type):
    """To the bit on every backend, padding included; and each is what it is alone."""
    core = attention(backend, mask_type)
    torch.manual_seed(2)
    query, key, value = (torch.randn(12, heads, D, dtype=torch.float64) for heads in (HEADS, 2, 2))
    params = packed([3, 5], [4, 8])
    before = core(query, key, value, None, packed_seq_params=params)
    assert before.shape == (12, HEADS * D)
    for start, length in ((0, 3), (4, 5)):
        alone = core(*(t[start : start + length, None] for t in (query, key, value)), None)[:, 0]
        torch.testing.assert_close(before[start : start + length], alone, rtol=1e-10, atol=1e-10)
    changed, values = key.clone(), value.clone()
    changed[:4], values[:4], values[9:] = 5.0, -5.0, 7.0
    after = core(query, changed, values, None, packed_seq_params=params)
    assert torch.equal(after[4:9], before[4:9]) and not torch.equal(after[:3], before[:3])


def test_dropout_within_a_window_comes_from_the_tracker():
    core = attention(AttnBackend.auto, attention_dropout=0.5, window_size=(2, 0))
    outs = []
    for tp_rank in (0, 0, 1):
        model_parallel_cuda_manual_seed(7, tp_rank=tp_rank)
        outs.append(run(core)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_a_window_and_packs_need_as_many_keys_as_queries():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="7 queries and 4 keys"):
        attention(AttnBackend.auto, window_size=(2, 0))(query, key[:4], value[:4], None)
    with pytest.raises(ValueError, match="packed sequences of 8 tokens, but there are 7"):
        attention(AttnBackend.auto)(*(t[:, :1] for t in (query, key, value)), None, packed_seq_params=packed([8]))
