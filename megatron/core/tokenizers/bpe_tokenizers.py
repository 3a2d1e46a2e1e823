"""Byte-level BPE tokenizers through Hugging Face's `tokenizers`: a tokenizer.json, or GPT-2's vocab.json and merges.txt.

`transformers` is used only for names that are not local files; importing it takes seconds.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from megatron.core.optional_imports import require
from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file

# a tokenizer.json alone does not say which of its tokens ends a text
USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class _FastTokenizer(MegatronTokenizer):
    """Over a `tokenizers.Tokenizer` in self._backend, with the names of special tokens in self._names."""

    include_special_tokens = False
    _backend: Any
    _names: dict[str, str]

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        # the number of threads is the process's: RAYON_NUM_THREADS, read once
        if threads > 1 and len(texts) > 1:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=self.include_special_tokens)
        else:
            encodings = [self._backend.encode(text, add_special_tokens=self.include_special_tokens) for text in texts]
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def _special(self, role: str) -> int | None:
        name = self._names.get(role)
        return None if name is None else self._backend.token_to_id(name)

    @property
    def bos(self) -> int | None:
        return self._special("bos_token")

    @property
    def eos(self) -> int | None:
        return self._special("eos_token")

    @property
    def pad(self) -> int | None:
        return self._special("pad_token")


class GPT2BPETokenizer(_FastTokenizer):
    """GPT-2's byte-level BPE out of its vocab.json and merges.txt. Special tokens in a text are plain text."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(vocab_file, merge_file)
        tokenizers = require("tokenizers", "GPT2BPETokenizer (--tokenizer-type)")
        need_file(vocab_file, "--vocab-file"), need_file(merge_file, "--merge-file")
        try:
            model = tokenizers.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exception
            files = f"--vocab-file {vocab_file}, --merge-file {merge_file}"
            raise TokenizerFileError(f"{files}: not a GPT-2 vocabulary and its merges ({error})") from None
        self._backend = tokenizers.Tokenizer(model)
        self._backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = tokenizers.decoders.ByteLevel()
        self._names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


class HuggingFaceTokenizer(_FastTokenizer):
    """A folder with a tokenizer.json, such a file, or the name of a model on the Hugging Face hub.

    include_special_tokens  put BOS and the like where the tokenizer's own post-processing does
    special_tokens          more tokens to add, unless they are there
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        include_special_tokens: bool = True,
        special_tokens: Sequence[str] = (),
        trust_remote_code: bool = False,
    ) -> None:
        path = pretrained_model_name_or_path
        options: dict[str, Any] = {"include_special_tokens": include_special_tokens}
        if special_tokens:
            options["special_tokens"] = list(special_tokens)
        super().__init__(path, **options)
        self.include_special_tokens = include_special_tokens
        if os.path.exists(path):
            self._load_local(path)
        else:
            self._load_named(path, trust_remote_code)
        if special_tokens:
            self._backend.add_special_tokens(list(special_tokens))

    def _load_local(self, path: str) -> None:
        tokenizers = require("tokenizers", "HuggingFaceTokenizer (--tokenizer-type)")
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        need_file(file, "--tokenizer-model")
        try:
            self._backend = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFileError(f"--tokenizer-model {file}: not a tokenizer.json ({error})") from None
        self.paths = [file]
        self._names = _special_token_names(os.path.dirname(file))
        if "eos_token" not in self._names:
            found = next((name for name in USUAL_EOS if self._backend.token_to_id(name) is not None), None)
            self._names.update({"eos_token": found} if found else {})

    def _load_named(self, name: str, trust_remote_code: bool) -> None:
        transformers = require("transformers", f"--tokenizer-model {name} (no local file or folder, so a name on the hub)")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:  # network, name, and file errors of several libraries
            reason = (str(error) or repr(error)).splitlines()[0]
            raise TokenizerFileError(f"--tokenizer-model {name}: no local file or folder, and not on the hub ({reason})") from None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise TokenizerFileError(f"--tokenizer-model {name}: has no fast tokenizer (tokenizer.json)")
        self.paths = []
        self.unique_identifiers["tokenizer_json"] = hashlib.sha256(self._backend.to_str().encode()).hexdigest()
        self._names = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


def _special_token_names(folder: str) -> dict[str, str]:
    """Role (bos_token, eos_token, pad_token, ...) -> token, from the files that accompany a tokenizer.json."""
    names: dict[str, str] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = os.path.join(folder, file_name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                entries = json.load(file)
            for role, token in entries.items():
                text = token.get("content") if isinstance(token, dict) else token
                if role.endswith("_token") and isinstance(text, str):
                    names[role] = text
    return names
