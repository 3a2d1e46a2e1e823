"""GPTDataset: the samples of Megatron-LM, masks and positions, the index cache."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.core.datasets import index_cache
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset, document_starts, square_mask
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split, get_blend_from_list
from tests.unit_tests.datasets.corpus import EOD, TOKENIZER, make_config, random_documents, write_corpus


def build(config, sizes=(50, 5, 0), cls=GPTDataset):
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


def one_dataset(prefix, config, num_samples=None, split=Split.train):
    low_level = IndexedDataset(prefix)
    return GPTDataset(low_level, prefix, np.arange(len(low_level), dtype=np.int32), num_samples, split, config)


@pytest.mark.parametrize("case", ["single", "blend", "several_epochs", "late_full_epoch", "resets"])
@pytest.mark.parametrize("mmap", [True, False])
def test_samples_equal_those_of_megatron_lm(golden, tmp_path, case, mmap):
    stored = np.load(golden / "samples.npz")
    setting = json.loads((golden / "samples.json").read_text())[case]
    resets = setting.get("reset", False)
    blend = [item if item[0].isdigit() else str(golden / "tokens" / item) for item in setting["blend"]]
    config = make_config(
        random_seed=setting["seed"],
        sequence_length=setting["seq"],
        blend=get_blend_from_list(blend),
        split=setting["split"],
        path_to_cache=str(tmp_path),
        mmap_bin_files=mmap,
        reset_position_ids=resets,
        reset_attention_mask=resets,
        eod_mask_loss=resets,
        create_attention_mask=resets,
    )
    compared = 0
    for split, dataset in zip(Split, build(config, setting["sizes"])):
        name = f"{case}.{split.name}"
        if f"{name}.len" not in stored:
            assert dataset is None
            continue
        assert len(dataset) == stored[f"{name}.len"]
        samples = [dataset[int(index)] for index in stored[f"{name}.index"]]
        for field in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(torch.stack([sample[field] for sample in samples]).numpy(), stored[f"{name}.{field}"]), (name, field)
            compared += 1
    assert compared == 8


def test_consecutive_samples_lose_nothing(tmp_path):
    documents = random_documents(0)
    dataset = one_dataset(write_corpus(tmp_path / "c", documents), make_config(blend=(["x"], None)))
    read = [token for document in dataset.document_index for token in [*documents[document], EOD]]
    for number in range(len(dataset)):
        position = dataset.shuffle_index.tolist().index(number)
        sample = dataset[position]
        text = read[number * 16 : number * 16 + 17]
        assert sample["tokens"].tolist() == text[:-1] and sample["labels"].tolist() == text[1:]
    assert len(dataset) == (len(read) - 1) // 16


def test_types_and_attention_mask(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    sample = one_dataset(prefix, make_config(blend=([prefix], None), create_attention_mask=True))[0]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in sample.items()} == {
        "tokens": (torch.int64, (16,)),
        "labels": (torch.int64, (16,)),
        "loss_mask": (torch.float32, (16,)),
        "position_ids": (torch.int64, (16,)),
        "attention_mask": (torch.bool, (1, 16, 16)),
    }
    assert torch.equal(sample["attention_mask"][0], torch.ones(16, 16, dtype=torch.bool).triu(1))


def test_resets_against_a_plain_loop():
    tokens = np.array([5, EOD, 6, 7, EOD, EOD, 8, EOD])
    starts = document_starts(tokens, EOD)
    assert starts.tolist() == [0, 0, 2, 2, 2, 5, 6, 6]
    mask = square_mask(starts)[0]
    for query in range(8):
        for key in range(8):
            assert mask[query, key].item() == (key > query or EOD in tokens[key:query].tolist())


def test_a_long_sample_of_many_documents_is_made_fast(tmp_path):
    """8192 tokens, 1000 documents: positions start anew without a loop over them, and without a square mask that nobody asked for."""
    documents = [[5] * (7 if d % 5 else 8) for d in range(1100)]
    prefix = write_corpus(tmp_path / "c", documents)
    config = make_config(blend=([prefix], None), sequence_length=8192, reset_position_ids=True, eod_mask_loss=True)
    dataset = one_dataset(prefix, config)
    started = time.process_time()
    sample = dataset[0]
    assert time.process_time() - started < 0.5 and "attention_mask" not in sample
    position, expected = 0, []
    for token in sample["tokens"].tolist():
        expected.append(position)
        position = 0 if token == EOD else position + 1
    assert sample["position_ids"].tolist() == expected
    assert sample["loss_mask"].tolist() == [float(token != EOD) for token in sample["tokens"].tolist()]


def test_masks_are_not_shared_between_samples(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(2))
    dataset = one_dataset(prefix, make_config(blend=([prefix], None), eod_mask_loss=True, reset_position_ids=True))
    expected = {key: value.clone() for key, value in dataset[1].items()}
    for value in dataset[0].values():
        value.zero_()
    assert all(torch.equal(value, expected[key]) for key, value in dataset[1].items())


def test_padding_is_masked_by_position_not_by_value(tmp_path):
    # pad is the same id as eod: both real ends keep their loss, only what was filled in has none
    tokenizer = SimpleNamespace(eod=EOD, pad=EOD, vocab_size=1000, unique_identifiers={})
    prefix = write_corpus(tmp_path / "c", [[4, 5, 6, 7], [8, 9, 10]])
    config = make_config(blend=([prefix], None), tokenizer=tokenizer, drop_last_partial_validation_sequence=False)
    dataset = one_dataset(prefix, config, None, Split.valid)
    sample = dataset[0]
    assert len(dataset) == 1
    assert sample["loss_mask"].tolist() == [1.0] * 8 + [0.0] * 8
    assert sample["labels"][:8].tolist().count(EOD) == 2 and sample["tokens"][9:].eq(0).all()


def test_without_the_extra_token_the_last_position_has_no_loss(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(3))
    dataset = one_dataset(prefix, make_config(blend=([prefix], None), add_extra_token_to_sequence=False))
    sample = dataset[0]
    assert sample["loss_mask"].tolist() == [1.0] * 15 + [0.0]
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()


def test_a_corpus_too_small_is_refused(tmp_path):
    prefix = write_corpus(tmp_path / "tiny", [[5, 6]])
    with pytest.raises(ValueError, match=r"tiny: the 1 documents of the train split do not give one sample of 17 tokens"):
        one_dataset(prefix, make_config(blend=([prefix], None)))
    assert len(one_dataset(prefix, make_config(blend=([prefix], None)), num_samples=3)) >= 3  # by many epochs
    empty = str(tmp_path / "empty")
    builder = IndexedDatasetBuilder(f"{empty}.bin")
    builder.add_item([])
    builder.end_document()
    builder.finalize(f"{empty}.idx")
    with pytest.raises(ValueError, match=r"empty: .* there is not one token"):
        one_dataset(empty, make_config(blend=([empty], None)), num_samples=3)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    prefix = write_corpus(tmp_path / "other", random_documents(4))
    with pytest.raises(ValueError, match=r"other: sample 0 holds ids from .* beyond the vocabulary of 200"):
        one_dataset(prefix, make_config(blend=([prefix], None), vocab_size=200))
    one_dataset(prefix, make_config(blend=([prefix], None), vocab_size=1000))


def cache_files(folder):
    return sorted(os.listdir(folder))


def test_cache_is_written_once_and_used(tmp_path, monkeypatch):
    prefix = write_corpus(tmp_path / "c", random_documents(5))
    config = make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "cache"))
    first = one_dataset(prefix, config, 30)
    stem = f"{first.unique_description_hash}-GPTDataset-train-"
    assert cache_files(tmp_path / "cache") == [
        f"{stem}{name}" for name in ("checksums.json", "description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
    ]
    description = json.loads((tmp_path / "cache" / f"{stem}description.txt").read_text())
    assert list(description) == [
        "class", "dataset_path", "num_samples", "index_split", "random_seed", "sequence_length", "split", "split_matrix", "tokenizer"
    ]  # fmt: skip
    monkeypatch.setattr(GPTDataset, "_build_indices", lambda self: pytest.fail("the cache was not used"))
    assert torch.equal(one_dataset(prefix, config, 30)[7]["tokens"], first[7]["tokens"])


@pytest.mark.parametrize("victim", ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "description.txt", "checksums.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "empty", "one bit", "other content"])
def test_a_damaged_cache_is_built_again(tmp_path, victim, damage, caplog):
    prefix = write_corpus(tmp_path / "c", random_documents(6))
    config = make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "cache"))
    expected = [sample["tokens"].tolist() for sample in map(one_dataset(prefix, config, 30).__getitem__, range(30))]
    path = next((tmp_path / "cache").glob(f"*{victim}"))
    content = path.read_bytes()
    path.unlink()
    damaged = {
        "truncate": content[: len(content) // 2],
        "empty": b"",
        "one bit": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "other content": b'{"another": 1}',
    }
    if damage != "remove":
        path.write_bytes(damaged[damage])
    again = one_dataset(prefix, config, 30)
    assert [sample["tokens"].tolist() for sample in map(again.__getitem__, range(30))] == expected
    if (victim, damage) == ("checksums.json", "remove"):  # as a cache of Megatron-LM
        assert not path.exists()
        return
    assert path.read_bytes() == content
    if damage != "remove":
        assert path.name in caplog.text and "building it again" in caplog.text


@pytest.mark.parametrize("checksums", [True, False], ids=["our cache", "a cache of Megatron-LM"])
@pytest.mark.parametrize("change", ["longer", "fewer", "more", "the same lengths in another order"])
def test_a_cache_of_other_data_under_the_same_path_is_built_again(tmp_path, change, checksums, caplog):
    """The description names the path alone: data that was prepared anew must not be read by the old places."""
    documents = random_documents(6)
    prefix = write_corpus(tmp_path / "c", documents)
    config = make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "cache"))
    one_dataset(prefix, config, 30)
    if not checksums:
        next((tmp_path / "cache").glob("*-checksums.json")).unlink()
        if change == "the same lengths in another order":
            return  # the arrays cannot tell
    changed: dict[str, list] = {
        "longer": [np.concatenate([document, document]) for document in documents],
        "fewer": documents[: len(documents) // 2],
        "more": documents + documents,
        "the same lengths in another order": documents[::-1],
    }
    write_corpus(tmp_path / "c", changed[change])
    again = [sample["tokens"].tolist() for sample in map(one_dataset(prefix, config, 30).__getitem__, range(30))]
    assert "building it again" in caplog.text
    fresh = one_dataset(prefix, make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "fresh")), 30)
    assert again == [sample["tokens"].tolist() for sample in map(fresh.__getitem__, range(30))]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("number", [0, 3])
def test_an_index_damaged_in_the_middle_is_never_trained_on(tmp_path, number, cached):
    """What opening a pair does not see: it trained on tokens that are in no such order in the corpus."""
    prefix = write_corpus(tmp_path / "c", random_documents(6))
    config = make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "cache"))
    if cached:
        one_dataset(prefix, config, 30)
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    content[34 + 4 * number] ^= 1  # its length
    Path(f"{prefix}.idx").write_bytes(content)
    with pytest.raises(ValueError, match=rf"\.idx: sequence {number + 1} has .* the file is damaged"):
        one_dataset(prefix, config, 30)


def test_arrays_that_another_process_has_checked_are_judged_by_their_size(tmp_path, caplog):
    prefix = write_corpus(tmp_path / "c", random_documents(6))
    config = make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "cache"))
    one_dataset(prefix, config, 30)
    path = next((tmp_path / "cache").glob("*shuffle_index.npy"))
    content = path.read_bytes()
    path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with index_cache.trusted():
        one_dataset(prefix, config, 30)
        assert "building it again" not in caplog.text
        path.write_bytes(content + b"more")
        one_dataset(prefix, config, 30)
    assert f"{path.name} is damaged" in caplog.text and path.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    prefix = write_corpus(tmp_path / "c", random_documents(7))
    (tmp_path / "file").write_text("")
    dataset = one_dataset(prefix, make_config(blend=([prefix], None), path_to_cache=str(tmp_path / "file" / "cache")), 30)
    assert len(dataset) >= 30 and "--data-cache-path" in caplog.text


def test_mock_data_needs_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, valid, test = build(make_config(split=None, mock=True, sequence_length=64, vocab_size=1000), (20, 4, 4), MockGPTDataset)
    assert len(train) >= 20 and len(valid) >= 4 and len(test) >= 4
    tokens = torch.cat([train[i]["tokens"] for i in range(20)])
    assert tokens.max() < TOKENIZER.vocab_size and (tokens == EOD).any()
    assert not list(tmp_path.iterdir())
