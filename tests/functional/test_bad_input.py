"""What the user can mend: one clear error that names the flag or the file, exit code 2 for the command line and 1 for the rest."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.functional.runner import TINY, Result, on, torchrun, train, write_corpus

USAGE, RUN_TIME = 2, 1


def assert_refused(result: Result, code: int, *parts: str) -> None:
    """Ended with `code` before the first step, with one error, which says `parts`, and no traceback."""
    assert result.code == code, result.err
    assert result.rows == []
    assert "Traceback" not in result.err + result.out
    for part in parts:
        assert part in result.err
    if code == RUN_TIME:
        (line,) = result.errors
        assert line.startswith("ERROR: rank 0, phase ")
        assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--global-batch-size 5", ("--global-batch-size 5", "--micro-batch-size 2", "--global-batch-size 4 or --global-batch-size 6")),
        ("--hidden-size 66", ("--hidden-size 66", "--num-attention-heads 4", "--hidden-size 64 or --hidden-size 68")),
        ("--group-query-attention --num-query-groups 3", ("--num-query-groups 3", "--num-attention-heads 4")),
        ("--padded-vocab-size 64", ("--padded-vocab-size 64", "--vocab-size 100")),
        ("--padded-vocab-size 100", ("--padded-vocab-size 100", "101 ids")),
        ("--seq-length 65", ("--seq-length 65", "64 learned positions", "--max-position-embeddings 65")),
        ("--hiden-size 64", ("--hiden-size 64", "--hidden-size")),
        ("--lr fast", ("--lr fast",)),
        ("--bf16 --fp16", ("--fp16", "--bf16")),
        ("--ckpt-step 3", ("--ckpt-step 3", "--load")),
        ("--lr-warmup-iters 4", ("--lr-warmup-iters 4",)),
        ("--tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere/t.model", ("--tokenizer-model /nowhere/t.model",)),
    ],
)
def test_a_flag_is_named(corpus: Path, flags: str, parts: tuple[str, ...]) -> None:
    assert_refused(train(*on(corpus, flags)), USAGE, "problem", *parts)


def test_all_problems_at_once(corpus: Path) -> None:
    result = train(*on(corpus, "--hidden-size 66 --global-batch-size 5 --lr fast --no-such-flag --eval-interval 0"))
    assert_refused(result, USAGE, "5 problems", "--hidden-size", "--global-batch-size", "--lr", "--no-such-flag", "--eval-interval")


def test_all_missing_flags_at_once() -> None:
    result = train("--eval-iters 0", base="")
    assert result.code == USAGE and "Traceback" not in result.err
    required = "--num-layers --hidden-size --num-attention-heads --seq-length --micro-batch-size --train-iters --lr --data-path"
    for flag in [*required.split(), "--tokenizer-type"]:
        assert f"{flag}: is required" in result.err


@pytest.mark.parametrize(
    "flag", ["--num-layers 2", "--hidden-size 64", "--seq-length 64", "--micro-batch-size 2", "--train-iters 4", "--lr 1e-2"]
)
def test_a_missing_flag(corpus: Path, flag: str) -> None:
    base = TINY.replace(f"{flag} ", "", 1)
    assert base != TINY
    result = train(*on(corpus), base=base)
    assert_refused(result, USAGE, f"{flag.split()[0]}: is required")


def rewrite(end: str, change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    """A damage that rewrites prefix + end; returns the file's name."""

    def damage(prefix: Path) -> str:
        path = Path(f"{prefix}{end}")
        path.write_bytes(change(path.read_bytes()))
        return str(path)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rewrite(".bin", lambda data: data[:1000]), "truncated"),
        (rewrite(".bin", lambda data: b""), "truncated"),
        (rewrite(".idx", lambda data: data[:500]), "truncated"),
        (rewrite(".idx", lambda data: data[:20]), "truncated"),
        (rewrite(".idx", lambda data: b""), "magic"),
        (rewrite(".idx", lambda data: b"NOT THIS " + data[9:]), "magic"),
        (rewrite(".idx", lambda data: data[:9] + b"\7" + data[10:]), "version 7"),
        (rewrite(".idx", lambda data: data[:17] + b"\x63" + data[18:]), "99"),
    ],
    ids=["half a bin", "empty bin", "half an idx", "header cut off", "empty idx", "wrong magic", "wrong version", "unknown dtype"],
)
def test_a_damaged_data_file_is_named(corpus: Path, tmp_path: Path, damage: Callable[[Path], str], says: str) -> None:
    prefix = tmp_path / "copy_text_document"
    for end in (".bin", ".idx"):
        shutil.copy(f"{corpus}{end}", f"{prefix}{end}")
    damaged = damage(prefix)
    assert_refused(train(*on(prefix)), RUN_TIME, damaged, says)


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_missing_data_file_is_named(corpus: Path, tmp_path: Path, end: str) -> None:
    prefix = tmp_path / "copy_text_document"
    for other in {".bin", ".idx"} - {end}:
        shutil.copy(f"{corpus}{other}", f"{prefix}{other}")
    assert_refused(train(*on(prefix)), USAGE, f"--data-path {prefix}: no file {prefix}{end}")


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_beyond_the_vocabulary_are_an_error(corpus: Path, tmp_path: Path, workers: int) -> None:
    """Also when a single document has them, which only a loader's worker reads."""
    large = write_corpus(tmp_path / "large", vocab=500)
    assert_refused(train(*on(large, f"--num-workers {workers}")), RUN_TIME, str(large), "beyond the vocabulary of 101")
    late = write_corpus(tmp_path / "late", documents=60)
    data = bytearray(Path(f"{late}.bin").read_bytes())
    data[len(data) // 2 + 1] = 3  # an id of 768 and more
    Path(f"{late}.bin").write_bytes(bytes(data))
    result = train(*on(late, f"--num-workers {workers} --train-iters 60 --split 1,0,0"))
    assert result.code == RUN_TIME and "Traceback" not in result.err
    (line,) = result.errors
    assert str(late) in line and "beyond the vocabulary of 101" in line


def test_a_split_without_documents_is_an_error(corpus: Path) -> None:
    result = train(*on(corpus, "--split 0,50,50"))
    assert_refused(result, RUN_TIME, "--split", "training")


def test_a_save_folder_that_cannot_be_is_an_early_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(train(*on(corpus, f"--save {tmp_path}/file")), USAGE, f"--save {tmp_path}/file: must be a folder")
    assert_refused(train(*on(corpus, f"--save {tmp_path}/file/below")), RUN_TIME, f"{tmp_path}/file/below", "phase initialization")


def test_layouts_of_later_versions_are_refused_by_name(corpus: Path) -> None:
    assert_refused(train(*on(corpus, "--ckpt-format fsdp_dtensor")), USAGE, "--ckpt-format fsdp_dtensor")


# --- under torchrun, which turns codes into 1 and prints a table of its own last ---


def table_of(result: Result) -> str:
    assert result.code == 1
    return result.err[result.err.index("Root Cause") :]


def test_torchruns_table_carries_usage_errors(corpus: Path) -> None:
    table = table_of(torchrun(2, *on(corpus, "--global-batch-size 6 --hidden-size 66")))
    assert "--global-batch-size 6: must be a multiple of --micro-batch-size 2 x data-parallel size 2 = 4" in table
    assert "--hidden-size 66: must be a multiple of" in table and "2 problems" in table


def test_torchruns_table_carries_run_time_errors(corpus: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "copy_text_document"
    shutil.copy(f"{corpus}.idx", f"{prefix}.idx")
    Path(f"{prefix}.bin").write_bytes(b"")
    result = torchrun(2, *on(prefix))
    table = table_of(result)
    assert f"{prefix}.bin" in table and "phase building the datasets" in table
    assert "traceback : rank" in table, "our line stands where torchrun prints the reason"
    assert result.errors and "megatron/" not in result.err, "no traceback of ours"
