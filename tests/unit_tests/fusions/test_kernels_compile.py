"""Triton's compiler takes every kernel of megatron/core/fusions/kernels, with such arguments as its wrapper is called with. No GPU is
needed; Triton's interpreter, in which the other tests run, takes more than the compiler does.

The cases are the tables of compile_kernels.py, which says how far each call is compiled. One process compiles all for a kind of GPU, in
50 s of one core (machine code of every call: 150); by the front end alone, in 10.
"""

import ast
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton", reason="Triton is not installed")
from tests.unit_tests.fusions.compile_kernels import CASES

FOLDER = ROOT / "megatron" / "core" / "fusions" / "kernels"
MOST_SHARED = 227 << 10  # bytes that a program may have of a multiprocessor's memory, on either kind of GPU
KINDS = [
    pytest.param(("90", "front"), id="front end"),
    pytest.param(("90",), id="hopper", marks=pytest.mark.slow),
    pytest.param(("100",), id="blackwell", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of each call, in order."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "TRITON_DISABLE_LINE_INFO": "1",  # a quarter of the time
    }
    words = [sys.executable, "-m", "tests.unit_tests.fusions.compile_kernels", *request.param]
    done = subprocess.run(
        words, cwd=ROOT, env=kept | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=900
    )
    results: list[dict[str, Any]] = []
    for line in done.stdout.splitlines():
        if line.startswith('{"case"'):
            results.append(json.loads(line) | {"said": []})
        elif line.startswith('{"made"'):
            results[-1] |= json.loads(line)
        elif results and line:
            results[-1]["said"].append(line)
    assert results, done.stdout
    if done.returncode:
        results[-1].setdefault("errors", []).append(f"here the process ended with {done.returncode}")
    return results


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_takes_it(compiled: list[dict[str, Any]], case: str) -> None:
    results = [result for result in compiled if result["case"] == case]
    assert results, f"not reached: {compiled[-1]}"
    failed = [result for result in results if result["errors"]]
    texts = ["\n".join([result["call"], *result["errors"], *result["said"][:50]]) for result in failed]  # more is the program as it was
    if failed:
        pytest.fail("\n\n".join([f"{len(failed)} of {len(results)} calls", *texts]), pytrace=False)
    for result in results:
        assert result["made"], f"launches no kernel: {result['call']}"
        too_large = {kernel: shared for kernel, shared in result["made"].items() if (shared or 0) > MOST_SHARED}
        assert not too_large, f"more than {MOST_SHARED} bytes of shared memory: {too_large} in {result['call']}"


def test_no_kernel_is_left_out(compiled: list[dict[str, Any]]) -> None:
    """Each has been compiled at least once, and where any has become machine code, that far."""
    sizes = [item for result in compiled for item in result.get("made", {}).items()]
    far = any(shared is not None for _, shared in sizes)
    made = {kernel for kernel, shared in sizes if shared is not None or not far}
    missing = kernels_of_the_folder() - made
    assert not missing, f"no call in compile_kernels.py makes {sorted(missing)}"


def kernels_of_the_folder() -> set[str]:
    """Those that are launched, kernel[grid](..), and those that no other one calls, lest one is launched by another name."""
    files, called, launched = {}, set(), set()
    for file in FOLDER.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            functions = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
            launched |= {ast.unparse(function.value) for function in functions if isinstance(function, ast.Subscript)}
            if isinstance(node, ast.FunctionDef) and any(ast.unparse(word).startswith("triton.jit") for word in node.decorator_list):
                files[node.name] = file.stem
                called |= {ast.unparse(function) for function in functions}
    return {f"{stem}.{name}" for name, stem in files.items() if name in launched or name not in called}
