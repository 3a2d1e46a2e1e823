"""Small valid command lines that the tests of this folder change one flag at a time."""

import argparse
import shlex
from typing import Any

from megatron.training.arguments import parse_args, validate_args

TINY = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --transformer-impl local"
)


def without(*flags: str, line: list[str] | None = None) -> list[str]:
    """TINY (or `line`) less these flags and their values."""
    kept: list[str] = []
    skipping = False
    for token in TINY if line is None else line:
        skipping = token in flags if token.startswith("--") else skipping
        if not skipping:
            kept.append(token)
    return kept


def checked(line: list[str], defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """The arguments of a line, or UsageError."""
    return validate_args(parse_args(argv=line, defaults=defaults), defaults)
