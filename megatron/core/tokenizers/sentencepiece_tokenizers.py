"""Tokenizers over a SentencePiece `.model` file."""

from collections.abc import Sequence
from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file


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
        return self._model.encode(list(texts), out_type=int, add_bos=self.add_bos, num_threads=threads)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(token) for token in ids])

    @property
    def bos(self) -> int | None:
        return _valid(self._model.bos_id())

    @property
    def eos(self) -> int | None:
        return _valid(self._model.eos_id())

    @property
    def pad(self) -> int | None:
        return _valid(self._model.pad_id())


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """As Llama 2 was trained: every text begins with the BOS piece."""

    add_bos = True


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """The pieces of a `.model` file, followed by `vocab_extra_ids` sentinels <extra_id_0>, <extra_id_1>, ...

    A document ends with the piece <eod> or <EOD> where the model has one, else with its end of sentence.
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

    @property
    def eod(self) -> int:
        for name in ("<eod>", "<EOD>"):
            token = self._model.piece_to_id(name)
            if self._model.id_to_piece(token) == name:  # an unknown name gives the unknown piece
                return token
        return super().eod


def _valid(token: int) -> int | None:
    return token if token >= 0 else None
