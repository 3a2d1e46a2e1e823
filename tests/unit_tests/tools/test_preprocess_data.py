"""tools/preprocess_data.py as a program: what it writes, what it refuses, and how it dies."""

import contextlib
import gzip
import itertools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset

TOOL = Path(__file__).resolve().parents[3] / "tools" / "preprocess_data.py"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
EOD = 1000


def run(folder, *arguments, tokenizer=NULL, environment=None):
    command = [sys.executable, str(TOOL), "--output-prefix", str(folder / "out"), "--workers", "2", *tokenizer, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **(environment or {})})


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def outputs(folder):
    return sorted(path.name for path in folder.glob("out*"))


def read(folder, key="text", level="document"):
    dataset = IndexedDataset(str(folder / f"out_{key}_{level}"))
    bounds = dataset.document_indices.tolist()
    return [[sequence.tolist() for sequence in dataset[begin:end]] for begin, end in itertools.pairwise(bounds)]


RECORDS = [{"text": f"{i} {i % 7}" if i % 10 else "", "title": str(i)} for i in range(1000)]


@pytest.mark.parametrize("eod", [False, True])
def test_documents_in_order(tmp_path, eod):
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    result = run(tmp_path, "--input", source, "--json-keys", "text", "title", *(["--append-eod"] if eod else []))
    assert result.returncode == 0, result.stderr
    end = [EOD] if eod else []
    # an empty document stays a document, of no sequence and without EOD
    assert read(tmp_path) == [[[i, i % 7, *end]] if i % 10 else [] for i in range(1000)]
    assert read(tmp_path, "title") == [[[i, *end]] for i in range(1000)]
    assert IndexedDataset(str(tmp_path / "out_text_document")).dtype == "uint16"
    assert "processed 1000 documents" in result.stderr and "MB/s" in result.stderr and "100 texts were empty" in result.stderr
    assert len(outputs(tmp_path)) == 6  # .bin, .idx and .meta.json of each


