"""Mixtures of layouts through the trainer: the same losses and gradient norms as one process, and their checkpoints go on in it.

To add a mixture: one line of MIXTURES.
"""

import pytest

from tests.functional.runner import on, torchrun, train, write_corpus

SIZE = "--num-layers 4 --global-batch-size 8 --micro-batch-size 1"
MODELS = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
}
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# name -> (processes, flags, is it part of the fast tests)
MIXTURES = {
    "tp2 sp, pp2": (4, f"{SP} {PP}", True),
    "pp2, dp2 sharded optimizer": (4, f"{PP} {SHARDED}", True),
    "tp2, pp2": (4, f"{TP} {PP}", False),
    "tp2 sp, dp2 sharded optimizer": (4, f"{SP} {SHARDED}", False),
    "tp2 sp, pp2 with virtual stages": (4, f"{SP} {PP} --num-layers-per-virtual-pipeline-stage 1", False),
    "pp2, dp2 overlapped": (4, f"{PP} --overlap-grad-reduce", False),
    "pp2, dp2, per-token loss": (4, f"{PP} --calculate-per-token-loss", False),
    "tp2 sp, recompute": (2, f"{SP} {RECOMPUTE}", False),
    "pp2, recompute": (2, f"{PP} {RECOMPUTE}", False),
    "pp2 zero-bubble, tp2": (4, f"{PP} --pipeline-schedule zero-bubble {TP}", False),
    "tp2 sp, pp2, dp2 sharded optimizer": (8, f"{SP} {PP} {SHARDED}", False),
}


def cases():
    for name, (_, _, fast) in MIXTURES.items():
        for model in MODELS:
            is_fast = fast and model == "gpt"
            marks = [] if is_fast else [pytest.mark.slow(reason="several processes each; `make test-layouts` runs them all")]
            yield pytest.param(name, model, id=f"{name} {model}", marks=marks)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def alone(corpus):
    """model -> the run in one process."""
    return {model: train(*on(corpus, SIZE, flags)) for model, flags in MODELS.items()}


@pytest.mark.parametrize("name, model", cases())
def test_a_mixture_trains_the_same_model(corpus, alone, tmp_path, name, model):
    processes, flags, _ = MIXTURES[name]
    result = torchrun(processes, *on(corpus, SIZE, MODELS[model], flags, "--save-interval 2 --save", tmp_path))
    assert result.code == 0, result.err
    for column in ("lm_loss", "grad_norm"):
        assert result.column(column) == pytest.approx(alone[model].column(column), rel=1e-5)
    resumed = train(*on(corpus, SIZE, MODELS[model], "--ckpt-step 2 --load", tmp_path))
    assert resumed.code == 0, resumed.err
    assert resumed.column("lm_loss") == pytest.approx(alone[model].column("lm_loss")[2:], rel=1e-5)
