"""Whole trainings over pipeline stages: the same losses as one process, and each resumes the other's checkpoints."""

import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import on, train, write_corpus

SIZE = "--num-layers 4 --global-batch-size 8 --eval-iters 1 --eval-interval 2"
PP = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """(folder of checkpoints, result) of the run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    result = train(*on(corpus, SIZE, "--save-interval 2 --save", folder))
    assert result.code == 0, result.err
    return folder, result


def same_numbers(found, expected):
    """Losses, gradient norms and evaluations, in fp32."""
    assert found.code == 0, found.err
    for name in ("lm_loss", "grad_norm"):
        assert found.column(name) == pytest.approx(expected.column(name), rel=2e-5)
    assert [row["evaluation"] for row in found.evaluations] == [row["evaluation"] for row in expected.evaluations]
    for one, other in zip(found.evaluations, expected.evaluations, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=2e-5)


def test_two_stages_train_and_one_process_goes_on(corpus, alone, tmp_path):
    _, expected = alone
    result = on_ranks(2, *on(corpus, SIZE, PP, "--save-interval 2 --save", tmp_path))
    same_numbers(result, expected)
    assert "number of parameters" in result.out
    resumed = train(*on(corpus, SIZE, "--ckpt-step 2 --load", tmp_path))
    assert resumed.code == 0, resumed.err
    assert "the checkpoint is of another layout: random states" in resumed.out
    assert resumed.losses() == pytest.approx(expected.losses()[2:], rel=2e-5)


def test_chunks_go_on_where_one_process_stopped(corpus, alone):
    folder, expected = alone
    flags = "--num-virtual-stages-per-pipeline-rank 2 --ckpt-step 2 --load"
    resumed = on_ranks(2, *on(corpus, SIZE, PP, flags, folder))
    assert resumed.code == 0, resumed.err
    assert resumed.losses() == pytest.approx(expected.losses()[2:], rel=2e-5)


@pytest.mark.parametrize(
    "extra", ["--bf16 --decoder-first-pipeline-num-layers 1", "--pipeline-schedule zero-bubble --calculate-per-token-loss"]
)
def test_other_pipelines_train(corpus, extra):
    expected = train(
        *on(corpus, SIZE, extra.replace("--pipeline-schedule zero-bubble", "").replace("--decoder-first-pipeline-num-layers 1", ""))
    )
    result = on_ranks(2, *on(corpus, SIZE, PP, extra))
    assert result.code == 0, result.err
    assert result.losses() == pytest.approx(expected.losses(), rel=2e-3 if "bf16" in extra else 2e-5)


@pytest.mark.parametrize("flags", ["", "--fp16 --initial-loss-scale 4"])
def test_all_stages_end_when_the_loss_is_not_finite(corpus, flags):
    poison = f"--poison loss --poison-rank 1 --train-iters 6 {flags}"
    result = on_ranks(2, *on(corpus, SIZE, "--global-batch-size 4 --eval-iters 0", PP, poison), script="tests/functional/poisoned_gpt.py")
    assert result.code == 1
    assert "on rank 1 all parameters are finite, its own lm loss was not" in result.err
    assert result.column("iteration") == [1, 2, 3]
