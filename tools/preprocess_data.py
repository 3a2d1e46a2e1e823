#!/usr/bin/env python3
"""JSON lines to token datasets: text in, `<output-prefix>_<key>_document.bin/.idx` out.

One process reads lines and writes ids, `--workers` processes tokenize batches of lines in between. The order is that of the input,
memory does not grow with it, and the result does not depend on the number of workers. The pair gets its final names at the very end.
Torch-free.
"""

import argparse
import glob
import gzip
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path, optimal_dtype
from megatron.core.optional_imports import require
from megatron.core.tokenizers import TOKENIZER_TYPES, MegatronTokenizer, build_tokenizer

SUFFIXES = (".jsonl", ".json", ".ndjson")
BATCH_BYTES = 1 << 20
BATCHES_AHEAD = 3  # per worker
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InputError(ValueError):
    """Input that cannot be prepared; the message names path:line."""


@dataclass(frozen=True)
class Batch:
    """Consecutive lines of one file, from line number `first_line` (counted from 1) on."""

    path: str
    first_line: int
    lines: list[bytes]
    bytes_read: int  # of all input so far, as it lies on disk


@dataclass(frozen=True)
class Encoded:
    """One key of a batch: ids back to back, the length of each sequence, the number of sequences of each document."""

    tokens: np.ndarray
    lengths: list[int]
    sequences: list[int]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("input")
    files = "files of JSON lines (.jsonl, .json, each also .gz), or quoted patterns of them, taken in sorted order"
    group.add_argument("--input", required=True, nargs="+", help=files)
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take text from; each gives a pair of its own")
    group.add_argument("--split-sentences", action="store_true", help="store each sentence as a sequence of its own (nltk's Punkt)")
    group.add_argument("--lang", default="english", help="language of the sentence model")
    group.add_argument("--keep-newlines", action="store_true", help="with --split-sentences: keep the white space between sentences")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="path of the pair, without the suffix")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, choices=list(TOKENIZER_TYPES))
    group.add_argument("--tokenizer-model", help="its file, folder or name")
    group.add_argument("--vocab-file", help="vocab.json")
    group.add_argument("--merge-file", help="merges.txt")
    group.add_argument("--vocab-size", type=int, help="number of ids, where the tokenizer's files do not say")
    group.add_argument("--vocab-extra-ids", type=int, default=0, help="sentinel ids to add")
    group.add_argument("--tokenizer-special-tokens", dest="special_tokens", nargs="+", help="special tokens to add")
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts words")
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000, help="ids that TikTokenizer keeps for special tokens")
    group.add_argument("--tokenizer-hf-no-include-special-tokens", action="store_true", help="HuggingFaceTokenizer adds no BOS or EOS")
    group.add_argument("--trust-remote-code", action="store_true", help="let the hub's own code run")
    group = parser.add_argument_group("run")
    group.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="tokenizing processes (default: the cores)")
    group.add_argument("--partitions", type=int, default=1, help="accepted for compatibility: input is streamed to all workers")
    group.add_argument("--keep-sequential-samples", action="store_true", help="accepted for compatibility: the order is always kept")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between progress lines")
    args = parser.parse_args(argv)
    for name in ("workers", "partitions", "log_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.keep_newlines and not args.split_sentences:
        parser.error("--keep-newlines has a meaning only with --split-sentences")
    if duplicates := sorted({key for key in args.json_keys if args.json_keys.count(key) > 1}):
        parser.error(f"--json-keys {' '.join(duplicates)} given twice")
    try:
        args.files = find_files(args.input)
    except InputError as error:
        parser.error(str(error))
    missing = [f"--{name.replace('_', '-')}" for name in TOKENIZER_TYPES[args.tokenizer_type] if getattr(args, name) is None]
    if missing:
        parser.error(f"--tokenizer-type {args.tokenizer_type} needs {' and '.join(missing)}")
    if not Path(args.output_prefix).absolute().parent.is_dir():
        parser.error(f"--output-prefix {args.output_prefix}: the folder {Path(args.output_prefix).absolute().parent} does not exist")
    return args


def find_files(patterns: list[str]) -> list[str]:
    """The files that `patterns` name, those of a pattern sorted."""
    files = []
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) and not os.path.isdir(pattern) else sorted(glob.glob(pattern))
        if not found:
            raise InputError(f"--input {pattern}: no such file")
        files += found
    for path in files:
        if not path.removesuffix(".gz").endswith(SUFFIXES):
            raise InputError(f"--input {path}: must be JSON lines, named {', '.join(SUFFIXES)}, each also with .gz")
    return files


