"""From raw text to a trained GPT on this machine, every step by the command a user would type (`make train`).

Corpus: the Python standard library's sources, of which some files are held out. The steps: JSONL, a SentencePiece tokenizer,
tools/preprocess_data.py, torchrun pretrain_gpt.py, the held-out loss in bits per byte, a sample.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 4096
HELD_OUT_SHARE = 0.03
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}
BLANK = "\u2581"  # how SentencePiece writes a space
# Source code is indented: a new line with its indentation is one token.
INDENTATION = ["\n" * lines + BLANK * width for lines in (1, 2) for width in (0, 4, 8, 12, 16, 20, 24)] + ["\n\n\n", BLANK * 4, "\t"]
PROMPT = "def read_lines(path):\n    "
SEQ_LENGTH = 256


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def run(*command: str | Path, **environment: str) -> None:
    """Run a command in sight; a failure ends the example with the command's code."""
    words = [str(word) for word in command]
    print("$ " + shlex.join(words), flush=True)
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    if done.returncode:
        sys.exit(f"the step above failed with code {done.returncode}")


def source_files() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-"))
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


def is_held_out(text: str) -> bool:
    """By the text's hash: the same files on every machine that has them."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 < HELD_OUT_SHARE


def write_corpus(folder: Path) -> dict[str, int]:
    """train.jsonl and held_out.jsonl with one file a line; the bytes of text in each."""
    sizes = {"train": 0, "held_out": 0}
    with open(folder / "train.jsonl", "w") as train, open(folder / "held_out.jsonl", "w") as held_out:
        for path in source_files():
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            part, file = ("held_out", held_out) if is_held_out(text) else ("train", train)
            if text.strip():
                file.write(json.dumps({"text": text}) + "\n")
                sizes[part] += len(text.encode())
    return sizes


def train_tokenizer(corpus: Path, prefix: Path) -> None:
    import sentencepiece

    def lines() -> Iterator[str]:
        with open(corpus) as file:
            for line in file:
                yield from json.loads(line)["text"].split("\n")

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=INDENTATION,
        character_coverage=0.9999,
        input_sentence_size=200_000,
        shuffle_input_sentence=True,
        pad_id=3,
        num_threads=os.cpu_count() or 1,
        minloglevel=2,
    )


def preprocess(folder: Path, part: str) -> None:
    run(
        sys.executable, "tools/preprocess_data.py", "--input", folder / f"{part}.jsonl", "--output-prefix", folder / part,
        "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "tokenizer.model", "--append-eod",
    )  # fmt: skip


def tokens_in(prefix: Path) -> int:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return int(IndexedDataset(str(prefix)).sequence_lengths.sum())


def train(folder: Path, iterations: int, bf16: bool, threads: int) -> None:
    """A GPT of 4 layers; evaluation goes over the whole held-out text."""
    batch = 8
    run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "pretrain_gpt.py",
        "--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "704",
        "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope",
        "--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH),
        "--attention-dropout", "0", "--hidden-dropout", "0", *(["--bf16"] if bf16 else []), "--transformer-impl", "local",
        "--micro-batch-size", str(batch), "--global-batch-size", str(batch), "--train-iters", str(iterations),
        "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine", "--lr-warmup-iters", str(max(1, iterations // 25)),
        "--weight-decay", "0.1", "--adam-beta2", "0.95", "--clip-grad", "1.0",
        "--train-data-path", folder / "train_text_document", "--valid-data-path", folder / "held_out_text_document",
        "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "tokenizer.model",
        "--make-vocab-size-divisible-by", "64", "--no-create-attention-mask-in-dataloader", "--num-workers", "0",
        "--full-validation", "--eval-interval", str(max(1, iterations // 4)), "--log-interval", str(max(1, iterations // 40)),
        "--save", folder / "checkpoints", "--save-interval", str(max(1, iterations // 2)),
        "--metrics-file", folder / "metrics.jsonl", "--tensorboard-dir", folder / "tensorboard",
        OMP_NUM_THREADS=str(threads),
    )  # fmt: skip


def final_loss(metrics: Path) -> float:
    """The last evaluation's loss, in nats a token."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["lm_loss"] for row in rows if "evaluation" in row][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "train_on_python_source", help="folder for everything that is made")
    parser.add_argument("--iterations", type=int, help="training steps of 2048 tokens; default: 1200, in fp32 (no bf16 hardware) 600")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from megatron.core import device

    bf16 = device.has_fast_bf16()
    iterations = args.iterations or (1200 if bf16 else 600)
    started = time.monotonic()
    folder: Path = args.output.resolve()
    if (folder / "checkpoints").exists():
        sys.exit(f"{folder} holds an earlier run: remove it, or give --output another folder")
    folder.mkdir(parents=True, exist_ok=True)

    say("1. The corpus: this machine's Python standard library")
    sizes = write_corpus(folder)
    print(f"{sizes['train'] / 1e6:.1f} MB to train on, {sizes['held_out'] / 1e6:.2f} MB held out")
    say(f"2. A tokenizer of {VOCABULARY} pieces")
    train_tokenizer(folder / "train.jsonl", folder / "tokenizer")
    say("3. Tokens")
    for part in ("train", "held_out"):
        preprocess(folder, part)
    tokens = tokens_in(folder / "held_out_text_document")
    bytes_per_token = sizes["held_out"] / tokens
    print(f"held out: {tokens} tokens, {bytes_per_token:.2f} bytes each")
    say("4. Training")
    train(folder, iterations, bf16, threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    say("5. Held-out text")
    loss = final_loss(folder / "metrics.jsonl")
    print(f"{loss:.4f} nats a token = {loss / bytes_per_token / math.log(2):.3f} bits per byte")
    say("6. A sample")
    run(sys.executable, "examples/train_on_python_source/sample.py", "--checkpoint", folder / "checkpoints", "--prompt", PROMPT)
    say(f"Done in {(time.monotonic() - started) / 60:.1f} minutes")
    for what, path in (("curves", "checkpoints/training_curves.png"), ("TensorBoard", "tensorboard"), ("numbers", "metrics.jsonl")):
        print(f"{what}: {folder / path}")


if __name__ == "__main__":
    main()
