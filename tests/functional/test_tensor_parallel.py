"""Tensor and sequence parallelism through the whole trainer: the run of one process, and checkpoints that any layout goes on from."""

import re
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import load_common_state_dict
from tests.functional.forked import on_ranks
from tests.functional.runner import Result, checkpoint_tensors, on, train

TP2 = "--tensor-model-parallel-size 2"
TP4 = "--tensor-model-parallel-size 4"
SP = "--sequence-parallel"
# biases, gate and up, an output layer of its own: all that a split has to put in the right order
GATED = "--swiglu --untie-embeddings-and-output-weights --position-embedding-type rope --attention-backend unfused"


def assert_same_training(result: Result, expected: Result, after: int = 0) -> None:
    assert result.code == 0, result.err
    steps = [row for row in expected.steps if after < row["iteration"] <= after + len(result.steps)]
    assert result.steps and len(steps) == len(result.steps)
    for name, tolerance in (("lm_loss", 1e-6), ("grad_norm", 1e-5), ("consumed_samples", 0), ("lr", 0)):
        assert result.column(name) == pytest.approx([row[name] for row in steps], rel=tolerance, abs=0), name


@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, f"{TP2} {SP}"),
        pytest.param(2, TP2, marks=pytest.mark.slow),
        pytest.param(4, f"{TP4} {SP}", marks=pytest.mark.slow),
        pytest.param(4, f"{TP2} --use-tp-pp-dp-mapping --calculate-per-token-loss", marks=pytest.mark.slow),
    ],
)
def test_a_run_equals_that_of_one_process(corpus: Path, processes: int, layout: str) -> None:
    """With a vocabulary of 251, which no tensor-parallel size divides, padded to a multiple of that size alone."""
    flags = "--vocab-size 250 --make-vocab-size-divisible-by 1 --eval-iters 1 --log-throughput --log-params-norm"
    normalised = " --calculate-per-token-loss" if "per-token" in layout else ""
    alone = train(*on(corpus, flags + normalised))
    result = on_ranks(processes, *on(corpus, f"{flags} {layout}"))
    assert_same_training(result, alone)
    for row, expected in zip(result.evaluations, alone.evaluations, strict=True):
        assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-6)
    (count,) = [line for line in alone.out.splitlines() if "number of parameters" in line]
    assert count in result.out, "the number of parameters does not depend on the layout"
    assert re.findall(r"params norm: ([\d.]+)", result.out) == re.findall(r"params norm: ([\d.]+)", alone.out) != []


def test_checkpoints_go_on_in_another_tensor_parallel_size(corpus: Path, tmp_path: Path) -> None:
    """One process, two with the vocabulary padded to 256 rows instead of 128, one again: the run that never stopped, optimizer included."""
    straight = train(*on(corpus, GATED, "--train-iters 9"))
    folder = f"--save {tmp_path} --load {tmp_path} --train-iters 9"
    first = train(*on(corpus, GATED, folder), "--exit-interval 3")
    second = on_ranks(2, *on(corpus, GATED, folder, f"{TP2} {SP}"), "--exit-interval 6")
    third = train(*on(corpus, GATED, folder), "--use-checkpoint-args")
    for result, after in ((first, 0), (second, 3), (third, 6)):
        assert_same_training(result, straight, after)
    for result in (second, third):
        assert result.out.count("of another layout: random states were taken where it has them") == 1
    operations = [load_common_state_dict(tmp_path / f"iter_{n:07d}")["num_floating_point_operations_so_far"] for n in (3, 6, 9)]
    assert operations == pytest.approx([operations[0] * part for part in (1, 2, 3)]), "a sample costs the same in every layout"
    saved = [checkpoint_tensors(tmp_path, iteration) for iteration in (3, 6, 9)]
    for key in ("embedding.word_embeddings.weight", "output_layer.weight", "optimizer.state.exp_avg.output_layer.weight"):
        assert [len(tensors[key]) for tensors in saved] == [128, 256, 128]
        assert not saved[1][key][128:].any(), "rows that are there for the split alone stay zero"
    assert {key: value.shape for key, value in saved[0].items()} == {key: value.shape for key, value in saved[2].items()}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [GATED, "--num-query-groups 4 --group-query-attention --qk-layernorm"], ids=["gated", "tied"])
