#!/usr/bin/env python3
"""Speed of the way of data, part by part, each against a yardstick that is measured in the same run, in turns with ours.

    prepare   tools/preprocess_data.py against the bare tokenizer library's batched call with as many threads on the same text

    python tools/benchmark/data.py prepare --text corpus.jsonl --huggingface FOLDER --gpt2 FOLDER --sentencepiece FILE --tekken FILE

Each part is a function of PARTS that takes the command line and yields lines; a new one needs no change elsewhere.
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

PROCESSED = re.compile(r"^processed .*, (\d+) tokens of ", re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer: the flag that names its files, our flags for them, and the bare library's batched call."""

    option: str
    flags: Callable[[str], list[str]]
    load: Callable[[str], Callable[[list[str], int], Any]]  # path -> (texts, threads) -> ids


def _load_huggingface(path: str) -> Callable[[list[str], int], Any]:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
    return lambda texts, threads: [encoding.ids for encoding in backend.encode_batch_fast(texts)]


def _load_gpt2(path: str) -> Callable[[list[str], int], Any]:
    """tiktoken, the fastest well-kept library for these ids, out of vocab.json: the merges' ranks are the ids in its order."""
    import tiktoken

    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    byte_of = {chr(byte): byte for byte in letters} | {chr(256 + place): byte for place, byte in enumerate(others)}
    vocabulary = json.loads(Path(path, "vocab.json").read_text(encoding="utf-8"))
    tokens = sorted((rank, token) for token, rank in vocabulary.items() if token != "<|endoftext|>")
    ranks = {bytes(byte_of[letter] for letter in token): rank for rank, token in tokens}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    model = tiktoken.Encoding(name="gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda texts, threads: model.encode_ordinary_batch(texts, num_threads=threads)


def _load_sentencepiece(path: str) -> Callable[[list[str], int], Any]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=path)
    return lambda texts, threads: model.encode(texts, out_type=int, num_threads=threads)


def _load_tekken(path: str) -> Callable[[list[str], int], Any]:
    import base64

    import tiktoken

    content = json.loads(Path(path).read_text(encoding="utf-8"))
    config = content["config"]
    kept = content["vocab"][: config["default_vocab_size"] - config["default_num_special_tokens"]]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    model = tiktoken.Encoding(name="tekken", pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={})
    return lambda texts, threads: model.encode_ordinary_batch(texts, num_threads=threads)


def _gpt2_flags(path: str) -> list[str]:
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", f"{path}/vocab.json", "--merge-file", f"{path}/merges.txt"]


def _model_flags(tokenizer_type: str) -> Callable[[str], list[str]]:
    return lambda path: ["--tokenizer-type", tokenizer_type, "--tokenizer-model", path]


def _tekken_flags(path: str) -> list[str]:
    vocab_size = json.loads(Path(path).read_text(encoding="utf-8"))["config"]["default_vocab_size"]
    return [*_model_flags("TikTokenizer")(path), "--vocab-size", str(vocab_size)]


KINDS = {
    "Hugging Face (tokenizers)": Kind("huggingface", _model_flags("HuggingFaceTokenizer"), _load_huggingface),
    "GPT-2 (tiktoken)": Kind("gpt2", _gpt2_flags, _load_gpt2),
    "SentencePiece": Kind("sentencepiece", _model_flags("GPTSentencePieceTokenizer"), _load_sentencepiece),
    "Tekken (tiktoken)": Kind("tekken", _tekken_flags, _load_tekken),
}


@dataclass(frozen=True)
class Turn:
    """One measurement: seconds of the clock and of all processors for the text, seconds before it began, peak memory (MB), tokens."""

    seconds: float
    cpu_seconds: float
    start_seconds: float
    memory: float
    tokens: int


def read_texts(path: str) -> list[str]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def measure_bare(name: str, path: str, text: str, threads: int) -> None:
    """In a process of its own: print what the library's batched call takes, without reading and loading."""
    begun = time.perf_counter()
    call = KINDS[name].load(path)
    start = time.perf_counter() - begun
    texts = read_texts(text)
    call(texts[:2], threads)  # threads that start once
    cpu, begun = time.process_time(), time.perf_counter()
    ids = call(texts, threads)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps([seconds, cpu, start, memory, sum(map(len, ids))]))


def run_bare(name: str, path: str, args: argparse.Namespace) -> Turn:
    command = [sys.executable, __file__, "bare", name, path, "--text", args.text, "--threads", str(args.threads)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "true"}
    return Turn(*json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout))


