"""BPE over bytes through `tiktoken`, whatever file the merges come from. Torch-free."""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import unicode_texts

# GPT-2's cut into words before the merges (Radford et al. 2019)
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# tiktoken's engine keeps a state for each blank of a run before `(?!\S)`, at most a million of them, and panics beyond
LONG_RUN = 500_000


class ByteBPE:
    """ranks: byte sequence -> id; merges go by id, lowest first. pattern: how a text is cut into words. Special tokens in a text are text.

    Raises ValueError for ranks that do not hold every single byte.
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, purpose: str) -> None:
        self._tiktoken = require("tiktoken", purpose)
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        if missing:
            raise ValueError(f"the vocabulary lacks {len(missing)} of the 256 single bytes, first 0x{missing[0]:02X}")
        self.ranks, self.pattern, self._purpose = ranks, pattern, purpose
        self._model = self._encoding(pattern)

    def _encoding(self, pattern: str) -> Any:
        return self._tiktoken.Encoding(name="byte_bpe", pat_str=pattern, mergeable_ranks=self.ranks, special_tokens={})

    @cached_property
    def _whole(self) -> Any:
        """Merges a word that is cut already."""
        return self._encoding(r"(?s:.+)")

    def encode(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Ids of each text. Raises ValueError for one that is no Unicode."""
        texts = unicode_texts(texts)
        if any(len(text) >= LONG_RUN and has_long_run(text) for text in texts):
            return [self._encode_long(text) for text in texts]
        if threads > 1 and len(texts) > 1:
            return self._model.encode_ordinary_batch(texts, num_threads=threads)
        return [self._model.encode_ordinary(text) for text in texts]

    def _encode_long(self, text: str) -> list[int]:
        if not has_long_run(text):
            return self._model.encode_ordinary(text)
        regex = require("regex", f"{self._purpose}: a text with {LONG_RUN} blanks in a row")
        words = regex.findall(self.pattern, text, regex.V0)
        return [token for word in words for token in self._whole.encode_ordinary(word)]

    def bytes_of(self, token: int) -> bytes:
        """Raises KeyError for an id that is none of the ranks."""
        return self._model.decode_single_token_bytes(token)


def has_long_run(text: str) -> bool:
    """Whether a text has LONG_RUN blanks in a row."""
    if not re.search(r"\s{1000}", text):  # most texts end here, and a search for the number itself takes its square
        return False
    return any(run.end() - run.start() >= LONG_RUN for run in re.finditer(r"\s{1000,}", text))


def byte_of_letter() -> dict[str, int]:
    """The alphabet of GPT-2's vocab.json: a byte that prints is itself, the others follow in order from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


def merges_follow_ids(merges: Sequence[tuple[bytes, bytes]], ranks: dict[bytes, int]) -> bool:
    """Whether merging neighbours whose union has the lowest id, as tiktoken does, is the same as merging by the list of pairs.

    It is where the unions' ids grow along the list, and the two parts of each union are what the union's bytes become by the merges before
    it: then no other pair of neighbours with that union ever arises.
    """
    last = -1
    for left, right in merges:
        union = ranks.get(left + right, -1)
        if union <= last or left not in ranks or right not in ranks:
            return False
        last = union
    return all(_merged(left + right, ranks[left + right], ranks) == [left, right] for left, right in merges if len(left + right) > 2)


def _merged(word: bytes, below: int, ranks: dict[bytes, int]) -> list[bytes]:
    """`word` after the merges with ids under `below`."""
    parts = [word[place : place + 1] for place in range(len(word))]
    while len(parts) > 1:
        ids = [ranks.get(left + right, below) for left, right in pairwise(parts)]
        lowest = min(ids)
        if lowest >= below:
            break
        place = ids.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts
