"""Datasets of a run that is taken up again: what they share with those of its first start, and what comes after."""

import copy

import numpy as np
import pytest

from megatron.core.datasets import index_cache
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.core.datasets.planned_dataset import PlannedDataset, corpus_identity
from tests.unit_tests.datasets.corpus import make_config, random_documents, write_corpus


@pytest.fixture
def three(tmp_path):
    return [write_corpus(tmp_path / name, random_documents(seed)) for seed, name in enumerate("abc")]


def build(blend, sizes, tmp_path, order=None, cls=GPTDataset, **changes):
    config = make_config(blend=blend, path_to_cache=str(tmp_path / "cache"), data_order=order, **changes)
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


def saved(position, *, train=None, valid=None):
    plans = {"train": [train], "valid": [valid]}
    return {name: [dataset.sample_plan.state_dict(position) for dataset in found if dataset is not None] for name, found in plans.items()}


def texts(dataset, numbers):
    return [dataset[i]["tokens"].tolist() for i in numbers]


KINDS = {"one": 1, "blend": 2, "by size": 2}


def blend_of(kind, prefixes):
    return (prefixes[: KINDS[kind]], [0.7, 0.3] if kind == "blend" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_other_sizes_go_on_in_the_first_order(three, tmp_path, kind):
    blend = blend_of(kind, three)
    first, valid, _ = build(blend, (30, 9, 0), tmp_path)
    for wanted in (10, 30, len(first), 500):
        again, valid_again, _ = build(blend, (wanted, wanted, 0), tmp_path, saved(8, train=first, valid=valid))
        shared = range(8, min(len(first), len(again), wanted))
        assert len(again) >= wanted and texts(again, shared) == texts(first, shared)
        assert isinstance(again, PlannedDataset) == (wanted > len(first))
        shared = range(8, min(len(valid), wanted))
        assert texts(valid_again, shared) == texts(valid, shared)
        assert again.sample_plan == first.sample_plan and again.sample_plan.size <= 30


@pytest.mark.parametrize("kind", KINDS)
def test_how_often_a_run_was_lengthened_makes_no_difference(three, tmp_path, kind):
    blend = blend_of(kind, three)
    first, _, _ = build(blend, (30, 0, 0), tmp_path)
    at_once, _, _ = build(blend, (400, 0, 0), tmp_path, saved(20, train=first))
    step, _, _ = build(blend, (170, 0, 0), tmp_path, saved(20, train=first))
    then, _, _ = build(blend, (400, 0, 0), tmp_path, saved(160, train=step))
    assert texts(step, range(20, 170)) == texts(at_once, range(20, 170))
    assert texts(then, range(160, 400)) == texts(at_once, range(160, 400))


def test_each_later_epoch_holds_every_sample_once_in_an_order_of_its_own(three, tmp_path):
    first, _, _ = build(([three[0]], None), (5, 0, 0), tmp_path)
    epoch = len(first)
    longer, _, _ = build(([three[0]], None), (5 * epoch, 0, 0), tmp_path, saved(0, train=first))
    orders = [texts(longer, range(e * epoch, (e + 1) * epoch)) for e in range(5)]
    assert orders[0] == texts(first, range(epoch))
    starts = [{tuple(text[:3]) for text in order} for order in orders]
    assert all(len(found) == epoch for found in starts)  # nothing twice
    assert len({str(order) for order in orders}) == 5


def test_a_new_blend_reads_on(three, tmp_path, caplog):
    first, _, _ = build((three[:2], [0.5, 0.5]), (60, 0, 0), tmp_path)
    state = saved(40, train=first)
    later, _, _ = build((three, [0.2, 0.3, 0.5]), (100, 0, 0), tmp_path, state)
    assert "another train blend from sample 40 on" in caplog.text and "goes on after 20 samples" in caplog.text
    picks = np.array([later[i]["dataset_id"] for i in range(40, 100)])
    assert np.bincount(picks).tolist() == [12, 18, 30]
    old = first.datasets[0]
    assert texts(later, 40 + np.flatnonzero(picks == 0)) == texts(old, range(20, 32))
    with pytest.raises(IndexError, match="sample 39: the run goes on from 40"):
        later[39]
    # saved and taken up again, as it is and for longer
    again, _, _ = build((three, [2, 3, 5]), (130, 0, 0), tmp_path, saved(70, train=later))
    assert len(again.sample_plan.segments) == 2 and texts(again, range(70, 100)) == texts(later, range(70, 100))


def test_a_corpus_that_is_in_the_blend_twice(three, tmp_path):
    blend = ([three[0], three[0]], [0.5, 0.5])
    first, _, _ = build(blend, (20, 0, 0), tmp_path)
    assert len({member.identity for member in first.sample_plan.members}) == 2
    again, _, _ = build(blend, (20, 0, 0), tmp_path, saved(10, train=first))
    assert isinstance(again, BlendedDataset) and texts(again, range(20)) == texts(first, range(20))


def test_a_corpus_shorter_than_a_sample_goes_on_too(tmp_path):
    prefix = write_corpus(tmp_path / "tiny", [[5, 6, 7]])
    first, _, _ = build(([prefix], None), (3, 0, 0), tmp_path, split="100,0,0")
    longer, _, _ = build(([prefix], None), (50, 0, 0), tmp_path, saved(2, train=first), split="100,0,0")
    assert len(texts(longer, range(50))) == 50


def test_weights_without_a_size_read_each_corpus_once(three, tmp_path):
    """--full-validation over a weighted blend: every sample, whatever the weights."""
    _, valid, _ = build((three[:2], [0.9, 0.1]), (10, None, None), tmp_path, split="50,50,0")
    pairs = sorted(zip(valid.dataset_index.tolist(), valid.dataset_sample_index.tolist()))
    assert pairs == [(d, i) for d, dataset in enumerate(valid.datasets) for i in range(len(dataset))]
    assert not hasattr(valid, "sample_plan")


def test_validation_sets_of_their_own_keep_their_orders(three, tmp_path):
    sizes, changes = (10, 6, 0), {"multiple_validation_sets": True, "split": "50,50,0"}
    _, valid, _ = build((three[:2], [1, 1]), sizes, tmp_path, **changes)
    state = {"train": [], "valid": [dataset.sample_plan.state_dict(4) for dataset in valid]}
    _, again, _ = build((three[:2], [1, 1]), (10, 90, 0), tmp_path, state, **changes)
    for before, now in zip(valid, again):
        assert texts(now, range(4, len(before))) == texts(before, range(4, len(before))) and len(texts(now, range(4, 90))) == 86


def test_made_up_data_goes_on(tmp_path):
    changes = {"cls": MockGPTDataset, "mock": True, "split": None, "sequence_length": 4096}
    first, _, _ = build(None, (20, 0, 0), tmp_path, **changes)
    again, _, _ = build(None, (30, 0, 0), tmp_path, saved(10, train=first), **changes)
    assert texts(again, range(10, 20)) == texts(first, range(10, 20))


def test_what_is_built_ahead_is_found(three, tmp_path):
    first, _, _ = build((three[:2], [0.5, 0.5]), (60, 0, 0), tmp_path)
    longer = (three[:2], [0.5, 0.5]), (400, 0, 0), tmp_path, saved(40, train=first)
    build(*longer)
    before = copy.copy(index_cache.use)
    again, _, _ = build(*longer)
    texts(again, range(40, 400))
    assert index_cache.use.built == before.built


def test_the_identity_of_a_corpus_is_its_content(tmp_path, three):
    same = write_corpus(tmp_path / "same", random_documents(0))
    opened = [GPTDataset.build_low_level_dataset(prefix, make_config(blend=([prefix], None))) for prefix in (three[0], same, three[1])]
    first, second, other = (corpus_identity(low_level, "x") for low_level in opened)
    assert first == second != other
    assert corpus_identity(object(), "somebody/elses") == "somebody/elses"
