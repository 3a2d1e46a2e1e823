"""Corpora in object storage, read through copies in a local folder."""

import json

import numpy as np
import pytest

from megatron.core.datasets import object_storage
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from tests.unit_tests.datasets.corpus import make_config, random_documents, write_corpus

fsspec = pytest.importorskip("fsspec")
URL = "memory://bucket/corpora/c"


@pytest.fixture
def stored(tmp_path):
    """A corpus at URL; gives its local prefix, and a function that stores another one there."""
    memory = fsspec.filesystem("memory")

    def store(seed):
        prefix = write_corpus(tmp_path / "original", random_documents(seed))
        for suffix in (".bin", ".idx"):
            with open(prefix + suffix, "rb") as file, memory.open(URL.partition("://")[2] + suffix, "wb") as copy:
                copy.write(file.read())
        return prefix

    yield store(1), store
    memory.store.clear()


def build(prefix, tmp_path, **changes):
    settings = {"split": "100,0,0", "object_storage_cache_path": str(tmp_path / "copies"), **changes}
    config = make_config(blend=([prefix], None), **settings)
    return BlendedMegatronDatasetBuilder(GPTDataset, (30, 0, 0), lambda: True, config).build()[0]


@pytest.mark.parametrize("mmap", [True, False])
def test_samples_are_those_of_the_local_pair(tmp_path, stored, mmap):
    local, _ = stored
    remote, here = build(URL, tmp_path, mmap_bin_files=mmap), build(local, tmp_path)
    assert len(remote) == len(here)
    assert all(np.array_equal(remote[i]["tokens"], here[i]["tokens"]) for i in range(30))
    assert (tmp_path / "copies" / "memory" / "bucket" / "corpora" / "c" / "cache").is_dir()  # its indices, beside the copy


def test_copies_are_made_once_and_again_when_the_object_changes(tmp_path, stored, monkeypatch):
    _, store = stored
    first = build(URL, tmp_path)[0]["tokens"]
    copy = tmp_path / "copies" / "memory" / "bucket" / "corpora" / "c.bin"
    before = copy.stat().st_mtime_ns
    build(URL, tmp_path)
    assert copy.stat().st_mtime_ns == before
    store(2)
    changed = build(URL, tmp_path, path_to_cache=str(tmp_path / "other"))
    assert copy.stat().st_mtime_ns != before and not np.array_equal(changed[0]["tokens"], first)


def test_without_a_connection_the_copy_is_used(tmp_path, stored, monkeypatch, caplog):
    first = build(URL, tmp_path)[3]["tokens"]

    def unreachable(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(object_storage, "_version", unreachable)
    assert np.array_equal(build(URL, tmp_path)[3]["tokens"], first) and "the copy" in caplog.text
    with pytest.raises(ValueError, match=r"memory://bucket/corpora/c\.idx cannot be read: no route to host"):
        build(URL, tmp_path, object_storage_cache_path=str(tmp_path / "empty"))


def test_errors_name_the_object(tmp_path, stored, monkeypatch):
    with pytest.raises(ValueError, match=r"memory://bucket/none\.idx: no such object"):
        build("memory://bucket/none", tmp_path)
    with pytest.raises(ValueError, match="give --object-storage-cache-path a local folder"):
        build(URL, tmp_path, object_storage_cache_path=None)
    with pytest.raises(ValueError, match=r"nonesuch://bucket/c\.idx cannot be read"):
        build("nonesuch://bucket/c", tmp_path)


def test_a_copy_that_breaks_off_is_not_left(tmp_path, stored, monkeypatch):
    version = object_storage._version
    monkeypatch.setattr(object_storage, "_version", lambda *where: {**version(*where), "size": version(*where)["size"] + 1})
    with pytest.raises(ValueError, match="bytes came, it has"):
        build(URL, tmp_path)
    assert [path for path in (tmp_path / "copies").rglob("*") if path.is_file()] == []


def test_a_damaged_note_is_a_copy_made_again(tmp_path, stored):
    build(URL, tmp_path)
    note = tmp_path / "copies" / "memory" / "bucket" / "corpora" / "c.bin.source.json"
    note.write_text("{")
    build(URL, tmp_path)
    assert json.loads(note.read_text())["size"] > 0


def test_what_is_remote():
    assert object_storage.is_remote("s3://b/c") and object_storage.is_remote("memory://b/c")
    assert not object_storage.is_remote("/data/c") and not object_storage.is_remote("data/c") and not object_storage.is_remote(None)
