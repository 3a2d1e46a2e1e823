"""No tokenizer: the text is ids already."""

import re
from collections.abc import Iterable, Sequence

from megatron.core.tokenizers.base import MegatronTokenizer


class NullTokenizer(MegatronTokenizer):
    """Text of whole numbers separated by blanks: ids 0 .. vocab_size - 1 as `--vocab-size` says, and one more that ends documents."""

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = -1) -> None:
        options = {"vocab_size": vocab_size} | ({} if eod_id is None else {"eod_id": eod_id}) | ({} if pad_id < 0 else {"pad_id": pad_id})
        super().__init__(**options)
        self._ids = vocab_size
        self._eod = vocab_size if eod_id is None else eod_id
        self._pad = pad_id

    @property
    def vocab_size(self) -> int:
        return max(self._ids - 1, self._eod, self._pad) + 1

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return [self._parse(text) for text in texts]

    def _parse(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(f"NullTokenizer takes whole numbers separated by blanks: {error}") from None
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            raise ValueError(f"NullTokenizer: ids {min(ids)} to {max(ids)} exceed 0 to {self.vocab_size - 1} (--vocab-size {self._ids})")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        starts = [word.start() for word in re.finditer(r"\S+", text)]
        if self._parse(text) != list(ids):
            raise ValueError("NullTokenizer: these ids are not those of the text")
        return starts

    def _token_names(self) -> Iterable[tuple[int, str]]:
        return ((token, str(token)) for token in range(self.vocab_size))

    @property
    def eos(self) -> int | None:
        return self._eod

    @property
    def pad(self) -> int | None:
        return None if self._pad < 0 else self._pad

    def _fingerprint_options(self) -> dict[str, object]:
        return {}  # the number of ids and the one that ends documents count anyway, padding is in no document
