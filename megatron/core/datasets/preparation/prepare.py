"""The whole way from text to pairs: read, tokenize, write, commit a shard, finish; or go on where a killed run has stopped.

Everything is written into a working folder (working_folder.py). After each shard, a fixed amount of text, what is there is made safe
and noted; a later run cuts the files back to that note and reads on behind it. So the bytes are those of an unbroken run, whatever the
number of workers or the size of shards. The final names are given at the very end.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preparation.interruption import check_stopped
from megatron.core.datasets.preparation.pair_metadata import PairMetadata, get_meta_path, read_metadata
from megatron.core.datasets.preparation.pair_writer import PairWriter, publish
from megatron.core.datasets.preparation.progress import Progress, counted
from megatron.core.datasets.preparation.records import EncodedBatch, Encoder, TextRules
from megatron.core.datasets.preparation.safe_files import HashedFile, WriteError
from megatron.core.datasets.preparation.text_input import (
    BATCH_BYTES,
    Batch,
    InputError,
    InputFile,
    Position,
    is_stream,
    read_batches,
    size_on_disk,
)
from megatron.core.datasets.preparation.workers import encode_all
from megatron.core.datasets.preparation.working_folder import ResumeError, State, WorkingFolder, plan_fingerprint
from megatron.core.tokenizers import MegatronTokenizer, tokenizer_record
from megatron.core.tokenizers.fingerprint import META_SUFFIX

SHARD_BYTES = 64 << 20
SUFFIXES = (".bin", META_SUFFIX, ".idx")
REFUSED = "rejected.txt"


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Job:
    """What to prepare, and how.

    files            as find_files gives them
    output_prefix    the pairs are `<output_prefix>_<key>_<level>`
    tokenizer_flags  the flags that describe the tokenizer, for the .meta.json; `tokenizer_type` among them
    on_bad_record    "fail" or "skip" (and list them in `<output_prefix>.rejected.txt`)
    workers          tokenizing processes; 0: none beside this one
    resume           go on with what a killed run left
    shard_bytes      of text between two commits: what a kill costs at most
    """

    files: list[str]
    output_prefix: str
    tokenizer: MegatronTokenizer
    rules: TextRules = field(default_factory=TextRules)
    tokenizer_flags: dict[str, Any] = field(default_factory=dict)
    on_bad_record: str = "fail"
    workers: int = 1
    resume: bool = False
    shard_bytes: int = SHARD_BYTES
    batch_bytes: int = BATCH_BYTES
    log_interval: int = 1000
    say: Callable[[str], None] = say_on_stderr

    @property
    def names(self) -> list[str]:
        """What each key's files are called behind the output prefix."""
        return [f"{key}_{self.rules.level}" for key in self.rules.json_keys]

    def final_prefix(self, name: str) -> str:
        return f"{self.output_prefix}_{name}"

    @property
    def streamed(self) -> bool:
        """Whether the input cannot be read a second time."""
        return any(map(is_stream, self.files))


def prepare(job: Job) -> None:
    """Write the pairs. Raises InputError, ResumeError, WriteError, WorkerDeathError; what can be gone on with then stays, and is noted."""
    encoder = Encoder(job.tokenizer, job.rules)
    if job.resume and job.streamed:
        raise ResumeError("--resume: standard input and pipes cannot be read a second time; write the text to a file first")
    plan = _plan(job, encoder)
    folder = WorkingFolder(job.output_prefix)
    if job.resume and not os.path.isdir(folder.path) and _is_finished(job, plan):
        job.say(f"--resume: nothing is left to do, {', '.join(map(job.final_prefix, job.names))} came from this very input")
        return
    with folder.locked():
        state = _take_over(job, folder, plan)
        try:
            if not state.finished:
                _Run(job, encoder, folder, state, plan).go()
            _publish(job, folder)
        except BaseException as error:
            _explain_what_is_left(error, job, folder)
            raise
        folder.remove()


