#!/usr/bin/env python3
"""Time and memory of building the three indices of a large dataset, against what numpy's shuffles alone take.

The order of samples is defined by RandomState.shuffle, one element at a time: no builder can be faster than those calls.
Both are measured in the same process, in turns; memory is the peak of the whole process, data included, in a process of its own.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from command_line import count

from megatron.core.datasets.helpers import build_gpt_indices, count_samples, plan_epochs

SEED = 1234


def make_lengths(documents: int) -> np.ndarray:
    """Document lengths around 500 tokens, long-tailed, int32."""
    return np.random.default_rng(0).geometric(1 / 500, size=documents).astype(np.int32)


def samples_for(lengths: np.ndarray, epochs: float, sequence_length: int) -> int:
    return int(epochs * count_samples(int(lengths.sum(dtype=np.int64)), sequence_length))


def shuffles_alone(lengths: np.ndarray, samples: int, sequence_length: int) -> float:
    """Seconds in the shuffle calls that the order demands."""
    tokens = int(lengths.sum(dtype=np.int64))
    plan = plan_epochs(tokens, sequence_length, samples)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), plan.num_epochs)
    order = np.arange(count_samples(tokens * plan.num_epochs, sequence_length), dtype=np.uint32)
    calls = [documents, order]
    if plan.separate:
        split = len(documents) - len(lengths)
        calls = [documents[:split], documents[split:], order[: plan.samples_before], order[plan.samples_before :]]
    random = np.random.RandomState(SEED)
    started = time.perf_counter()
    for call in calls:
        random.shuffle(call)
    return time.perf_counter() - started


def build(lengths: np.ndarray, samples: int, sequence_length: int) -> float:
    documents = np.arange(len(lengths), dtype=np.int32)
    started = time.perf_counter()
    build_gpt_indices(lengths, documents, samples, sequence_length, SEED)
    return time.perf_counter() - started


def peak_memory(arguments: list[str]) -> float:
    """MB (10^6 bytes) at the peak of a process that only builds."""
    command = [sys.executable, __file__, "--only-build", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=count, default=5_000_000)
    parser.add_argument("--seq-length", type=count, default=4096)
    parser.add_argument("--epochs", type=float, nargs="+", default=[1.0, 3.3])
    parser.add_argument("--rounds", type=count, default=5, help="the median of so many")
    parser.add_argument("--only-build", action="store_true", help="build once and print the peak of resident memory in KiB")
    args = parser.parse_args()
    lengths = make_lengths(args.documents)
    if args.only_build:
        build(lengths, samples_for(lengths, args.epochs[0], args.seq_length), args.seq_length)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return
    tokens = lengths.sum(dtype=np.int64) / 1e9
    print(f"{args.documents} documents, {tokens:.2f} billion tokens, seq {args.seq_length}; median of {args.rounds}")
    print("epochs   samples     shuffles (s)   build (s)   ratio   peak (MB)")
    for epochs in args.epochs:
        samples = samples_for(lengths, epochs, args.seq_length)
        work = lengths, samples, args.seq_length
        timings = [(shuffles_alone(*work), build(*work)) for _ in range(args.rounds)]
        floor, ours = (statistics.median(column) for column in zip(*timings))
        peak = peak_memory(["--documents", str(args.documents), "--seq-length", str(args.seq_length), "--epochs", str(epochs)])
        print(f"{epochs:6.1f}   {samples:7d}     {floor:12.3f}   {ours:9.3f}   {ours / floor:5.2f}   {peak:9.0f}")


if __name__ == "__main__":
    main()
