"""How the global batch is cut (micro batches, ranks) changes nothing; what is masked counts nothing."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from tests.functional.forked import on_ranks
from tests.functional.runner import TINY, VOCAB, Result, on, torchrun, train

BATCH = "--global-batch-size 8 --train-iters 6 --eval-interval 3 --eval-iters 2 --log-params-norm --log-num-zeros-in-grad"


def assert_same_training(left: Result, right: Result) -> None:
    assert left.code == right.code == 0, left.err + right.err
    assert left.column("consumed_samples") == right.column("consumed_samples")
    assert left.losses() == pytest.approx(right.losses(), rel=1e-6)
    assert left.column("grad_norm") == pytest.approx(right.column("grad_norm"), rel=1e-5)
    assert left.column("lr") == right.column("lr")
    assert [row["iteration"] for row in left.evaluations] == [row["iteration"] for row in right.evaluations]
    assert [row["lm_loss"] for row in left.evaluations] == pytest.approx([row["lm_loss"] for row in right.evaluations], rel=1e-6)


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Result:
    """The batch in one piece."""
    return train(*on(corpus, BATCH, "--micro-batch-size 8"))


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_equals_one_large_micro_batch(corpus: Path, whole: Result, micro: int) -> None:
    pieces = train(*on(corpus, BATCH, f"--micro-batch-size {micro}"))
    assert_same_training(pieces, whole)


@pytest.mark.parametrize("fused", ["", "--no-gradient-accumulation-fusion"], ids=["fused", "unfused"])
def test_accumulation_under_bf16(corpus: Path, fused: str) -> None:
    """Micro batches add up in fp32: cutting the batch moves the losses by rounding of bf16 activations only."""
    whole, pieces = (train(*on(corpus, BATCH, f"--bf16 {fused} --micro-batch-size {micro}")) for micro in (8, 1))
    assert whole.losses() == pytest.approx(pieces.losses(), rel=2e-3)
    assert whole.losses()[0] == pytest.approx(pieces.losses()[0], rel=1e-5)


@pytest.mark.parametrize(("start", "ranks"), [(torchrun, 2), (on_ranks, 4)])  # the one plain run under torchrun
def test_data_parallel_ranks_equal_one_process(corpus: Path, whole: Result, start: Callable[..., Result], ranks: int) -> None:
    """Losses, norms, rates, and evaluation: each rank reads its part of the held-out samples, and all count once."""
    spread = start(ranks, *on(corpus, BATCH, "--micro-batch-size 2"))
    assert_same_training(spread, whole)
    lines = [text for text in spread.out.splitlines() if "elapsed time per iteration" in text]
    assert len(lines) == 6, "one line an iteration, whatever the number of ranks"
    assert all(line.startswith(" [") and line.endswith("nan iterations:   0 |") for line in lines), "not mixed with another rank's"
    assert spread.out.count("number of parameters") == 1
    assert spread.out.count("validation loss at iteration 3 |") == 1


def test_parameters_are_counted_in_the_log(corpus: Path, whole: Result) -> None:
    """Unique parameters: the tied output layer is the embedding and counts once, the padding of the vocabulary not at all."""
    hidden, layers, positions = 64, 2, 64
    a_layer = 4 * hidden + 3 * hidden * hidden + 3 * hidden + hidden * hidden + hidden + 8 * hidden * hidden + 5 * hidden
    total = (VOCAB + 1) * hidden + positions * hidden + layers * a_layer + 2 * hidden
    assert f"number of parameters: {total:,} in " in whole.out


def corpus_with_blank_documents(prefix: Path) -> Path:
    """Every other document is end-of-document tokens alone: with --eod-mask-loss nothing of it counts."""
    random = np.random.RandomState(3)
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.int32) as builder:
        for number in range(80):
            tokens = np.full(65, VOCAB) if number % 2 else random.randint(0, VOCAB, 64 * 4)
            builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [len(tokens)])
        builder.finalize(get_idx_path(str(prefix)))
    return prefix


def test_a_micro_batch_without_targets_contributes_nothing(tmp_path: Path) -> None:
    data = on(corpus_with_blank_documents(tmp_path / "blank"), BATCH, "--eod-mask-loss --split 80,20,0 --calculate-per-token-loss")
    whole, single = train(*data, "--micro-batch-size 8"), train(*data, "--micro-batch-size 1")
    assert all(np.isfinite(single.losses()))
    assert_same_training(whole, single)


def test_a_step_without_any_target_changes_nothing_and_is_finite(tmp_path: Path) -> None:
    prefix = tmp_path / "blank"
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.int32) as builder:
        for _ in range(20):
            builder.add_document(torch.full((130,), VOCAB), [130])
        builder.finalize(get_idx_path(str(prefix)))
    for more in ("", "--calculate-per-token-loss"):
        result = train(*on(prefix, f"--eod-mask-loss --split 100,0,0 {more}"))
        assert result.code == 0, result.err
        assert result.losses() == [0.0] * 4 and result.column("grad_norm") == [0.0] * 4


@pytest.mark.parametrize(
    ("flags", "warmup", "decay"),
    [("--lr-warmup-samples 8 --lr-decay-samples 24", 8, 24), ("--lr-warmup-samples 12", 12, 32), ("--lr-warmup-fraction 0.25", 8, 32)],
)
def test_rates_count_samples_from_the_start(corpus: Path, flags: str, warmup: int, decay: int) -> None:
    """The decay's length includes warm-up; where it ends before training does, that is said."""
    base = TINY.replace("--train-iters 4 ", "--train-samples 32 ").replace("cosine", "linear")
    result = train(*on(corpus, flags), base=base)

    def rate(samples: int) -> float:
        if samples <= warmup:
            return 1e-2 * samples / warmup
        return 1e-3 + (1e-2 - 1e-3) * max(0.0, 1 - (samples - warmup) / (decay - warmup))

    assert result.column("lr") == pytest.approx([rate(samples) for samples in range(4, 33, 4)], rel=1e-12)
    assert ("decay ends 8 samples before training does" in result.err) == (decay == 24)


@pytest.mark.parametrize(("first", "last", "masks", "reads"), [(1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 0)])
def test_stages_that_need_nothing_of_a_batch_read_nothing(monkeypatch: pytest.MonkeyPatch, first, last, masks, reads) -> None:
    import pretrain_gpt

    monkeypatch.setattr(pretrain_gpt.parallel_state, "is_pipeline_first_stage", lambda **_: bool(first))
    monkeypatch.setattr(pretrain_gpt.parallel_state, "is_pipeline_last_stage", lambda **_: bool(last))
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: SimpleNamespace(reset_attention_mask=bool(masks), sft=False))
    monkeypatch.setattr(pretrain_gpt, "packs_documents", lambda args: False)
    monkeypatch.setattr(pretrain_gpt, "get_batch_on_this_cp_rank", lambda batch, **_: batch)
    batch = {name: torch.zeros(1, 4) for name in ("tokens", "labels", "loss_mask", "position_ids")}
    stream, seen = iter([batch]), []

    class Model(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            seen.extend([*args, *kwargs.values()])

    pretrain_gpt.forward_step(stream, Model().eval())
    assert (next(stream, None) is None) == bool(reads)
    assert all(value is None for value in seen) == (not reads)
