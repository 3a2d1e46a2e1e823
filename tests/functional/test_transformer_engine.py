"""Trainings with the real Transformer Engine on GPUs against the local backend: losses, layouts, FP8 recipes, moves of checkpoints."""

from pathlib import Path

import pytest

from megatron.core.optional_imports import available
from tests import fake_te
from tests.functional.runner import TINY, Result, checkpoint_tensors, on, torchrun, train
from tests.gpus import RANKS, needs_gpus, needs_two_gpus

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(not available("transformer_engine"), reason="Transformer Engine is not installed"),
]

assert fake_te, "imports the real package before torch's cuDNN is loaded"
# heads of 64 and a vocabulary of 512, so that every kernel and FP8 take the shapes
SHAPE = (
    "--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128 --bf16 --train-iters 5 "
    "--lr 1e-3 --lr-warmup-iters 0"
)
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights"
)
MOE = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
TE = "--transformer-impl transformer_engine"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECIPES = ("delayed", "tensorwise", "blockwise")


def run(corpus: Path, flags: str, processes: int = 1) -> Result:
    words = on(corpus, SHAPE, flags)
    result = train(*words) if processes == 1 else torchrun(processes, *words, on_gpu=True)
    assert result.code == 0, result.err[-4000:]
    return result


def assert_close(one: Result, other: Result, within: float = 5e-3) -> None:
    """Losses of every step, relative: bf16 has 3 digits, and a mean over 512 tokens half one more."""
    assert len(one.losses()) == len(other.losses()) > 0
    assert other.losses() == pytest.approx(one.losses(), rel=within), (one.losses(), other.losses())


CASES = {
    "gpt": (1, ""),
    "gpt, gradients not fused": (1, "--no-gradient-accumulation-fusion"),
    "llama": (1, LLAMA),
    "window": (1, f"{LLAMA} --window-size 32,0"),
    "packed": (1, f"{LLAMA} --reset-attention-mask --reset-position-ids"),
    "experts": (1, MOE),
    "one expert after the other": (1, MOE.replace("--moe-grouped-gemm ", "")),
    "recompute": (1, f"{LLAMA} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "data parallel": (2, f"{LLAMA} {OVERLAPPED} --ddp-bucket-size 100000"),
    "tensor parallel": (2, f"{LLAMA} --tensor-model-parallel-size 2"),
    "sequence parallel": (2, f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel"),
    "sequence parallel with biases": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pipeline": (2, f"{LLAMA} --pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "experts apart": (2, f"{MOE} --expert-model-parallel-size 2 {OVERLAPPED}"),
    "context parallel, ring": (2, f"{LLAMA} --context-parallel-size 2 --cp-comm-type p2p"),
    "context parallel, gathered": (2, f"{LLAMA} --context-parallel-size 2 --cp-comm-type all_gather"),
    "context parallel, exchanged": (2, f"{LLAMA} --context-parallel-size 2 --cp-comm-type a2a"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_two_gpus if CASES[name][0] > 1 else ()) for name in CASES])
def test_losses_are_those_of_the_local_backend(corpus: Path, name: str) -> None:
    processes, flags = CASES[name]
    local, other = run(corpus, flags, processes), run(corpus, f"{flags} {TE}", processes)
    assert "used instead" not in other.err
    assert other.losses() != local.losses()  # other kernels
    assert_close(local, other)
    for one, two in zip(local.column("grad_norm"), other.column("grad_norm"), strict=True):
        assert two == pytest.approx(one, rel=0.03)


@pytest.mark.parametrize("model", ["llama", "experts"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_stays_close_to_bf16(corpus: Path, recipe: str, model: str) -> None:
    flags = f"{LLAMA if model == 'llama' else MOE} {TE} --train-iters 20"
    plain = run(corpus, flags)
    fp8 = run(corpus, f"{flags} --fp8-format hybrid --fp8-recipe {recipe}")
    assert fp8.losses() != plain.losses()
    assert_close(plain, fp8, 0.03)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_with_full_recompute_is_fp8_without(corpus: Path, recipe: str) -> None:
    flags = f"{LLAMA} {TE} --fp8-format hybrid --fp8-recipe {recipe}"
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    assert_close(run(corpus, flags), run(corpus, f"{flags} {again}"), 1e-3)


MOVES = {
    "local bf16 to bf16": ("--transformer-impl local", TE),
    "bf16 to fp8": (TE, f"{TE} --fp8-format hybrid --fp8-recipe delayed"),
    "local bf16 to fp8": ("--transformer-impl local", f"{TE} --fp8-format hybrid --fp8-recipe tensorwise"),
    "fp8 to bf16": (f"{TE} --fp8-format hybrid --fp8-recipe delayed", TE),
    "fp8 to local bf16": (f"{TE} --fp8-format hybrid --fp8-recipe delayed", "--transformer-impl local"),
    "fp8 to fp8": (f"{TE} --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16",) * 2,
}


# the legacy format has no place for delayed scaling's state, and says so
SAVED = [(move, form) for move in MOVES for form in ("torch_dist", "torch") if form != "torch" or "delayed" not in MOVES[move][0]]


@pytest.mark.parametrize(("move", "form"), SAVED)
def test_a_checkpoint_moves_between_backends_and_precisions(corpus: Path, tmp_path: Path, move: str, form: str) -> None:
    """CKPT-24: weights have the same keys for all; FP8 state that is missing starts anew, and is used where it is there."""
    first, second = MOVES[move]
    whole = run(corpus, f"{LLAMA} {second} --train-iters 6")
    run(corpus, f"{LLAMA} {first} --train-iters 6 --exit-interval 3 --save {tmp_path} --save-interval 3 --ckpt-format {form}")
    resumed = run(corpus, f"{LLAMA} {second} --train-iters 6 --load {tmp_path}")
    assert [row["iteration"] for row in resumed.steps] == [4, 5, 6]
    assert resumed.losses() == pytest.approx(whole.losses()[3:], rel=0.03)


def test_grouped_experts_in_a_stateless_recipe_are_saved_and_resumed(corpus: Path, tmp_path: Path) -> None:
    """FP8-01: no FP8 state is invented, keys stay per expert."""
    flags = f"{MOE} {TE} --fp8-format hybrid --fp8-recipe tensorwise --train-iters 4"
    run(corpus, f"{flags} --exit-interval 2 --save {tmp_path} --save-interval 2")
    tensors = checkpoint_tensors(tmp_path, 2)
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (2, 4, 1024, 256)
    for processes in (1, 2)[: min(RANKS, 2)]:
        resumed = run(corpus, f"{flags} --load {tmp_path} --expert-model-parallel-size {processes}", processes)
        assert [row["iteration"] for row in resumed.steps] == [3, 4]


def test_it_is_used_where_it_is_asked_for_by_name(corpus: Path) -> None:
    base = TINY.replace("--transformer-impl local ", "")
    for asked, noted in (("", True), (TE, False)):
        result = train(*on(corpus, SHAPE, asked), base=base)
        assert result.code == 0 and ("used instead" in result.err) == noted, result.err[-4000:]
