"""The distributed optimizer's state by buckets, Megatron-LM's default: its own checkpoint trained on, and such of other layouts."""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.safe_pickle import load_torch, plain_namespace
from megatron.training.checkpoint_formats import open_checkpoint
from megatron.training.optimizer_buckets import place_in_buckets
from tests.functional.runner import on, train
from tests.functional.test_golden_continuation import continue_run

LLAMA = "--group-query-attention --num-query-groups 2 --bf16"


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ("", 1),
        ("--use-distributed-optimizer", 2),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer", 2, marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2", 2, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_buckets(golden: Path, tmp_path: Path, more: str, processes: int) -> None:
    result, stored = continue_run(golden, tmp_path, "llama_te_bf16", "pretrain_llama", f"{LLAMA} {more}", processes)
    assert result.code == 0, result.err
    expected = stored["train"][10:]
    assert result.column("iteration") == list(range(11, 21))
    assert result.losses() == pytest.approx([row["lm_loss"] for row in expected], rel=2e-3)
    held_out = [row["lm_loss"] for row in stored["validation"][1:]]
    assert [row["lm_loss"] for row in result.evaluations] == pytest.approx(held_out, rel=2e-3)
    # bf16 products of two devices round differently: measured 0.0025 (one step of ten above 0.001), at TP 2 0.0058, at norms of 0.6 to 0.9
    assert result.column("grad_norm") == pytest.approx([row["grad_norm"] for row in expected], abs=0.01, rel=0)


# --- other layouts: the same state, written by buckets as Megatron-LM's ranks would ---

BATCH = "--bf16 --num-layers 4 --hidden-size 48 --ffn-hidden-size 68 --swiglu --normalization RMSNorm --use-distributed-optimizer"
DENSE = f"{BATCH} --disable-bias-linear --untie-embeddings-and-output-weights"
TIED = f"{BATCH} --add-qkv-bias"
EXPERTS = f"{BATCH} --disable-bias-linear --num-experts 4 --moe-router-load-balancing-type none"
LATENT = (
    f"{DENSE} --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--qk-layernorm --position-embedding-type none"
)
LATENT_PARTS = ["linear_q_down_proj", "linear_q_up_proj.layer_norm", "linear_q_up_proj", "linear_kv_down_proj"]
LATENT_PARTS += ["linear_kv_up_proj.layer_norm", "linear_kv_up_proj"]
NORM_BEFORE_ATTENTION, NORM_BEFORE_MLP = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"