def read_batches(files: list[str]) -> Iterator[Batch]:
    """All lines of all files in order, about a megabyte a batch; never two files in one."""
    read_before = 0
    for path in files:
        with open(path, "rb") as raw:
            stream: Any = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            position = raw.tell if raw.seekable() else lambda: 0
            first_line = 1
            try:
                while lines := stream.readlines(BATCH_BYTES):
                    yield Batch(path, first_line, lines, read_before + position())
                    first_line += len(lines)
            except (OSError, EOFError) as error:
                raise InputError(f"{path}:{first_line}: cannot be read on from about here: {error}") from None
            read_before += position()


class Encoder:
    """Lines to ids. Lives in the workers; what it needs comes by fork."""

    def __init__(self, tokenizer: MegatronTokenizer, args: argparse.Namespace) -> None:
        self.tokenizer = tokenizer
        self.keys: list[str] = args.json_keys
        self.dtype = optimal_dtype(tokenizer.vocab_size)
        self.eod = tokenizer.eod if args.append_eod else None
        self.split = sentence_splitter(args.lang, args.keep_newlines) if args.split_sentences else None

    def encode(self, batch: Batch) -> list[Encoded]:
        """One Encoded for each key. Raises InputError that names the line."""
        try:
            return self._encode_lines(batch.lines)
        except ValueError:
            # the first bad line is the one to report, whether its JSON or its text is bad
            for number, line in enumerate(batch.lines, batch.first_line):
                try:
                    self._encode_lines([line])
                except ValueError as error:
                    raise InputError(f"{batch.path}:{number}: {error}") from None
            raise

    def _encode_lines(self, lines: list[bytes]) -> list[Encoded]:
        columns: list[list[str]] = [[] for _ in self.keys]
        for line in lines:
            if line.strip():
                for column, text in zip(columns, parse_line(line, self.keys)):
                    column.append(text)
        return [self._encode_texts(column) for column in columns]

    def _encode_texts(self, texts: list[str]) -> Encoded:
        parts = [self.split(text) for text in texts] if self.split else [[text] for text in texts]
        encoded = iter(self.tokenizer.tokenize_batch([part for document in parts for part in document]))
        tokens: list[int] = []
        lengths: list[int] = []
        sequences: list[int] = []
        for document in parts:
            ids = [sequence for sequence in (next(encoded) for _ in document) if sequence]
            if ids and self.eod is not None:
                ids[-1] = [*ids[-1], self.eod]
            for sequence in ids:
                tokens += sequence
                lengths.append(len(sequence))
            sequences.append(len(ids))  # an empty document stays one, of no sequences
        return Encoded(np.array(tokens, dtype=self.dtype), lengths, sequences)


def parse_line(line: bytes, keys: list[str]) -> list[str]:
    """The texts under `keys` of the JSON object in `line`. Raises InputError that says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise InputError(f"not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"a {type(record).__name__}, each line must be a JSON object such as {{\"text\": \"...\"}}")
    texts = []
    for key in keys:
        if key not in record:
            raise InputError(f"has no key {key!r} (--json-keys), only {', '.join(map(repr, record)) or 'an empty object'}")
        text = record[key]
        if not isinstance(text, str):
            raise InputError(f"key {key!r} holds a {type(text).__name__}, it must be text")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
                raise InputError(f"key {key!r} is not valid Unicode: {error}") from None
        texts.append(text)
    return texts


def sentence_splitter(language: str, keep_white_space: bool) -> Callable[[str], list[str]]:
    """Text to sentences by nltk's Punkt model of `language`."""
    punkt = require("nltk.tokenize.punkt", "--split-sentences")
    if not re.fullmatch(r"\w+", language):
        raise ValueError(f"--lang {language!r} must be the name of a language, for example english")
    try:
        model = punkt.PunktTokenizer(language)
    except (LookupError, OSError):
        where = f"set NLTK_DATA to a folder with tokenizers/punkt_tab/{language}"
        raise ValueError(f"--split-sentences: no Punkt model for --lang {language}; {where}") from None

    def split(text: str) -> list[str]:
        spans = list(model.span_tokenize(text))
        if keep_white_space:
            starts = [0, *(begin for begin, _ in spans[1:])]
            return [text[begin:end] for begin, end in zip(starts, [*starts[1:], len(text)])] if spans else [text]
        return [text[begin:end] for begin, end in spans]

    return split


