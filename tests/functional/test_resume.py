"""A run that is saved and taken up again is the run that never stopped, to the bit."""

from pathlib import Path

import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import (
    TINY,
    Result,
    assert_equal_tensors,
    checkpoint_tensors,
    on,
    train,
)

ADAM = ""
SGD = "--optimizer sgd --sgd-momentum 0.9 --lr 1e-1"
# a scale that the first steps overflow, so that both halves of a run hold skipped steps and the growth counter matters
FP16 = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"
TRAIN_BY_SAMPLES = TINY.replace("--train-iters 4 ", "")
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


def followed(corpus: Path, folder: Path, flags: str, first: int, last: int, second: str | None = None) -> tuple[Result, Result]:
    """(`last` steps at once, the steps after `first` of a run that stopped there), both saved at the end under `folder`."""
    straight = train(*on(corpus, flags), f"--train-iters {last} --save {folder}/straight")
    assert straight.code == 0, straight.err
    half = train(*on(corpus, flags), f"--train-iters {last} --exit-interval {first} --save {folder}/resumed")
    assert half.code == 0, half.err
    assert half.rows == [] or half.column("iteration") == list(range(1, first + 1))
    resumed = train(*on(corpus, second or flags), f"--train-iters {last} --save {folder}/resumed --load {folder}/resumed")
    assert resumed.code == 0, resumed.err
    assert resumed.column("iteration") == list(range(first + 1, last + 1))
    return straight, resumed


def numbers(result: Result, after: int = 0) -> list[tuple[float, ...]]:
    """What must be the same to the bit, step by step."""
    names = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "lr", "loss_scale", "skipped_iterations")
    return [tuple(row[name] for name in names) for row in result.steps if row["iteration"] > after]


@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("precision", ["", "--bf16", FP16], ids=["fp32", "bf16", "fp16"])
def test_resume_is_exact(corpus: Path, tmp_path: Path, precision: str, optimizer: str) -> None:
    straight, resumed = followed(corpus, tmp_path, f"{precision} {optimizer} {DROPOUT}", 4, 8)
    assert numbers(straight, after=4) == numbers(resumed)
    assert_equal_tensors(checkpoint_tensors(tmp_path / "straight", 8), checkpoint_tensors(tmp_path / "resumed", 8))


def test_dropout_masks_go_on_where_they_were(corpus: Path, tmp_path: Path) -> None:
    """The random state matters: without it the same resume gives other losses."""
    straight, resumed = followed(corpus, tmp_path, DROPOUT, 3, 6)
    other = train(*on(corpus, DROPOUT), f"--train-iters 6 --load {tmp_path}/resumed --ckpt-step 3 --no-load-rng")
    assert numbers(straight, after=3) == numbers(resumed)
    assert other.column("consumed_samples") == resumed.column("consumed_samples")
    assert other.losses()[0] != resumed.losses()[0]


def test_data_order_goes_on_with_workers_and_a_random_order(corpus: Path, tmp_path: Path) -> None:
    flags = f"--dataloader-type cyclic --num-workers 2 {DROPOUT}"
    straight, resumed = followed(corpus, tmp_path, flags, 3, 6)
    assert numbers(straight, after=3) == numbers(resumed)


def test_evaluation_does_not_disturb_training(corpus: Path, tmp_path: Path) -> None:
    """Nor does it lose its place: validation goes on through its samples after a resume."""
    flags = f"{DROPOUT} --eval-interval 2 --eval-iters 1"
    straight, resumed = followed(corpus, tmp_path, flags, 4, 8)
    without = train(*on(corpus, DROPOUT), "--train-iters 8")
    assert straight.losses() == without.losses()
    assert numbers(straight, after=4) == numbers(resumed)
    late = [row for row in straight.evaluations if row["iteration"] > 4]
    assert late == resumed.evaluations
    assert len({row["lm_loss"] for row in straight.evaluations}) > 2


