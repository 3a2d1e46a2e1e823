"""Shared fixtures. Tests compute on the CPU with one thread a process, so that two workers fit two cores."""

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of artifacts that Megatron-LM produced: MEGATRON_GOLDEN, or ../shared/golden beside the clone."""
    folder = Path(os.environ.get("MEGATRON_GOLDEN", ROOT.parent / "shared" / "golden"))
    if not folder.is_dir():
        pytest.skip(f"no stored artifacts of Megatron-LM at {folder} (set MEGATRON_GOLDEN)")
    return folder
