"""Checkpoints in the legacy `torch` format: Megatron-LM's own one trained on, in other layouts too, and what we write in it."""

import argparse
import errno
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointError, load_plain_tensors
from megatron.core.dist_checkpointing.safe_pickle import load_torch, plain_namespace
from megatron.training import legacy_checkpoint_writer
from megatron.training.checkpoint_formats import open_checkpoint
from tests.functional.forked import on_ranks
from tests.functional.runner import Result, on, train
from tests.functional.test_golden_continuation import LOGGED_DIGIT, RECIPE, continue_run, data_flags

EXPERTS = "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --moe-router-load-balancing-type none"
LLAMA = "--group-query-attention --num-query-groups 2"


def assert_stored_losses(result: Result, stored: dict[str, Any], norms: bool = True) -> None:
    assert result.code == 0, result.err
    expected = stored["train"][10:]
    assert result.column("iteration") == list(range(11, 21))
    assert result.losses() == pytest.approx([row["lm_loss"] for row in expected], abs=2e-6 + LOGGED_DIGIT, rel=0)
    assert result.column("grad_norm") == pytest.approx([row["grad_norm"] for row in expected], abs=1.1e-3, rel=0)
    held_out = [row["lm_loss"] for row in stored["validation"][1:]]
    assert [row["lm_loss"] for row in result.evaluations] == pytest.approx(held_out, abs=2e-6 + LOGGED_DIGIT, rel=0)
    assert result.column("consumed_samples")[-1] == 160


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        ("", 1),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", 2, marks=pytest.mark.slow),
        ("--pipeline-model-parallel-size 2", 2),
        pytest.param("--use-distributed-optimizer", 2, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_a_legacy_checkpoint(golden: Path, tmp_path: Path, more: str, processes: int) -> None:
    result, stored = continue_run(golden, tmp_path, "llama_legacy", "pretrain_llama", f"{LLAMA} {more}", processes)
    assert_stored_losses(result, stored)


def test_a_legacy_checkpoint_becomes_torch_dist(golden: Path, tmp_path: Path) -> None:
    save = tmp_path / "saved"
    result, stored = continue_run(golden, tmp_path, "llama_legacy", "pretrain_llama", f"{LLAMA} --save {save} --exit-interval 15")
    assert result.code == 0 and (save / "iter_0000015" / "metadata.json").is_file(), result.err
    rest = train(*data_flags(golden, tmp_path), f"{LLAMA} --load {save}", script="pretrain_llama", base=RECIPE)
    assert rest.code == 0, rest.err
    assert result.column("iteration") + rest.column("iteration") == list(range(11, 21))
    expected = [row["lm_loss"] for row in stored["train"][10:]]
    assert result.losses() + rest.losses() == pytest.approx(expected, abs=2e-6 + LOGGED_DIGIT, rel=0)


def test_a_wrong_format_is_named(golden: Path, tmp_path: Path) -> None:
    result, _ = continue_run(golden, tmp_path, "llama_legacy", "pretrain_llama", f"{LLAMA} --ckpt-format torch_dist")
    assert result.code == 1 and len(result.errors) == 1
    assert "is in the format torch and --ckpt-format torch_dist was given" in result.errors[0]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "model_optim_rng.pt is damaged"),
        (lambda path: path.write_bytes(b""), "model_optim_rng.pt is damaged"),
        (lambda path: path.rename(path.with_suffix(".old")), "has no readable metadata.json"),
    ],
)
def test_a_damaged_legacy_checkpoint_is_an_error(golden: Path, tmp_path: Path, harm: Any, message: str) -> None:
    with tarfile.open(golden / "checkpoints" / "llama_legacy.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    harm(file)
    folder = file.parent.parent
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder).common()


# --- what we write ---

LAYERS = "--num-layers 4 --swiglu --untie-embeddings-and-output-weights"
STILL = "--lr 0 --min-lr 0 --override-opt-param-scheduler --train-iters 3 --auto-detect-ckpt-format"
WIDE = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"


