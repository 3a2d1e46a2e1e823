"""Fill in the middle: what was rearranged can be put back, and nothing else has moved."""

from functools import cache
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.tokenizers.bpe_tokenizers import HuggingFaceTokenizer
from megatron.training.datasets.data_samplers import build_pretraining_data_loader
from megatron.training.datasets.fim_dataset import FillInTheMiddle, GPTFIMDataset, GPTFIMDatasetConfig, joins_up
from tests.functional.runner import VOCAB, on, train
from tests.functional.runner import write_corpus as write_numbers

TEXTS = ["def add(a, b):\n    return a + b\n", "the quick brown fox jumps over it", "Grüße, 日本 🙂", "x", "# a\n\nclass A:\n    pass\n"]
EOD, PREFIX, MIDDLE, SUFFIX, PAD, SPLIT = range(6)
MARKS = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<split>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("fim")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS * 3, vocab_size=320, special_tokens=MARKS)
    bpe.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(str(folder))


def config_of(tokenizer, **changes):
    options = {"random_seed": 1, "sequence_length": 32, "split": "100,0,0", "tokenizer": tokenizer, "create_attention_mask": False}
    return GPTFIMDatasetConfig(**(options | {"blend": (["none"], None), "fim_rate": 1.0} | changes))


def put_back(ids):
    """(prefix, middle, suffix) of one rearranged document, fillers off; None where it was left alone."""
    ids = list(ids)
    if PREFIX not in ids:
        return None
    while ids[-1] == PAD:
        ids.pop()
    assert ids[0] == PREFIX and sorted(token for token in ids if token in (PREFIX, MIDDLE, SUFFIX)) == [PREFIX, MIDDLE, SUFFIX]
    middle, suffix = ids.index(MIDDLE), ids.index(SUFFIX)
    if suffix == 1:  # SPM: where prefix and middle meet cannot be told, nor need it
        return ids[middle + 1 :], [], ids[2:middle]
    return ids[1:suffix], ids[middle + 1 :], ids[suffix + 1 : middle]


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_the_parts_put_back_are_the_text_but_for_its_last_tokens(tokenizer, spm_rate):
    fim = FillInTheMiddle(config_of(tokenizer, fim_spm_rate=spm_rate))
    assert fim.by_characters
    rearranged = suffix_first = 0
    for seed in range(200):
        text = TEXTS[seed % len(TEXTS)] * 4
        ids = np.array(tokenizer.tokenize(text))
        found, padding = fim.rearrange(ids, np.random.default_rng(seed))
        assert len(found) == len(ids)
        parts = put_back(found)
        if parts is None:
            assert np.array_equal(found, ids)
            continue
        rearranged += 1
        whole = (
            b"".join(tokenizer.detokenize(part).encode() for part in parts)
            .decode(errors="ignore")
            .removesuffix("\N{REPLACEMENT CHARACTER}")
        )
        assert text.startswith(whole.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert (found[list(padding)] == PAD).all() and (found == PAD).sum() == len(padding)
        suffix_first += int(found[1] == SUFFIX)  # or an empty prefix
    assert rearranged > 100
    assert suffix_first == rearranged if spm_rate else suffix_first < 0.2 * rearranged, "the mode that was asked for"


NUMBERS = SimpleNamespace(
    vocab={name: token for token, name in enumerate(MARKS)}, eod=EOD, pad=None, vocab_size=1000, unique_identifiers={"class": "numbers"},
    detokenize=lambda ids: " ".join(map(str, ids)), tokenize_batch=lambda texts: [[int(word) for word in text.split()] for text in texts],
)  # fmt: skip


@cache
def by_tokens(spm_rate, split):
    return FillInTheMiddle(config_of(NUMBERS, fim_spm_rate=spm_rate, fim_split_sample="<split>" if split else None))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(6, 999), max_size=20).map(lambda ids: [*ids, EOD]), max_size=5),
    st.lists(st.integers(6, 999), max_size=20),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 2**32),
)
def test_ends_of_documents_stay_and_each_document_is_a_rotation_of_its_tokens(documents, rest, spm_rate, seed):
    fim = by_tokens(spm_rate, False)
    assert not fim.by_characters, "numbers do not join up"
    text = np.array([token for document in [*documents, rest] for token in document], dtype=np.int64)
    before = text.copy()
    found, padding = fim.rearrange(text, np.random.default_rng(seed))
    assert np.array_equal(text, before), "the input is left alone"
    assert len(found) == len(text) and not padding and np.array_equal(found == EOD, text == EOD)
    begin = 0
    for document in [*documents, rest]:
        ids = document[:-1] if document and document[-1] == EOD else document
        parts = put_back(found[begin : begin + len(ids)].tolist()) if ids else None
        if parts is None:
            assert found[begin : begin + len(ids)].tolist() == ids
        else:
            assert list(chain(*parts)) == ids[: len(ids) - 3], "the suffix gives its last three tokens for the marks"
        begin += len(document)


def test_fragments_between_split_tokens_are_rearranged_each_by_itself():
    fim = by_tokens(0.0, True)
    text = np.array([*range(10, 30), SPLIT, *range(40, 60), EOD, *range(70, 90)])
    for seed in range(20):
        found, _ = fim.rearrange(text, np.random.default_rng(seed))
        assert found[20] == SPLIT and found[41] == EOD
        for begin, end in ((0, 20), (21, 41), (42, 62)):
            parts = put_back(found[begin:end])
            assert parts is None or list(chain(*parts)) == text[begin : end - 3].tolist()


