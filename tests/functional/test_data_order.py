"""What may change when a run is taken up again: lengths, batches and blends, without a sample that comes twice or is left out."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.dist_checkpointing import load_common_state_dict
from tests.functional.runner import TINY, Result, train, write_corpus

BASE = TINY.replace("--train-iters 4 ", "").replace("--global-batch-size 4 ", "") + " --override-opt_param-scheduler --split 100,0,0"


@pytest.fixture
def corpora(tmp_path: Path) -> dict[str, Path]:
    return {name: write_corpus(tmp_path / name, seed=seed, documents=6) for seed, name in enumerate("abc")}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every sample that training reads: (corpus, seed of its epochs, place of its tokens in them)."""
    seen: list[tuple[str, int, int]] = []
    get = GPTDataset.__getitem__

    def record(self: Any, idx: int) -> Any:
        seen.append((str(self.dataset_path), self.config.random_seed, int(self.shuffle_index[idx])))
        return get(self, idx)

    monkeypatch.setattr(GPTDataset, "__getitem__", record)
    monkeypatch.setattr("megatron.core.datasets.gpt_dataset.GPTDataset._check_first_sample", lambda self: None)
    return seen


def run(folder: Path, data: list[Any], iterations: int, flags: str = "--global-batch-size 4") -> Result:
    words = ["--data-path", *map(str, data), "--data-cache-path", str(folder / "cache")]
    where = f"--save {folder}/save --load {folder}/save --train-iters {iterations} {flags}"
    result = train(" ".join(words), where, base=BASE)
    assert result.code == 0, result.err
    return result


def order(folder: Path, iteration: int) -> dict[str, Any]:
    return load_common_state_dict(folder / "save" / f"iter_{iteration:07d}")["data_order"]


def assert_streams(read: list[tuple[str, int, int]], expected: dict[Path, int]) -> None:
    """Each corpus gave so many samples, none of them twice within the epochs of one shuffle."""
    assert max(Counter(read).values()) == 1
    assert Counter(corpus for corpus, _, _ in read) == {str(path): count for path, count in expected.items()}


def test_more_iterations_and_other_batches_go_on_in_the_order_of_the_first_start(tmp_path: Path, corpora: dict, read: list) -> None:
    a = corpora["a"]
    run(tmp_path, [a], 3)
    first = order(tmp_path, 3)["train"][0]
    assert first["size"] == first["position"] == 12 and first["consumed"] == [12]
    run(tmp_path, [a], 5, "--global-batch-size 8 --micro-batch-size 4")
    run(tmp_path, [a], 30, "--global-batch-size 4 --micro-batch-size 1")
    assert_streams(read, {a: 12 + 16 + 100})
    # the epoch of the first start to its end, then epochs that are shuffled on their own
    seeds = [seed for _, seed, _ in read]
    assert seeds == sorted(seeds) and len(set(seeds)) > 3
    epochs = [sorted(place for _, seed, place in read if seed == wanted) for wanted in sorted(set(seeds))]
    assert all(places == list(range(len(places))) for places in epochs[:-1])
    assert order(tmp_path, 30)["train"][0]["size"] == 12, "what was asked at first stays"


def test_another_blend_on_resume_repeats_nothing(tmp_path: Path, corpora: dict, read: list, caplog: Any) -> None:
    a, b, c = corpora.values()
    run(tmp_path, [0.7, a, 0.3, b], 5)
    run(tmp_path, [0.25, a, 0.25, b, 0.5, c], 10)
    assert "another train blend from sample 20 on" in caplog.text
    assert "a (weight 0.25) goes on after 14 samples" in caplog.text and "c (weight 0.5) is new" in caplog.text
    saved = order(tmp_path, 10)["train"][0]
    assert saved["consumed"] == [14 + 5, 6 + 5, 10] and [segment["start"] for segment in saved["segments"]] == [0, 20]
    run(tmp_path, [0.25, a, 0.25, b, 0.5, c], 12)  # the same blend again, for longer
    assert_streams(read, {a: 14 + 7, b: 6 + 7, c: 14})
    assert len(order(tmp_path, 12)["train"][0]["segments"]) == 2


def test_a_corpus_that_moved_goes_on_and_one_that_changed_begins_anew(tmp_path: Path, corpora: dict, read: list, caplog: Any) -> None:
    a = corpora["a"]
    run(tmp_path, [a], 2)
    moved = tmp_path / "elsewhere"
    for end in (".bin", ".idx"):
        (tmp_path / f"a{end}").rename(f"{moved}{end}")
    run(tmp_path, [moved], 4)
    assert order(tmp_path, 4)["train"][0]["consumed"] == [16]
    assert max(Counter((seed, place) for _, seed, place in read).values()) == 1
    write_corpus(moved, seed=9, documents=6)
    run(tmp_path, [moved], 5)
    assert "its content is not what it was" in caplog.text
    assert order(tmp_path, 5)["train"][0]["consumed"] == [16, 4]


def test_another_seed_begins_a_new_order_and_says_so(tmp_path: Path, corpora: dict) -> None:
    run(tmp_path, [corpora["a"]], 2)
    result = run(tmp_path, [corpora["a"]], 4, "--global-batch-size 4 --seed 8")
    assert "with another --seed sample numbers stand for other samples" in result.out
    assert order(tmp_path, 4)["settings"]["seed"] == 8


def test_an_order_that_begins_anew_reaches_behind_what_larger_batches_consumed(tmp_path: Path, corpora: dict, read: list) -> None:
    """5 x 32 samples are consumed; 7 x 4, what the flags alone ask for, would end before this position."""
    data = [0.7, corpora["a"], 0.3, corpora["b"]]
    run(tmp_path, data, 5, "--global-batch-size 32 --micro-batch-size 4")
    read.clear()
    run(tmp_path, data, 7, "--global-batch-size 4 --seed 4321")
    assert len(read) == 2 * 4
    assert order(tmp_path, 7)["train"][0]["size"] == 5 * 32 + 2 * 4


def test_a_checkpoint_without_an_order_goes_on_by_this_runs_sizes(tmp_path: Path, corpora: dict, monkeypatch: Any) -> None:
    monkeypatch.setattr("megatron.training.checkpoint_contents.DATA_ORDER", "not written")
    run(tmp_path, [corpora["a"]], 2)
    monkeypatch.undo()
    assert "data_order" not in load_common_state_dict(tmp_path / "save" / "iter_0000002")
    run(tmp_path, [corpora["a"]], 4)
    assert order(tmp_path, 4)["train"][0]["size"] == 16


def test_a_random_order_keeps_its_dataset(tmp_path: Path, corpora: dict, read: list) -> None:
    a, b = corpora["a"], corpora["b"]
    cyclic = "--global-batch-size 4 --dataloader-type cyclic"
    run(tmp_path, [a], 3, cyclic)
    size = order(tmp_path, 3)["train"][0]["size"]
    run(tmp_path, [a], 5, cyclic)
    assert order(tmp_path, 5)["train"][0]["size"] == size and max(Counter(read).values()) == 1
    result = run(tmp_path, [b], 6, cyclic)
    assert "with another --data-path sample numbers stand for other samples" in result.out