def run_ours(name: str, path: str, args: argparse.Namespace) -> Turn:
    """The whole tool: reading, tokenizing, writing, checksums, index. What it takes for one line is its start, and is subtracted."""
    with tempfile.TemporaryDirectory() as folder:
        one_line = os.path.join(folder, "one.jsonl")
        with open(args.text, encoding="utf-8") as text, open(one_line, "w", encoding="utf-8") as file:
            file.write(min((next(text) for _ in range(20)), key=len))
        start, start_cpu, _, _ = _run_tool(name, path, one_line, folder, args.threads)
        whole, whole_cpu, memory, tokens = _run_tool(name, path, args.text, folder, args.threads)
    return Turn(whole - start, whole_cpu - start_cpu, start, memory, tokens)


def _run_tool(name: str, path: str, text: str, folder: str, workers: int) -> tuple[float, float, float, int]:
    """Seconds of the clock and of all processors, peak memory (MB), tokens."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", text, "--output-prefix", f"{folder}/out"]
    command += ["--workers", str(workers), "--log-interval", "1000000000", *KINDS[name].flags(path)]
    before, begun, memory = os.times(), time.perf_counter(), 0.0
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.poll() is None:
            memory = max(memory, memory_of(process.pid))
            time.sleep(0.05)
        output = process.stderr.read()
    whole, after = time.perf_counter() - begun, os.times()
    found = PROCESSED.search(output)
    if found is None:
        raise SystemExit(f"{' '.join(command)}\n{output}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return whole, cpu, memory, int(found[1])


def memory_of(pid: int) -> float:
    """Megabytes that a process and its children hold, shared pages divided among them; 0 where the system does not say."""
    total = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (str(pid), *children):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+)", rollup, re.MULTILINE)[1])  # type: ignore[index]
    except (OSError, TypeError):
        return 0.0
    return total / 1e3


def prepare(args: argparse.Namespace) -> Iterator[str]:
    if args.text is None:
        yield "prepare: skipped, needs --text, a file of JSON lines with the key text"
        return
    megabytes = sum(len(text.encode()) for text in read_texts(args.text)) / 1e6
    yield f"prepare: {megabytes:.1f} MB of text, {args.threads} threads or workers, median of {args.turns} turns; MB/s of text"
    yield f"{'kind':<27} {'bare':>6} {'ours':>6} {'ratio':>6} {'cpu ratio':>9} {'start s':>8} {'memory MB':>10}"
    for name, kind in KINDS.items():
        path = getattr(args, kind.option)
        if path is None:
            yield f"{name:<27} skipped, needs --{kind.option}"
            continue
        turns = [(run_bare(name, path, args), run_ours(name, path, args)) for _ in range(args.turns)]
        if turns[0][0].tokens != turns[0][1].tokens:
            yield f"{name:<27} warning: {turns[0][0].tokens} tokens by the bare library, {turns[0][1].tokens} by ours"
        bare, ours = (megabytes / statistics.median(turn[side].seconds for turn in turns) for side in (0, 1))
        ratio = statistics.median(bare.seconds / ours.seconds for bare, ours in turns)
        cpu = statistics.median(bare.cpu_seconds / ours.cpu_seconds for bare, ours in turns)
        start, memory = (max(getattr(turn[1], field) for turn in turns) for field in ("start_seconds", "memory"))
        yield f"{name:<27} {bare:>6.1f} {ours:>6.1f} {ratio:>6.2f} {cpu:>9.2f} {start:>8.2f} {memory:>10.0f}"


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[str]]] = {"prepare": prepare}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"which, of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each")
    group = parser.add_argument_group("prepare")
    group.add_argument("--text", help="JSON lines with the key text")
    group.add_argument("--threads", type=int, default=2, help="threads of the library, workers of ours")
    group.add_argument("--huggingface", help="folder with a tokenizer.json")
    group.add_argument("--gpt2", help="folder with vocab.json and merges.txt")
    group.add_argument("--sentencepiece", help="a .model file")
    group.add_argument("--tekken", help="a Tekken JSON file")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.parts[:1] == ["bare"]:  # the process that run_bare starts
        measure_bare(args.parts[1], args.parts[2], args.text, args.threads)
        return
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {cpu_model()}, load before the start {load:.1f}")
    for name in args.parts or PARTS:
        if name not in PARTS:
            raise SystemExit(f"there is no part {name}, only {', '.join(PARTS)}")
        for line in PARTS[name](args):
            print(line, flush=True)


def cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


if __name__ == "__main__":
    main()
