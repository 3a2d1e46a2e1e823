"""--use-distributed-optimizer: the same training as without, its checkpoints read by any number of ranks and by the plain optimizer."""

from pathlib import Path

import pytest
import torch

from tests.functional.forked import on_ranks
from tests.functional.runner import Result, assert_equal_tensors, checkpoint_tensors, on, train

SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
NO_CLIP = "--clip-grad 0"  # norms are summed in another order
ACCUMULATED = "--micro-batch-size 1"


def rows(result: Result, after: int = 0) -> list[tuple[float, ...]]:
    assert result.code == 0, result.err
    return [(row["lm_loss"], row["lr"]) for row in result.steps if row["iteration"] > after]


@pytest.mark.parametrize("precision", ["", pytest.param("--bf16", marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_the_same_training(corpus: Path, tmp_path: Path, precision: str) -> None:
    flags = f"{precision} {NO_CLIP} {ACCUMULATED} --attention-dropout 0.1 --hidden-dropout 0.1"
    plain = on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/plain"))
    sharded = on_ranks(2, *on(corpus, flags, SHARDED, f"--save {tmp_path}/sharded"))
    overlapped = on_ranks(2, *on(corpus, flags, OVERLAPPED, f"--save {tmp_path}/overlapped"))
    assert rows(sharded) == rows(plain) == rows(overlapped)
    assert sharded.column("grad_norm") == pytest.approx(plain.column("grad_norm"), rel=1e-5)
    saved = {name: checkpoint_tensors(tmp_path / name, 4) for name in ("plain", "sharded", "overlapped")}
    assert_equal_tensors(saved["sharded"], saved["overlapped"])
    main, params = "optimizer.state.fp32_param.", "optimizer.state.param."
    for key, value in saved["sharded"].items():
        other = key.replace(params, main) if precision else key.removeprefix(params)
        assert torch.equal(value, saved["plain"][other]), key
    without_params = {key for key in saved["sharded"] if not key.startswith(params)}
    assert without_params == {key for key in saved["plain"] if not key.startswith(main)}


@pytest.mark.parametrize("precision", ["", pytest.param("--bf16", marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_resume_across_ranks_and_kinds_of_optimizer(corpus: Path, tmp_path: Path, precision: str) -> None:
    """2 ranks sharded, then 1 sharded, plain on 1, 4 sharded, plain on 2, each going on from the last: as one run."""
    flags = f"{precision} --train-iters 10 --global-batch-size 4 --micro-batch-size 1 {NO_CLIP}"
    straight = train(*on(corpus, flags))
    folder = f"--save {tmp_path} --load {tmp_path}"
    parts = [
        on_ranks(2, *on(corpus, flags, OVERLAPPED, folder), "--exit-interval 2"),
        train(*on(corpus, flags, SHARDED, folder), "--exit-interval 4"),
        train(*on(corpus, flags, folder), "--exit-interval 6"),
        on_ranks(4, *on(corpus, flags, SHARDED, folder), "--exit-interval 8"),
        on_ranks(2, *on(corpus, flags, folder)),
    ]
    assert [part.code for part in parts] == [0] * 5, "\n".join(part.err for part in parts)
    losses = [loss for part in parts for loss in part.losses()]
    assert losses == pytest.approx(straight.losses(), rel=2e-2 if precision else 2e-6)
    assert len({len(part.rows) for part in parts}) == 1


FP16 = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"  # with skipped steps before and after the save


@pytest.mark.parametrize("flags", ["--bf16", *(pytest.param(flags, marks=pytest.mark.slow) for flags in (FP16, "--optimizer sgd"))])
def test_resume_is_exact(corpus: Path, tmp_path: Path, flags: str) -> None:
    flags = f"{flags} {OVERLAPPED} --train-iters 6"
    straight = on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/straight"))
    first = on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/resumed --exit-interval 3"))
    second = on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/resumed --load {tmp_path}/resumed"))
    assert rows(first) + rows(second) == rows(straight)
    assert_equal_tensors(checkpoint_tensors(tmp_path / "straight", 6), checkpoint_tensors(tmp_path / "resumed", 6))


def test_kinds_convert_without_a_change(corpus: Path, tmp_path: Path) -> None:
    """Loading into the other kind and saving at once keeps every number."""
    train(*on(corpus, f"--bf16 --train-iters 3 --save {tmp_path}/plain"))
    flags = "--bf16 --train-iters 4 --exit-interval 4 --lr 0 --min-lr 0 --override-opt_param-scheduler --weight-decay 0"
    sharded = on_ranks(2, *on(corpus, flags, SHARDED, f"--load {tmp_path}/plain --save {tmp_path}/sharded"))
    assert sharded.code == 0, sharded.err
    before, after = checkpoint_tensors(tmp_path / "plain", 3), checkpoint_tensors(tmp_path / "sharded", 4)
    main = [key for key in before if key.startswith("optimizer.state.fp32_param.")]
    assert main and all(torch.equal(before[key], after[key.replace("fp32_param", "param")]) for key in main)


def test_deterministic_runs_are_equal(corpus: Path, tmp_path: Path) -> None:
    flags = "--deterministic-mode --attention-dropout 0.1 --hidden-dropout 0.1"
    runs = [on_ranks(2, *on(corpus, flags, SHARDED, f"--save {tmp_path}/{name}")) for name in ("one", "two")]
    assert rows(runs[0]) == rows(runs[1])
    assert_equal_tensors(checkpoint_tensors(tmp_path / "one", 4), checkpoint_tensors(tmp_path / "two", 4))


@pytest.mark.slow
def test_instances_and_options_of_the_reduction(corpus: Path, tmp_path: Path) -> None:
    """Two instances train as one, also from a checkpoint of the other; buckets of another size and bf16 gradients train."""
    flags = f"--train-iters 6 --global-batch-size 4 --micro-batch-size 1 {NO_CLIP}"
    instances = f"{OVERLAPPED} --num-distributed-optimizer-instances 2 --ddp-num-buckets 3"
    one = on_ranks(4, *on(corpus, flags, SHARDED))
    folder = f"--save {tmp_path} --load {tmp_path}"
    first = on_ranks(4, *on(corpus, flags, instances, folder), "--exit-interval 3")
    second = on_ranks(2, *on(corpus, flags, f"{SHARDED} --ddp-bucket-size 5000", folder))
    assert [result.code for result in (one, first, second)] == [0] * 3, first.err + second.err
    assert first.losses() + second.losses() == pytest.approx(one.losses(), rel=2e-6)
    half = f"--bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation {SHARDED}"
    assert on_ranks(2, *on(corpus, flags, half)).losses() == pytest.approx(one.losses(), rel=3e-2)
