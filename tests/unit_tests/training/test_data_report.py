"""The start-up table of corpora, and held-out sets that fill their last batch."""

import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training.data_report import MOST_ROWS, short_names, table_of_datasets
from megatron.training.datasets.whole_batches import WholeBatches
from tests.unit_tests.datasets.corpus import make_config, random_documents, write_corpus


def build(sizes, **changes):
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, make_config(**changes)).build()


def test_the_table_is_aligned_and_says_what_a_run_takes(tmp_path):
    a, b = write_corpus(tmp_path / "books", random_documents(1)), write_corpus(tmp_path / "code_and_more", random_documents(2, 9))
    train, valid, _ = build((100, 7, 0), blend=([a, b], [0.75, 0.25]), split="80,20,0")
    lines = table_of_datasets(train, valid, None).splitlines()
    cells = [line.split() for line in lines]
    assert cells[0] == ["split", "corpus", "weight", "samples", "samples", "an", "epoch", "epochs"]
    assert [row[:5] for row in cells[1:3]] == [["train", "books", "75.00", "%", "75"], ["train", "code_and_more", "25.00", "%", "25"]]
    assert len({len(line) for line in lines}) == 1
    for row, dataset in zip(cells[1:3], train.datasets):
        an_epoch = len(dataset) * len(dataset.indices) / len(dataset.document_index)
        assert int(row[5]) == round(an_epoch) and float(row[6]) == pytest.approx(int(row[4]) / an_epoch, abs=0.05)
    assert [row[0] for row in cells[3:]] == ["valid", "valid"]


def test_a_blend_of_hundreds_is_cut(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    count = MOST_ROWS + 5
    train, _, _ = build((count, 0, 0), blend=([prefix] * count, [1.0] * count), split="100,0,0")
    lines = table_of_datasets(train, None, None).splitlines()
    assert len(lines) == MOST_ROWS + 2 and "... and 5 more" in lines[-1]


def test_names_are_as_short_as_they_can_be():
    assert short_names(["/data/a/text", "/data/b/text"]) == ["a/text", "b/text"]
    assert short_names(["/data/a", "b"]) == ["a", "b"] and short_names(["x/a", "x/a"]) == ["a", "a"]


@pytest.mark.parametrize(("samples", "batch", "whole"), [(10, 4, 12), (8, 4, 8), (3, 4, 4), (1, 1, 1)])
def test_what_fills_the_last_batch_counts_nothing(samples, batch, whole):
    data = [{"tokens": torch.tensor([i]), "loss_mask": torch.ones(1)} for i in range(samples)]
    filled = WholeBatches(data, batch)
    read = [filled[i] for i in range(len(filled))]
    assert len(read) == whole
    assert [int(sample["tokens"]) for sample in read if sample["loss_mask"].any()] == list(range(samples))
    assert data[-1]["loss_mask"].tolist() == [1.0]


def test_samples_without_a_mask_must_fill_it():
    assert WholeBatches([{"tokens": 1}] * 4, 2)[3] == {"tokens": 1}
    with pytest.raises(ValueError, match="--full-validation: 3 samples do not fill the last batch"):
        WholeBatches([{"tokens": 1}] * 3, 2)[3]
