"""Files that the documents name are there, and the map of the house leaves no folder out."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMED = re.compile(r"`([\w./*-]+\.(?:py|md|toml|sh))`")
LINKED = re.compile(r"\]\((?!http)([^)#]+)")
SOURCES = ("megatron", "tools", "tests", "examples")
STARTS = ("", "megatron", "megatron/core", "megatron/training", "docs")
FILES = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.*")]


def is_there(name: str) -> bool:
    """By its path from one of STARTS, or any file of that name or whose path ends so."""
    return any(list((ROOT / start).glob(name)) for start in STARTS) or any(file.match(name) for file in FILES)


@pytest.mark.parametrize("doc", [doc for doc in DOCS if doc.name != "CHANGELOG.md"], ids=lambda doc: doc.name)
def test_named_files_exist(doc: Path) -> None:
    text = doc.read_text()
    missing = [name for name in NAMED.findall(text) if not is_there(name)]
    missing += [link for link in LINKED.findall(text) if not (doc.parent / link).exists()]
    assert not missing, f"{doc.name} names {missing}"


def test_the_map_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {file.parent for file in (ROOT / "megatron").rglob("*.py")} - {ROOT / "megatron"}
    paths = {folder: folder.relative_to(ROOT / "megatron").as_posix() for folder in folders}
    missing = sorted(path for path in paths.values() if "/" in path and f"{path}/" not in text and f"{Path(path).name}/" not in text)
    assert not missing, f"docs/architecture.md leaves out {missing}"
