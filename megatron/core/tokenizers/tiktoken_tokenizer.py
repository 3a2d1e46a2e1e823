"""BPE over bytes through `tiktoken`, from a Tekken-style JSON or a `.tiktoken` file."""

import base64
import binascii
import json
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file, readable, starts_of_pieces
from megatron.core.tokenizers.byte_bpe import ByteBPE

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
        ranks, own_pattern = _read_ranks(need_file(path, "--tokenizer-model"))
        names = list(special_tokens or SPECIAL_TOKENS)
        if len(names) > num_special_tokens or len(set(names)) < len(names):
            rule = f"must be all different, and at most --tiktoken-num-special-tokens {num_special_tokens}"
            raise ValueError(f"--tokenizer-special-tokens {' '.join(names)}: they {rule}")
        if missing := [name for name in SPECIAL_TOKENS if name not in names]:
            raise ValueError(f"--tokenizer-special-tokens lacks {', '.join(missing)}")
        self._names = names + [f"<SPECIAL_{i}>" for i in range(len(names), num_special_tokens)]
        self._vocab_size = min(vocab_size or len(ranks) + num_special_tokens, len(ranks) + num_special_tokens)
        # the special tokens come first: a rank is the id less their number
        kept = {token: rank + num_special_tokens for token, rank in ranks.items() if rank < self._vocab_size - num_special_tokens}
        expression = PATTERNS[pattern] if pattern else own_pattern or PATTERNS["v2"]
        try:
            self._bpe = ByteBPE(kept, expression, "TikTokenizer (--tokenizer-type)")
        except ValueError as error:
            size = f" with --vocab-size {vocab_size}, of which {num_special_tokens} are special tokens" if vocab_size else ""
            raise TokenizerFileError(f"--tokenizer-model {path}{size}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return self._bpe.encode(texts, threads)

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        return self._names[token].encode() if token < len(self._names) else self._bpe.bytes_of(int(token))

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return starts_of_pieces(ids, text, self._piece, type(self).__name__)

    def _token_names(self) -> Iterable[tuple[int, str]]:
        yield from enumerate(self._names)
        yield from ((token, readable(piece)) for piece, token in self._bpe.ranks.items())

    @property
    def bos(self) -> int | None:
        return self._names.index("<s>")

    @property
    def eos(self) -> int | None:
        return self._names.index("</s>")

    @property
    def pad(self) -> int | None:
        return self._names.index("<pad>") if "<pad>" in self._names else None

    @property
    def unk(self) -> int | None:
        return self._names.index("<unk>")

    def _fingerprint_options(self) -> dict[str, Any]:
        return {"num_special_tokens": len(self._names), "pattern": self._bpe.pattern}


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
