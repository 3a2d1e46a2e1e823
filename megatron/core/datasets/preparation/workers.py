"""Processes that tokenize batches, one thread each (or two, see _own_threads): results in order, deaths noticed and named."""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megatron.core.datasets.preparation.interruption import STOP_SIGNALS
from megatron.core.datasets.preparation.records import EncodedBatch, Encoder
from megatron.core.datasets.preparation.text_input import Batch
from megatron.core.tokenizers.bpe_tokenizers import HuggingFaceTokenizer

BATCHES_AHEAD = 3  # per worker
LOOK_SECONDS = 1.0  # between looks at whether the workers live


class WorkerDeathError(RuntimeError):
    """A worker process is gone. The message says which and how."""


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_all(batches: Iterator[Batch], encoder: Encoder, workers: int) -> Generator[tuple[Batch, EncodedBatch], None, None]:
    """Each batch with its ids, in order. `workers` 0: in this process. Raises WorkerDeathError."""
    if workers == 0:
        for batch in batches:
            yield batch, encoder.encode(batch)
        return
    pending: deque[tuple[Batch, Future]] = deque()
    encoder.threads = _own_threads(encoder, workers)
    workers = math.ceil(workers / encoder.threads)
    pool, processes = _start_pool(encoder, workers)
    try:
        for batch in batches:
            pending.append((batch, pool.submit(_encode, batch)))
            if len(pending) > workers * BATCHES_AHEAD:
                done, future = pending.popleft()
                yield done, _result(future, processes)
        while pending:
            done, future = pending.popleft()
            yield done, _result(future, processes)
        pool.shutdown()
    except BrokenProcessPool:
        raise WorkerDeathError(_obituary(processes)) from None
    except BaseException:
        for process in processes:
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _own_threads(encoder: Encoder, workers: int) -> int:
    """Threads that the tokenizer's library runs in each worker. Hugging Face's keep a cache of words, and one for two threads is better
    filled than one for each of two processes (a fifth less time); more threads would wait for the part of the work that is Python's."""
    return 2 if workers > 1 and isinstance(encoder.tokenizer, HuggingFaceTokenizer) else 1


def kill_workers() -> None:
    """End all worker processes at once, whatever state the pool is in."""
    for process in multiprocessing.active_children():
        process.kill()


def _start_pool(encoder: Encoder, workers: int) -> tuple[ProcessPoolExecutor, list[Any]]:
    global _encoder
    _encoder = encoder
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Python loses a signal that comes while it forks
    pool.submit(os.getpid)  # forks the workers
    processes = [process for process in multiprocessing.active_children() if process not in others]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return pool, processes


_encoder: Encoder  # of this process, set before the workers are forked


def _encode(batch: Batch) -> EncodedBatch:
    return _encoder.encode(batch)


def _start_worker() -> None:
    # read by the library when it first tokenizes: no more threads than there are workers for, they would fight over the same cores
    os.environ.setdefault("RAYON_NUM_THREADS", str(_encoder.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if _encoder.threads > 1 else "false")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _result(future: Future, processes: list[Any]) -> EncodedBatch:
    """The future's result. A pool whose worker died while its queue was full may never say so (CPython before 3.12): looked for here."""
    while True:
        try:
            return future.result(timeout=LOOK_SECONDS)
        except TimeoutError:
            if any(process.exitcode is not None for process in processes):
                raise BrokenProcessPool from None


def _obituary(processes: list[Any]) -> str:
    deadline = time.monotonic() + 5
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        code = process.exitcode
        if code not in (None, 0, -signal.SIGTERM):  # by SIGTERM the pool has ended the others
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            hint = "; the kernel does so when memory is short: use fewer --workers" if code == -signal.SIGKILL else ""
            return f"worker {process.pid} died {how}{hint}"
    return "a worker was ended from outside (SIGTERM)"
