"""--build-index-only: the indices of a training, ahead of it, on a machine without GPUs."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.functional.runner import TINY, torchrun, train, write_corpus

NO_SPLIT = TINY.replace("--split 80,10,10 ", "")


def snapshot(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture
def blend(tmp_path: Path) -> str:
    a, b = write_corpus(tmp_path / "a", seed=1), write_corpus(tmp_path / "b", seed=2)
    return f"--data-path 0.7 {a} 0.3 {b} --data-cache-path {tmp_path}/cache"


def test_the_training_finds_every_index(tmp_path: Path, blend: str) -> None:
    """Also one on two ranks, and with tensor parallelism: the process that builds is alone."""
    flags = f"{blend} --eval-interval 2 --eval-iters 1 --tensor-model-parallel-size 2"
    first = train(flags, "--build-index-only")
    assert first.code == 0, first.err
    assert "9 index(es) built, 0 found in the cache" in first.out and "iteration" not in first.out
    before = snapshot(tmp_path / "cache")
    again = train(flags, "--build-index-only")
    assert "0 index(es) built, 9 found in the cache" in again.out
    training = torchrun(2, flags)
    assert training.code == 0, training.err
    assert "0 index(es) built, 9 found in the cache" in training.out
    assert snapshot(tmp_path / "cache") == before


def test_a_training_that_goes_on_for_longer_finds_every_index(tmp_path: Path, blend: str) -> None:
    train(blend, f"--save {tmp_path}/save")
    longer = f"{blend} --load {tmp_path}/save --train-iters 60 --override-opt_param-scheduler"
    first = train(longer, "--build-index-only")
    assert first.code == 0 and "0 index(es) built" not in first.out
    before = snapshot(tmp_path / "cache")
    training = train(longer)
    assert training.code == 0 and ", 0 index(es) built" not in training.out and "; 0 index(es) built" in training.out
    assert snapshot(tmp_path / "cache") == before


def test_what_cannot_be_kept_is_an_error(tmp_path: Path, blend: str) -> None:
    (tmp_path / "file").write_text("")
    result = train(blend.replace(f"{tmp_path}/cache", f"{tmp_path}/file/cache"), "--build-index-only")
    assert result.code == 1 and "--data-cache-path" in result.err


def test_the_batch_must_be_known(blend: str) -> None:
    base = TINY.replace("--global-batch-size 4 ", "")
    result = train(blend, "--build-index-only", base=base)
    assert result.code == 2 and "--global-batch-size" in result.err and "--check-config-world-size" in result.err
    assert train(blend, "--build-index-only --check-config-world-size 2", base=base).code == 0


def test_blends_in_files(tmp_path: Path, blend: str) -> None:
    """The same datasets, so the same index files, as from the command line."""
    train(blend, "--build-index-only")
    before = snapshot(tmp_path / "cache")
    words = blend.split(" --data-cache-path")[0].removeprefix("--data-path ")
    (tmp_path / "blend.txt").write_text(words.replace(" ", "\n") + "\n")
    cache = f"--data-cache-path {tmp_path}/cache --build-index-only"
    result = train(f"--data-args-path {tmp_path}/blend.txt", cache)
    assert result.code == 0, result.err
    assert snapshot(tmp_path / "cache") == before
    splits = {"train": words.split(), "valid": words.split()[1:2]}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    typed = f"--train-data-path {words} --valid-data-path {splits['valid'][0]}"
    assert train(typed, cache, base=NO_SPLIT).code == 0
    before = snapshot(tmp_path / "cache")
    result = train(f"--per-split-data-args-path {tmp_path}/splits.json", cache, base=NO_SPLIT)
    assert result.code == 0, result.err
    assert snapshot(tmp_path / "cache") == before


def test_a_blend_of_three_hundred_corpora_in_a_file(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / f"c{i}", seed=i, documents=1) for i in range(300)]
    (tmp_path / "blend.txt").write_text("".join(f"1.0 {prefix}\n" for prefix in prefixes))
    base = TINY.replace("--split 80,10,10", "--split 100,0,0").replace("--train-iters 4", "--train-iters 150")
    data = f"--data-args-path {tmp_path}/blend.txt --data-cache-path {tmp_path}/cache"
    result = train(data, "--build-index-only", base=base)
    assert result.code == 0 and "301 index(es) built" in result.out and "... and 260 more" in result.out, result.err
    index = np.load(next((tmp_path / "cache").glob("*-BlendedDataset-train-dataset_index.npy")))
    assert index.dtype == np.int16 and np.bincount(index).tolist() == [2] * 300


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is no JSON"),
        ("[1]", "an object with the keys train, valid, test"),
        ('{"training": ["a"]}', "an object with the keys train, valid, test"),
        ('{"train": "a"}', "train must be a list"),
        ('{"train": []}', "train must be a list"),
        (None, "No such file"),
    ],
)
def test_files_that_hold_no_blend(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "splits.json"
    if content is not None:
        path.write_text(content)
    result = train(f"--per-split-data-args-path {path}", base=NO_SPLIT)
    assert result.code == 2 and "--per-split-data-args-path" in result.err and why in result.err
    result = train(f"--data-args-path {tmp_path}/missing", "--mock-data")
    assert result.code == 2 and "excludes --mock-data" in result.err
