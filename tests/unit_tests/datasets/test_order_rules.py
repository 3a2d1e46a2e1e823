"""The whole way from documents to samples against the rules of the formats, written out with lists: any split, seed, length and blend."""

import logging
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from tests.unit_tests.datasets.corpus import EOD, make_config, write_corpus

DOCUMENTS = [[5 + d] * (1 + (7 * d) % 23) for d in range(40)], [[100 + d] * (1 + (11 * d) % 9) for d in range(31)]


def plain_samples(documents, part, size, length, seed):
    """Samples of one corpus, each a list of length + 1 ids. `part`: the fractions of documents between which a split lies."""
    chosen = list(range(round(part[0] * len(documents)), round(part[1] * len(documents))))
    tokens = sum(len(documents[d]) + 1 for d in chosen)
    epochs = 1
    while size is not None and tokens * epochs < size * length + 1:
        epochs += 1
    before = (tokens * (epochs - 1) - 1) // length
    apart = epochs > 1 and size - before < int(0.80 * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    orders = [np.array(chosen * (epochs - 1)), np.array(chosen)] if apart else [np.array(chosen * epochs)]
    for order in orders:
        random.shuffle(order)
    line = [token for order in orders for d in order for token in [*documents[d], EOD]]
    samples = [line[i : i + length + 1] for i in range(0, len(line) - length, length)]
    places = [np.arange(before), np.arange(before, len(samples))] if apart else [np.arange(len(samples))]
    for part_of_them in places:
        random.shuffle(part_of_them)
    return [samples[i] for part_of_them in places for i in part_of_them]


def plain_blend(corpora, weights, size, surplus):
    """Samples of a blend."""
    asked = [math.ceil(math.ceil(size * w) * (1 + surplus)) for w in weights]
    streams, drawn = [make(count) for make, count in zip(corpora, asked)], [0] * len(weights)
    taken = []
    for i in range(sum(math.ceil(size * w) for w in weights)):
        behind = [w * max(i, 1) - n for w, n in zip(weights, drawn)]
        corpus = behind.index(max(behind))
        taken.append(streams[corpus][drawn[corpus]])
        drawn[corpus] += 1
    return taken


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return [write_corpus(folder / name, documents) for name, documents in zip("ab", DOCUMENTS)]


def texts(dataset):
    samples = map(dataset.__getitem__, range(len(dataset)))
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


SPLITS = st.sampled_from(["90,10,0", "969,30,1", "1,1,1", "50,49,1", "100,0,0", "0.5,0.25,0.25"])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    split=SPLITS,
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 40),
    size=st.integers(1, 150),
    surplus=st.sampled_from([0.005, 0.2]),
    weight=st.one_of(st.none(), st.integers(1, 9)),
)
def test_every_rule_at_once(corpora, tmp_path_factory, split, seed, length, size, surplus, weight):
    weights = [] if weight is None else [weight / 10, 1 - weight / 10]
    blend = (corpora, weights) if weights else ([corpora[0]], None)
    cache = str(tmp_path_factory.mktemp("cache"))
    config = make_config(
        blend=blend, split=split, random_seed=seed, sequence_length=length, path_to_cache=cache, mid_level_dataset_surplus=surplus
    )
    train = BlendedMegatronDatasetBuilder(GPTDataset, (size, 0, 0), lambda: True, config).build()[0]
    shares = [float(part) for part in split.split(",")]
    part = 0.0, shares[0] / sum(shares)
    makers = [lambda count, documents=documents: plain_samples(documents, part, count, length, seed) for documents in DOCUMENTS]
    expected = makers[0](size) if not weights else plain_blend(makers, weights, size, surplus)
    assert len(train) == len(expected)
    assert texts(train) == expected


@settings(deadline=None, max_examples=40)
@given(documents=st.integers(1, 6), epochs=st.floats(1.01, 4.0), below=st.floats(0, 1))
def test_what_a_last_epoch_gives_decides_whether_it_is_shuffled_apart(documents, epochs, below):
    lengths = np.full(documents * 10, 16, dtype=np.int32)
    size = max(1, int(epochs * len(lengths)))
    plan = helpers.plan_epochs(int(lengths.sum()), 16, size, separate_below=below)
    index, _, shuffle = helpers.build_gpt_indices(lengths, np.arange(len(lengths)), size, 16, 3, separate_below=below)
    last = index[-len(lengths) :]
    if plan.separate:
        assert sorted(last) == list(range(len(lengths)))
        assert sorted(shuffle[: plan.samples_before]) == list(range(plan.samples_before))
    needed = size - plan.samples_before
    assert plan.separate == (plan.num_epochs > 1 and needed < int(below * ((int(lengths.sum()) - 1) // 16)))


def test_a_whole_epoch_within_a_part_of_another_holds_each_document_once():
    lengths = np.full(100, 17, dtype=np.int32)
    index, _, _ = helpers.build_gpt_indices(lengths, np.arange(100), 150, 16, 3)
    assert len(index) == 200 and sorted(index[:100]) == sorted(index[100:]) == list(range(100))
    mixed, _, _ = helpers.build_gpt_indices(lengths, np.arange(100), 150, 16, 3, separate_below=0.0)
    assert sorted(mixed[:100]) != list(range(100))


def test_another_threshold_is_another_cache_and_the_usual_one_is_megatrons(corpora, caplog):
    usual = make_config(blend=([corpora[0]], None))
    other = make_config(blend=([corpora[0]], None), separate_last_epoch_below=0.5)
    with caplog.at_level(logging.INFO):
        hashes = [
            BlendedMegatronDatasetBuilder(GPTDataset, (30, 0, 0), lambda: True, config).build()[0].unique_identifiers
            for config in (usual, other)
        ]
    assert "the last of 2 epochs" in caplog.text
    assert "separate_last_epoch_below" not in hashes[0] and hashes[1]["separate_last_epoch_below"] == 0.5


def test_positions_beyond_32_bits():
    """Many epochs over many short documents: types, not arrays of that size."""
    assert helpers.sample_index_dtype(2**31 + 8, 10) is np.int64
    assert helpers.document_ids(2**31 - 4, 2**31 + 3).tolist() == list(range(2**31 - 4, 2**31 + 3))
    assert helpers.document_ids(0, 5).dtype == np.int32
    wide = helpers.build_document_index(helpers.document_ids(2**31, 2**31 + 5), 2, np.random.RandomState(0), False)
    assert wide.dtype == np.int64 and wide.min() == 2**31
    plan = helpers.plan_epochs(3_000_000_000, 4096, 5_000_000_000)
    assert plan.num_epochs == -(-(5_000_000_000 * 4096 + 1) // 3_000_000_000)
    lengths = np.full(3, 2**31 - 1, dtype=np.int32)  # 6.4 billion tokens in three documents
    _, samples, shuffle = helpers.build_gpt_indices(lengths, np.arange(3), None, 2**20, 1)
    starts = samples[:, 0].astype(np.int64) * (2**31 - 1) + samples[:, 1]
    assert (np.diff(starts) == 2**20).all() and len(shuffle) == (3 * (2**31 - 1) - 1) // 2**20
