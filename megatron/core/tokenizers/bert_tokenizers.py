"""BERT's WordPiece out of a vocab.txt, one token a line, through Hugging Face's `tokenizers`."""

from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import TokenizerFileError, need_file
from megatron.core.tokenizers.bpe_tokenizers import _FastTokenizer

NEEDED = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")


class BertWordPiece(_FastTokenizer):
    """Words of a text, split into pieces; [BOS] and [EOS], where the file lacks them, and `vocab_extra_ids` sentinels <extra_id_0>, ...
    follow the file's tokens, as in Megatron-LM. Texts get no [CLS] and [SEP] here.

    Not lossless, by BERT's design: white space and control characters are not kept, and what has no pieces becomes [UNK].
    """

    lower_case: bool

    def __init__(self, vocab_file: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(vocab_file, **({"vocab_extra_ids": vocab_extra_ids} if vocab_extra_ids else {}))
        tokenizers = require("tokenizers", f"{type(self).__name__} (--tokenizer-type)")
        need_file(vocab_file, "--vocab-file")
        try:
            model = tokenizers.models.WordPiece.from_file(vocab_file, unk_token="[UNK]", max_input_chars_per_word=100)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFileError(f"--vocab-file {vocab_file}: not a vocabulary of one token a line ({error})") from None
        self._backend = tokenizers.Tokenizer(model)
        if missing := [name for name in NEEDED if self._backend.token_to_id(name) is None]:
            raise TokenizerFileError(f"--vocab-file {vocab_file}: BERT's vocabulary needs {', '.join(missing)}, a line each")
        self._backend.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=self.lower_case)
        self._backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self._backend.decoder = tokenizers.decoders.WordPiece()
        self._sentinels = [f"<extra_id_{number}>" for number in range(vocab_extra_ids)]
        self._backend.add_special_tokens([*NEEDED, "[BOS]", "[EOS]", *self._sentinels])
        roles = ("unk", "cls", "sep", "pad", "mask", "bos", "eos")
        self._names = {f"{role}_token": f"[{role.upper()}]" for role in roles}

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        return [self._backend.token_to_id(name) for name in self._sentinels]

    def _fingerprint_options(self) -> dict[str, Any]:
        return {}


class BertWordPieceLowerCase(BertWordPiece):
    """Lower case, accents taken off."""

    lower_case = True


class BertWordPieceCase(BertWordPiece):
    """Capitals and accents as they are."""

    lower_case = False
