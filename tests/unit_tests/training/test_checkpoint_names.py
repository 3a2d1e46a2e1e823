"""Names of checkpoints on disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training import checkpoint_names as names


def test_names_and_back(tmp_path: Path) -> None:
    assert names.get_checkpoint_name("a", 12) == "a/iter_0000012" and names.get_checkpoint_name("a", 0, release=True) == "a/release"
    assert names.get_checkpoint_tracker_filename("a") == "a/latest_checkpointed_iteration.txt"
    for iteration in (0, 12, 12345678):
        assert names.iteration_of(names.get_checkpoint_name("a", iteration)) == iteration
    assert [names.iteration_of(name) for name in ("a/release", "a/iter_0000012.unfinished", "a/iter_12", "a")] == [None] * 4


def test_the_tracker_file(tmp_path: Path) -> None:
    path = tmp_path / names.TRACKER
    for text, meaning in (("12\n", (12, False)), ("release", (0, True))):
        path.write_text(text)
        assert names.read_metadata(str(path)) == meaning
    path.write_text("soon")
    with pytest.raises(ValueError, match=r"holds 'soon'.*release"):
        names.read_metadata(str(path))


def test_they_need_no_torch() -> None:
    code = "import megatron.training.checkpoint_names, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=60).returncode == 0


def test_checkpointing_has_the_public_names() -> None:
    from megatron.training import checkpointing

    for name in ("get_checkpoint_name", "get_checkpoint_tracker_filename", "read_metadata"):
        assert getattr(checkpointing, name) is getattr(names, name)
