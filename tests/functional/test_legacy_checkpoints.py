"""Checkpoints in the legacy `torch` format: Megatron-LM's own one trained on, in other layouts too, and what we write in it."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing import CheckpointError
from megatron.training.checkpoint_formats import open_checkpoint
from tests.functional.runner import Result, train
from tests.functional.test_golden_continuation import LOGGED_DIGIT, RECIPE, continue_run, data_flags

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