_encoder: Encoder  # of this process, set before the workers are forked


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode(batch: Batch) -> list[Encoded]:
    return _encoder.encode(batch)


def encode_all(batches: Iterator[Batch], workers: int) -> Generator[tuple[Batch, list[Encoded]], None, None]:
    """Each batch with its ids, in order. Raises InputError of the first bad line, RuntimeError when a worker has died."""
    pending: deque[tuple[Batch, Future]] = deque()
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _start_worker)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # Python loses a signal that comes while it forks
    pool.submit(os.getpid)  # forks the workers
    processes = multiprocessing.active_children()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
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
        raise RuntimeError(_obituary(processes)) from None
    except BaseException:
        for process in processes:
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _result(future: Future, processes: list[Any]) -> list[Encoded]:
    """The future's result. A pool whose worker died while its queue was full may never say so (CPython before 3.12): looked for here."""
    while True:
        try:
            return future.result(timeout=1.0)
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


class Progress:
    """A line on stderr every `interval` documents: documents, rates, and the time that is left."""

    def __init__(self, interval: int, total_bytes: int) -> None:
        self.interval, self.total_bytes = interval, total_bytes
        self.started = time.perf_counter()
        self.documents = self.text_bytes = self.tokens = self.empty = 0
        self.next_line = interval

    def add(self, batch: Batch, encoded: list[Encoded]) -> None:
        self.documents += len(encoded[0].sequences)
        self.empty += sum(count == 0 for key in encoded for count in key.sequences)
        self.tokens += sum(len(key.tokens) for key in encoded)
        self.text_bytes += sum(map(len, batch.lines))
        if self.documents >= self.next_line:
            self.next_line = self.documents - self.documents % self.interval + self.interval
            seconds = time.perf_counter() - self.started
            left = max(0.0, seconds * (self.total_bytes / max(batch.bytes_read, 1) - 1))
            done = 100 * batch.bytes_read / max(self.total_bytes, 1)
            self.say(f"{done:.0f}%, ETA {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}")

    def say(self, ending: str) -> None:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        rates = f"{self.documents / seconds:.0f} docs/s, {self.text_bytes / seconds / 1e6:.1f} MB/s, {self.tokens / seconds:.0f} tokens/s"
        print(f"processed {self.documents} documents ({rates}), {ending}", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> None:
    global _encoder
    # each worker is one thread of work: threads of its own would fight over the same cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    wanted = inspect.signature(build_tokenizer).parameters
    tokenizer = build_tokenizer(**{name: value for name, value in vars(args).items() if name in wanted})
    _encoder = Encoder(tokenizer, args)
    level = "sentence" if args.split_sentences else "document"
    prefixes = [f"{args.output_prefix}_{key}_{level}" for key in args.json_keys]
    progress = Progress(args.log_interval, sum(os.path.getsize(path) for path in args.files))
    with ExitStack() as stack:
        builders = [stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), _encoder.dtype)) for prefix in prefixes]
        for batch, encoded in stack.enter_context(closing(encode_all(read_batches(args.files), args.workers))):
            for builder, key in zip(builders, encoded):
                builder.add_documents(key.tokens, key.lengths, key.sequences)
            progress.add(batch, encoded)
            if _stopped_by:  # what a handler raises inside of a finalizer is lost
                raise KeyboardInterrupt
        if progress.documents == 0:
            raise InputError(f"0 documents written from {', '.join(args.files)}")
        for builder, prefix in zip(builders, prefixes):
            builder.finalize(get_idx_path(prefix))
    empty = f", {progress.empty} texts were empty" if progress.empty else ""
    progress.say(f"{progress.tokens} tokens of {np.dtype(_encoder.dtype)} in {', '.join(prefixes)}{empty}")


_stopped_by = ""  # a signal's name


def _stop(number: int, _: Any) -> NoReturn:
    global _stopped_by
    for other in STOP_SIGNALS:  # once is enough: a second one must not cut the cleaning short
        signal.signal(other, signal.SIG_IGN)
    _stopped_by = signal.Signals(number).name
    raise KeyboardInterrupt


def main() -> None:
    args = parse_args()
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    try:
        run(args)
        return
    except (ValueError, RuntimeError, OSError) as error:
        message = str(error)
    except KeyboardInterrupt:
        message = f"stopped by {_stopped_by}, nothing is written"
    print(f"error: {message}", file=sys.stderr, flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(1)  # without waiting for the pool, which may be in any state


if __name__ == "__main__":
    main()
