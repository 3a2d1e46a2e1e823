"""Text to pairs in this process: what is written for any input, what is refused, and that every interruption can be gone on with."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preparation import interruption, safe_files
from megatron.core.datasets.preparation import prepare as prepare_module
from megatron.core.datasets.preparation.pair_metadata import read_metadata
from megatron.core.datasets.preparation.prepare import prepare
from megatron.core.datasets.preparation.safe_files import DamagedFileError, HashedFile, WriteError
from megatron.core.datasets.preparation.text_input import InputError
from megatron.core.datasets.preparation.verification import Expected, verify
from megatron.core.datasets.preparation.working_folder import ResumeError
from tests.unit_tests.datasets.preparation.jobs import EOD, ByteTokenizer, content, documents, make_job, run


def write_texts(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


TEXTS = [f"{i} is not {i * 7}" if i % 9 else "" for i in range(60)]

# what may stand in a line, good or bad; the reference below says which is which
BAD_LINES = st.sampled_from(
    ["{", "[]", '"text"', "5", "null", "nul", '{"text": 1}', '{"text": null}', '{"text": ["a"]}', '{"txt": "a"}', "{}", '{"text": "a"'],
)
ODD_BYTES = st.sampled_from(
    [
        b'{"text": "\xff"}',
        b"\x00",
        b'{"text": "\\ud800"}',
        b"[" * 3000,
        b'{"text": "a"} {}',
        b'{"text": "@"}',
        b"\xef\xbb\xbf{}",
        b'{"text": "~"}',
    ]
)
GOOD_LINES = st.text(alphabet=st.characters(exclude_characters="@~", exclude_categories=["Cs"]), max_size=20).map(
    lambda text: json.dumps({"text": text, "other": [text]})
)
LINES = st.lists(
    st.one_of(
        GOOD_LINES.map(str.encode), BAD_LINES.map(str.encode), ODD_BYTES, st.binary(max_size=12), st.sampled_from([b"", b"  ", b"\r"])
    ),
    max_size=15,
)


def judge(lines: list[bytes]) -> tuple[list[list[int]], list[int]]:
    """The plain twin: the documents that must come out, and the numbers (from 1 on) of the lines that must be refused."""
    good, bad = [], []
    for number, line in enumerate(b"\n".join(lines).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))["text"]
            if not isinstance(text, str) or "@" in text or "~" in text:
                raise ValueError
            ids = list(text.encode())
            good.append([*ids, EOD] if ids else [])
        except (ValueError, KeyError, TypeError, RecursionError):
            bad.append(number)
    return good, bad


@settings(max_examples=100, deadline=None)
@given(LINES, st.integers(1, 200), st.booleans())
def test_any_lines_give_the_right_pair_or_the_right_line(tmp_path_factory, lines, batch_bytes, skip):
    folder = tmp_path_factory.mktemp("fuzz")
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    good, bad = judge(lines)
    options = {"batch_bytes": batch_bytes, "shard_bytes": 1 << 30, "on_bad_record": "skip" if skip else "fail"}
    if bad and not skip:
        with pytest.raises(InputError) as caught:
            run(folder, source, **options)
        assert str(caught.value).startswith(f"{source}:{bad[0]}: ")
    elif not good:
        with pytest.raises(InputError, match="0 documents written from"):
            run(folder, source, **options)
    else:
        run(folder, source, **options)
        assert documents(folder) == good
        assert verify(str(folder / "out_text_document"), Expected()).problems == []
        refused = folder / "out.rejected.txt"
        found = refused.read_text(errors="strict").splitlines() if refused.exists() else []
        assert [line.removeprefix(f"{source}:").partition(": ")[0] for line in found] == [str(number) for number in bad]
        return
    assert content(folder) == {} and not (folder / "out.partial").exists()


BAD_RECORDS = {
    "cut JSON": (b'{"text": "1 2', "not a line of JSON"),
    "missing key": (b'{"txt": "1"}', "has no key 'text' (--json-keys), only 'txt'"),
    "empty object": (b"{}", "only an empty object"),
    "no object": (b'["1"]', "a list, each line must be a JSON object"),
    "no text": (b'{"text": 5}', "key 'text' holds a int, it must be text"),
    "null": (b'{"text": null}', "key 'text' holds a NoneType"),
    "half a character": (b'{"text": "1 \\ud800"}', "key 'text' is not valid Unicode"),
    "Latin-1": (b'{"text": "\xe9"}', "not UTF-8"),
    "deep": (b"[" * 100_000, "not a line of JSON"),
    "refused by the tokenizer": (b'{"text": "@"}', "no @ in this vocabulary"),
    "a broken tokenizer": (b'{"text": "~"}', "the tokenizer cannot take this text: RuntimeError('internal')"),
}


@pytest.mark.parametrize("kind", BAD_RECORDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_kind_of_bad_record_is_named_or_skipped(tmp_path, kind, workers):
    line, message = BAD_RECORDS[kind]
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([b'{"text": "good"}'] * 30 + [line] + [b'{"text": "last"}', line]))
    with pytest.raises(InputError) as caught:
        run(tmp_path, source, workers=workers, shard_bytes=1 << 30)
    assert str(caught.value).startswith(f"{source}:31: ") and message in str(caught.value)
    assert content(tmp_path) == {} and not (tmp_path / "out.partial").exists()
    said: list[str] = []
    run(tmp_path, source, workers=workers, on_bad_record="skip", say=said.append)
    assert len(documents(tmp_path)) == 31 and bytes(documents(tmp_path)[30][:-1]) == b"last"
    first, second = (tmp_path / "out.rejected.txt").read_text().splitlines()
    assert first.startswith(f"{source}:31: ") and second.startswith(f"{source}:33: ") and message in first
    metadata = read_metadata(str(tmp_path / "out_text_document"))
    assert metadata is not None and metadata.source["rejected"] == 2 and metadata.counts["documents"] == 31


def test_a_record_that_is_bad_for_one_key_is_skipped_for_all(tmp_path):
    records = [{"text": str(i), "title": f"t{i}"} for i in range(20)]
    records[7]["title"], records[11]["text"] = "~", "@"
    del records[3]["title"]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    run(tmp_path, tmp_path / "in.jsonl", keys=("title", "text"), on_bad_record="skip", eod=False)
    kept = [i for i in range(20) if i not in (3, 7, 11)]
    assert documents(tmp_path, "text") == [list(str(i).encode()) for i in kept]
    assert documents(tmp_path, "title") == [list(f"t{i}".encode()) for i in kept]
    assert [line.split(":")[1] for line in (tmp_path / "out.rejected.txt").read_text().splitlines()] == ["4", "8", "12"]


def test_only_bad_records_are_an_error_that_shows_the_first(tmp_path):
    (tmp_path / "in.jsonl").write_text("{\n[]\n")
    with pytest.raises(InputError, match=r"0 documents written from .*: 2 records skipped, the first was .*in.jsonl:1: not a line of JSON"):
        run(tmp_path, tmp_path / "in.jsonl", on_bad_record="skip")


@pytest.mark.parametrize("eod", [False, True])
def test_lengths_count_the_end_of_document(tmp_path, eod):
    run(tmp_path, write_texts(tmp_path / "in.jsonl", TEXTS), eod=eod)
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    size = os.path.getsize(tmp_path / "out_text_document.bin")
    assert int(dataset.sequence_lengths.sum()) * dataset.dtype.itemsize == size
    assert documents(tmp_path) == [[*text.encode(), *([EOD] if eod else [])] if text else [] for text in TEXTS]


@pytest.mark.parametrize("vocab_size", [257, 65499, 65500, 65537, 200_000])
def test_an_id_beyond_the_type_of_the_vocabulary_is_never_wrapped(tmp_path, monkeypatch, vocab_size):
    tokenizer = ByteTokenizer(vocab_size)
    highest = vocab_size - 1
    monkeypatch.setattr(tokenizer, "tokenize_batch", lambda texts, threads: [[int(text)] for text in texts])
    source = write_texts(tmp_path / "in.jsonl", [str(highest)])
    run(tmp_path, source, tokenizer=tokenizer, eod=False)
    assert documents(tmp_path) == [[highest]]
    for wrong in (-1, 2**31, 70_000 if vocab_size < 65500 else 2**40):
        write_texts(source, [str(wrong)])
        with pytest.raises(InputError, match=r"in.jsonl:1: the tokenizer gave"):
            run(tmp_path, source, tokenizer=tokenizer, eod=False)


class Killed(BaseException):
    """Stands for a kill: nothing below can clean up after it."""


def kill_at_write(monkeypatch, number: int) -> None:
    """Let the `number`-th write of a file do half of its work, and then end everything."""
    plain, count = HashedFile.write, 0

    def write(self, data):
        nonlocal count
        count += 1
        if count == number:
            plain(self, memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            raise Killed
        plain(self, data)

    monkeypatch.setattr(HashedFile, "write", write)
    monkeypatch.setattr(prepare_module, "_explain_what_is_left", lambda *_: None)


RESUMABLE = [json.dumps({"text": text, "title": str(i)}) for i, text in enumerate(TEXTS)]
RESUMABLE[20] = RESUMABLE[41] = "{"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A source of two files, and what a run without interruption makes of it."""
    folder = tmp_path_factory.mktemp("unbroken")
    for name, lines in (("a.jsonl", RESUMABLE[:35]), ("b.jsonl", RESUMABLE[35:])):
        (folder / name).write_text("\n".join(lines))
    run(folder, folder / "a.jsonl", folder / "b.jsonl", keys=("text", "title"), on_bad_record="skip")
    return folder