def test_workers_batches_patterns_and_gzip_change_nothing(tmp_path, monkeypatch):
    lines = [json.dumps({"text": " ".join(str((i * j) % 1000) for j in range(300))}) + "\n" for i in range(2500)]  # several batches
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "all.jsonl").write_text("".join(lines) + "\n\n")
    for shard in range(5):
        with gzip.open(tmp_path / f"part{shard}.jsonl.gz", "wt") as file:
            file.write("".join(lines[shard * 500 : shard * 500 + 500]))
    assert run(tmp_path / "one", "--input", tmp_path / "one" / "all.jsonl", "--workers", "1").returncode == 0
    result = run(tmp_path, "--input", tmp_path / "part*.jsonl.gz", "--workers", "3", "--log-interval", "100")
    assert result.returncode == 0 and "ETA" in result.stderr
    for suffix in (".bin", ".idx"):
        name = f"out_text_document{suffix}"
        assert (tmp_path / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_equals_the_pair_that_megatron_lm_wrote(golden, tmp_path):
    """Its own tokens, turned back to text, give its own bytes again."""
    import sentencepiece

    model = str(golden / "tokens" / "sp1000.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    whole = IndexedDataset(str(golden / "tokens" / "kjv_text_document"))
    stored = [sequence for sequence in whole[:] if processor.unk_id() not in sequence][:20]  # an unknown piece has lost its text
    texts = [processor.decode(sequence[:-1].tolist()) for sequence in stored]
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]
    assert run(tmp_path, "--input", source, "--append-eod", tokenizer=tokenizer).returncode == 0
    assert [document for (document,) in read(tmp_path)] == [sequence.tolist() for sequence in stored]


@pytest.mark.parametrize("workers", ["1", "8"])
@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "1 2', "not a line of JSON"),
        ('{"txt": "1"}', "has no key 'text' (--json-keys), only 'txt'"),
        ('["1"]', "a list, each line must be a JSON object"),
        ('{"text": 5}', "key 'text' holds a int, it must be text"),
        ('{"text": "1 \\ud800"}', "key 'text' is not valid Unicode"),
        ('{"text": "1 two"}', "NullTokenizer takes whole numbers"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, workers, line, message):
    lines = [json.dumps({"text": "1 2 3"})] * 2000
    lines[1500] = line
    lines[1700] = "also bad"
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = run(tmp_path, "--input", tmp_path / "in.jsonl", "--workers", workers)
    assert result.returncode == 1
    assert f"in.jsonl:1501: {message}" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and outputs(tmp_path) == []


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_no_documents_is_an_error(tmp_path, content):
    (tmp_path / "in.jsonl").write_text(content)
    result = run(tmp_path, "--input", tmp_path / "in.jsonl")
    assert result.returncode == 1 and f"0 documents written from {tmp_path / 'in.jsonl'}" in result.stderr and outputs(tmp_path) == []


def test_a_broken_archive_is_named(tmp_path):
    data = gzip.compress(b'{"text": "1 2"}\n' * 1000)
    (tmp_path / "in.jsonl.gz").write_bytes(data[:-20])
    result = run(tmp_path, "--input", tmp_path / "in.jsonl.gz")
    assert result.returncode == 1 and "in.jsonl.gz:" in result.stderr and "Traceback" not in result.stderr and outputs(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--input", "nowhere.jsonl"], "--input nowhere.jsonl: no such file"),
        (["--input", "{folder}/in.parquet"], "in.parquet: must be JSON lines"),
        (["--input", "{folder}/in.jsonl", "--workers", "0"], "--workers 0 must be at least 1"),
        (["--input", "{folder}/in.jsonl", "--keep-newlines"], "--keep-newlines"),
        (["--input", "{folder}/in.jsonl", "--json-keys", "a", "a"], "--json-keys a given twice"),
        (["--input", "{folder}/in.jsonl", "--output-prefix", "/no/such/folder/x"], "--output-prefix /no/such/folder/x"),
        (["--input", "{folder}/in.jsonl", "--tokenizer-type", "Other"], "--tokenizer-type"),
        (["--input", "-", "-"], "standard input can be read only once"),
        (["--input", "{folder}/in.jsonl", "--json-keys", "a/b"], "--json-keys a/b: the key is part of the output's name"),
        (["--input", "{folder}/in.jsonl", "--shard-megabytes", "0"], "--shard-megabytes 0.0 must be above 0"),
        (["--input", "{folder}/in.jsonl", "--workers-to-check", "0"], "--workers-to-check 0 must be at least 1"),
    ],
)
def test_usage_errors(tmp_path, arguments, message):
    for name in ("in.jsonl", "in.parquet"):
        (tmp_path / name).write_text('{"text": "1"}\n')
    result = run(tmp_path, *(argument.format(folder=tmp_path) for argument in arguments))
    assert result.returncode == 2 and message in result.stderr and outputs(tmp_path) == []


