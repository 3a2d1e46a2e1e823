"""The stand-in for Transformer Engine in tests/fakes, put in the place of the package (or of its absence).

Tests of the real one import this module too, so that it is loaded in time.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core import optional_imports
from megatron.core.extensions.transformer_engine import base
from tests.conftest import ROOT

FAKES = str(ROOT / "tests" / "fakes")


if torch.cuda.is_available() and optional_imports.available("transformer_engine"):
    # The real one loads libraries that fail once torch's cuDNN is loaded: before any test runs.
    importlib.import_module("transformer_engine.pytorch")


def _taken_away() -> dict[str, Any]:
    """The package's modules, no longer known."""
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "transformer_engine"}
    for cached in (optional_imports.available, base.te_pytorch, base._joined):
        cached.cache_clear()
    return modules


@contextmanager
def fake_transformer_engine() -> Iterator[Any]:
    """Within it `transformer_engine` is the stand-in; gives its module `pytorch`."""
    real = _taken_away()
    sys.path.insert(0, FAKES)
    try:
        yield base.te_pytorch("a test")
    finally:
        sys.path.remove(FAKES)
        _taken_away()
        sys.modules.update(real)