@dataclass
class Ranks:
    """A layout, and how its ranks register a layer's parameters."""

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    expert: int = 1
    local: bool = False  # norms by themselves
    grouped: bool = False
    mixed: bool = False  # experts in the dense parameters' buffers, as without expert parallelism
    bucket: int = 10**9  # elements after which a bucket is closed

    def layer_order(self, layer: int, keys: Iterable[str]) -> list[str]:
        attention = ["self_attention.linear_proj.weight", "self_attention.linear_proj.bias", NORM_BEFORE_ATTENTION]
        if self.local:
            attention = [attention[2], *attention[:2]]
        attention += ["self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"]
        # of latent attention the norm before it is always by itself, those of latents are fused or the last
        latent = [f"self_attention.{part}{'_' if part.endswith('norm') else '.'}weight" for part in LATENT_PARTS]
        latent = sorted(latent, key=lambda part: part.endswith("norm_weight")) if self.local else latent
        attention = ["input_layernorm.weight", *attention, *latent]
        mlp = ["pre_mlp_layernorm.weight", "mlp.router.weight", NORM_BEFORE_MLP]
        mlp += [f"mlp.linear_fc{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
        return [f"decoder.layers.{part}" for part in attention + mlp if f"decoder.layers.{part}" in keys]


def cut(key: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The part of one layer's tensor that a tensor-parallel rank holds."""
    if re.search(r"linear_fc1\.(weight|bias)$", key):
        return torch.cat([half.chunk(size, 0)[rank] for half in tensor.chunk(2, 0)])
    if re.search(r"(linear_qkv\.(weight|bias)|_up_proj\.weight|word_embeddings\.weight|output_layer\.weight)$", key):
        return tensor.chunk(size, 0)[rank]
    return tensor.chunk(size, 1)[rank] if re.search(r"(linear_proj|linear_fc2)\.weight$", key) else tensor


def flat(parts: list[torch.Tensor], bucket: int) -> list[torch.Tensor]:
    """Buckets of the parts, last first, each part at a multiple of 64."""
    buckets: list[list[torch.Tensor]] = [[]]
    for part in reversed(parts):
        if sum(one.numel() for one in buckets[-1]) >= bucket:
            buckets.append([])
        filled = sum(one.numel() for one in buckets[-1])
        buckets[-1] += [torch.zeros(-filled % 64), part.flatten()]
    return [torch.cat(one) for one in buckets]


def registered(ranks: Ranks, state: dict[str, torch.Tensor], chunk: int, stage: int, tensor: int) -> list[torch.Tensor]:
    """One rank's dense parameters' state in registration order."""

    def whole(key: str) -> list[torch.Tensor]:
        return [cut(key, state[key], tensor, ranks.tensor)] if key in state else []

    count = 4 // (ranks.pipeline * ranks.chunks)
    slot = chunk * ranks.pipeline + stage
    found = whole("embedding.word_embeddings.weight") + whole("embedding.position_embeddings.weight") if slot == 0 else []
    for layer in range(slot * count, (slot + 1) * count):
        for key in ranks.layer_order(layer, state):
            found.append(cut(key, state[key][layer], tensor, ranks.tensor))
            if ranks.mixed and key.endswith("router.weight"):
                found += registered_experts(ranks, state, 0, range(layer, layer + 1))
    if slot == ranks.pipeline * ranks.chunks - 1:
        found += whole("decoder.final_layernorm.weight")
        tied = "embedding.word_embeddings.weight" if slot else ""
        found += whole("output_layer.weight" if "output_layer.weight" in state else tied)
    return found


def registered_experts(ranks: Ranks, state: dict[str, torch.Tensor], expert: int, layers: Iterable[int] = range(4)) -> list[torch.Tensor]:
    first, second = (state[f"decoder.layers.mlp.experts.experts.linear_fc{number}.weight"] for number in (1, 2))
    held = range(expert * 4 // ranks.expert, (expert + 1) * 4 // ranks.expert)
    found = []
    for layer in layers:
        if ranks.grouped:
            found += [first[layer, one] for one in held] + [second[layer, one] for one in held]
        else:
            found += [tensor[layer, one] for one in held for tensor in (first, second)]
    return found


def write_by_buckets(source: Path, folder: Path, ranks: Ranks, **claimed: Any) -> None:
    """The checkpoint `source`, saved by a distributed optimizer in the fully reshardable form, by buckets of the layout `ranks`.

    claimed: arguments that the checkpoint has instead of that layout's.
    """
    tensors, common = dist_checkpointing.load_plain_tensors(source), open_checkpoint(source).common()
    contents: dict[str, Any] = {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}
    with_experts = any(".experts." in key for key in contents) and not ranks.mixed
    groups = common.pop("optimizer")["param_groups"]
    for state in ("param", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{state}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for stage, tensor, chunk in itertools.product(range(ranks.pipeline), range(ranks.tensor), range(ranks.chunks)):
            name = f"optimizer.distributed.dp_group_idx_{stage * ranks.tensor + tensor}"
            name = f"chained_0.{name}" if with_experts else name
            for number, one in enumerate(flat(registered(ranks, own, chunk, stage, tensor), ranks.bucket)):
                contents[f"{name}.gbuf_idx_{chunk}.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}.{state}"] = one
            contents[f"{name}.optimizer"] = ShardedObject(f"{name}.optimizer", {"param_groups": [groups[0], groups[-1]]}, (1,), (0,))
        for expert in range(ranks.expert if with_experts else 0):
            name = f"chained_1.optimizer.distributed.dp_group_idx_{expert}"
            for number, one in enumerate(flat(registered_experts(ranks, own, expert), ranks.bucket)):
                contents[f"{name}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}.{state}"] = one
            of_experts = [group | {"is_expert_parallel": True} for group in groups if group["wd_mult"]]
            contents[f"{name}.optimizer"] = ShardedObject(f"{name}.optimizer", {"param_groups": of_experts}, (1,), (0,))
    for key, value in contents.items():
        if torch.is_tensor(value):
            contents[key] = ShardedTensor.from_rank_offsets(key, value)
    layout = {
        "tensor_model_parallel_size": ranks.tensor,
        "pipeline_model_parallel_size": ranks.pipeline,
        "virtual_pipeline_model_parallel_size": ranks.chunks if ranks.chunks > 1 else None,
        "expert_model_parallel_size": ranks.expert,
        "expert_tensor_parallel_size": 1 if with_experts else None,
        "transformer_impl": "local" if ranks.local else "transformer_engine",
        "moe_grouped_gemm": ranks.grouped,
    }
    common["args"] = plain_namespace({**vars(common["args"]), **layout, **claimed})
    common["optimizer"] = {"param_state_sharding_type": "dp_reshardable"}
    folder.mkdir(parents=True)
    dist_checkpointing.save({**common, **contents}, folder)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(common["iteration"]))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """model's flags -> (its checkpoint of iteration 2, the run of all 4), made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def run(model: str) -> tuple[Path, Any]:
        if model not in made:
            folder = tmp_path_factory.mktemp("source")
            result = train(*on(corpus, model, f"--save {folder} --save-interval 2"))
            assert result.code == 0, result.err
            made[model] = folder / "iter_0000002", result
        return made[model]

    return run


LAYOUTS = {
    "one_rank_local_norms": (DENSE, Ranks(local=True)),
    "tp2_pp2": (DENSE, Ranks(tensor=2, pipeline=2, bucket=9000)),
    "interleaved_tied": (TIED, Ranks(pipeline=2, chunks=2, bucket=5000)),
    "small_buckets_tied": (TIED, Ranks(bucket=3000, local=True)),
    "latent_tp2": (LATENT, Ranks(tensor=2, bucket=5000)),
    "latent_local_pp2": (LATENT, Ranks(pipeline=2, local=True)),
    "experts_ep2": (EXPERTS, Ranks(expert=2, bucket=20000)),
    "experts_mixed": (EXPERTS, Ranks(mixed=True, bucket=20000)),
    "experts_grouped_tp2": (EXPERTS, Ranks(tensor=2, expert=4, grouped=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_buckets_of_any_layout_are_read(runs: Callable, corpus: Path, tmp_path: Path, name: str) -> None:
    model, ranks = LAYOUTS[name]
    source, whole = runs(model)
    write_by_buckets(source, tmp_path / "saved" / "iter_0000002", ranks)
    rest = train(*on(corpus, model, f"--no-load-rng --load {tmp_path / 'saved'}"))
    assert rest.code == 0, rest.err
    assert rest.losses() == whole.losses()[2:] and rest.column("grad_norm") == whole.column("grad_norm")[2:]


def test_a_run_of_another_precision_reads_buckets(runs: Callable, corpus: Path, tmp_path: Path) -> None:
    source, whole = runs(DENSE)
    write_by_buckets(source, tmp_path / "saved" / "iter_0000002", Ranks())
    rest = train(*on(corpus, DENSE.removeprefix("--bf16"), f"--no-load-rng --load {tmp_path / 'saved'}"))
    assert rest.code == 0, rest.err
    assert rest.losses() == pytest.approx(whole.losses()[2:], rel=2e-3)


@pytest.mark.parametrize(
    ("claimed", "message"),
    [
        ({"pipeline_model_parallel_size": 2}, "elements"),
        ({"transformer_impl": "local"}, "another order than is known"),
        ({"tensor_model_parallel_size": 4}, "elements"),
    ],
)
def test_buckets_that_are_not_understood_are_refused(
    runs: Callable, corpus: Path, tmp_path: Path, claimed: dict[str, Any], message: str
) -> None:
    source, _ = runs(DENSE)
    folder = tmp_path / "saved" / "iter_0000002"
    write_by_buckets(source, folder, Ranks(), **claimed)
    result = train(*on(corpus, DENSE, f"--no-load-rng --load {tmp_path / 'saved'}"))
    assert result.code == 1 and message in result.errors[0] and "--no-load-optim" in result.errors[0]
    assert train(*on(corpus, DENSE, f"--no-load-rng --load {tmp_path / 'saved'} --no-load-optim")).code == 0


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 600))
def test_parameters_are_placed_as_they_were_written(numels: list[int], bucket: int) -> None:
    written = flat([torch.full((numel,), float(number + 1)) for number, numel in enumerate(numels)], bucket)
    places = place_in_buckets([one.numel() for one in written], numels[::-1])
    assert places is not None
    for (number, start), numel, value in zip(places, numels[::-1], range(len(numels), 0, -1), strict=True):
        assert (written[number][start : start + numel] == value).all()
    assert place_in_buckets([one.numel() for one in written[:-1]] + [written[-1].numel() + 64], numels[::-1]) is None


# --- the same flat tensors in a file of the legacy format ---


def add_legacy_optimizer(source: Path, folder: Path) -> None:
    """Put the optimizer of `source` beside the model of one rank that was written without."""
    tensors, common = dist_checkpointing.load_plain_tensors(source), open_checkpoint(source).common()
    flats: dict[str, Any] = {}
    for state in ("param", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{state}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        (flats[state],) = flat(registered(Ranks(local=True), own, 0, 0, 0), 10**9)
    flats["numel_unpadded"] = flats["param"].numel()
    torch.save({"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): flats}}, folder / "distrib_optim.pt")
    file = load_torch(str(folder / "model_optim_rng.pt"))
    file |= {"optimizer": {"optimizer": common["optimizer"]}, "opt_param_scheduler": common["opt_param_scheduler"]}
    file["args"] = plain_namespace(vars(file["args"]))
    torch.save(file, folder / "model_optim_rng.pt")


def test_a_legacy_distributed_optimizer_is_read(runs: Callable, corpus: Path, tmp_path: Path) -> None:
    source, whole = runs(DENSE)
    flags = f"--ckpt-format torch --no-save-optim --save {tmp_path} --exit-interval 2"
    assert train(*on(corpus, DENSE, flags)).code == 0
    rank = tmp_path / "iter_0000002" / "mp_rank_00"
    (tmp_path / "iter_0000002" / "checksums.json").unlink()  # from here on it is as another program wrote it
    add_legacy_optimizer(source, rank)
    rest = train(*on(corpus, DENSE, f"--load {tmp_path}"))
    assert rest.code == 0, rest.err
    assert rest.losses() == whole.losses()[2:] and rest.column("grad_norm") == whole.column("grad_norm")[2:]
    stored = load_torch(str(rank / "distrib_optim.pt"))
    stored[0][torch.bfloat16, torch.float32]["param"] *= 2
    torch.save(stored, rank / "distrib_optim.pt")
    refused = train(*on(corpus, DENSE, f"--load {tmp_path}"))
    assert refused.code == 1 and "distrib_optim.pt: the main values of" in refused.errors[0]
    (rank / "distrib_optim.pt").unlink()
    refused = train(*on(corpus, DENSE, f"--load {tmp_path}"))
    assert refused.code == 1 and "distrib_optim.pt is not beside it" in refused.errors[0]
