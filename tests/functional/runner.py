"""Run a tiny training: in this process (fast), or in processes of its own, with torchrun or without.
train(*on(corpus, "--bf16 --train-iters 30", f"--save {folder}")).losses() is the list of its losses.
"""

import contextlib
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.dist_checkpointing import load_plain_tensors
from tests.conftest import ROOT
from tests.ports import free_port

VOCAB = 100  # NullTokenizer: ids 0 .. 99, and 100 ends documents
LEARNING = "--train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1"
TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    f"--global-batch-size 4 {LEARNING} --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --tokenizer-type NullTokenizer "
    f"--vocab-size {VOCAB} --split 80,10,10 --eval-iters 0 --log-interval 1 --num-workers 0 --seed 7 "
    "--no-create-attention-mask-in-dataloader"
)
WAIT = 120  # seconds that a process of a test may take at most


def write_corpus(prefix: Path, vocab: int = VOCAB, documents: int = 60, seed: int = 0) -> Path:
    """A corpus that can be learned: in each document the next id is the last plus the document's step, most of the time."""
    random = np.random.RandomState(seed)
    with IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.int32) as builder:
        for length in random.randint(40, 400, documents):
            steps = np.where(random.rand(length) < 0.9, random.randint(1, 4), random.randint(0, vocab, length))
            tokens = np.append((random.randint(0, vocab) + np.cumsum(steps)) % vocab, vocab)
            builder.add_document(torch.from_numpy(tokens), [len(tokens)])
        builder.finalize(get_idx_path(str(prefix)))
    return prefix


@dataclass
class Result:
    """How a training ended: exit code, what it printed, what it wrote to --metrics-file."""

    code: int
    out: str
    err: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "evaluation" not in row]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "evaluation" in row]

    def losses(self) -> list[float]:
        return self.column("lm_loss")

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.steps]

    def __post_init__(self) -> None:
        self.errors = [text for text in self.err.splitlines() if text.startswith("ERROR")]


def argv(*words: str | Path, base: str = TINY) -> list[str]:
    """The command line `base` and more of it: each of `words` is a path, or flags as one types them. Later flags win."""
    more = [part for word in words for part in ([str(word)] if isinstance(word, Path) else shlex.split(word))]
    return shlex.split(base) + more


def on(corpus: Path, *words: str | Path) -> tuple[str | Path, ...]:
    """Flags to train on `corpus`, its index cached beside it."""
    return ("--data-path", corpus, "--data-cache-path", corpus.parent / "cache", *words)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def train(*words: str | Path, script: str = "pretrain_gpt", base: str = TINY, metrics: Path | None = None) -> Result:
    """Train in this process with `script`'s functions. The result's rows are those of the file `metrics`, a fresh one by default."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = metrics or Path(folder) / "metrics.jsonl"
        with _captured() as (out, err), mock.patch.object(sys, "argv", [script, *argv(*words, base=base), "--metrics-file", str(metrics)]):
            code = _call_pretrain(script)
            out.flush()
            err.flush()
        said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
        return Result(code, said, complained, read_rows(metrics))


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.TextIOWrapper, io.TextIOWrapper]]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        yield out, err


def _call_pretrain(script: str) -> int:
    module = importlib.import_module(script)
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    defaults = dict(getattr(module, "LLAMA_DEFAULTS", {}))
    try:
        pretrain(
            module.train_valid_test_datasets_provider,
            module.model_provider,
            ModelType.encoder_or_decoder,
            module.forward_step,
            extra_args_provider=getattr(module, "add_arguments", None),
            args_defaults=defaults,
        )
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def environment(on_gpu: bool = False, **more: str) -> dict[str, str]:
    """This process's environment less what a launcher set, one thread each; GPUs hidden unless asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_"))}
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | hidden | more


def torchrun(processes: int, *words: str | Path, script: str = "pretrain_gpt.py", base: str = TINY, on_gpu: bool = False) -> Result:
    """Train through torch.distributed.run."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        with Processes(on_gpu) as started:
            child = started.torchrun(processes, *words, "--metrics-file", metrics, script=script, base=base)
            return finished(child, metrics)


def finished(child: subprocess.Popen, metrics: Path | None = None, timeout: float = WAIT) -> Result:
    """Wait for a process to end."""
    out, err = child.communicate(timeout=timeout)
    return Result(child.returncode, out, err, read_rows(metrics) if metrics else [])


class Processes:
    """Starts trainings in processes of their own, on the CPU or on GPUs; none outlives the `with` block."""

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self.children: list[subprocess.Popen] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate()

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen:
        child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.children.append(child)
        return child

    def torchrun(self, processes: int, *words: str | Path, script: str = "pretrain_gpt.py", base: str = TINY) -> subprocess.Popen:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(free_port())]
        return self._start([sys.executable, *launcher, script, *argv(*words, base=base)], environment(self.on_gpu))

    def alone(self, *words: str | Path, script: str = "pretrain_gpt.py") -> subprocess.Popen:
        """One process, no launcher."""
        return self._start([sys.executable, script, *argv(*words)], environment(self.on_gpu))

    def ranks(self, processes: int, *words: str | Path, script: str = "pretrain_gpt.py") -> list[subprocess.Popen]:
        """One process a rank, started side by side with nobody who watches over them (as SLURM does)."""
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        return [
            self._start([sys.executable, script, *argv(*words)], environment(self.on_gpu, RANK=str(rank), LOCAL_RANK=str(rank), **meet))
            for rank in range(processes)
        ]


def wait_for_rows(path: Path, number: int, is_alive: Callable[[], bool]) -> None:
    """Until the metrics file has that many rows: the training is in its loop."""
    end = time.monotonic() + WAIT
    while len(read_rows(path)) < number:
        assert is_alive(), "the training ended early"
        assert time.monotonic() < end, "the training did not get going"
        time.sleep(0.05)


def checkpoint_tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole: weights and optimizer state."""
    return load_plain_tensors(folder / f"iter_{iteration:07d}")


def assert_equal_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """The same keys, and every tensor equal to the bit."""
    assert left.keys() == right.keys()
    differing = [key for key in left if not torch.equal(left[key], right[key])]
    assert not differing, f"{len(differing)} of {len(left)} tensors differ, first {differing[0]}"


def tracker(folder: Path) -> str:
    return (folder / "latest_checkpointed_iteration.txt").read_text()


def checkpoints(folder: Path) -> list[str]:
    """Names under which complete checkpoints stand."""
    return sorted(path.name for path in folder.glob("iter_*") if path.suffix == "")
