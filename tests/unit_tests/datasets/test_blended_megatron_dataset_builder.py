"""Blends and splits, on one rank and on several."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import get_blend_from_list, parse_and_normalize_split
from tests.distributed import run_on_ranks
from tests.unit_tests.datasets.corpus import make_config, random_documents, write_corpus


def build(config, sizes=(50, 5, 0)):
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


@pytest.fixture
def two(tmp_path):
    return [write_corpus(tmp_path / name, random_documents(seed)) for seed, name in enumerate("ab")]


def test_get_blend_from_list():
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["0.7", "a", "0.3", "b"]) == (["a", "b"], [0.7, 0.3])
    for wrong in (["0.7", "a", "0.3"], ["0.7", "a", "b", "c"], ["a", "0.7", "b", "0.3"], ["0.7", "0.3"]):
        with pytest.raises(ValueError, match="a weight before each prefix"):
            get_blend_from_list(wrong)


@pytest.mark.parametrize(
    ("split", "why"),
    [
        ("", "a weight is missing"),
        ("90,10,", "a weight is missing"),
        ("a,1", "'a' is not a number"),
        ("1,2,3,4", "it has 4 weights"),
        ("0,0,0", "all weights are 0"),
        ("-1,2", "-1 is negative or not finite"),
        ("inf,1", "inf is negative or not finite"),
        ("nan", "nan is negative or not finite"),
    ],
)
def test_splits_that_mean_nothing_are_refused(split, why):
    with pytest.raises(ValueError, match=rf"split '{split}': {why}; .* 969,30,1"):
        parse_and_normalize_split(split)


def test_splits():
    assert parse_and_normalize_split("90, 10") == [0.9, 0.1, 0.0]
    assert parse_and_normalize_split("1/0/3") == [0.25, 0.0, 0.75]


def test_all_problems_of_a_config_come_together():
    with pytest.raises(ValueError) as caught:
        make_config(sequence_length=0, split="a", blend=(["x", "y"], [1.0]), tokenizer=None, mid_level_dataset_surplus=-1)
    assert len(str(caught.value).splitlines()) == 5


def test_samples_come_from_their_corpus(two):
    config = make_config(blend=(two, [0.7, 0.3]))
    train, valid, test = build(config)
    assert len(train) == 50 and len(valid) == 6 and test is None  # ceil(5 * 0.7) + ceil(5 * 0.3)
    sample = train[3]
    dataset = train.datasets[sample["dataset_id"]]
    assert torch.equal(sample["tokens"], dataset[int(train.dataset_sample_index[3])]["tokens"])
    assert np.bincount(train.dataset_index).tolist() == [35, 15]


def test_without_weights_each_corpus_is_read_once(two, caplog):
    train, _, _ = build(make_config(blend=(two, None)), (None, 1, 0))
    assert len(train) == sum(len(dataset) for dataset in train.datasets)
    assert sorted(zip(train.dataset_index.tolist(), train.dataset_sample_index.tolist())) == [
        (d, i) for d, dataset in enumerate(train.datasets) for i in range(len(dataset))
    ]
    short, _, _ = build(make_config(blend=(two, None)), (10_000, 1, 0))
    assert len(short) == len(train) and "10000 train samples are wanted" in caplog.text


def test_a_blend_for_each_split(two):
    config = make_config(split=None, blend_per_split=[([two[0]], None), (two, [1.0, 1.0]), None])
    train, valid, test = build(config, (30, 8, 0))
    assert train.dataset_path == two[0] and len(train.indices) == 40
    assert [dataset.dataset_path for dataset in valid.datasets] == two and test is None


def test_validation_sets_apart(two):
    train, valid, _ = build(make_config(blend=(two, [0.5, 0.5]), multiple_validation_sets=True), (20, 3, 0))
    assert len(train) == 20 and [dataset.dataset_path for dataset in valid] == two and all(len(dataset) >= 3 for dataset in valid)


def test_a_member_without_draws_is_named(tmp_path, two, caplog):
    third = write_corpus(tmp_path / "rare", random_documents(9))
    train, _, _ = build(make_config(blend=([*two, third], [0.5, 0.5, 1e-9]), split="100,0,0"), (20, 0, 0))
    assert np.bincount(train.dataset_index).tolist() == [10, 10, 1]  # the rule of the order gives it one
    build(make_config(blend=([*two, third], [0.5, 0.5, 0.0]), split="100,0,0"), (20, 0, 0))
    assert "rare: weight 0 draws none of the 20 train samples" in caplog.text


def test_many_members(tmp_path):
    prefixes = [write_corpus(tmp_path / str(i), [list(range(3, 30))]) for i in range(300)]
    train, _, _ = build(make_config(blend=(prefixes, [1.0] * 300), split="100,0,0"), (600, 0, 0))
    assert np.bincount(train.dataset_index, minlength=300).tolist() == [2] * 300
    assert len(train[599]["tokens"]) == 16


def test_a_split_without_documents_names_the_corpus(tmp_path):
    prefix = write_corpus(tmp_path / "lonely", random_documents(1, count=1))
    with pytest.raises(ValueError, match="lonely: the valid split gets none of its 1 documents"):
        build(make_config(blend=([prefix], None)))


def _build_on_rank(prefix, cache):
    build_indices = GPTDataset._build_indices

    def count(self):
        assert dist.get_rank() == 0, "only rank 0 may have to build"
        time.sleep(0.3)
        return build_indices(self)

    GPTDataset._build_indices = count
    config = make_config(blend=([prefix], None), path_to_cache=cache)
    needed = dist.get_rank() != 1
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, (40, 5, 0), lambda: needed, config).build()
    return train[5]["tokens"].tolist() if train is not None else None


def test_rank_0_builds_and_the_others_load(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    first, second, third = run_on_ranks(3, _build_on_rank, prefix, str(tmp_path / "cache"))
    assert first == third and second is None


def _fail_together(prefix):
    started = time.perf_counter()
    try:
        BlendedMegatronDatasetBuilder(GPTDataset, (40, 5, 0), lambda: True, make_config(blend=([prefix], None))).build()
    except ValueError as error:
        return str(error), time.perf_counter() - started
    return "no error", 0.0


def test_a_failure_reaches_all_ranks_at_once(tmp_path):
    for message, seconds in run_on_ranks(2, _fail_together, str(tmp_path / "nowhere")):
        assert "nowhere.idx: no such file" in message and seconds < 10
