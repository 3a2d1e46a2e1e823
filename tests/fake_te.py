"""The stand-in for Transformer Engine in tests/fakes, put in the place of the package (or of its absence)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import optional_imports
from megatron.core.extensions.transformer_engine import base
from tests.conftest import ROOT

FAKES = str(ROOT / "tests" / "fakes")


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    for cached in (optional_imports.available, base.te_pytorch, base._joined):
        cached.cache_clear()


@contextmanager
def fake_transformer_engine() -> Iterator[Any]:
    """Within it `transformer_engine` is the stand-in; gives its module `pytorch`."""
    _forget()
    sys.path.insert(0, FAKES)
    try:
        yield base.te_pytorch("a test")
    finally:
        sys.path.remove(FAKES)
        _forget()
