"""tools/checkpoint/verify.py: what it says of a checkpoint, and its exit code when one is damaged."""

import math
import re
from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from tests.functional.runner import on, train
from tools.checkpoint import verify


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert train(*on(corpus), f"--save {folder} --save-interval 2").code == 0
    return folder


def test_the_report(saved: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify.main([str(saved), "--values"]) == 0
    text = capsys.readouterr().out
    for part in (
        "iter_0000004",
        "torch_dist, iteration 4",
        "num_layers 2, hidden_size 64",
        "all as written",
        "optimizer   plain",
        "parameters  112,384",
        "optimizer exp_avg_sq",
        "decoder.layers.self_attention.linear_qkv.weight",
        "(2, 192, 64) float32",
        "all are finite",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert verify.main([str(saved), "--ckpt-step", "2"]) == 0 and "iteration 2" in capsys.readouterr().out
    assert verify.main([str(saved / "iter_0000002")]) == 0 and "iteration 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json", "checksums.json"])
def test_a_damaged_file_is_named(saved: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    path = saved / "iter_0000004" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    try:
        assert verify.main([str(saved)]) == 1
        said = capsys.readouterr()
        assert str(path) in said.out + said.err
    finally:
        path.write_bytes(whole)


def test_numbers_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    values = {"bad": torch.tensor([math.nan, 1.0, math.inf, -math.inf]), "good": torch.ones(3)}
    dist_checkpointing.save({key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}, folder)
    assert verify.main([str(folder)]) == 0
    assert verify.main([str(folder), "--values"]) == 1
    text = capsys.readouterr().out
    assert "bad: 1 NaN, 2 infinite of 4" in text and "good:" not in text


@pytest.mark.parametrize("form", ["torch", "torch_dcp"])
def test_other_formats(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, form: str) -> None:
    assert train(*on(corpus), f"--bf16 --train-iters 2 --save {tmp_path} --ckpt-format {form}").code == 0
    assert verify.main([str(tmp_path), "--values"]) == 0
    text = capsys.readouterr().out
    for part in ("iteration 2, version 3.0", "num_layers 2, hidden_size 64", "all as written", "all are finite"):
        assert part in text, f"{part!r} is not in\n{text}"
    rows = {
        (name, dtype): size for name, size, dtype in re.findall(r"^  (\S.*?) +\d+ tensors +([\d,]+) numbers +(\w+)", text, re.MULTILINE)
    }
    for name, dtype in (("weights", "bfloat16"), ("optimizer exp_avg", "float32"), ("optimizer fp32_from_fp16_params", "float32")):
        assert rows[name, dtype] == "112,384", text
    data = next(tmp_path.glob("iter_0000002/*.distcp" if form == "torch_dcp" else "iter_0000002/*/model_optim_rng.pt"))
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    assert verify.main([str(tmp_path)]) == 1 and data.name in capsys.readouterr().out


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify.main([str(tmp_path)]) == 1 and "holds no checkpoint" in capsys.readouterr().err
    assert verify.main([str(tmp_path), "--ckpt-step", "7"]) == 1 and "iter_0000007" in capsys.readouterr().err
