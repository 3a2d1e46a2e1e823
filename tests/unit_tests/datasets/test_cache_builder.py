"""Who builds an index cache: one rank for each folder, whether it is shared or not."""

import os
import time

import numpy as np
import torch.distributed as dist

from megatron.core.datasets import index_cache
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from tests.distributed import run_on_ranks
from tests.unit_tests.datasets.corpus import make_config, random_documents, write_corpus


def _build(prefixes, caches, hosts):
    """(indices built here, samples, names of the cache's files) of a rank whose `hosts` entry is its host and `caches` entry its folder."""
    rank = dist.get_rank()
    os.environ["HOST_OF_TEST"] = hosts[rank]
    from megatron.core.datasets import cache_builder

    cache_builder.socket.gethostname = lambda: os.environ["HOST_OF_TEST"]
    config = make_config(blend=([prefixes[rank]], None), path_to_cache=caches[rank])
    before = index_cache.use.built
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, (40, 5, 0), lambda: True, config).build()
    dist.barrier()
    left = sorted(name for name in os.listdir(caches[rank]) if name.startswith("."))
    return index_cache.use.built - before, [train[i]["tokens"].tolist() for i in (0, 7)], left


def build(tmp_path, caches, hosts):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    folders = [str(tmp_path / name) for name in caches]
    results = run_on_ranks(len(hosts), _build, [prefix] * len(hosts), folders, hosts)
    assert all(samples == results[0][1] for _, samples, _ in results) and all(left == [] for *_, left in results)
    return [built for built, *_ in results]


def test_of_two_nodes_with_a_shared_cache_one_rank_builds(tmp_path):
    assert build(tmp_path, ["shared"] * 3, ["one", "one", "two"]) == [2, 0, 0]


def test_of_two_nodes_with_caches_of_their_own_one_rank_each_builds(tmp_path):
    assert build(tmp_path, ["first", "first", "second", "second"], ["one", "one", "two", "two"]) == [2, 0, 2, 0]


def test_ranks_of_one_node_with_folders_of_their_own_each_build(tmp_path):
    assert build(tmp_path, ["first", "second"], ["one", "one"]) == [2, 2]


def _slow_and_failing(prefix, cache, fails):
    save, rank = np.save, dist.get_rank()

    def slow_save(file, arr, **options):
        file.write(b"half")
        file.flush()
        time.sleep(0.2)
        if fails:
            raise ValueError("the builder failed in the middle of a file")
        file.seek(0)
        save(file, arr, **options)

    setattr(index_cache.np, "save", slow_save)  # noqa: B010
    config = make_config(blend=([prefix], None), path_to_cache=cache)
    try:
        train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, (40, 5, 0), lambda: True, config).build()
    except ValueError as error:
        return str(error)
    return rank, train[3]["tokens"].tolist()


def test_no_rank_goes_on_before_the_files_are_complete(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    first, second = run_on_ranks(2, _slow_and_failing, prefix, str(tmp_path / "cache"), False)
    assert first[1] == second[1]


def test_when_the_builder_fails_all_ranks_end_and_nothing_half_written_is_left(tmp_path):
    prefix = write_corpus(tmp_path / "c", random_documents(1))
    messages = run_on_ranks(2, _slow_and_failing, prefix, str(tmp_path / "cache"), True)
    assert all("in the middle of a file" in message for message in messages)
    assert "rank 0 could not build the datasets" in messages[1]
    assert [name for name in os.listdir(tmp_path / "cache") if not name.startswith(".index-builder")] == []
