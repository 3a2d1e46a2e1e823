"""Trainings in FP8 (emulated on a CPU): the loss against bf16's, layouts, checkpoints."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.serialization import load as load_shards
from megatron.core.dist_checkpointing.serialization import stored_objects
from tests.functional.forked import on_ranks
from tests.functional.runner import Result, checkpoint_tensors, on, train
from tests.functional.test_golden_continuation import data_flags

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
HYBRID = "--bf16 --fp8-format hybrid --fp8-recipe"
DELAYED = f"{HYBRID} delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-shared-expert-intermediate-size 64 --swiglu --disable-bias-linear"
FC1 = "decoder.layers.mlp.linear_fc1"


def curve(golden: Path, folder: Path, steps: int, precision: str, seed: int = 1234) -> list[float]:
    """Losses on the stored corpus of a real text."""
    shape = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --seq-length 128 --max-position-embeddings 128"
    data, cache = data_flags(golden, folder)
    flags = f"{shape} --train-iters {steps} --lr 2e-3 --lr-warmup-iters 5 --tokenizer-type SentencePieceTokenizer --vocab-size 1000"
    result = train(flags, data, cache, precision, f"--seed {seed}", script="pretrain_llama")
    assert result.code == 0 and len(result.losses()) == steps, result.err
    return result.losses()


def stored_states(folder: Path, linear: str) -> list[Any]:
    """What the checkpoint of iteration 2 has as extra state of a linear, layer by layer (and expert); None: an empty entry."""
    folder = folder / "iter_0000002"
    states = stored_objects(folder, f"decoder.layers.{linear}._extra_state")
    return load_shards({"states": states}, folder)["states"]


SEEDS = (1, 2, 3)


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("recipe", "more"), [("delayed", ""), ("blockwise", MOE), pytest.param("mxfp8", MOE, marks=pytest.mark.slow)])
def test_learns_as_in_bf16(golden: Path, tmp_path: Path, recipe: str, more: str) -> None:
    precisions = ("--bf16", f"{HYBRID} {recipe}")
    assert_learns_alike(*(curve(golden, tmp_path, 30, f"{precision} {more}") for precision in precisions))


@pytest.fixture(scope="module")
def curves_in_bf16(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return [curve(golden, tmp_path_factory.mktemp("bf16"), 200, "--bf16", seed) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_200_steps_are_as_in_bf16(golden: Path, tmp_path: Path, curves_in_bf16: list[list[float]], recipe: str) -> None:
    """Mean of several seeds: one run of so small a model ends up to 0.9 % above or below, whichever its rounding."""
    quantized = [curve(golden, tmp_path / str(seed), 200, f"{HYBRID} {recipe}", seed) for seed in SEEDS]
    assert_learns_alike(*([mean(list(losses)) for losses in zip(*curves, strict=True)] for curves in (curves_in_bf16, quantized)))


def assert_learns_alike(plain: list[float], quantized: list[float]) -> None:
    """In the last fifth, within 0.5 %."""
    last = len(plain) // 5
    assert quantized != plain
    assert mean(quantized[-last:]) == pytest.approx(mean(plain[-last:]), rel=5e-3)
    assert mean(plain[-last:]) < 0.9 * plain[0]


def losses_of(result: Result) -> list[float]:
    assert result.code == 0, result.err
    return result.losses()


def test_schedules_recompute_and_overlap_change_nothing(corpus: Path) -> None:
    """Full recompute: to the bit. Two pipeline stages, zero-bubble; two data-parallel ranks, weights gathered in the background: but for
    the order of sums."""
    alone = losses_of(train(*on(corpus, DELAYED)))
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert losses_of(train(*on(corpus, DELAYED, recompute))) == alone
    staged = "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
    assert losses_of(on_ranks(2, *on(corpus, DELAYED, staged, recompute))) == pytest.approx(alone, rel=1e-3)
    overlapped = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert losses_of(on_ranks(2, *on(corpus, DELAYED, overlapped))) == pytest.approx(alone, rel=2e-3)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("delayed", ""),
        ("delayed", MOE),
        ("blockwise", MOE),
        pytest.param("tensorwise", "", marks=pytest.mark.slow),
        pytest.param("tensorwise", MOE, marks=pytest.mark.slow),
        pytest.param("delayed", MOE.replace("--moe-grouped-gemm", ""), marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_ranks_train_the_same(corpus: Path, recipe: str, more: str) -> None:
    """Of experts too, which they split: there rounding now and then sends a token elsewhere."""
    flags = f"{HYBRID} {recipe} --swiglu --ffn-hidden-size 160 {more}"
    alone = losses_of(train(*on(corpus, flags)))
    split = losses_of(on_ranks(2, *on(corpus, flags, "--tensor-model-parallel-size 2 --sequence-parallel")))
    assert split == pytest.approx(alone, rel=5e-3 if more else 2e-3)


def test_a_run_that_goes_on_equals_one_that_never_stopped(corpus: Path, tmp_path: Path) -> None:
    straight = losses_of(train(*on(corpus, DELAYED)))
    folder = f"--save {tmp_path} --load {tmp_path}"
    first = train(*on(corpus, DELAYED, folder, "--exit-interval 2"))
    second = train(*on(corpus, DELAYED, folder))
    assert losses_of(first) + losses_of(second) == straight and "no history of scales" not in second.out
    keys = [state.unique_key for state in stored_objects(tmp_path / "iter_0000002", f"{FC1}._extra_state")]
    assert keys == [f"{FC1}._extra_state/shard_{layer}_2" for layer in range(2)]
    for state in stored_states(tmp_path, "mlp.linear_fc1"):
        assert state["amax_history"].shape == (4, 3) and state["amax_history"][:2].all() and state["scale"].shape == (3,)


def test_checkpoints_with_and_without_fp8_state_load_each_other(corpus: Path, tmp_path: Path) -> None:
    """The keys of weights are the same; a history that is missing begins anew, and is said once."""
    save = "--exit-interval 2 --save"
    losses_of(train(*on(corpus, "--bf16", save, tmp_path / "bf16")))
    losses_of(train(*on(corpus, DELAYED, save, tmp_path / "fp8")))
    losses_of(train(*on(corpus, f"{HYBRID} blockwise", save, tmp_path / "blockwise")))
    keys = [set(checkpoint_tensors(tmp_path / name, 2)) for name in ("bf16", "fp8", "blockwise")]
    assert keys[0] == keys[1] == keys[2]
    assert stored_states(tmp_path / "blockwise", "mlp.linear_fc1") == [None, None], "no state, no metadata"
    for there, precision, notes in (
        ("bf16", DELAYED, 1),
        ("blockwise", DELAYED, 1),
        ("fp8", "--bf16", 0),
        ("fp8", f"{HYBRID} tensorwise", 0),
        ("fp8", "--bf16 --fp8-format hybrid --fp8-amax-history-len 2", 0),
    ):
        result = train(*on(corpus, precision, "--load", tmp_path / there))
        assert len(losses_of(result)) == 2
        assert result.out.count("no history of scales for 8 linears") == notes


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", pytest.param("tensorwise", marks=pytest.mark.slow)])
def test_experts_save_and_go_on(corpus: Path, tmp_path: Path, recipe: str) -> None:
    """To the bit, and on another number of expert-parallel ranks; no metadata where the recipe has no state."""
    flags, folder = f"{HYBRID} {recipe} {MOE}", f"--save {tmp_path} --load {tmp_path}"
    straight = losses_of(train(*on(corpus, flags)))
    first = losses_of(train(*on(corpus, flags, folder, "--exit-interval 2")))
    for path, entries in (("self_attention.linear_qkv", 2), ("mlp.shared_experts.linear_fc1", 2), ("mlp.experts.experts.linear_fc1", 8)):
        assert [bool(state) for state in stored_states(tmp_path, path)] == [recipe == "delayed"] * entries
    for state in stored_states(tmp_path, "mlp.experts.experts.linear_fc2") if recipe == "delayed" else ():
        assert state["amax_history"].shape == (1, 3) and state["amax_history"].all() and state["scale"].shape == (3,)
    assert any(re.search(r"mlp\.experts\.experts\.linear_fc1\.weight$", key) for key in checkpoint_tensors(tmp_path, 2))
    resumed = train(*on(corpus, flags, f"--load {tmp_path}"))
    assert first + losses_of(resumed) == straight and "no history of scales" not in resumed.out
    second = losses_of(on_ranks(2, *on(corpus, flags, folder, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall")))
    assert first + second == pytest.approx(straight, rel=2e-3)


def test_bits_of_a_run_in_bf16_do_not_depend_on_fp8_being_there(corpus: Path) -> None:
    """All layers excluded: bf16's own bits."""
    none = f"{DELAYED} --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1"
    assert losses_of(train(*on(corpus, none))) == losses_of(train(*on(corpus, "--bf16")))


def test_numbers_that_are_not_finite_are_seen(corpus: Path) -> None:
    """A learning rate that blows the model up stops the run with the tensor's name, not with saturated numbers."""
    result = train(*on(corpus, DELAYED, "--lr 1e30 --min-lr 1e30 --lr-decay-style constant --clip-grad 0 --train-iters 8"))
    assert result.code == 1 and ("NaN" in result.err or "nan" in result.err), result.err
