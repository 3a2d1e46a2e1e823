"""Mixtures of layouts through the trainer: one saves, another goes on, and both train as one process does.

That each layout is exact is shown in tests/parallel_equivalence; this is about what only the trainer does: flags, batches, checkpoints.
A run of each layout is made once for each model, saved half way and trained to its end: others that go on from there must have its losses.
To add a layout: one line of LAYOUTS. To add a pair: its two names in MOVES.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import Result, on, train

# A small learning rate: Adam moves weights whose gradients are all but zero by full steps, in directions that rounding decides.
SIZE = "--num-layers 4 --global-batch-size 8 --micro-batch-size 1 --lr 1e-3"
MODELS = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --num-attention-heads 8 --group-query-attention --num-query-groups 4",
}
MODELS["moe"] = (
    f"{MODELS['llama']} --num-experts 4 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--moe-ffn-hidden-size 96 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
# as DeepSeek-V3's: latents, one dense layer before those with experts, one that looks ahead
MODELS["deepseek"] = (
    f"{MODELS['moe'].replace('--group-query-attention --num-query-groups 4', '')} --multi-latent-attention --q-lora-rank 24 "
    "--kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm --rotary-scaling-factor 4 --mscale 1.0 "
    "--mscale-all-dim 1.0 --mtp-num-layers 1 --moe-layer-freq ([0]*1+[1]*3) --moe-shared-expert-intermediate-size 48"
)
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CP, EP = "--context-parallel-size 2", "--expert-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GROUPED = "--moe-grouped-gemm"  # the layouts without it have one module for each expert
# name -> processes, flags. The vocabulary of 101 ids has 128 rows, with two tensor ranks 256, with four 512.
LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "dp2": (2, ""),
    "dp4 sharded": (4, SHARDED),
    "tp2 sp recompute": (2, f"{SP} {RECOMPUTE}"),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "tp2 dp2": (4, TP),
    "tp2 sp dp2 sharded": (4, f"{SP} {SHARDED}"),
    "pp2 recompute": (2, f"{PP} {RECOMPUTE}"),
    "pp2 dp2 overlapped": (4, f"{PP} --overlap-grad-reduce"),
    "pp2 dp2 sharded": (4, f"{PP} {SHARDED}"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "tp2 sp pp2": (4, f"{SP} {PP}"),
    "tp2 sp pp2 vpp2": (4, f"{SP} {VPP}"),
    "tp2 zero-bubble": (4, f"{PP} --pipeline-schedule zero-bubble {TP}"),
    "tp2 sp pp2 dp2 sharded": (8, f"{SP} {PP} {SHARDED}"),
    "tp2 sp cp2": (4, f"{SP} {CP}"),
    "cp2 dp2 sharded a2a": (4, f"{CP} {SHARDED} --cp-comm-type a2a"),
    "cp2 pp2": (4, f"{CP} {PP}"),
}
EXPERT_LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "one grouped": (1, GROUPED),
    "tp2 sp": (2, f"{SP} {GROUPED}"),
    "ep2": (2, EP),
    "ep2 sharded": (2, f"{EP} {SHARDED} {GROUPED}"),
    "ep4 sharded": (4, f"--expert-model-parallel-size 4 {SHARDED} {GROUPED}"),
    "ep2 pp2": (4, f"{EP} {PP} {GROUPED}"),
    "tp2 sp ep2": (4, f"{SP} {EP}"),
    "tp2 sp ep2 etp1": (2, f"{SP} {EP} --expert-tensor-parallel-size 1 {GROUPED}"),
    "cp2 ep2": (2, f"{CP} {EP} {SHARDED} {GROUPED}"),
    "ep2 pp2 vpp2 instances": (8, f"{EP} {VPP} {SHARDED} --num-distributed-optimizer-instances 2 {GROUPED}"),
}
LATENT_LAYOUTS: dict[str, tuple[int, str]] = {
    "one": (1, ""),
    "tp2 sp": (2, f"{SP} {GROUPED}"),
    "sharded": (2, f"{SHARDED} {GROUPED}"),
    "tp2 sp pp2 dp2 ep2 recompute": (
        8,
        f"{SP} {PP} {EP} {SHARDED} {GROUPED} --recompute-granularity selective --recompute-modules mla_up_proj moe",
    ),
}
LAYOUTS_OF = {"moe": EXPERT_LAYOUTS, "deepseek": LATENT_LAYOUTS}  # of the others: LAYOUTS
# the layout that saves after half of its steps -> those that go on
MOVES = {
    "one": ("dp2", "tp4", "pp4", "tp2 sp pp2 vpp2"),
    "dp4 sharded": ("one", "tp2 dp2", "pp2 dp2 sharded"),
    "tp4": ("one", "tp2 sp dp2 sharded", "pp2 dp2 overlapped"),
    "tp2 sp pp2": ("pp2 dp2 sharded", "dp2", "pp4"),
    "tp2 sp pp2 vpp2": ("one", "tp4", "dp4 sharded"),
    "tp2 sp dp2 sharded": ("tp2 sp pp2 vpp2", "dp2"),
    "pp2 dp2 overlapped": ("tp2 sp recompute", "tp2 dp2"),
    "pp2 recompute": ("tp2 zero-bubble",),
    "tp2 sp pp2 dp2 sharded": ("one",),
    "tp2 sp cp2": ("cp2 dp2 sharded a2a",),
    "cp2 pp2": ("one",),
}
EXPERT_MOVES = {
    "one": ("one grouped", "ep2 sharded", "tp2 sp ep2"),
    "one grouped": ("one", "ep2", "ep2 pp2"),
    "ep2": ("one grouped", "ep4 sharded", "tp2 sp ep2 etp1"),
    "ep2 sharded": ("tp2 sp", "one", "ep2 pp2 vpp2 instances"),
    "ep2 pp2": ("ep4 sharded", "one"),
    "tp2 sp ep2": ("ep2 sharded", "one"),
    "tp2 sp ep2 etp1": ("cp2 ep2", "tp2 sp ep2"),
    "ep2 pp2 vpp2 instances": ("one",),
}
LATENT_MOVES: dict[str, tuple[str, ...]] = {"tp2 sp": ("sharded",), "one": ("tp2 sp pp2 dp2 ep2 recompute",)}
MOVES_OF = {"moe": EXPERT_MOVES, "deepseek": LATENT_MOVES}
FAST = {("gpt", "tp2 sp pp2", "pp2 dp2 sharded"), ("moe", "one", "ep2 sharded")}
LATER = "--train-iters 4 --save-interval 2"


def cases():
    for model in MODELS:
        for source, targets in MOVES_OF.get(model, MOVES).items():
            for target in targets:
                marks = [] if (model, source, target) in FAST else [pytest.mark.slow(reason="`make test-layouts` runs them all")]
                yield pytest.param(model, source, target, id=f"{model}: {source} to {target}", marks=marks)


def run(corpus: Path, model: str, layout: str, *words: str | Path) -> Result:
    processes, flags = LAYOUTS_OF.get(model, LAYOUTS)[layout]
    line = on(corpus, SIZE, MODELS[model], flags, *words)
    result = train(*line) if processes == 1 else on_ranks(processes, *line)
    assert result.code == 0, f"{layout}: {result.err}"
    return result


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Result]]:
    """(model, layout) -> (its checkpoints, of iteration 2 too; the run of all 4 iterations), made once."""
    made: dict[tuple[str, str], tuple[Path, Result]] = {}

    def save(model: str, layout: str) -> tuple[Path, Result]:
        if (model, layout) not in made:
            folder = tmp_path_factory.mktemp("saved")
            made[model, layout] = folder, run(corpus, model, layout, f"{LATER} --save", folder)
        return made[model, layout]

    return save


@pytest.mark.parametrize(("model", "source", "target"), cases())
def test_moved_to_another_layout_training_goes_on_as_it_would_have(
    corpus: Path, saved: Callable[[str, str], tuple[Path, Result]], model: str, source: str, target: str
) -> None:
    folder, unmoved = saved(model, source)
    _, alone = saved(model, "one")
    moved = run(corpus, model, target, "--ckpt-step 2 --load", folder)
    assert moved.column("iteration") == [3, 4] and moved.column("lr") == unmoved.column("lr")[2:]
    assert moved.losses() == pytest.approx(unmoved.losses()[2:], rel=1e-6)
    assert moved.column("grad_norm") == pytest.approx(unmoved.column("grad_norm")[2:], rel=1e-5)
    for column in ("lm_loss", "grad_norm", *(["mtp_1_loss"] if model == "deepseek" else [])):
        assert unmoved.column(column) == pytest.approx(alone.column(column), rel=1e-5)
