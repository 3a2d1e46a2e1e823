"""What all tests here share: a corpus, and that trainings draw no picture, which takes three times as long as the rest of them."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron.training.callbacks.plot import PlotCurves
from tests.functional.runner import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small corpus of NullTokenizer ids."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small_text_document")


@pytest.fixture
def drawn() -> None:
    """For tests of the picture: trainings draw it."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    if "drawn" in request.fixturenames:
        yield
    else:
        with mock.patch.object(PlotCurves, "draw"):
            yield
