"""Losses on held-out data: which samples, how weighted, under which name."""

from pathlib import Path

import pytest

from tests.functional.runner import TINY, on, torchrun, train, write_corpus

EVALUATE = "--eval-interval 2 --eval-iters 2"


def evaluated(corpus: Path, *flags: str) -> list[float]:
    """Losses of a run's evaluations."""
    return [row["lm_loss"] for row in train(*on(corpus, EVALUATE, *flags)).evaluations]


def test_every_token_weighs_the_same(corpus: Path) -> None:
    """Masked tokens fall unevenly on samples, and the mean does not depend on how samples are grouped."""
    frozen = "--lr 0 --min-lr 0 --weight-decay 0"
    masked = [evaluated(corpus, frozen, f"--eod-mask-loss --micro-batch-size {micro}") for micro in (1, 2, 4)]
    assert masked[0] == pytest.approx(masked[1], rel=1e-6) and masked[1] == pytest.approx(masked[2], rel=1e-6)
    assert masked[0] != pytest.approx(evaluated(corpus, frozen), rel=1e-4), "there are masked tokens"


def test_dropout_is_off_and_masks_go_on(corpus: Path) -> None:
    """Two evaluations of the same model on the same samples agree with dropout on; training's masks are not touched."""
    flags = "--attention-dropout 0.3 --hidden-dropout 0.3"
    frozen = train(*on(corpus, EVALUATE, flags, "--lr 0 --min-lr 0 --weight-decay 0 --full-validation"))
    first, second = (row["lm_loss"] for row in frozen.evaluations[:2])
    assert first == second
    assert len(set(frozen.losses())) == 4
    assert train(*on(corpus, flags)).losses() == train(*on(corpus, flags, EVALUATE)).losses()


def test_full_validation_begins_anew_each_time(corpus: Path, tmp_path: Path) -> None:
    """Every evaluation reads the same samples, however many there are, and takes none of the run's position."""
    result = train(*on(corpus, f"--eval-interval 2 --full-validation --save {tmp_path}"))
    assert result.code == 0, result.err
    kinds = [row["evaluation"] for row in result.evaluations]
    assert len(result.evaluations) == 4 and len(set(kinds)) == 2
    alone = train(*on(corpus, f"--full-validation --skip-train --load {tmp_path}"))
    assert [row["lm_loss"] for row in alone.evaluations] == [row["lm_loss"] for row in result.evaluations[2:]]
    again = train(*on(corpus, f"--full-validation --skip-train --load {tmp_path}"))
    assert again.evaluations == alone.evaluations


def test_each_validation_corpus_has_a_loss_of_its_own(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "easy", seed=1), write_corpus(tmp_path / "hard", seed=2)
    data = f"--train-data-path {first} --valid-data-path {first} {second} --data-cache-path {tmp_path}/cache"
    base = TINY.replace("--split 80,10,10 ", "")
    both = train(data, EVALUATE, "--multiple-validation-sets", base=base)
    assert both.code == 0, both.err
    assert {row["evaluation"] for row in both.evaluations} == {"easy", "hard"}
    for name in ("easy", "hard"):
        assert f" validation loss at iteration 2 on {name} | lm loss value: " in both.out
    named = train(data, EVALUATE, "--multiple-validation-sets --validation-set-names one two", base=base)
    assert {row["evaluation"] for row in named.evaluations} == {"one", "two"}
    losses = [[row["lm_loss"] for row in result.evaluations] for result in (both, named)]
    assert losses[0] == losses[1] and losses[0][0] != losses[0][1]
    for place, prefix in enumerate((first, second)):
        alone = train(data.replace(f"{first} {second}", str(prefix)), EVALUATE, base=base)
        assert alone.evaluations[0]["lm_loss"] == pytest.approx(losses[0][place], rel=1e-9)
    wrong = train(data, EVALUATE, "--multiple-validation-sets --validation-set-names one", base=base)
    assert wrong.code == 2 and "--validation-set-names one" in wrong.err and "2 validation sets" in wrong.err


def test_full_validation_counts_every_sample_once_whatever_the_batch(corpus: Path) -> None:
    """19 samples: the last batch of 4 is short, in batches of 2, 4 and 8, and on two ranks."""
    frozen = "--lr 0 --min-lr 0 --weight-decay 0 --full-validation --eval-interval 4 --train-iters 4"
    sizes = [("2", "1"), ("4", "2"), ("8", "8")]
    results = [train(*on(corpus, frozen, f"--global-batch-size {total} --micro-batch-size {micro}")) for total, micro in sizes]
    results.append(torchrun(2, *on(corpus, frozen, "--global-batch-size 8 --micro-batch-size 2")))
    losses = [result.evaluations[0]["lm_loss"] for result in results]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