def test_ramp_up_of_the_batch_is_resumed(corpus: Path, tmp_path: Path) -> None:
    flags = "--global-batch-size 8 --rampup-batch-size 2 2 24"
    base = train(*on(corpus, flags), "--train-samples 60", f"--save {tmp_path}/straight", base=TRAIN_BY_SAMPLES)
    assert base.code == 0, base.err
    half = train(*on(corpus, flags), f"--train-samples 60 --exit-interval 5 --save {tmp_path}/resumed", base=TRAIN_BY_SAMPLES)
    resumed = train(*on(corpus, flags), f"--train-samples 60 --load {tmp_path}/resumed --save {tmp_path}/resumed", base=TRAIN_BY_SAMPLES)
    consumed = base.column("consumed_samples")
    sizes = [after - before for before, after in zip([0, *consumed], consumed, strict=False)]
    assert sizes == sorted(sizes) and set(sizes) == {2, 4, 6, 8}
    assert consumed[-1] <= 60 < consumed[-1] + 8
    assert numbers(half) + numbers(resumed) == numbers(base)
    last = base.steps[-1]["iteration"]
    assert_equal_tensors(checkpoint_tensors(tmp_path / "straight", last), checkpoint_tensors(tmp_path / "resumed", last))


def test_batch_sizes_in_steps(corpus: Path, tmp_path: Path) -> None:
    """By a table worked out by hand (a sample is 64 tokens), also after a resume; a size may come back."""
    flags = "--step-batch-size-schedule '0:4 512:8 1.6K:4' --train-samples 40 --global-batch-size 4"
    base = train(*on(corpus, flags), base=TRAIN_BY_SAMPLES)
    assert base.code == 0, base.err
    # 512 tokens are 8 samples, 1600 are 25: 4 4 | 8 8 8 | 4 4
    assert base.column("consumed_samples") == [4, 8, 16, 24, 32, 36, 40]
    half = train(*on(corpus, flags), f"--exit-interval 3 --save {tmp_path}", base=TRAIN_BY_SAMPLES)
    resumed = train(*on(corpus, flags), f"--load {tmp_path}", base=TRAIN_BY_SAMPLES)
    assert half.column("consumed_samples") == [4, 8, 16]
    assert numbers(half) + numbers(resumed) == numbers(base)


def test_training_by_samples_is_resumed(corpus: Path, tmp_path: Path) -> None:
    length = "--train-samples 32 --lr-warmup-samples 8"
    straight = train(*on(corpus, length), base=TRAIN_BY_SAMPLES)
    train(*on(corpus, length), f"--exit-interval 3 --save {tmp_path}", base=TRAIN_BY_SAMPLES)
    resumed = train(*on(corpus, length), f"--load {tmp_path}", base=TRAIN_BY_SAMPLES)
    assert straight.column("consumed_samples") == list(range(4, 33, 4))
    assert numbers(straight, after=3) == numbers(resumed)


def test_resume_with_other_micro_batches(corpus: Path, tmp_path: Path) -> None:
    straight, resumed = followed(corpus, tmp_path, "--micro-batch-size 1", 3, 6, second="--micro-batch-size 4")
    assert straight.losses()[3:] == pytest.approx(resumed.losses(), rel=1e-6)
    assert straight.column("grad_norm")[3:] == pytest.approx(resumed.column("grad_norm"), rel=1e-5)


