"""Faults that users of such trainers have met, each as a test of what it broke."""

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from tests.distributed import ranks
from tests.parallel_equivalence import harness
from tests.parallel_equivalence.comparison import differences, distance, reference, trained
from tests.parallel_equivalence.harness import Key, start_groups
from tests.parallel_equivalence.layouts import MICRO_BATCH, SEQ, TOKENS, TOLERANCES, Layout

TP2 = Layout("tp2", tp=2, models=("norms",))

# --- a replicated norm that sees sharded heads gets a partial gradient, with sequence parallelism or without ---


@contextlib.contextmanager
def head_norms_look_whole() -> Iterator[None]:
    with mock.patch.object(attention, "mark_partial_over_tp"):
        yield


def test_the_gradient_of_a_norm_of_sharded_heads_is_summed_without_sequence_parallelism() -> None:
    """That the layouts of the table with the model `norms` are equal to one process means something: without the mark they are not."""
    expected = reference(TP2.alone, "norms", torch.float64, "gloo")
    for rank in trained(TP2, (torch.float64,), head_norms_look_whole):
        found = differences(rank["norms", torch.float64], expected, TOLERANCES[torch.float64])
        wrong = {text.split("'")[1] for text in found if text.startswith("gradient of (")}
        assert wrong == {f"decoder.layers.self_attention.{head}_layernorm.{part}" for head in "qk" for part in ("weight", "bias")}


# --- averages of averages: ranks hold different numbers of tokens ---


def uneven(index: int) -> dict[str, torch.Tensor]:
    """Micro batch 0 has all tokens but 4 of its second half masked out, micro batch 1 all but 4."""
    data = harness.micro_batch(index)
    mask = torch.zeros(MICRO_BATCH, SEQ, dtype=torch.float64)
    mask.view(-1)[: (28, 4)[index]] = 1.0
    return {**data, "loss_mask": mask}


def uneven_gradients(dp: int, per_token: bool) -> dict[Key, torch.Tensor]:
    """Gradients of one step of both micro batches, on one rank or one on each of two."""
    layout = Layout("uneven", dp=dp, microbatches=2 // dp, per_token=per_token)
    if dp > 1:
        start_groups(layout)
    else:
        parallel_state.destroy_model_parallel()
    chunks, _ = harness.build(layout, "gpt", torch.float64)
    recorder = harness.Recorder(layout, chunks, harness.Trace())
    rank = parallel_state.get_data_parallel_rank()
    chunks[0].zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=recorder.forward_step,
        data_iterator=iter([uneven(index) for index in range(rank, 2, dp)]),
        model=chunks,
        num_microbatches=layout.microbatches,
        seq_length=SEQ,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    return {key: weight.value for key, weight in harness.gradients(chunks).items()}


def gradients_of_loss(per_token: bool) -> dict[Key, torch.Tensor]:
    """The definition, by autograd: the mean over the global batch's tokens, or the mean of the micro batches' means."""
    parallel_state.destroy_model_parallel()
    chunks, _ = harness.build(Layout("plain"), "gpt", torch.float64)
    chunks[0].zero_grad_buffer()
    sums, counts = [], []
    for data in map(uneven, range(2)):
        losses = chunks[0](data["tokens"], torch.arange(SEQ).expand(MICRO_BATCH, -1), None, labels=data["labels"])
        sums.append((losses * data["loss_mask"]).sum())
        counts.append(data["loss_mask"].sum())
    loss = sum(sums) / sum(counts) if per_token else (sums[0] / counts[0] + sums[1] / counts[1]) / 2
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    return {key: weight.value for key, weight in harness.gradients(chunks).items()}


def uneven_gradients_on_two() -> dict[bool, dict[Key, torch.Tensor]]:
    return {per_token: uneven_gradients(2, per_token) for per_token in (False, True)}


@cache
def uneven_ranks() -> list[dict[bool, dict[Key, torch.Tensor]]]:
    return ranks().run(2, uneven_gradients_on_two)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean of means", "per token"])
def test_uneven_numbers_of_tokens_on_data_parallel_ranks(per_token: bool) -> None:
    expected = gradients_of_loss(per_token)
    for gradients in (uneven_gradients(1, per_token), *(rank[per_token] for rank in uneven_ranks())):
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            assert distance(gradient, expected[key]) < 1e-9, key
    other = gradients_of_loss(not per_token)
    assert all(distance(other[key], expected[key]) > 1e-2 for key in expected), "the two normalisations differ much here"


# --- a vocabulary that tensor parallelism does not divide: its padding ---


def losses_with_wild_padding(sequence_parallel: bool) -> list[torch.Tensor]:
    """Losses of a token, before and after the rows that are there for the split alone got huge weights."""
    layout = Layout("tp4", tp=4, sp=sequence_parallel)
    start_groups(layout)
    chunks, _ = harness.build(layout, "llama", torch.float64)
    model: Any = chunks[0].module
    data = harness.micro_batch(0)

    def losses() -> torch.Tensor:
        return model(data["tokens"], None, None, labels=data["labels"]).detach()

    before = losses()
    weight = model.output_layer.weight
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    with torch.no_grad():
        weight[max(0, 48 - first) :] = 1e3
    return [before, losses()]


def test_padding_for_the_split_never_enters_the_softmax() -> None:
    """45 tokens: 48 rows on one rank, 64 on four; the last rank holds nothing but padding."""
    assert TOKENS == 45
    for before, after in ranks().run(4, losses_with_wild_padding, True):
        assert torch.equal(before, after) and before.isfinite().all()


# --- dropout: other masks where ranks hold different things, the same where they hold the same ---


def dropout_masks() -> dict[str, torch.Tensor]:
    """On each of two tensor-parallel ranks: zeros of the stream after the embedding, streams after a layer, and attention's outputs."""
    found = {}
    for sequence_parallel in (False, True):
        layout = Layout("tp2", tp=2, sp=sequence_parallel)
        start_groups(layout)
        model_parallel_cuda_manual_seed(5)
        with mock.patch.dict(harness.MODELS["llama"].config, {"hidden_dropout": 0.5, "attention_dropout": 0.3}):
            chunks, _ = harness.build(layout, "llama", torch.float64)
        model: Any = chunks[0].module
        ids = torch.full((MICRO_BATCH, SEQ), 7)
        name = "sequence" if sequence_parallel else "tensor"
        embedded = model.embedding(ids, None)
        found[f"{name} embedding"] = embedded == 0
        found[f"{name} layer"] = model.decoder.layers[0](embedded, rotary_pos_emb=model.rotary_pos_emb(SEQ))[0].detach()
    attend = DotProductAttention(model.config, 1, AttnMaskType.causal, "self")
    query = torch.ones(SEQ, MICRO_BATCH, 4, 4, dtype=torch.float64)
    found["attention"] = attend(query, query, torch.randn(query.shape, generator=torch.Generator().manual_seed(0)).double(), None)
    return found


def test_dropout_agrees_where_ranks_hold_the_same_and_differs_where_they_do_not() -> None:
    first, second = ranks().run(2, dropout_masks)
    for name in ("tensor embedding", "tensor layer"):
        assert torch.equal(first[name], second[name]), name
    for name in ("sequence embedding", "attention"):
        assert not torch.equal(first[name], second[name]), name
    assert 0.3 < first["tensor embedding"].double().mean() < 0.7
