"""Batches that leave a loader's process in one buffer are those that torch would have sent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from megatron.training.datasets import batch_message
from megatron.training.datasets.batch_message import PackedBatch, collate
from megatron.training.datasets.data_samplers import build_pretraining_data_loader

DTYPES = st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.uint8])
SHAPES = st.lists(st.integers(0, 5), max_size=3)
FIELDS = st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(DTYPES, SHAPES), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(fields=FIELDS, count=st.integers(1, 5), top=st.sampled_from([1, 2, 2**31, 2**40]))
def test_any_dict_of_tensors_comes_out_as_it_was(fields, count, top):
    random = torch.Generator().manual_seed(0)
    samples = [
        {name: (-torch.randint(0, top, shape, generator=random)).to(dtype) for name, (dtype, shape) in fields.items()} for _ in range(count)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_message, "get_worker_info", lambda: "a worker")
        batch = collate(samples, 2)
    assert isinstance(batch, PackedBatch)
    expected = default_collate(samples)
    for name, value in batch.unpack().items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name])


def test_what_is_the_same_in_all_samples_travels_once(monkeypatch):
    monkeypatch.setattr(batch_message, "get_worker_info", lambda: "a worker")
    samples = [{"tokens": torch.full((1000,), i), "positions": torch.arange(1000), "mask": torch.ones(1000)} for i in range(8)]
    batch = collate(samples, 8)
    assert isinstance(batch, PackedBatch)
    assert batch.buffer.numel() == 8 * 4000 + 4032 + 4032  # numbers of 32 bits, each field on 64 bytes
    unpacked = batch.unpack()
    unpacked["positions"][0] += 1  # rows are apart
    assert unpacked["positions"][1].tolist() == list(range(1000))


class Samples(torch.utils.data.Dataset):
    def __init__(self, make, count):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


KINDS = {
    "alike": lambda i: {"a": torch.full((3,), i), "b": torch.tensor(float(i))},
    "with a number": lambda i: {"a": torch.full((3,), i), "number": i},
    "another length each": lambda i: {"a": torch.full((1 + i % 2,), i)},
    "no dict": lambda i: torch.full((3,), i),
}


@pytest.mark.parametrize(
    ("kind", "micro_batch_size"), [(kind, 1) for kind in KINDS] + [(kind, 3) for kind in KINDS if kind != "another length each"]
)
def test_workers_give_the_same_micro_batches(kind, micro_batch_size):
    read = [
        list(
            build_pretraining_data_loader(
                Samples(KINDS[kind], 23), 2, micro_batch_size=micro_batch_size, num_workers=workers, drop_last=False
            )
        )
        for workers in (0, 1)
    ]
    assert len(read[0]) == len(read[1]) == -(-21 // micro_batch_size)
    for left, right in zip(*read):
        flat = [list(batch.items()) if isinstance(batch, dict) else [("", batch)] for batch in (left, right)]
        for (name, one), (other_name, other) in zip(*flat):
            assert name == other_name and torch.equal(torch.as_tensor(one), torch.as_tensor(other))