def endless(tmp_path):
    """A run that goes on until it is ended, out of a pipe; it has begun to write. And its two workers."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    command = [sys.executable, str(TOOL), "--input", str(pipe), "--output-prefix", str(tmp_path / "out"), "--workers", "2", *NULL]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def feed():
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb", buffering=0) as file:
            while True:
                file.write(b'{"text": "1 2 3"}\n' * 60_000)
                time.sleep(0.05)

    threading.Thread(target=feed, daemon=True).start()
    wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("out.partial/*.bin")))
    return process, children(process.pid)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def wait_for(condition):
    deadline = time.time() + 20
    while not condition():
        assert time.time() < deadline
        time.sleep(0.02)


def test_the_death_of_a_worker_is_noticed_and_named(tmp_path):
    process, (victim, _) = endless(tmp_path)
    os.kill(victim, signal.SIGKILL)
    started = time.time()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and time.time() - started < 10
    assert f"worker {victim} died by signal 9" in errors and "memory" in errors and "Traceback" not in errors
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path, number):
    process, workers = endless(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and f"stopped by {number.name}" in errors and "Traceback" not in errors
    assert outputs(tmp_path) == []
    wait_for(lambda: not any(map(is_running, workers)))


def big_source(tmp_path, lines):
    """Lines of about 800 bytes that a worker has some work with."""
    with open(tmp_path / "in.jsonl", "w") as file:
        for i in range(lines):
            file.write(json.dumps({"text": " ".join(str((i * j) % 1000) for j in range(200)), "title": str(i % 1000)}) + "\n")
    return tmp_path / "in.jsonl"


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, kills):
    """SIGKILL at random moments of the real tool, until a resumed run is let live."""
    source = big_source(tmp_path, 4000 if kills == 1 else 20_000)
    (tmp_path / "unbroken").mkdir()
    arguments = ["--input", source, "--json-keys", "text", "title", "--append-eod", "--shard-megabytes", "0.5"]
    assert run(tmp_path / "unbroken", *arguments).returncode == 0
    rng = random.Random(kills)
    landed = 0
    for attempt in range(kills):
        command = [sys.executable, str(TOOL), "--output-prefix", str(tmp_path / "out"), *NULL, *map(str, arguments), "--resume"]
        process = subprocess.Popen([*command, "--workers", str(1 + attempt % 3)], stderr=subprocess.PIPE, text=True)
        state = tmp_path / "out.partial" / "state.json"
        before = state.read_bytes() if state.exists() else b""
        wait_for(lambda: process.poll() is not None or (state.exists() and state.read_bytes() != before))  # noqa: B023
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.communicate()
        landed += process.returncode == -signal.SIGKILL
        for path in tmp_path.glob("out_*.idx"):  # a final name is a whole file, also when the kill came between two of them
            assert path.read_bytes() == (tmp_path / "unbroken" / path.name).read_bytes()
            assert path.with_suffix(".bin").read_bytes() == (tmp_path / "unbroken" / path.name).with_suffix(".bin").read_bytes()
        if process.returncode == 0:  # finished by itself: begin anew
            for path in tmp_path.glob("out_*"):
                path.unlink()
    assert landed
    result = run(tmp_path, *arguments, "--resume", "--workers", "3")
    assert result.returncode == 0, result.stderr
    for name in outputs(tmp_path / "unbroken"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    assert outputs(tmp_path) == outputs(tmp_path / "unbroken")


def test_every_way_in_gives_the_same_bytes(tmp_path):
    zstandard = pytest.importorskip("zstandard", reason=".zst needs zstandard")
    plain = write_lines(tmp_path / "in.jsonl", RECORDS).read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "in.jsonl.zst").write_bytes(zstandard.compress(plain))
    found = []
    for number, source in enumerate(("in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "-")):
        command = [sys.executable, str(TOOL), "--input", source, "--output-prefix", f"o{number}", *NULL, "--workers", "2"]
        subprocess.run(command, input=plain if source == "-" else b"", cwd=tmp_path, check=True, capture_output=True)
        found.append([(tmp_path / f"o{number}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert found[1:] == found[:1] * 3


def test_bad_records_are_skipped_counted_and_listed(tmp_path):
    lines = [json.dumps(record) for record in RECORDS]
    lines[500], lines[800] = '{"txt": "1"}', '{"text": "1 two"}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = run(tmp_path, "--input", tmp_path / "in.jsonl", "--on-bad-record", "skip")
    assert result.returncode == 0 and f"skipped 2 records: see {tmp_path / 'out'}.rejected.txt" in result.stderr
    assert len(read(tmp_path)) == 998
    first, second = (tmp_path / "out.rejected.txt").read_text().splitlines()
    assert "in.jsonl:501: has no key 'text'" in first and "in.jsonl:801: NullTokenizer takes whole numbers" in second


def test_the_best_number_of_workers_is_looked_for_and_nothing_written(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    arguments = ["--find-optimal-num-workers", "--workers-to-check", "1", "2", "--max-documents", "500"]
    result = run(tmp_path, "--input", source, *arguments)
    assert result.returncode == 0 and outputs(tmp_path) == [], result.stderr
    assert "--workers 1: " in result.stderr and "--workers 2: " in result.stderr and "docs/s" in result.stderr
    assert result.stdout in ("fastest: --workers 1\n", "fastest: --workers 2\n")


def test_flags_are_those_of_the_reference():
    """Names, types and defaults of the reference's tool; what is ours comes on top."""
    table = TOOL.parents[2] / "shared" / "reference" / "flags_scripts.tsv"
    if not table.exists():
        pytest.skip("no table of the reference's flags beside the clone")
    make_parser = runpy.run_path(str(TOOL))["make_parser"]
    actions = {name: action for action in make_parser()._actions for name in action.option_strings}
    for row in (line.split("\t") for line in table.read_text().splitlines()):
        if row[0] == "tools/preprocess_data.py":
            _, name, action, kind, default = row[:5]
            ours = actions[name]
            assert (ours.nargs == 0) == ("store_true" in action), name
            assert (ours.type or str) is {"int": int}.get(kind, str) or "store_true" in action, name
            assert repr(ours.default) == default if default else ours.default in (None, False), name


