"""BPE over bytes through `tiktoken`, from a Tekken-style JSON or a `.tiktoken` file."""

import base64
import binascii
import json
from collections.abc import Sequence

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file

# How text is cut into words before the merges. v1: words, single digits, punctuation. v2: also where lower case meets upper case.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


class TikTokenizer(MegatronTokenizer):
    """Special tokens at ids 0 .. num_special_tokens - 1, then the byte sequences by rank.

    path                a JSON list (or Tekken's object with "vocab") of {"rank", "token_bytes"}, or lines "<base64> <rank>"
    pattern             "v1" or "v2" (PATTERNS); None: the file's own, else v2
    num_special_tokens  ids kept for special tokens
    special_tokens      their names from id 0 on; the rest are called <SPECIAL_n>. Needs <unk>, <s> and </s>
    vocab_size          ids in all; None: all that the file has
    """

    def __init__(
        self,
        path: str,
        pattern: str | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(path, pattern=pattern, num_special_tokens=num_special_tokens, special_tokens=special_tokens, vocab_size=vocab_size)
        tiktoken = require("tiktoken", "TikTokenizer (--tokenizer-type)")
        ranks, own_pattern = _read_ranks(need_file(path, "--tokenizer-model"))
        names = list(special_tokens or SPECIAL_TOKENS)
        if len(names) > num_special_tokens or len(set(names)) < len(names):
            rule = f"must be all different, and at most --tiktoken-num-special-tokens {num_special_tokens}"
            raise ValueError(f"--tokenizer-special-tokens {' '.join(names)}: they {rule}")
        if missing := [name for name in SPECIAL_TOKENS if name not in names]:
            raise ValueError(f"--tokenizer-special-tokens lacks {', '.join(missing)}")
        self._names = names + [f"<SPECIAL_{i}>" for i in range(len(names), num_special_tokens)]
        self._vocab_size = min(vocab_size or len(ranks) + num_special_tokens, len(ranks) + num_special_tokens)
        kept = {token: rank for token, rank in ranks.items() if rank < self._vocab_size - num_special_tokens}
        expression = PATTERNS[pattern] if pattern else own_pattern or PATTERNS["v2"]
        self._model = tiktoken.Encoding(name=path, pat_str=expression, mergeable_ranks=kept, special_tokens={})

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        shift = len(self._names)
        if threads > 1 and len(texts) > 1:
            encoded = self._model.encode_ordinary_batch(list(texts), num_threads=threads)
        else:
            encoded = [self._model.encode_ordinary(text) for text in texts]
        return [[token + shift for token in tokens] for tokens in encoded]

    def detokenize(self, ids: Sequence[int]) -> str:
        shift = len(self._names)
        single = self._model.decode_single_token_bytes
        pieces = [self._names[token].encode() if token < shift else single(token - shift) for token in map(int, ids)]
        return b"".join(pieces).decode("utf-8", errors="replace")

    @property
    def bos(self) -> int | None:
        return self._names.index("<s>")

    @property
    def eos(self) -> int | None:
        return self._names.index("</s>")

    @property
    def pad(self) -> int | None:
        return self._names.index("<pad>") if "<pad>" in self._names else None


def _read_ranks(path: str) -> tuple[dict[bytes, int], str | None]:
    """Byte sequence -> rank, and the word pattern if the file has one."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        if content.lstrip()[:1] in (b"[", b"{"):
            parsed = json.loads(content)
            entries = parsed["vocab"] if isinstance(parsed, dict) else parsed
            pattern = parsed.get("config", {}).get("pattern") if isinstance(parsed, dict) else None
            return {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in entries}, pattern
        lines = (line.split() for line in content.splitlines() if line.strip())
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}, None
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        rule = "neither a JSON list of rank and token_bytes nor lines of base64 and rank"
        raise TokenizerFileError(f"--tokenizer-model {path}: {rule} ({error!r})") from None