def _plan(job: Job, encoder: Encoder) -> dict[str, Any]:
    inputs = [{"path": path} if is_stream(path) else InputFile.look_at(path).as_json() for path in job.files]
    tokenizer = tokenizer_record(job.tokenizer) | {"eod": encoder.eod}
    return {"inputs": inputs, "flags": _as_json(asdict(job.rules)), "tokenizer": tokenizer}


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))  # tuples become lists, as they come back from a file


def _is_finished(job: Job, plan: dict[str, Any]) -> bool:
    for prefix in map(job.final_prefix, job.names):
        metadata = read_metadata(prefix) if IndexedDataset.exists(prefix) else None
        if metadata is None or metadata.source.get("fingerprint") != plan_fingerprint(plan):
            return False
    return True


def _take_over(job: Job, folder: WorkingFolder, plan: dict[str, Any]) -> State:
    """The state to go on from; that of a new run where there is none. Raises ResumeError."""
    state = folder.unfinished()
    if state is None:
        try:
            folder.begin(plan)
        except OSError:
            folder.remove()
            raise
        if job.resume:
            job.say(f"--resume: {folder.path} holds nothing that was made safe, starting from the beginning")
        return State()
    done = f"{counted(state.documents, 'document')} ({state.bytes_read / 1e6:.1f} MB of input)"
    if not job.resume:
        raise ResumeError(f"{folder.path} holds an unfinished run of {done}: go on with --resume, or remove that folder to start again")
    folder.check_plan(plan)
    if state.refused and job.on_bad_record == "fail":
        raise ResumeError(f"--resume: {counted(state.refused, 'record')} were skipped so far; go on with --on-bad-record skip")
    where = f"{job.files[state.position.file]}:{state.position.lines + 1}" if not state.finished else "the names of the finished files"
    job.say(f"--resume: taking over {done}, going on with {where}")
    return state


class _Run:
    """One run of the tool over what is left of the input."""

    def __init__(self, job: Job, encoder: Encoder, folder: WorkingFolder, state: State, plan: dict[str, Any]) -> None:
        self.job, self.encoder, self.folder, self.state, self.plan = job, encoder, folder, state, plan
        total_bytes = 0 if job.streamed else sum(map(size_on_disk, job.files))
        self.progress = Progress(job.log_interval, total_bytes, state.bytes_read, state.documents)
        self.writers: list[PairWriter] = []
        self.refused: HashedFile
        self.first_refused = ""
        self.uncommitted = 0  # bytes of text

    def go(self) -> None:
        with ExitStack() as stack:
            for name in self.job.names:
                self.writers.append(PairWriter(self.folder.file(name), self.encoder.dtype, self.state.pairs.get(name)))
                stack.callback(self.writers[-1].close)
            self.refused = HashedFile(self.folder.file(REFUSED), **self._refused_so_far())
            stack.callback(self.refused.close)
            batches = read_batches(self.job.files, self.state.position, self.job.batch_bytes)
            for batch, encoded in stack.enter_context(closing(encode_all(batches, self.encoder, self.job.workers))):
                self._take(batch, encoded)
                check_stopped()
            self._finish()

    def _refused_so_far(self) -> dict[str, Any]:
        record = self.state.refused_file
        return {} if record is None else {"size": record["bytes"], "sha256": record["sha256"]}

    def _take(self, batch: Batch, encoded: EncodedBatch) -> None:
        """Refuse, append, count, and commit where a shard is full."""
        for line, reason in encoded.refused:
            where = f"{'<stdin>' if batch.path == '-' else batch.path}:{line}: {reason}"
            if self.job.on_bad_record == "fail":
                raise InputError(where)
            self.first_refused = self.first_refused or where
            self.refused.write((where.replace("\n", "\\n") + "\n").encode("utf-8", "backslashreplace"))
            self.state.refused += 1
        for writer, key in zip(self.writers, encoded.keys):
            writer.add(key)
        self.state.documents += len(encoded.keys[0].sequences)
        self.state.position, self.state.bytes_read = batch.after, batch.bytes_read
        self.progress.add(batch, encoded)
        self.uncommitted += len(batch.text)
        if self.uncommitted >= self.job.shard_bytes and not self.job.streamed:
            self._commit()

    def _commit(self) -> None:
        self.state.pairs = {name: writer.state() for name, writer in zip(self.job.names, self.writers)}
        self.refused.sync()
        self.state.refused_file = self.refused.record()
        self.folder.commit(self.state)
        self.uncommitted = 0

    def _finish(self) -> None:
        if self.state.documents == 0:
            skipped = f": {counted(self.state.refused, 'record')} skipped, the first was {self.first_refused}" if self.state.refused else ""
            raise InputError(f"0 documents written from {', '.join(self.job.files[:5])}{skipped}")
        empty = sum(writer.empty_documents for writer in self.writers)
        for key, name, writer in zip(self.job.rules.json_keys, self.job.names, self.writers):
            bin_record, idx_record = writer.finish()
            flags = {**_as_json(asdict(self.job.rules)), **_as_json(self.job.tokenizer_flags), "json_keys": [key]}
            tokenizer = {name: value for name, value in self.plan["tokenizer"].items() if name != "eod"}
            source = {"fingerprint": plan_fingerprint(self.plan), "files": len(self.job.files), "rejected": self.state.refused}
            metadata = PairMetadata(str(self.encoder.dtype), writer.counts, tokenizer, flags, source, bin_record, idx_record)
            metadata.write(get_meta_path(self.folder.file(name)))
        self.state.finished = True
        self.folder.commit(self.state)
        tokens = sum(writer.counts["tokens"] for writer in self.writers)
        ending = f"{tokens} tokens of {self.encoder.dtype} in {', '.join(map(self.job.final_prefix, self.job.names))}"
        if empty:
            ending += f", {counted(empty, 'text')} {'was' if empty == 1 else 'were'} empty"
        if self.state.refused:
            ending += f", skipped {counted(self.state.refused, 'record')}: see {self.job.output_prefix}.{REFUSED}"
        self.progress.say(ending)