def test_it_starts_quickly_and_without_the_trainers(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", RECORDS[:1])
    program = f"import runpy, sys, time; sys.argv[1:] = {['--input', str(source), '--output-prefix', str(tmp_path / 'out'), *NULL]!r}; "
    program += f"runpy.run_path({str(TOOL)!r}, run_name='__main__'); print(time.process_time(), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, torch = result.stdout.split()
    assert float(seconds) < 2 and torch == "False"


def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    process, workers = endless(tmp_path)
    process.kill()
    process.wait()
    process.stderr.close()
    wait_for(lambda: not any(map(is_running, workers)))
    assert not (tmp_path / "out_text_document.bin").exists() and not (tmp_path / "out_text_document.idx").exists()


@pytest.fixture(scope="module")
def punkt(tmp_path_factory):
    """A folder for NLTK_DATA with a Punkt model that knows no abbreviations."""
    nltk = pytest.importorskip("nltk", reason="--split-sentences needs nltk")
    from nltk.tokenize import punkt

    folder = tmp_path_factory.mktemp("nltk")
    nltk.data.path.append(str(folder))  # it writes below its data folders only
    model = folder / "tokenizers" / "punkt_tab" / "english"
    model.mkdir(parents=True)
    punkt.save_punkt_params(punkt.PunktParameters(), str(model))
    return {"NLTK_DATA": str(folder)}


def test_sentences_become_sequences(tmp_path, punkt, golden):
    source = write_lines(tmp_path / "in.jsonl", [{"text": "They came. They left.\n\nThen  nothing."}, {"text": ""}, {"text": "One"}])
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(golden / "tokens" / "sp1000.model")]
    arguments = ["--input", source, "--split-sentences", "--append-eod"]
    result = run(tmp_path, *arguments, tokenizer=tokenizer, environment=punkt)
    assert result.returncode == 0, result.stderr
    documents = read(tmp_path, level="sentence")
    assert [len(document) for document in documents] == [3, 0, 1]
    assert [sequence[-1] == 2 for sequence in documents[0]] == [False, False, True]  # EOD once a document


def test_sentences_keep_their_white_space(punkt, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", punkt["NLTK_DATA"])
    program = f"""
import sys; sys.path.insert(0, {str(TOOL.parent.parent)!r})
from megatron.core.datasets.preparation.records import sentence_splitter
text = " They came. They left.\\n\\nThen  nothing. "
assert "".join(sentence_splitter("english", True)(text)) == text
assert sentence_splitter("english", True)(text)[1] == "They left.\\n\\n"
assert sentence_splitter("english", False)(text) == [" They came.", "They left.", "Then  nothing."]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_sentence_model_is_said(tmp_path):
    pytest.importorskip("nltk", reason="--split-sentences needs nltk")
    source = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    result = run(tmp_path, "--input", source, "--split-sentences", "--lang", "klingon", environment={"NLTK_DATA": str(tmp_path)})
    assert result.returncode == 1 and "no Punkt model for --lang klingon; set NLTK_DATA" in result.stderr and outputs(tmp_path) == []


def test_torch_is_never_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    source = write_lines(tmp_path / "in.jsonl", RECORDS)
    result = run(tmp_path, "--input", source, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
