"""Saving and loading against plain files, in one run: `python tools/benchmark/checkpoint.py [--folder DIR] [--rounds 5]`.

The state is that of a GPT of 125 million parameters in fp32 with Adam's two moments, 1.5 GB, on the CPU. In turns, each the median of the
rounds: a save against one sequential write of as many bytes with fsync; a load against one read of them, with cold caches (of the files
read) and warm ones; the time that an asynchronous save blocks training, from its second on, against copies of the state in memory: copy
and hand-over, and the completion at a later step. --scale makes a smaller state.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from command_line import count, positive

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.async_writer import AsyncWriter

HIDDEN, LAYERS, VOCABULARY, POSITIONS = 768, 12, 50304, 1024
CHUNK = 16 * 2**20  # bytes that the plain reader and writer move at a time


def state_of(scale: float) -> dict[str, ShardedTensor]:
    """Weights and both moments, layer by layer as a training has them."""
    vocabulary, layers = int(VOCABULARY * scale), max(1, int(LAYERS * scale))
    whole = {"embedding": (vocabulary, HIDDEN), "positions": (POSITIONS, HIDDEN), "norm": (HIDDEN,)}
    layer = {
        "qkv": (3 * HIDDEN, HIDDEN),
        "proj": (HIDDEN, HIDDEN),
        "fc1": (4 * HIDDEN, HIDDEN),
        "fc2": (HIDDEN, 4 * HIDDEN),
        "norm": (HIDDEN,),
    }
    found = {}
    for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        for name, shape in whole.items():
            found[prefix + name] = ShardedTensor.from_rank_offsets(prefix + name, torch.randn(shape))
        for name, shape in layer.items():
            for number in range(layers):
                place = (0, number, layers)
                key = f"{prefix}layers.{name}"
                found[f"{key}.{number}"] = ShardedTensor.from_rank_offsets(key, torch.randn(shape), place, prepend_axis_num=1)
    return found


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Bench:
    def __init__(self, folder: Path, scale: float) -> None:
        self.folder = folder
        self.state = state_of(scale)
        self.bytes = sum(value.data.nbytes for value in self.state.values() if value.data is not None)
        self.copies = {name: value.data.clone() for name, value in self.state.items() if value.data is not None}
        self.plain = folder / "plain"
        self.chunk = memoryview(bytearray(CHUNK))
        self.writer = AsyncWriter()
        self.times: dict[str, list[float]] = {}

    def _fresh(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()  # what the one before left to write is not this one's to pay for
        return folder

    def plain_write(self) -> None:
        with open(self.plain, "wb", buffering=0) as file:
            for start in range(0, self.bytes, CHUNK):
                file.write(self.chunk[: min(CHUNK, self.bytes - start)])
            os.fsync(file.fileno())

    def plain_read(self) -> None:
        with open(self.plain, "rb", buffering=0) as file:
            while file.readinto(self.chunk):
                pass

    def memory_copy(self) -> None:
        for name, value in self.state.items():
            assert value.data is not None
            self.copies[name].copy_(value.data)

    def forget(self) -> None:
        """The files are no longer in the page cache."""
        os.sync()
        for path in (self.plain, *(self.folder / "save").iterdir()):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def load(self) -> None:
        dist_checkpointing.load(dict(self.state), self.folder / "save")

    def async_save(self) -> float:
        """Seconds for which it blocks."""
        folder = self._fresh("beside")
        began = time.perf_counter()
        pending = dist_checkpointing.begin_save(dict(self.state), folder)
        self.writer.start(pending)
        blocked = time.perf_counter() - began
        while not self.writer.has_ended():
            time.sleep(0.01)
        return blocked + seconds(lambda: pending.commit(self.writer.result))

    def note(self, name: str, taken: float) -> None:
        self.times.setdefault(name, []).append(taken)

    def round(self, number: int) -> None:
        self._fresh("nothing")
        self.plain.unlink(missing_ok=True)
        self.note("write", seconds(self.plain_write))
        folder = self._fresh("save")
        self.note("save", seconds(lambda: dist_checkpointing.save(dict(self.state), folder)))
        self.forget()
        self.note("read cold", seconds(self.plain_read))
        self.note("load cold", seconds(self.load))
        self.note("read warm", seconds(self.plain_read))
        self.note("load warm", seconds(self.load))
        blocked = self.async_save()
        if number:  # the first one makes the memory and waits for nothing of its worker, which starts beside it
            self.note("copy", seconds(self.memory_copy))
            self.note("blocked", blocked)


def main() -> None:
    parser = argparse.ArgumentParser(description="Saving and loading against plain files.")
    parser.add_argument("--folder", help="on the disk to measure; default: a temporary one")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--scale", type=positive, default=1.0, help="of the state")
    given = parser.parse_args()
    if given.folder is not None and not Path(given.folder).is_dir():
        parser.error(f"--folder {given.folder}: there is no such folder")
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        bench = Bench(Path(name), given.scale)
        try:
            for number in range(given.rounds + 1):
                bench.round(number)
        finally:
            bench.writer.close()
    median = {name: statistics.median(taken[-given.rounds :]) for name, taken in bench.times.items()}
    gigabytes = bench.bytes / 1e9
    print(f"{gigabytes:.2f} GB, torch {torch.__version__}, median of {given.rounds}")
    for ours, yardstick in (("save", "write"), ("load cold", "read cold"), ("load warm", "read warm")):
        rates = [gigabytes / median[name] for name in (ours, yardstick)]
        print(f"{ours}: {rates[0]:.2f} GB/s, plain {yardstick} {rates[1]:.2f} GB/s, ratio {rates[0] / rates[1]:.2f}")
    copies = median["blocked"] / median["copy"]
    print(f"async save blocks for {median['blocked']:.3f} s, a copy in memory takes {median['copy']:.3f} s: {copies:.2f} copies")
    print(json.dumps({name: [round(value, 3) for value in taken] for name, taken in bench.times.items()}))


if __name__ == "__main__":
    main()
