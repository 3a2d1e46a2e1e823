"""Mixtures of layouts through the trainer: one saves, another goes on, and both train as one process does.

That each layout is exact is shown in tests/parallel_equivalence; this is about what only the trainer does: flags, batches, checkpoints.
To add a pair: one line of PAIRS.
"""

from functools import cache

import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import on, train, write_corpus

# A small learning rate: Adam moves weights whose gradients are all but zero by full steps, in directions that rounding decides.
SIZE = "--num-layers 4 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3"
MODELS = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
}
MODELS["moe"] = (
    f"{MODELS['llama']} --num-experts 4 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--moe-ffn-hidden-size 96 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
# as DeepSeek-V3's: latents, one dense layer before those with experts, one that looks ahead
MODELS["deepseek"] = (
    f"{MODELS['moe'].replace('--group-query-attention --num-query-groups 2', '')} --multi-latent-attention --q-lora-rank 24 "
    "--kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --rotary-scaling-factor 4 --mscale 1.0 "
    "--mscale-all-dim 1.0 --mtp-num-layers 1 --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 48"
)
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP, EP = "--context-parallel-size 2", "--expert-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# (processes, flags) of the run that saves after half of its steps, of the one that goes on; models; is it part of the fast tests
DENSE, EXPERTS, LATENT = ("gpt", "llama"), ("moe",), ("deepseek",)
PAIRS = {
    "tp2 sp pp2 to pp2 dp2 sharded": ((4, f"{SP} {PP}"), (4, f"{PP} {SHARDED}"), DENSE, True),
    "tp2 sp dp2 sharded to tp2 sp pp2 vpp2": (
        (4, f"{SP} {SHARDED}"),
        (4, f"{SP} {VPP}"),
        DENSE,
        False,
    ),
    "pp2 dp2 overlapped to tp2 sp recompute": ((4, f"{PP} --overlap-grad-reduce"), (2, f"{SP} {RECOMPUTE}"), DENSE, False),
    "pp2 recompute to pp2 zero-bubble tp2": ((2, f"{PP} {RECOMPUTE}"), (4, f"{PP} --pipeline-schedule zero-bubble {TP}"), DENSE, False),
    "pp2 dp2 per-token to tp2 dp2": ((4, f"{PP} --calculate-per-token-loss"), (4, TP), DENSE, False),
    "tp2 sp pp2 dp2 sharded to one process": ((8, f"{SP} {PP} {SHARDED}"), (1, ""), DENSE, False),
    "tp2 sp cp2 to cp2 dp2 sharded a2a": ((4, f"{SP} {CP}"), (4, f"{CP} {SHARDED} --cp-comm-type a2a"), DENSE, False),
    "cp2 pp2 to one process": ((4, f"{CP} {PP}"), (1, ""), DENSE, False),
    "ep2 sharded to tp2 sp": ((2, f"{EP} {SHARDED}"), (2, SP), EXPERTS, True),
    "ep2 pp2 to ep4 sharded": ((4, f"{EP} {PP}"), (4, f"--expert-model-parallel-size 4 {SHARDED}"), EXPERTS, False),
    "tp2 sp ep2 etp1 to cp2 ep2": ((2, f"{SP} {EP} --expert-tensor-parallel-size 1"), (2, f"{CP} {EP} {SHARDED}"), EXPERTS, False),
    "tp2 sp to sharded": ((2, SP), (2, SHARDED), LATENT, False),
    "one process to tp2 sp pp2 dp2 ep2 recompute": (
        (1, ""),
        (8, f"{SP} {PP} {EP} {SHARDED} --recompute-granularity selective --recompute-modules mla_up_proj moe"),
        LATENT,
        False,
    ),
    "ep2 pp2 vpp2 instances to one process": (
        (8, f"{EP} {VPP} {SHARDED} --num-distributed-optimizer-instances 2"),
        (1, ""),
        EXPERTS,
        False,
    ),
}


def cases():
    for name, (_, _, models, fast) in PAIRS.items():
        for model in models:
            is_fast = fast and model == models[0]
            marks = [] if is_fast else [pytest.mark.slow(reason="several processes each; `make test-layouts` runs them all")]
            yield pytest.param(name, model, id=f"{name} {model}", marks=marks)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def alone(corpus):
    """model -> the run in one process, when first asked for."""
    return cache(lambda model: train(*on(corpus, SIZE, MODELS[model])))


@pytest.mark.parametrize("name, model", cases())
def test_a_pair_trains_the_same_model(corpus, alone, tmp_path, name, model):
    (processes, flags), (later_processes, later_flags), _, _ = PAIRS[name]
    first = on_ranks(processes, *on(corpus, SIZE, MODELS[model], flags, "--exit-interval 2 --save", tmp_path))
    assert first.code == 0, first.err
    second = on_ranks(later_processes, *on(corpus, SIZE, MODELS[model], later_flags, "--load", tmp_path))
    assert second.code == 0, second.err
    assert (first.column("iteration"), second.column("iteration")) == ([1, 2], [3, 4])
    for column in ("lm_loss", "grad_norm", *(["mtp_1_loss"] if model == "deepseek" else [])):
        assert first.column(column) + second.column(column) == pytest.approx(alone(model).column(column), rel=1e-5)