@pytest.mark.parametrize("first, step", [(1, 17), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_kill_at_any_write_can_be_gone_on_with(unbroken, tmp_path, monkeypatch, first, step):
    files = [unbroken / "a.jsonl", unbroken / "b.jsonl"]
    expected = content(unbroken)
    number, kills, taken_over = first - step, 0, 0
    while True:
        number += step
        options = {"keys": ("text", "title"), "on_bad_record": "skip", "name": f"n{number}"}
        with monkeypatch.context() as patch:
            kill_at_write(patch, number)
            try:
                run(tmp_path, *files, **options)
                break
            except Killed:
                kills += 1
        assert not any(name.endswith((".bin", ".idx", ".json", ".txt")) for name in content(tmp_path, f"n{number}"))
        said: list[str] = []
        run(tmp_path, *files, resume=True, say=said.append, workers=int(number % 40 == 0), shard_bytes=50 + number, **options)
        taken_over += "taking over" in said[0]
        assert content(tmp_path, f"n{number}") == expected and not (tmp_path / f"n{number}.partial").exists()
    assert kills > 100 / step and kills / 2 < taken_over < kills


def test_a_kill_between_two_final_names_can_be_gone_on_with(unbroken, tmp_path, monkeypatch):
    files, options = [unbroken / "a.jsonl", unbroken / "b.jsonl"], {"keys": ("text", "title"), "on_bad_record": "skip"}
    plain = os.replace
    for allowed in range(7):
        renames = 0

        def replace(source, target, allowed=allowed):
            nonlocal renames
            if ".partial" not in str(target):
                renames += 1
                if renames > allowed:
                    raise Killed
            plain(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            patch.setattr(prepare_module, "_explain_what_is_left", lambda *_: None)
            with pytest.raises(Killed):
                run(tmp_path, *files, name=f"n{allowed}", **options)
        run(tmp_path, *files, name=f"n{allowed}", resume=True, **options)
        assert content(tmp_path, f"n{allowed}") == content(unbroken)


def interrupted(folder: Path, source: Path, monkeypatch, at: int = 60, **options) -> None:
    """Leave an unfinished run behind."""
    with monkeypatch.context() as patch:
        kill_at_write(patch, at)
        with pytest.raises(Killed):
            run(folder, source, **options)


def test_a_second_start_does_not_throw_the_first_away(tmp_path, monkeypatch):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    interrupted(tmp_path, source, monkeypatch)
    with pytest.raises(ResumeError, match=r"out\.partial holds an unfinished run of \d+ documents .*: go on with --resume, or remove"):
        run(tmp_path, source)
    run(tmp_path, source, resume=True)
    assert len(documents(tmp_path)) == len(TEXTS)


def change_text(source, options):
    source.write_text(source.read_text().replace("is not", "is now"))


def change_time(source, options):
    os.utime(source, ns=(1, 1))


CHANGES = {
    "another text": (change_text, "in.jsonl has changed (mtime_ns, head_sha256)"),
    "another time": (change_time, "in.jsonl has changed (mtime_ns)"),
    "a longer file": (lambda source, options: source.write_text(source.read_text() + "\n"), "in.jsonl has changed (size, mtime_ns"),
    "eod": (lambda source, options: options.update(eod=False), "--append-eod was True, now False"),
    "keys": (lambda source, options: options.update(keys=("text", "title")), "--json-keys was ['text'], now ['text', 'title']"),
    "tokenizer": (lambda source, options: options.update(tokenizer=ByteTokenizer(300)), "the tokenizer's fingerprint was"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_resume_refuses_what_would_give_other_bytes(tmp_path, monkeypatch, change):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    options: dict = {}
    interrupted(tmp_path, source, monkeypatch)
    act, message = CHANGES[change]
    act(source, options)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()}
    with pytest.raises(ResumeError) as caught:
        run(tmp_path, source, resume=True, **options)
    assert message in str(caught.value) and "would give other bytes" in str(caught.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out.partial").iterdir()} == before


def test_resume_refuses_other_files_and_takes_moved_ones(tmp_path, monkeypatch):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    interrupted(tmp_path, source, monkeypatch)
    other = write_texts(tmp_path / "other.jsonl", TEXTS[::-1])
    with pytest.raises(ResumeError, match=r"other.jsonl is not .*in.jsonl"):
        run(tmp_path, other, resume=True)
    with pytest.raises(ResumeError, match="--input named 1 files, now 2"):
        run(tmp_path, source, other, resume=True)
    run(tmp_path, source.rename(tmp_path / "moved.jsonl"), resume=True)
    assert len(documents(tmp_path)) == len(TEXTS)


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "missing"])
def test_resume_refuses_files_that_somebody_changed(tmp_path, monkeypatch, damage):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    interrupted(tmp_path, source, monkeypatch)
    ids = tmp_path / "out.partial" / "text_document.bin"
    data = ids.read_bytes()
    ids.write_bytes({"shorter": data[:4], "other bytes": b"\0\1" + data[2:], "missing": b""}[damage])
    if damage == "missing":
        ids.unlink()
    with pytest.raises(DamagedFileError, match=r"out.partial/text_document.bin"):
        run(tmp_path, source, resume=True)


@pytest.mark.parametrize("name", ["state.json", "plan.json"])
@pytest.mark.parametrize("text", ["", "{}", "[]", '{"position": 5}', "\xff"])
def test_notes_that_cannot_be_read_are_refused_by_name(tmp_path, monkeypatch, name, text):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    interrupted(tmp_path, source, monkeypatch)
    (tmp_path / "out.partial" / name).write_text(text, encoding="latin-1")
    with pytest.raises(ResumeError, match=rf"{name}: cannot be understood"):
        run(tmp_path, source, resume=True)


def test_resume_of_nothing_starts_and_of_a_finished_run_does_nothing(tmp_path):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    said: list[str] = []
    run(tmp_path, source, resume=True, say=said.append)
    assert "starting from the beginning" in said[0]
    before = (tmp_path / "out_text_document.bin").stat().st_mtime_ns
    run(tmp_path, source, resume=True, say=said.append)
    assert "nothing is left to do" in said[-1] and (tmp_path / "out_text_document.bin").stat().st_mtime_ns == before
    write_texts(source, TEXTS[:3])  # other input: another pair
    run(tmp_path, source, resume=True)
    assert len(documents(tmp_path)) == 3


def test_a_bad_record_late_in_a_long_run_costs_one_shard(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([json.dumps({"text": text}) for text in TEXTS] + ["{", '{"text": "end"}']))
    with pytest.raises(InputError) as caught:
        run(tmp_path, source)
    (note,) = caught.value.__notes__
    assert "documents are safe in" in note and note.endswith("go on with --resume --on-bad-record skip")
    run(tmp_path, source, resume=True, on_bad_record="skip")
    assert len(documents(tmp_path)) == 61
    interrupted_after_skips = source.read_text().replace("{\n", "", 1)
    assert interrupted_after_skips != source.read_text()


def test_skipped_records_cannot_become_failures_on_resume(unbroken, tmp_path, monkeypatch):
    options = {"keys": ("text", "title"), "on_bad_record": "skip"}
    with monkeypatch.context() as patch:
        kill_at_write(patch, 200)
        with pytest.raises(Killed):
            run(tmp_path, unbroken / "a.jsonl", unbroken / "b.jsonl", **options)
    with pytest.raises(ResumeError, match=r"\d records? were skipped so far"):
        run(tmp_path, unbroken / "a.jsonl", unbroken / "b.jsonl", resume=True, keys=("text", "title"))


def test_pipes_are_not_resumed_and_leave_nothing(tmp_path):
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(ResumeError, match="cannot be read a second time"):
        run(tmp_path, pipe, resume=True)
    assert not (tmp_path / "out.partial").exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    module = "tests.unit_tests.datasets.preparation.jobs"
    program = f"import pathlib, sys; from {module} import run; run(pathlib.Path(sys.argv[1]), sys.argv[2])"
    results: list = []

    def say_and_start_another(line: str) -> None:
        if not results:
            results.append(subprocess.run([sys.executable, "-c", program, tmp_path, source], capture_output=True, text=True, check=False))

    run(tmp_path, source, resume=True, say=say_and_start_another)
    assert results[0].returncode == 1 and "another run is writing there" in results[0].stderr
    assert len(documents(tmp_path)) == len(TEXTS)


@pytest.mark.parametrize("limit", [0, 200, 500, 1000])
def test_a_full_disk_is_named_and_can_be_gone_on_with(tmp_path, monkeypatch, limit):
    """Every file stops at `limit` bytes, as a full disk would stop them."""
    source = write_texts(tmp_path / "in.jsonl", TEXTS * 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with pytest.raises(WriteError, match=r"out\.partial/.*: cannot write: ") as caught:
            run(tmp_path, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert content(tmp_path) == {}
    kept = (tmp_path / "out.partial").exists()
    assert kept == ("free some space, then go on with --resume" in "".join(getattr(caught.value, "__notes__", [])))
    run(tmp_path, source, resume=True)
    assert len(documents(tmp_path)) == 2 * len(TEXTS)


def test_an_old_pair_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    source = write_texts(tmp_path / "in.jsonl", TEXTS)
    run(tmp_path, source, on_bad_record="skip")
    old = content(tmp_path)
    write_texts(source, TEXTS[::-1])
    interrupted(tmp_path, source, monkeypatch)
    assert content(tmp_path) == old
    run(tmp_path, source, resume=True)
    assert documents(tmp_path)[0][:-1] == list(TEXTS[-1].encode())


def test_metadata_says_what_the_pair_is(tmp_path):
    run(tmp_path, write_texts(tmp_path / "in.jsonl", TEXTS), tokenizer_flags={"tokenizer_type": "Bytes", "vocab_size": 257})
    metadata = read_metadata(str(tmp_path / "out_text_document"))
    assert metadata is not None
    assert metadata.tokenizer == {"type": "ByteTokenizer", "fingerprint": ByteTokenizer().fingerprint, "vocab_size": 257}
    tokens = sum(len(text) + 1 for text in TEXTS if text)
    empty = TEXTS.count("")
    assert metadata.counts == {"documents": 60, "sequences": 60 - empty, "tokens": tokens, "empty_documents": empty}
    assert metadata.flags["append_eod"] is True and metadata.flags["json_keys"] == ["text"]
    for name in ("bin", "idx"):
        path = tmp_path / f"out_text_document.{name}"
        assert getattr(metadata, name) == {"bytes": path.stat().st_size, "sha256": safe_files.sha256_of(str(path))}


def test_a_stop_between_batches_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "_stopped_by", "SIGTERM")
    with pytest.raises(interruption.Stopped, match="SIGTERM"):
        run(tmp_path, write_texts(tmp_path / "in.jsonl", TEXTS), shard_bytes=1 << 30)
    assert content(tmp_path) == {} and not (tmp_path / "out.partial").exists()


def test_numbers_of_documents_do_not_matter_to_memory(tmp_path):
    """Documents of one token: their index is written from files, in pieces."""
    from megatron.core.datasets.preparation.pair_writer import PairWriter
    from megatron.core.datasets.preparation.records import Encoded

    ones = np.ones(100_000, dtype=np.int32)
    writer = PairWriter(str(tmp_path / "pair"), np.uint16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        writer.add(Encoded(ones.astype(np.uint16), ones, ones))
    writer.finish()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 60  # MB
    dataset = IndexedDataset(str(tmp_path / "pair"))
    assert len(dataset) == 5_000_000 and dataset.document_indices[-1] == 5_000_000 and dataset.sequence_lengths.max() == 1


def test_the_job_of_other_tests_is_an_ordinary_one(tmp_path):
    prepare(make_job(tmp_path, write_texts(tmp_path / "in.jsonl", ["a"])))
    assert documents(tmp_path) == [[97, EOD]]