def test_the_written_file_is_megatron_lms(corpus: Path, tmp_path: Path) -> None:
    save = tmp_path / "saved"
    assert train(*on(corpus, f"--ckpt-format torch --bf16 --save {save} --train-iters 2")).code == 0
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert [str(path.relative_to(save)) for path in sorted(save.rglob("*.pt"))] == ["iter_0000002/mp_rank_00/model_optim_rng.pt"]
    safe = [argparse.Namespace, signal.Signals, np.dtype, np.ndarray, np.dtypes.UInt32DType, np._core.multiarray._reconstruct]  # type: ignore[attr-defined]
    with torch.serialization.safe_globals(safe):
        file = torch.load(save / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt", weights_only=True)
    assert {"args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler", "rng_state"} <= file.keys()
    assert file["checkpoint_version"] == 3.0 and file["iteration"] == 2 and file["args"].consumed_train_samples == 8
    assert file["rng_state"][0].keys() == {
        "random_rng_state",
        "np_rng_state",
        "torch_rng_state",
        "cuda_rng_state",
        "rng_tracker_states",
    }
    tensors = {name: value for name, value in file["model"].items() if not name.endswith("_extra_state")}
    layer = [name.removeprefix("decoder.layers.1.") for name in tensors if name.startswith("decoder.layers.1.")]
    parts = ["input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv"]
    parts += ["pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2"]
    assert layer == [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    assert file["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] is None and "output_layer.weight" not in file["model"]
    inner, copies = file["optimizer"]["optimizer"], file["optimizer"]["fp32_from_fp16_params"]
    decayed = [value for value in tensors.values() if value.dim() > 1]
    assert inner["param_groups"][0]["params"] == list(range(len(decayed)))
    for number, (tensor, copy) in enumerate(zip(decayed, copies[0], strict=True)):
        assert copy.dtype == torch.float32 and torch.equal(copy.bfloat16(), tensor)
        assert inner["state"][number]["exp_avg"].shape == tensor.shape


@pytest.mark.parametrize(
    ("model", "writer", "ranks", "reader"),
    [
        pytest.param(
            LAYERS,
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            4,
            "",
            id="tp2_pp2_interleaved",
        ),
        pytest.param(f"{LAYERS} --mtp-num-layers 1", "--tensor-model-parallel-size 2", 2, "", id="ahead", marks=pytest.mark.slow),
        pytest.param("--num-layers 4", "--pipeline-model-parallel-size 2", 2, "--bf16", id="tied_pp2", marks=pytest.mark.slow),
        pytest.param(EXPERTS, "--expert-model-parallel-size 2", 2, "--moe-grouped-gemm", id="experts", marks=pytest.mark.slow),
        pytest.param(f"{EXPERTS} --moe-grouped-gemm", "", 1, "", id="grouped_experts", marks=pytest.mark.slow),
        pytest.param(EXPERTS, f"{WIDE} --expert-model-parallel-size 2", 2, "", id="experts_of_another_tensor_size"),
        pytest.param(
            EXPERTS,
            f"{WIDE} --expert-model-parallel-size 4 --use-distributed-optimizer --moe-grouped-gemm",
            4,
            "--use-distributed-optimizer",
            id="experts_of_another_tensor_size_distributed",
            marks=pytest.mark.slow,
        ),
        pytest.param("--num-layers 4", "--use-distributed-optimizer", 2, "", id="distributed"),
        pytest.param(
            EXPERTS,
            "--moe-grouped-gemm --use-distributed-optimizer --expert-model-parallel-size 2",
            2,
            "--bf16 --use-distributed-optimizer",
            id="distributed_experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{LAYERS} --micro-batch-size 1",
            "--use-distributed-optimizer --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            4,
            "--bf16",
            id="distributed_interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_one_layout_wrote_another_reads(
    corpus: Path, tmp_path: Path, request: pytest.FixtureRequest, model: str, writer: str, ranks: int, reader: str
) -> None:
    name = request.node.callspec.id
    flags, precision = on(corpus, model), "--bf16" if "--bf16" in reader else ""
    whole = train(*flags, precision)
    first = f"{writer} {precision} --ckpt-format torch --save {tmp_path / 'saved'} --exit-interval 2"
    written = train(*flags, first) if ranks == 1 else on_ranks(ranks, *flags, first)
    assert written.code == 0, written.err
    folders = ranks // 2 if name in ("distributed", "distributed_interleaved") else ranks  # two data-parallel ranks
    assert len(list((tmp_path / "saved" / "iter_0000002").glob("mp_rank_*"))) == folders
    rest = train(*flags, reader, f"--load {tmp_path / 'saved'}")
    assert rest.code == 0, rest.err
    assert rest.column("iteration") == [3, 4]
    assert rest.losses() == pytest.approx(whole.losses()[2:], rel=2e-3 if precision else 3e-6)
    assert rest.column("lr") == whole.column("lr")[2:]


LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm "
    "--swiglu --disable-bias-linear --normalization RMSNorm"
)


def test_latent_attention_of_local_layers_is_read(corpus: Path, tmp_path: Path) -> None:
    """Names of the file are the modules' own, norms last; Megatron-LM's local layers split the down-projections too, by rows."""
    whole = train(*on(corpus, LATENT))
    first = f"--tensor-model-parallel-size 2 --ckpt-format torch --save {tmp_path / 'saved'} --exit-interval 2"
    assert on_ranks(2, *on(corpus, LATENT, first)).code == 0
    folder = tmp_path / "saved" / "iter_0000002"
    (folder / "checksums.json").unlink()  # from here on it is as another program wrote it
    for rank in (0, 1):
        path = folder / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        file = load_torch(str(path))
        file["args"] = plain_namespace(vars(file["args"]))
        tensors = {name: tensor for name, tensor in file["model"].items() if torch.is_tensor(tensor)}
        own = [name.rpartition(".")[0].removeprefix("decoder.layers.1.self_attention.") for name in tensors if ".1.self_att" in name]
        projections = ["linear_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
        assert own == [*projections, "q_layernorm", "kv_layernorm"]
        state = file["optimizer"]["state"]
        decayed = [name for name, tensor in tensors.items() if tensor.dim() > 1]
        for number, name in enumerate(decayed):
            if "down_proj" in name:
                file["model"][name] = tensors[name].chunk(2)[rank].clone()
                state[number] |= {moment: state[number][moment].chunk(2)[rank].clone() for moment in ("exp_avg", "exp_avg_sq")}
        torch.save(file, path)
    for reader, ranks in (("", 1), ("--tensor-model-parallel-size 2 --sequence-parallel", 2)):
        flags = (*on(corpus, LATENT), reader, f"--load {tmp_path / 'saved'}")
        rest = train(*flags) if ranks == 1 else on_ranks(ranks, *flags)
        assert rest.code == 0, rest.err
        assert rest.losses() == pytest.approx(whole.losses()[2:], rel=3e-6)


def test_a_folder_of_the_other_format_is_read_and_this_one_written(corpus: Path, tmp_path: Path) -> None:
    save, back = tmp_path / "torch_dist", tmp_path / "torch"
    whole = train(*on(corpus, f"--save {save} --save-interval 2"))
    refused = train(*on(corpus, f"--ckpt-format torch --load {save} --ckpt-step 2 --save {back}"))
    assert refused.code == 1 and "format torch_dist and --ckpt-format torch was given" in refused.errors[0]
    auto = f"--auto-detect-ckpt-format --ckpt-format torch --load {save} --ckpt-step 2 --save {back} --exit-interval 3"
    assert train(*on(corpus, auto)).losses() == whole.losses()[2:3]
    rest = train(*on(corpus, f"--load {back}"))
    assert rest.column("iteration") == [4] and rest.losses() == whole.losses()[3:]


def test_a_full_disk_keeps_the_old_checkpoint(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = tmp_path / "saved"
    flags = f"--ckpt-format torch --save {save}"
    assert train(*on(corpus, f"{flags} --exit-interval 2")).code == 0

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on the disk", str(save))

    monkeypatch.setattr(legacy_checkpoint_writer, "_write_file", full)
    result = train(*on(corpus, f"{flags} --load {save}"))
    assert result.code == 1 and "no space left" in result.errors[0]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2" and not list(save.glob("iter_0000004*"))


def test_a_damaged_file_of_ours_is_named(corpus: Path, tmp_path: Path) -> None:
    save = tmp_path / "saved"
    assert train(*on(corpus, f"--ckpt-format torch --save {save}")).code == 0
    (file,) = save.rglob("model_optim_rng.pt")
    file.write_bytes(file.read_bytes()[:-100])
    result = train(*on(corpus, f"--ckpt-format torch --load {save} --train-iters 6"))
    assert result.code == 1 and "model_optim_rng.pt" in result.errors[0] and "bytes" in result.errors[0]


def test_experts_among_the_other_parameters_are_read(corpus: Path, tmp_path: Path) -> None:
    """Without expert parallelism Megatron-LM has one optimizer, whose groups hold experts too."""
    whole = train(*on(corpus, EXPERTS))
    assert train(*on(corpus, EXPERTS, f"--ckpt-format torch --save {tmp_path} --exit-interval 2")).code == 0
    path = tmp_path / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
    (tmp_path / "iter_0000002" / "checksums.json").unlink()  # from here on it is as another program wrote it
    file = load_torch(str(path))
    file["args"] = plain_namespace(vars(file["args"]))
    dense, experts = file["optimizer"]
    states = [iter(list(optimizer["state"].values())[: len(optimizer["param_groups"][0]["params"])]) for optimizer in (dense, experts)]
    names = [name for name, tensor in file["model"].items() if torch.is_tensor(tensor) and tensor.dim() > 1]
    decayed = [next(states[".mlp.experts." in name]) for name in names]
    groups = dense["param_groups"]
    others = [dense["state"][number] for number in groups[1]["params"]]
    groups[0]["params"] = list(range(len(decayed)))
    groups[1]["params"] = list(range(len(decayed), len(decayed) + len(others)))
    file["optimizer"] = {"state": dict(enumerate(decayed + others)), "param_groups": groups}
    torch.save(file, path)
    rest = train(*on(corpus, EXPERTS, f"--load {tmp_path}"))
    assert rest.code == 0, rest.err
    assert rest.losses() == whole.losses()[2:]
    file["optimizer"]["param_groups"][1]["params"].pop()
    torch.save(file, path)
    refused = train(*on(corpus, EXPERTS, f"--load {tmp_path}"))
    assert refused.code == 1 and "parameter group 1" in refused.errors[0] and "--no-load-optim" in refused.errors[0]


def test_experts_that_files_cannot_hold_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Where several ranks would write one file; on reading too."""
    narrow = f"--ckpt-format torch --save {tmp_path} --expert-tensor-parallel-size 2"
    refused = on_ranks(2, *on(corpus, EXPERTS, narrow))
    assert refused.code == 2 and "several would write the same file" in refused.err and "torch_dist" in refused.err
    assert train(*on(corpus, EXPERTS, f"--ckpt-format torch --save {tmp_path} --exit-interval 2")).code == 0
    path = tmp_path / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
    (tmp_path / "iter_0000002" / "checksums.json").unlink()
    file = load_torch(str(path))
    file["args"] = plain_namespace(vars(file["args"]) | {"expert_tensor_parallel_size": 2})
    torch.save(file, path)
    unread = train(*on(corpus, EXPERTS, f"--load {tmp_path}"))
    assert unread.code == 1 and "several would write the same file" in unread.errors[0]


@pytest.mark.parametrize(
    "writer",
    [
        "",
        "--ckpt-format torch",
        pytest.param("--use-distributed-optimizer", marks=pytest.mark.slow),
        pytest.param("--ckpt-format torch --use-distributed-optimizer", marks=pytest.mark.slow),
    ],
)
def test_fp32_goes_on_from_the_main_parameters_of_bf16(corpus: Path, tmp_path: Path, writer: str) -> None:
    """The weights of such a checkpoint are rounded, its optimizer's are not. A step of rate 0 shows what the run began with."""
    half, whole = tmp_path / "half", tmp_path / "whole"
    assert train(*on(corpus, f"--bf16 {writer} --save {half} --exit-interval 2")).code == 0
    assert train(*on(corpus, f"--bf16 {writer} --load {half} --save {tmp_path / 'same'} --ckpt-format torch_dist", STILL)).code == 0
    result = train(*on(corpus, f"--load {half} --save {whole}", STILL))
    assert result.code == 0, result.err
    mains = load_plain_tensors(tmp_path / "same" / "iter_0000003")
    found = load_plain_tensors(whole / "iter_0000003")
    weights = [key for key in found if not key.startswith("optimizer.")]
    for key in weights:
        main = next(mains[name] for kind in ("fp32_param", "param") if (name := f"optimizer.state.{kind}.{key}") in mains)
        assert found[key].dtype == torch.float32 and torch.equal(found[key], main), key
    assert any(not torch.equal(found[key], mains[key].float()) for key in weights)
    alone = train(*on(corpus, f"--load {half} --no-load-optim --save {tmp_path / 'rounded'}", STILL))
    assert alone.code == 0, alone.err
    rounded = load_plain_tensors(tmp_path / "rounded" / "iter_0000003")
    assert all(torch.equal(rounded[key], mains[key].float()) for key in weights)


@pytest.mark.parametrize("name", ["model_optim_rng.pt", "distrib_optim.pt"])
def test_a_flipped_bit_is_never_trained_on(corpus: Path, tmp_path: Path, name: str) -> None:
    flags = "--use-distributed-optimizer" if name == "distrib_optim.pt" else ""
    assert train(*on(corpus, f"--train-iters 2 --ckpt-format torch {flags} --save {tmp_path}")).code == 0
    path = tmp_path / "iter_0000002" / "mp_rank_00" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    result = train(*on(corpus, f"--train-iters 4 --override-opt_param-scheduler {flags} --load {tmp_path}"))
    assert result.code == 1 and f"{name} is damaged" in result.err and result.rows == []


def test_a_run_that_begins_anew_among_anothers_checkpoints_says_so(corpus: Path, tmp_path: Path) -> None:
    save = f"--train-iters 2 --save {tmp_path}"
    assert "holds checkpoints of another run" not in train(*on(corpus, save)).out
    again = train(*on(corpus, save))
    assert again.code == 0 and f"WARNING: {tmp_path} holds checkpoints of another run, the last one of iteration 2" in again.out
    assert "holds checkpoints of another run" not in train(*on(corpus, f"{save} --load {tmp_path}")).out
