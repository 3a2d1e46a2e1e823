"""Samplers and loaders: the order depends on consumed samples alone."""

import itertools
import multiprocessing
import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.datasets.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    build_pretraining_data_loader,
)


class Numbers(torch.utils.data.Dataset):
    def __init__(self, count=100, bad=-1):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError(f"numbers.bin: sample {index} is bad")
        return {"tokens": torch.tensor([index, index + 1])}


def read_steps(cls, total, consumed, micro, ranks, global_batch, steps):
    """The samples of `steps` global batches in the order in which the ranks' micro batches take them."""
    streams = [iter(cls(total, consumed, micro, rank, ranks)) for rank in range(ranks)]
    return [sample for _ in range(steps * global_batch // (micro * ranks)) for stream in streams for sample in next(stream)]


@settings(deadline=None, max_examples=100)
@given(
    cls=st.sampled_from([MegatronPretrainingSampler, MegatronPretrainingRandomSampler]),
    first=st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2), (8, 1)]),
    second=st.sampled_from([(1, 1), (4, 2), (1, 8), (2, 2)]),
    consumed=st.integers(0, 20),
)
def test_ranks_and_micro_batch_may_change_on_resume(cls, first, second, consumed):
    straight = read_steps(cls, 67, consumed, 1, 1, 8, 5)
    before = read_steps(cls, 67, consumed, first[0], first[1], 8, 2)
    after = read_steps(cls, 67, consumed + 16, second[0], second[1], 8, 3)
    assert before + after == straight


def test_each_rank_takes_its_slice():
    assert list(MegatronPretrainingSampler(20, 4, 2, 1, 3)) == [[6, 7], [12, 13]]
    assert len(MegatronPretrainingSampler(20, 4, 2, 1, 3)) == 2


def test_the_last_batch():
    assert list(MegatronPretrainingSampler(7, 0, 2, 0, 2)) == [[0, 1]]
    assert list(MegatronPretrainingSampler(7, 0, 2, 0, 2, drop_last=False)) == [[0, 1], [4, 5]]
    assert list(MegatronPretrainingSampler(7, 0, 2, 1, 2, drop_last=False)) == [[2, 3], [6]]


def test_random_epochs_are_permutations_of_everything():
    stream = itertools.chain.from_iterable(MegatronPretrainingRandomSampler(10, 0, 3, 0, 1))
    first, second = list(itertools.islice(stream, 10)), list(itertools.islice(stream, 10))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert next(iter(MegatronPretrainingRandomSampler(10, 0, 10, 0, 1, seed=1))) == second


def test_nothing_left_is_said():
    with pytest.raises(ValueError, match="100 of the dataset's 100 samples are consumed"):
        build_pretraining_data_loader(Numbers(), 100, micro_batch_size=2)
    with pytest.raises(ValueError, match="no samples"):
        build_pretraining_data_loader(Numbers(0), 0, micro_batch_size=2)
    with pytest.raises(ValueError, match="--dataloader-type odd"):
        build_pretraining_data_loader(Numbers(), 0, micro_batch_size=2, dataloader_type="odd")


def test_external_and_none_pass_through():
    assert build_pretraining_data_loader(None, 0, micro_batch_size=2) is None
    external = [1, 2]
    assert build_pretraining_data_loader(external, 0, micro_batch_size=2, dataloader_type="external") is external


def test_workers_change_nothing():
    results, others = [], set(multiprocessing.active_children())
    for workers in (0, 2):
        torch.manual_seed(5)
        loader = build_pretraining_data_loader(
            Numbers(), 8, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2, num_workers=workers, dataloader_type="cyclic"
        )
        stream = iter(loader)
        batches = [next(stream)["tokens"].tolist() for _ in range(6)]
        assert bool(set(multiprocessing.active_children()) - others) == (workers > 0)
        del stream, loader
        results.append((batches, torch.rand(1).item()))
    assert results[0] == results[1]
    # reading has not touched the global random state
    assert results[0][1] == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_comes_out_as_one_line(workers):
    others = set(multiprocessing.active_children())
    loader = build_pretraining_data_loader(Numbers(bad=3), 0, micro_batch_size=2, num_workers=workers)
    with pytest.raises(ValueError) as caught:
        list(loader)
    assert str(caught.value) == "numbers.bin: sample 3 is bad"
    for worker in set(multiprocessing.active_children()) - others:
        worker.terminate()
        worker.join()


def test_workers_end_for_their_parent_alone():
    others = set(multiprocessing.active_children())
    loader = build_pretraining_data_loader(Numbers(), 0, micro_batch_size=2, num_workers=1)
    stream = iter(loader)
    assert next(stream)["tokens"][0].tolist() == [0, 1]
    (worker,) = set(multiprocessing.active_children()) - others
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole job, by somebody else
        assert os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -{int(number)} {worker.pid}") == 0
    assert len(list(stream)) == 49 and worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
