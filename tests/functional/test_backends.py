"""Trainings by the command line with both backends, Transformer Engine by its stand-in: one checkpoint, whoever writes or reads it."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from megatron.training import arguments
from tests.fake_te import fake_transformer_engine
from tests.functional.runner import Result, assert_equal_tensors, checkpoint_tensors, on, train

LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall --disable-bias-linear"
MODELS = {"gpt": "", "llama": LLAMA, "experts": EXPERTS, "grouped experts": f"{EXPERTS} --moe-grouped-gemm --moe-layer-freq [0,1]"}
LOCAL, TE = "--transformer-impl local", "--transformer-impl transformer_engine"


@pytest.fixture(autouse=True)
def transformer_engine() -> Iterator[None]:
    with fake_transformer_engine(), mock.patch.object(arguments, "_why_no_transformer_engine", lambda args: None):
        yield


def run(corpus: Path, *words: str) -> Result:
    result = train(*on(corpus, *words))
    assert result.code == 0, result.err
    return result


FAST = [("llama", "torch_dist", LOCAL, TE), ("grouped experts", "torch", TE, LOCAL)]
ALL = product(MODELS, ("torch_dist", "torch"), (LOCAL, TE), (LOCAL, TE))
MOVES = [pytest.param(*move, marks=() if move in FAST else pytest.mark.slow) for move in ALL if move[2:] != (LOCAL, LOCAL)]


@pytest.mark.parametrize(("model", "form", "first", "second"), MOVES)
def test_a_run_goes_on_with_another_backend(corpus: Path, tmp_path: Path, model: str, form: str, first: str, second: str) -> None:
    """CKPT-24 in one precision: weights and optimizer state have the same keys for both, and nothing is lost on the way."""
    flags = f"{MODELS[model]} --ckpt-format {form}"
    whole = run(corpus, flags, LOCAL, f"--save {tmp_path / 'whole'} --save-interval 4")
    run(corpus, flags, first, f"--exit-interval 2 --save {tmp_path / 'parts'} --save-interval 2")
    resumed = run(corpus, flags, second, f"--load {tmp_path / 'parts'} --save {tmp_path / 'parts'} --save-interval 4")
    assert resumed.column("iteration") == [3, 4]
    assert resumed.losses() == pytest.approx(whole.losses()[2:], rel=1e-5)
    assert resumed.column("grad_norm") == pytest.approx(whole.column("grad_norm")[2:], rel=1e-4)


def test_both_write_the_same_tensors(corpus: Path, tmp_path: Path) -> None:
    """Before the first step: every key, shape and value."""
    flags = f"{MODELS['grouped experts']} --train-iters 1 --lr 0 --min-lr 0 --weight-decay 0 --no-save-optim --save-interval 1"
    for name, backend in (("local", LOCAL), ("te", TE)):
        run(corpus, flags, backend, f"--save {tmp_path / name}")
    assert_equal_tensors(*(checkpoint_tensors(tmp_path / name, 1) for name in ("local", "te")))


FP8 = "--bf16 --fp8-format hybrid --fp8-recipe delayed --hidden-size 64 --ffn-hidden-size 128"
NO_SCALES = "FP8: no scales that fit in the checkpoint: they begin as in a new run"


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        (f"{TE} {FP8}", f"{TE} {FP8}", False),
        (f"{LOCAL} --bf16 --ffn-hidden-size 128", f"{TE} {FP8}", True),
        (f"{TE} {FP8}", f"{LOCAL} --bf16 --ffn-hidden-size 128", False),
        pytest.param(f"{LOCAL} {FP8}", f"{TE} {FP8}", True, marks=pytest.mark.slow),
        pytest.param(f"{TE} {FP8}", f"{LOCAL} {FP8}", False, marks=pytest.mark.slow),
    ],
)
def test_scales_go_on_where_there_are_any_and_else_start_anew(corpus: Path, tmp_path: Path, first: str, second: str, note: bool) -> None:
    """CKPT-24 across precisions."""
    run(corpus, LLAMA, first, f"--exit-interval 2 --save {tmp_path} --save-interval 2")
    resumed = run(corpus, LLAMA, second, f"--load {tmp_path}")
    assert resumed.column("iteration") == [3, 4]
    assert (NO_SCALES in resumed.out) == note, resumed.out
