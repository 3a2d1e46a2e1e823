"""A corpus that all tests here share."""

from pathlib import Path

import pytest

from tests.functional.runner import write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a small corpus of NullTokenizer ids."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small_text_document")