def test_checkpoints_go_through_every_layout(corpus: Path, tmp_path: Path, flags: str) -> None:
    straight = train(*on(corpus, flags, "--train-iters 14"))
    folder = f"--save {tmp_path} --load {tmp_path} --train-iters 14"
    layouts = [(2, TP2), (4, f"{TP4} {SP}"), (2, ""), (4, f"{TP2} {SP}"), (4, TP4), (1, ""), (2, f"{TP2} {SP}")]
    for number, (processes, layout) in enumerate(layouts):
        result = on_ranks(processes, *on(corpus, flags, folder, layout), f"--exit-interval {2 * number + 2}")
        assert_same_training(result, straight, 2 * number)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["--bf16", "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1"], ids=["bf16", "fp16"]
)
def test_half_precision(corpus: Path, tmp_path: Path, precision: str) -> None:
    """Ranks agree on which steps overflow; fp32 copies of the weights go on in another tensor-parallel size."""
    flags = f"{precision} --train-iters 8"
    straight = train(*on(corpus, flags))
    half = on_ranks(2, *on(corpus, flags, f"{TP2} {SP} --save {tmp_path} --exit-interval 4"))
    resumed = train(*on(corpus, flags, f"--load {tmp_path}"))
    assert straight.code == half.code == resumed.code == 0, half.err
    assert half.losses() + resumed.losses() == pytest.approx(straight.losses(), rel=5e-3)
    for name in ("skipped_iterations", "loss_scale", "consumed_samples", "lr"):
        assert half.column(name) + resumed.column(name) == straight.column(name)
    assert ("fp16" in precision) == any(straight.column("skipped_iterations"))


@pytest.mark.slow
def test_random_states_of_another_layout(corpus: Path, tmp_path: Path) -> None:
    """Dropout: the same layout goes on with the same masks; another one takes what there is, and says so once."""
    flags = f"--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters 4 --load {tmp_path}"
    saved = on_ranks(2, *on(corpus, flags, TP2, f"--save {tmp_path} --exit-interval 2"))
    straight = on_ranks(2, *on(corpus, flags.replace(f"--load {tmp_path}", ""), TP2))
    resumed = on_ranks(2, *on(corpus, flags, TP2))
    assert saved.code == resumed.code == 0, resumed.err
    assert saved.losses() + resumed.losses() == straight.losses()
    assert "another layout" not in resumed.out
    alone = train(*on(corpus, flags))
    assert alone.code == 0 and alone.out.count("another layout") == 1
    assert alone.losses() == pytest.approx(resumed.losses(), rel=0.05)


def test_a_padded_vocabulary_that_tensor_parallelism_does_not_divide_is_refused(corpus: Path) -> None:
    result = on_ranks(2, *on(corpus, TP2, "--padded-vocab-size 129"))
    assert result.code != 0 and "--padded-vocab-size 129: must be a multiple of --tensor-model-parallel-size 2" in result.err


def test_rows_of_a_fixed_vocabulary_enter_the_softmax(corpus: Path) -> None:
    """--padded-vocab-size is the model's vocabulary, whatever the tokenizer's: as in Megatron-LM all of its rows count."""
    first = {
        size: train(*on(corpus, f"--train-iters 1 {size}")).losses()[0]
        for size in ("", "--padded-vocab-size 128", "--padded-vocab-size 256")
    }
    assert first[""] == first["--padded-vocab-size 128"]
    gap = first["--padded-vocab-size 256"] - first[""]
    assert gap == pytest.approx(float(torch.tensor(2.0).log()), abs=0.02)