def test_rates_and_the_prefix_that_forbids():
    text = np.array([token for start in range(6, 4806, 24) for token in [*range(start, start + 23), EOD]])
    counts = {}
    for rate in (0.0, 0.3, 1.0):
        found, _ = FillInTheMiddle(config_of(NUMBERS, fim_rate=rate)).rearrange(text, np.random.default_rng(0))
        counts[rate] = int((found == PREFIX).sum())
    assert counts[0.0] == 0 and 25 < counts[0.3] < 70 and counts[1.0] > 120
    split = {"fim_split_sample": "<split>", "fim_rate": 0.0, "fim_fragment_rate": 1.0}
    fragments = np.array([token for start in range(6, 4806, 24) for token in [*range(start, start + 23), SPLIT]])
    assert (FillInTheMiddle(config_of(NUMBERS, **split)).rearrange(fragments, np.random.default_rng(0))[0] == PREFIX).sum() > 120
    fim = FillInTheMiddle(config_of(NUMBERS, fim_no_prefix="6 7"))
    found, _ = fim.rearrange(text, np.random.default_rng(0))
    assert np.array_equal(found[:23], text[:23]) and (found == PREFIX).sum() > 120


@pytest.fixture
def corpus(tokenizer, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path / 'text'}.bin")
    for number in range(60):
        ids = [*tokenizer.tokenize(TEXTS[number % len(TEXTS)] * (1 + number % 3)), EOD]
        builder.add_document(np.array(ids), [len(ids)])
    builder.finalize(f"{tmp_path / 'text'}.idx")
    return str(tmp_path / "text")


def samples(tokenizer, corpus, cls=GPTFIMDataset, **changes):
    config = config_of(tokenizer, blend=([corpus], None), **({"reset_position_ids": True, "eod_mask_loss": True} | changes))
    return BlendedMegatronDatasetBuilder(cls, (40, 0, 0), lambda: True, config).build()[0]


def test_labels_are_the_next_tokens_and_masks_positions_and_borders_are_gpt_datasets(tokenizer, corpus):
    plain, filled = samples(tokenizer, corpus, GPTDataset), samples(tokenizer, corpus, fim_rate=0.7)
    changed = 0
    for number in range(len(plain)):
        one, other = plain[number], filled[number]
        assert torch.equal(other["labels"][:-1], other["tokens"][1:])
        assert torch.equal(one["tokens"] == EOD, other["tokens"] == EOD)
        assert torch.equal(one["position_ids"], other["position_ids"])
        where = other["labels"] != PAD
        assert torch.equal(one["loss_mask"][where], other["loss_mask"][where]) and not other["loss_mask"][~where].any()
        assert one["tokens"].shape == other["tokens"].shape and one["tokens"].dtype == other["tokens"].dtype
        changed += not torch.equal(one["tokens"], other["tokens"])
    assert 0.5 * len(plain) < changed
    assert torch.equal(samples(tokenizer, corpus, fim_rate=0.0)[3]["tokens"], plain[3]["tokens"])


def test_samples_do_not_depend_on_workers_nor_on_what_was_read_before(tokenizer, corpus):
    dataset = samples(tokenizer, corpus)
    read = [dataset[number]["tokens"] for number in (5, 2, 5)]
    assert torch.equal(read[0], read[2])
    loaders = [build_pretraining_data_loader(samples(tokenizer, corpus), 4, micro_batch_size=2, num_workers=workers) for workers in (0, 2)]
    for one, other in zip(*loaders):
        assert torch.equal(one["tokens"], other["tokens"])
    assert not torch.equal(samples(tokenizer, corpus, random_seed=2)[5]["tokens"], read[0])


def test_names_that_are_no_tokens_are_all_named(tokenizer):
    with pytest.raises(ValueError) as caught:
        config_of(tokenizer, fim_rate=1.5, fim_split_sample="<cut>", fim_extra_tokens={"prefix": "<PRE>", "eod": "<nothing>"})
    text = str(caught.value)
    assert len(text.splitlines()) == 4
    for part in ("fim_rate 1.5", "--fim-split-sample <cut>", "--fim-prefix-token <PRE>", "--fim-eod-token <nothing>"):
        assert part in text
    assert config_of(NUMBERS).token_ids().pad == PAD


def test_joining_up():
    assert not joins_up(NUMBERS)


def test_training_on_the_command_line(tmp_path):
    corpus = write_numbers(tmp_path / "numbers", vocab=VOCAB - 10)
    words = on(corpus, "--fim-data --fim-rate 0.9 --fim-prefix-token 92 --fim-middle-token 93 --fim-suffix-token 94")
    result = train(*words)
    assert result.code == 0 and len(result.losses()) == 4 and np.isfinite(result.losses()).all(), result.err
    assert result.losses() != train(*on(corpus)).losses()
    result = train(*on(corpus, "--fim-data"))
    assert result.code == 1 and "--fim-prefix-token <fim_prefix> is no token of the tokenizer" in result.err
    result = train("--mock-data --fim-data")
    assert result.code == 2 and "--fim-data: excludes --mock-data" in result.err
