#!/usr/bin/env python3
"""Speed of the way from tokens on disk to batches: the order of a blend, samples of one process, batches of a DataLoader.

Each number is the median of `--rounds`. On a machine that does other work at the same time the processor time beside it says more.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command_line import count

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.training.datasets.data_samplers import build_pretraining_data_loader

TOKENIZER = SimpleNamespace(eod=2, vocab_size=50304, unique_identifiers={"class": "benchmark"})
COLUMNS = "{:<52}{:>14}{:>14}{:>18}"


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, processor seconds of this process) of one call."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def blend_order(corpora: int, samples: int, rounds: int) -> tuple[float, float]:
    weights = np.random.default_rng(0).random(corpora)
    weights /= weights.sum()
    runs = [timed(lambda: build_blending_indices(weights, samples)) for _ in range(rounds)]
    return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs)


def write_corpus(prefix: str, tokens: int) -> int:
    """A pair of so many uint16 tokens in documents of 500 tokens, long-tailed; the number of documents."""
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / 500, size=tokens // 500)
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_documents(random.integers(3, 50000, size=lengths.sum()).astype(np.uint16), lengths.tolist(), [1] * len(lengths))
        builder.finalize(f"{prefix}.idx")
    return len(lengths)


def make_dataset(prefix: str, documents: int, seq_length: int, mmap: bool) -> GPTDataset:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        split="100,0,0",
        blend=([prefix], None),
        tokenizer=TOKENIZER,
        create_attention_mask=False,
        vocab_size=50304,
        mmap_bin_files=mmap,
        path_to_cache=f"{prefix}.cache",
    )
    return GPTDataset(IndexedDataset(prefix, mmap=mmap), prefix, np.arange(documents, dtype=np.int32), None, Split.train, config)


def samples_of_a_process(dataset: GPTDataset, count: int, rounds: int) -> tuple[float, float]:
    numbers = range(min(count, len(dataset)))
    runs = [timed(lambda: [dataset[i] and None for i in numbers]) for _ in range(rounds)]
    return len(numbers) / statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs) / len(numbers)


def samples_of_a_loader(dataset: GPTDataset, count: int, micro_batch: int, workers: int) -> tuple[float, float]:
    """Samples a second once the loader runs, and processor time a sample of all of its processes."""
    loader = build_pretraining_data_loader(dataset, 0, micro_batch_size=micro_batch, num_workers=workers)
    batches = iter(loader)
    next(batches)
    count = min(count, len(dataset) - 16 * micro_batch) // micro_batch * micro_batch
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    started, used = time.perf_counter(), time.process_time()
    for _ in range(count // micro_batch):
        next(batches)
    seconds, own = time.perf_counter() - started, time.process_time() - used
    del batches, loader  # ends its processes; their time is counted then
    children = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    return count / seconds, (own + children) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=count, default=10)
    parser.add_argument("--samples", type=count, default=20_000_000, help="of the blend")
    parser.add_argument("--seq-length", type=count, default=4096)
    parser.add_argument("--tokens", type=count, default=100_000_000, help="of the corpus that samples are read from")
    parser.add_argument("--reads", type=count, default=16_000, help="samples to read at most")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=count, default=5, help="the median of so many")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"numpy {np.__version__}, {len(os.sched_getaffinity(0))} cores, load {load:.1f} at the start")
    print(COLUMNS.format("", "seconds", "samples/s", "CPU us/sample"))
    seconds, used = blend_order(args.corpora, args.samples, args.rounds)
    name = f"order of {args.corpora} corpora, {args.samples:,} samples"
    print(COLUMNS.format(name, f"{seconds:.2f}", f"{args.samples / seconds:,.0f}", f"{1e6 * used / args.samples:.3f}"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        documents = write_corpus(f"{folder}/corpus", args.tokens)
        for mmap, kind in ((True, "mapped"), (False, "plain reads")):
            dataset = make_dataset(f"{folder}/corpus", documents, args.seq_length, mmap)
            rate, used = samples_of_a_process(dataset, args.reads, args.rounds)
            print(COLUMNS.format(f"one process, {kind}", "", f"{rate:,.0f}", f"{1e6 * used:.0f}"), flush=True)
            for micro_batch in (1, 8):
                runs = [samples_of_a_loader(dataset, args.reads, micro_batch, args.workers) for _ in range(args.rounds)]
                rate, used = (statistics.median(column) for column in zip(*runs))
                name = f"{args.workers} workers, micro batch {micro_batch}, {kind}"
                print(COLUMNS.format(name, "", f"{rate:,.0f}", f"{1e6 * used:.0f}"), flush=True)


if __name__ == "__main__":
    main()
