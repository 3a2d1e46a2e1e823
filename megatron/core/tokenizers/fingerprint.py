"""Whether tokens were made by the tokenizer that is used now: `<prefix>.meta.json` beside a pair says which one made it. Torch-free.

Contract: the file is a JSON object; its "tokenizer" is {"type": str, "fingerprint": str, "vocab_size": int}, see `tokenizer_record`.
"""

import json
import os
from collections.abc import Iterable
from typing import Any

from megatron.core.tokenizers.base import MegatronTokenizer

META_SUFFIX = ".meta.json"


class WrongTokenizerError(ValueError):
    """Tokens were made by another tokenizer. The message names the pair, and both tokenizers."""


def tokenizer_record(tokenizer: MegatronTokenizer) -> dict[str, Any]:
    """What `<prefix>.meta.json` says of a tokenizer."""
    return {"type": type(tokenizer).__name__, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}


def check_fingerprint(prefixes: Iterable[str], tokenizer: MegatronTokenizer) -> None:
    """Raises WrongTokenizerError for pairs that another tokenizer made, all of them in one message.

    A pair without `<prefix>.meta.json` (other programs', older ones) passes. NullTokenizer stands for any tokenizer, for training on ids
    alone: it must only have room for the ids of the one that made them.
    """
    problems = [text for prefix in dict.fromkeys(prefixes) if (text := _problem(prefix, tokenizer)) is not None]
    if problems:
        raise WrongTokenizerError("\n".join(problems))


def _problem(prefix: str, tokenizer: MegatronTokenizer) -> str | None:
    path = prefix + META_SUFFIX
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        made = content.get("tokenizer")
        if made is None:
            return None
        kind, fingerprint, vocab_size = str(made["type"]), str(made["fingerprint"]), int(made["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = 'is not a JSON object whose "tokenizer" has type, fingerprint and vocab_size'
        return f"{path}: {rule} ({error!r}); prepare the data again, or remove that file to train without the check"
    now = type(tokenizer).__name__
    if now == "NullTokenizer" != kind:
        if vocab_size <= tokenizer.vocab_size:
            return None
        rule = f"its tokenizer ({kind}) has {vocab_size} ids, NullTokenizer has {tokenizer.vocab_size}"
        return f"{prefix}: {rule}; give --vocab-size {vocab_size - 1} or more"
    if fingerprint == tokenizer.fingerprint:
        return None
    given = f"made by {_name(kind, vocab_size, fingerprint)}, and this run's is {_name(now, tokenizer.vocab_size, tokenizer.fingerprint)}"
    return f"{prefix}: {given}; give the tokenizer (and its flags) that tools/preprocess_data.py had, or prepare the data with this one"


def _name(kind: str, vocab_size: int, fingerprint: str) -> str:
    return f"{kind} of {vocab_size} ids ({fingerprint[:12]})"