# two ranks each; without tensor parallelism sizes that two ranks do not divide
ODD = "--hidden-size 33 --num-attention-heads 3 --ffn-hidden-size 57 --make-vocab-size-divisible-by 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EXPERTS = f"{ODD} --num-experts 4 --moe-ffn-hidden-size 31 --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2"
MODES = {
    "plain": ODD,
    "plain bf16": f"{ODD} --bf16",
    "distributed": f"{ODD} {SHARDED}",
    "experts": EXPERTS,
    "experts distributed": f"{EXPERTS} {SHARDED}",
    "experts distributed bf16 grouped": f"{EXPERTS} {SHARDED} --bf16 --moe-grouped-gemm --swiglu --disable-bias-linear",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline": f"{ODD} --pipeline-model-parallel-size 2",
    "interleaved": f"{ODD} --num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
}


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode == "experts distributed" else pytest.mark.slow) for mode in MODES])
def test_two_ranks_repeat_and_resume_to_the_bit(corpus: Path, tmp_path: Path, mode: str) -> None:
    """Twice the same command, and once stopped half way: dropout, loader processes, every optimizer and every rank's random states."""
    flags = f"{MODES[mode]} {DROPOUT} --deterministic-mode --num-workers 2 --train-iters 6 --save-interval 3"
    runs = [on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/{name}")) for name in ("one", "two")]
    resumed = on_ranks(2, *on(corpus, flags, f"--load {tmp_path}/one --ckpt-step 3 --save {tmp_path}/resumed"))
    assert [run.code for run in (*runs, resumed)] == [0] * 3, runs[0].err + resumed.err
    assert resumed.column("iteration") == [4, 5, 6]
    assert numbers(runs[0]) == numbers(runs[1]) and numbers(runs[0], after=3) == numbers(resumed)
    tensors = checkpoint_tensors(tmp_path / "one", 6)
    for name in ("two", "resumed"):
        assert_equal_tensors(checkpoint_tensors(tmp_path / name, 6), tensors)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", SHARDED], ids=["plain", "distributed"])
def test_resume_with_fewer_data_parallel_ranks(corpus: Path, tmp_path: Path, flags: str) -> None:
    """Four, two and one: the global order of samples goes on."""
    length = f"--micro-batch-size 1 --train-iters 9 --save {tmp_path} --load {tmp_path}"
    straight = train(*on(corpus, "--train-iters 9"))
    parts = [on_ranks(4, *on(corpus, length, flags), "--exit-interval 3"), on_ranks(2, *on(corpus, length, flags), "--exit-interval 6")]
    parts.append(train(*on(corpus, length, flags)))
    assert [part.code for part in parts] == [0] * 3, "".join(part.err for part in parts)
    together = [row for part in parts for row in part.steps]
    assert [row["consumed_samples"] for row in together] == straight.column("consumed_samples")
    assert [row["lm_loss"] for row in together] == pytest.approx(straight.losses(), rel=1e-6)
    assert not any("WARNING: --global-batch-size" in part.out for part in parts)


def test_resume_with_other_data_parallel_size(corpus: Path, tmp_path: Path) -> None:
    """The global order of samples goes on: one process, then two, then one, against one that never stopped."""
    straight = train(*on(corpus, "--train-iters 9"))
    folder = f"--save {tmp_path} --load {tmp_path} --train-iters 9"
    first = train(*on(corpus, folder), "--exit-interval 3")
    second = on_ranks(2, *on(corpus, folder), "--exit-interval 6")
    third = train(*on(corpus, folder))
    assert [result.code for result in (first, second, third)] == [0, 0, 0], second.err
    together = first.steps + second.steps + third.steps
    assert [row["consumed_samples"] for row in together] == straight.column("consumed_samples")
    assert [row["lm_loss"] for row in together] == pytest.approx(straight.losses(), rel=1e-6)


def test_a_longer_sequence_or_another_batch_on_resume_is_announced(corpus: Path, tmp_path: Path) -> None:
    """Both change which samples come next: the run goes on, and says so."""
    train(*on(corpus, f"--position-embedding-type rope --save {tmp_path} --train-iters 2 --lr-decay-iters 8"))
    more = f"--position-embedding-type rope --load {tmp_path} --train-iters 4 --lr-decay-iters 8"
    same = train(*on(corpus, more))
    longer = train(*on(corpus, more), "--seq-length 32")
    larger = train(*on(corpus, more), "--global-batch-size 2 --lr-decay-iters 16")
    assert (same.code, longer.code, larger.code) == (0, 0, 0), longer.err + larger.err
    assert "WARNING" not in same.out + same.err
    assert "WARNING: --seq-length is 32 and was 64" in longer.out + longer.err
    assert "WARNING: --global-batch-size is 2 and was 4" in larger.out + larger.err
