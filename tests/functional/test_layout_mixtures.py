"""Mixtures of layouts through the trainer: one saves, another goes on, and both train as one process does.

That each layout is exact is shown in tests/parallel_equivalence; this is about what only the trainer does: flags, batches, checkpoints.
To add a pair: one line of PAIRS.
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
# (processes, flags) of the run that saves after half of its steps, of the one that goes on; is it part of the fast tests
PAIRS = {
    "tp2 sp pp2 to pp2 dp2 sharded": ((4, f"{SP} {PP}"), (4, f"{PP} {SHARDED}"), True),
    "tp2 sp dp2 sharded to tp2 sp pp2 vpp2": ((4, f"{SP} {SHARDED}"), (4, f"{SP} {PP} --num-layers-per-virtual-pipeline-stage 1"), False),
    "pp2 dp2 overlapped to tp2 sp recompute": ((4, f"{PP} --overlap-grad-reduce"), (2, f"{SP} {RECOMPUTE}"), False),
    "pp2 recompute to pp2 zero-bubble tp2": ((2, f"{PP} {RECOMPUTE}"), (4, f"{PP} --pipeline-schedule zero-bubble {TP}"), False),
    "pp2 dp2 per-token to tp2 dp2": ((4, f"{PP} --calculate-per-token-loss"), (4, TP), False),
    "tp2 sp pp2 dp2 sharded to one process": ((8, f"{SP} {PP} {SHARDED}"), (1, ""), False),
}


def cases():
    for name, (_, _, fast) in PAIRS.items():
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
def test_a_pair_trains_the_same_model(corpus, alone, tmp_path, name, model):
    (processes, flags), (later_processes, later_flags), _ = PAIRS[name]
    first = torchrun(processes, *on(corpus, SIZE, MODELS[model], flags, "--exit-interval 2 --save", tmp_path))
    assert first.code == 0, first.err
    second = torchrun(later_processes, *on(corpus, SIZE, MODELS[model], later_flags, "--load", tmp_path))
    assert second.code == 0, second.err
    assert (first.column("iteration"), second.column("iteration")) == ([1, 2], [3, 4])
    for column in ("lm_loss", "grad_norm"):
        assert first.column(column) + second.column(column) == pytest.approx(alone[model].column(column), rel=1e-5)
