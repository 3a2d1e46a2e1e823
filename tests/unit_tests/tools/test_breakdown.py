"""What `train.py --breakdown` prints, of a profile written by hand."""

import json
from pathlib import Path

import pytest

from tools.benchmark.breakdown import FLOORS, breakdown, table
from tools.benchmark.peer_table import ROWS

PROFILE = {
    "nvjet_tst_256x128_NNT": {"ms": 6.0, "calls": 3},
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": {"ms": 2.0, "calls": 1},  # attention, though sm90_ is of products too
    "ncclDevKernel_ReduceScatter_Sum_bf16": {"ms": 1.0, "calls": 2},
    "nobody_knows": {"ms": 0.5, "calls": 4},
}


def lines_of(tmp_path: Path, configuration: str) -> dict[str, str]:
    """Kind -> its line."""
    (tmp_path / "kernels.json").write_text(json.dumps(PROFILE))
    printed = table(breakdown(tmp_path / "kernels.json"), configuration, 10.0).splitlines()[1:]
    return {line[:26].strip(): line[26:] for line in printed}


def test_kernels_are_told_apart(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, "llama8L")
    assert list(lines) == ["matrix products", "attention", "communication", "other", "all kernels"]
    assert lines["matrix products"].split() == ["6.0", "60.0%", "3", "655"]
    assert lines["communication"].split() == ["1.0", "10.0%", "2", "-"]
    assert lines["all kernels"].split() == ["9.5", "95.0%", "10", "800"]


@pytest.mark.parametrize("configuration", ["moe8x-fp8-delayed", "tiny"])
def test_an_unknown_floor_is_not_zero(tmp_path: Path, configuration: str) -> None:
    assert all(line.split()[-1] == "-" for line in lines_of(tmp_path, configuration).values())


def test_the_table_has_these_floors() -> None:
    assert {row.configuration for row in ROWS if row.floor_ms} == set(FLOORS)
    assert {row.floor_ms for row in ROWS if row.configuration == "llama8L"} == {800, None}  # that of one GPU is not two's
