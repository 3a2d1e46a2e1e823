"""Tokenizers over a SentencePiece `.model` file."""

import logging
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file, unicode_texts

logger = logging.getLogger(__name__)


class GPTSentencePieceTokenizer(MegatronTokenizer):
    """The pieces of a `.model` file; a document ends with its end of sentence."""

    add_bos = False

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        sentencepiece = require("sentencepiece", f"{type(self).__name__} (--tokenizer-type)")
        need_file(model_path, "--tokenizer-model")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=model_path)
        except (RuntimeError, OSError) as error:
            raise TokenizerFileError(f"--tokenizer-model {model_path}: not a SentencePiece model ({error})") from None
        self._pieces = self._model.get_piece_size()

    @property
    def vocab_size(self) -> int:
        return self._pieces

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return self._model.encode(unicode_texts(texts), out_type=int, add_bos=self.add_bos, num_threads=threads)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        if not hasattr(self._model, "encode_as_offset_mapping"):
            raise ValueError(f"{type(self).__name__}: places of tokens in a text need sentencepiece 0.2.3 or newer")
        found = self._model.encode_as_offset_mapping(text)
        added = [self.bos] if self.add_bos else []
        if [*added, *found["ids"]] != list(ids):
            raise ValueError(f"{type(self).__name__}: these ids are not those of the text")
        return [0] * len(added) + [start for start, _ in found["offsets"]]

    def _token_names(self) -> Iterable[tuple[int, str]]:
        return ((token, self._model.id_to_piece(token)) for token in range(self._pieces))

    def _fingerprint_kind(self) -> str:
        return f"SentencePiece add_bos={self.add_bos}"

    def _fingerprint_options(self) -> dict[str, Any]:
        return {}

    @property
    def bos(self) -> int | None:
        return _valid(self._model.bos_id())

    @property
    def eos(self) -> int | None:
        return _valid(self._model.eos_id())

    @property
    def pad(self) -> int | None:
        return _valid(self._model.pad_id())

    @property
    def unk(self) -> int | None:
        return _valid(self._model.unk_id())


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """As Llama 2 was trained: every text begins with the BOS piece."""

    add_bos = True


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """The pieces of a `.model` file, followed by `vocab_extra_ids` sentinels <extra_id_0>, <extra_id_1>, ...

    A document ends with the piece <eod> or <EOD> where the model has one, else with its end of sentence, which a note says.
    """

    def __init__(self, model_path: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_path, **({"vocab_extra_ids": vocab_extra_ids} if vocab_extra_ids else {}))
        self._extra_ids = vocab_extra_ids

    @property
    def vocab_size(self) -> int:
        return self._pieces + self._extra_ids

    def detokenize(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token < self._pieces:
                run.append(token)
            else:
                parts += [self._model.decode(run), f"<extra_id_{token - self._pieces}>"]
                run = []
        return "".join([*parts, self._model.decode(run)])

    def _token_names(self) -> Iterable[tuple[int, str]]:
        yield from super()._token_names()
        yield from ((self._pieces + number, f"<extra_id_{number}>") for number in range(self._extra_ids))

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return list(range(self._pieces, self.vocab_size))

    @cached_property
    def eod(self) -> int:  # type: ignore[override]  # found once
        for name in ("<eod>", "<EOD>"):
            token = self._model.piece_to_id(name)
            if self._model.id_to_piece(token) == name:  # an unknown name gives the unknown piece
                return token
        token = super().eod
        if os.environ.get("RANK", "0") == "0":
            logger.warning("%s has no <eod>: %s (id %d) ends documents", self.paths[0], self._model.id_to_piece(token), token)
        return token


def _valid(token: int) -> int | None:
    return token if token >= 0 else None
