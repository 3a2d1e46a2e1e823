"""--ckpt-format torch_dcp: plain torch.distributed.checkpoint reads what is written, and a training goes on from it to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.functional.forked import on_ranks
from tests.functional.runner import assert_equal_tensors, checkpoint_tensors, on, train

DCP = "--ckpt-format torch_dcp"
FLAGS = "--train-iters 6 --global-batch-size 4 --micro-batch-size 1 --attention-dropout 0.1 --hidden-dropout 0.1"


def read_by_torch(folder: Path) -> dict[str, Any]:
    """The nested state dict, by torch's own reader and planner."""
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
def test_torch_reads_it_and_the_training_goes_on(corpus: Path, tmp_path: Path, precision: str) -> None:
    dcp, dist, straight = (tmp_path / name for name in ("dcp", "dist", "straight"))
    first = on_ranks(2, *on(corpus, FLAGS, f"{precision} {DCP} --save {dcp} --exit-interval 3"))
    whole = on_ranks(2, *on(corpus, FLAGS, f"{precision} --save {straight} --save-interval 3"))
    assert first.code == whole.code == 0, first.err + whole.err
    folder = dcp / "iter_0000003"
    assert {path.name for path in folder.iterdir()} == {".metadata", "checksums.json", "__0_0.distcp", "__1_0.distcp"}
    assert (dcp / "latest_checkpointed_iteration.txt").read_text() == "3"
    stored, expected = read_by_torch(folder), checkpoint_tensors(straight, 3)
    assert stored["iteration"] == 3 and stored["args"].num_layers == 2 and stored["args"].rank == 0
    for layer in range(2):
        name = "self_attention.linear_qkv.weight"
        assert torch.equal(stored["model"][f"decoder.layers.{layer}.{name}"], expected[f"decoder.layers.{name}"][layer])
    optimizer = stored["optimizer"].get("optimizer", stored["optimizer"])
    assert set(optimizer["state"]["0"]) == {"exp_avg", "exp_avg_sq"} and optimizer["param_groups"][0]["step"] == 3
    assert ("fp32_from_fp16_params" in stored["optimizer"]) == bool(precision)

    second = on_ranks(2, *on(corpus, FLAGS, f"{precision} {DCP} --save {dcp} --load {dcp}"))
    assert second.code == 0, second.err
    assert first.losses() + second.losses() == whole.losses()
    # the format is found out, and another one is written
    other = on_ranks(2, *on(corpus, FLAGS, f"{precision} --load {dcp} --ckpt-step 3 --save {dist}"))
    assert other.losses() == second.losses(), other.err
    assert_equal_tensors(checkpoint_tensors(dist, 6), checkpoint_tensors(straight, 6))


def test_another_layout_and_optimizer_read_it(corpus: Path, tmp_path: Path) -> None:
    flags = "--train-iters 4 --global-batch-size 4 --micro-batch-size 1 --make-vocab-size-divisible-by 64"
    saved = train(*on(corpus, flags, f"{DCP} --save {tmp_path} --exit-interval 2"))
    assert saved.code == 0, saved.err
    straight = train(*on(corpus, flags))
    for layout in ("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"):
        resumed = on_ranks(2, *on(corpus, flags, f"--load {tmp_path} {layout}"))
        assert resumed.code == 0, resumed.err
        assert resumed.losses() == pytest.approx(straight.losses()[2:], rel=2e-6), layout


def test_damage_is_named(corpus: Path, tmp_path: Path) -> None:
    assert train(*on(corpus, f"--train-iters 2 {DCP} --save {tmp_path}")).code == 0
    data = tmp_path / "iter_0000002" / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    result = train(*on(corpus, f"--train-iters 4 --override-opt_param-scheduler --load {tmp_path}"))
    assert result.code == 1 and "__0_0.distcp is damaged" in result.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
        ("--use-distributed-optimizer", "--use-distributed-optimizer"),
        ("--async-save", "--async-save"),
    ],
)
def test_what_it_cannot_hold_is_refused(corpus: Path, tmp_path: Path, flags: str, reason: str) -> None:
    result = train(*on(corpus, f"{DCP} --save {tmp_path} {flags} --check-config --check-config-world-size 2"))
    assert result.code == 2 and "torch_dcp" in result.err and reason in result.err and "torch_dist" in result.err
