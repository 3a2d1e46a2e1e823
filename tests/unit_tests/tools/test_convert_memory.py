"""Conversions of a model of 836 MiB: what a process takes at its peak beside its code, the comparison at the end included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from tests.conftest import ROOT
from tests.unit_tests.export.hf_models import make

LIMIT = 1.3  # of the largest layer and the embeddings
HIDDEN, FFN, VOCAB, LAYERS = 768, 2048, 32000, 24
LAYER = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN)  # bytes
EMBEDDINGS = 4 * 2 * VOCAB * HIDDEN
SIZES = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
# loader, saver, folders of the large and of the small source, of the target; each goes on from one before
WAYS = [
    ("hf", "core", "hf", "core", []),
    ("core", "hf", "core", "back", []),
    ("hf", "torch", "hf", "torch", SIZES),
    ("torch", "hf", "torch", "again", []),
    ("torch", "core", "torch", "core2", []),
    ("core", "torch", "core", "torch2", ["--target-tensor-parallel-size", "4"]),
    ("torch", "torch", "torch", "torch3", ["--target-tensor-parallel-size", "4"]),
]
# The same conversion of a small model comes first: what that takes is code, and stays. Mapped files count, the disk's cache does not.
MEASURE = """
import gc, json, pathlib, runpy, sys
main = runpy.run_path(sys.argv[1])["main"]
def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
small, large = json.loads(sys.argv[2])
assert main(small) == 0
gc.collect()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before = status("VmRSS")
assert main(large) == 0
print(status("VmHWM") - before)
"""


def peak(small: list[str], large: list[str]) -> int:
    """Bytes."""
    words = [sys.executable, "-c", MEASURE, str(ROOT / "tools" / "checkpoint" / "convert.py"), json.dumps([small, large])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=1200)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not let a process count its peak anew")
def test_no_conversion_takes_more_than_a_layer_and_the_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shape = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    make("llama2", tmp_path / "large" / "hf", **shape, num_attention_heads=12, num_key_value_heads=12)
    make("llama2", tmp_path / "small" / "hf", num_hidden_layers=4, num_key_value_heads=4)
    found = {}
    for loader, saver, source, target, words in WAYS:
        runs = []
        for size in ("small", "large"):
            sides = ["--loader", loader, "--saver", saver, "--load-dir", tmp_path / size / source, "--save-dir", tmp_path / size / target]
            runs.append([str(word) for word in (*sides, *words)])
        found[f"{loader} to {saver}"] = peak(*runs) / (LAYER + EMBEDDINGS)
        if target not in ("core", "torch"):
            shutil.rmtree(tmp_path / "large" / target)
    with capsys.disabled():
        text = ", ".join(f"{way} {ratio:.2f}" for way, ratio in found.items())
        print(f"\npeak, by layer and embeddings of {(LAYER + EMBEDDINGS) / 2**20:.0f} MiB: {text}")
    assert max(found.values()) < LIMIT, found