def _publish(job: Job, folder: WorkingFolder) -> None:
    refused, final = folder.file(REFUSED), f"{job.output_prefix}.{REFUSED}"
    if os.path.exists(refused):
        with contextlib.suppress(FileNotFoundError):  # one of an earlier run says nothing about this one
            os.unlink(final)
        if os.path.getsize(refused):
            os.replace(refused, final)
    for name in job.names:
        publish(folder.file(name), job.final_prefix(name), SUFFIXES)


def _explain_what_is_left(error: BaseException, job: Job, folder: WorkingFolder) -> None:
    """Remove what no later run can use, or say how it goes on."""
    state = folder.unfinished()
    if state is None:
        folder.remove()
        return
    skip = " --on-bad-record skip" if isinstance(error, InputError) and job.on_bad_record == "fail" else ""
    room = "free some space, then " if isinstance(error, WriteError) else ""
    error.add_note(f"{counted(state.documents, 'document')} are safe in {folder.path}: {room}go on with --resume{skip}")


def count_rates(job: Job, workers_to_check: list[int], max_documents: int) -> Iterator[tuple[int, str, float]]:
    """For each number of workers: that number, the rates as a line, and documents per second, over the first documents. Writes nothing."""
    if job.streamed:
        raise InputError("--find-optimal-num-workers reads the input several times: give it files, not a pipe")
    encoder = Encoder(job.tokenizer, job.rules)
    for workers in workers_to_check:
        progress = Progress(sys.maxsize, 0)
        with closing(encode_all(read_batches(job.files, Position(), job.batch_bytes), encoder, workers)) as results:
            for batch, encoded in results:
                if encoded.refused and job.on_bad_record == "fail":
                    line, reason = encoded.refused[0]
                    raise InputError(f"{batch.path}:{line}: {reason}")
                progress.add(batch, encoded)
                check_stopped()
                if progress.documents >= max_documents:
                    break
        if progress.documents == 0:
            raise InputError(f"0 documents in {', '.join(job.files[:5])}")
        yield workers, progress.rates(), progress.documents_per_second()
