"""GPT-2's byte-level BPE, and whatever a Hugging Face tokenizer.json describes.

`transformers` is used only for names on the hub that have no tokenizer.json; importing it takes seconds.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from megatron.core.optional_imports import MissingPackageError, require
from megatron.core.tokenizers.base import MegatronTokenizer, TokenizerFileError, need_file, sha256_of_file, starts_of_pieces, unicode_texts
from megatron.core.tokenizers.byte_bpe import GPT2_PATTERN, ByteBPE, byte_of_letter, merges_follow_ids
from megatron.core.tokenizers.chat_template import OWN_FORMAT, read_template, template_of_folder, template_of_format

# a tokenizer.json alone does not say which of its tokens ends a text
USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")
HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
# sha256 of GPT-2's own vocab.json and merges.txt, for which `merges_follow_ids` holds (a test looks); it takes a second
PROVEN = (
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
)


class _FastTokenizer(MegatronTokenizer):
    """Over a `tokenizers.Tokenizer` in self._backend, with the names of special tokens in self._names."""

    include_special_tokens = False
    _backend: Any
    _names: dict[str, str]

    @cached_property
    def vocab_size(self) -> int:  # type: ignore[override]  # found once
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max(len(ids), max(ids) + 1)  # ids may have gaps

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        # the number of threads is the process's: RAYON_NUM_THREADS, read once. Only the batched call leaves out the places in the text.
        encode, add = self._backend.encode_batch_fast, self.include_special_tokens
        texts = unicode_texts(texts)
        batches = [texts] if threads > 1 else [[text] for text in texts]
        return [encoding.ids for batch in batches for encoding in encode(batch, add_special_tokens=add)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=False)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        encoding = self._backend.encode(text, add_special_tokens=self.include_special_tokens)
        if encoding.ids != list(ids):
            raise ValueError(f"{type(self).__name__}: these ids are not those of the text")
        return [start for start, _ in encoding.offsets]

    def _token_names(self) -> Iterable[tuple[int, str]]:
        return sorted((token, name) for name, token in self._backend.get_vocab(with_added_tokens=True).items())

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

    @property
    def cls(self) -> int | None:
        return self._special("cls_token")

    @property
    def sep(self) -> int | None:
        return self._special("sep_token")

    @property
    def mask(self) -> int | None:
        return self._special("mask_token")

    @property
    def unk(self) -> int | None:
        return self._special("unk_token")


class GPT2BPETokenizer(MegatronTokenizer):
    """GPT-2's byte-level BPE out of its vocab.json and merges.txt. Special tokens in a text are plain text.

    By tiktoken, which is several times as fast as `tokenizers`, wherever the ids are provably the same.
    """

    EOS = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        super().__init__(vocab_file, merge_file)
        need_file(vocab_file, "--vocab-file"), need_file(merge_file, "--merge-file")
        files = f"--vocab-file {vocab_file}, --merge-file {merge_file}"
        try:
            self._ids, merges = _read_vocab(vocab_file), _read_merges(merge_file)
            letters = byte_of_letter()
            pairs = [(_bytes(left, letters), _bytes(right, letters)) for left, right in merges]
            alphabet = {bytes([byte]): self._ids[letter] for letter, byte in letters.items()}
            ranks = alphabet | {_bytes(left + right, letters): self._ids[left + right] for left, right in merges}
        except (ValueError, KeyError, TypeError) as error:
            raise TokenizerFileError(f"{files}: not a GPT-2 vocabulary and its merges ({error!r})") from None
        self._bytes_of = {token: text for text, token in ranks.items()}
        self._bpe: ByteBPE | None = None
        if tuple(sha256_of_file(path) for path in self.paths) == PROVEN or merges_follow_ids(pairs, ranks):
            self._bpe = ByteBPE(ranks, GPT2_PATTERN, "GPT2BPETokenizer (--tokenizer-type)")
        else:
            self._backend = _gpt2_backend(vocab_file, merge_file)

    @cached_property
    def vocab_size(self) -> int:  # type: ignore[override]  # found once
        return max(len(self._ids), max(self._ids.values()) + 1)

    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        if self._bpe is not None:
            return self._bpe.encode(texts, threads)
        texts = unicode_texts(texts)
        batches = [texts] if threads > 1 else [[text] for text in texts]
        return [encoding.ids for batch in batches for encoding in self._backend.encode_batch_fast(batch, add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        found = self._bytes_of.get(int(token))
        return self.inv_vocab[int(token)].encode() if found is None else found

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return starts_of_pieces(ids, text, self._piece, type(self).__name__)

    def _token_names(self) -> Iterable[tuple[int, str]]:
        return sorted((token, name) for name, token in self._ids.items())

    @property
    def bos(self) -> int | None:
        return self._ids.get(self.EOS)

    @property
    def eos(self) -> int | None:
        return self._ids.get(self.EOS)


def _bytes(letters: str, byte_of: dict[str, int]) -> bytes:
    return bytes(byte_of[letter] for letter in letters)


def _read_vocab(path: str) -> dict[str, int]:
    with open(path, encoding="utf-8") as file:
        return {str(token): int(number) for token, number in json.load(file).items()}


def _read_merges(path: str) -> list[tuple[str, str]]:
    """Pairs by rank; a first line "#version: ..." is none."""
    with open(path, encoding="utf-8") as file:
        lines = [line.rstrip("\n") for line in file]
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if wrong := next((pair for pair in pairs if len(pair) != 2), None):
        raise ValueError(f"{' '.join(wrong)[:40]!r} is no pair")
    return [(left, right) for left, right in pairs]


def _gpt2_backend(vocab_file: str, merge_file: str) -> Any:
    tokenizers = require("tokenizers", "GPT2BPETokenizer (--tokenizer-type) with merges in another order than the ids")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_file, merge_file))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


class HuggingFaceTokenizer(_FastTokenizer):
    """A folder with a tokenizer.json, such a file, or the name of a model on the Hugging Face hub.

    include_special_tokens  put BOS and the like where the tokenizer's own post-processing does
    special_tokens          more tokens to add, unless they are there
    chat_template           file of a chat template, or the template; None: the one that comes with the tokenizer

    Limits and padding that a tokenizer.json may prescribe do not hold here: no document is cut.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        include_special_tokens: bool = True,
        special_tokens: Sequence[str] = (),
        trust_remote_code: bool = False,
        chat_template: str | None = None,
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
        self._backend.no_truncation()
        self._backend.no_padding()
        if special_tokens:
            self._backend.add_special_tokens(list(special_tokens))
        if chat_template is not None:
            self.chat_template = read_template(chat_template)

    def _load_local(self, path: str) -> None:
        tokenizers = require("tokenizers", f"{type(self).__name__} (--tokenizer-type)")
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        need_file(file, "--tokenizer-model")
        try:
            self._backend = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerFileError(f"--tokenizer-model {file}: not a tokenizer.json ({error})") from None
        self.paths = [file]
        folder = os.path.dirname(file)
        self.chat_template, self._names = template_of_folder(folder), _special_token_names(folder)
        if "eos_token" not in self._names:
            found = next((name for name in USUAL_EOS if self._backend.token_to_id(name) is not None), None)
            self._names.update({"eos_token": found} if found else {})

    def _load_named(self, name: str, trust_remote_code: bool) -> None:
        """The files of a name on the hub as those of a folder, so that ids and identity are the same; what has no tokenizer.json by
        `transformers`."""
        purpose = f"--tokenizer-model {name} (no local file or folder, so a name on the hub)"
        try:
            folder = require("huggingface_hub", purpose).snapshot_download(name, allow_patterns=HUB_FILES)
        except MissingPackageError:
            raise
        except Exception as error:  # network, name, and file errors of several libraries
            reason = (str(error) or repr(error)).splitlines()[0]
            raise TokenizerFileError(f"--tokenizer-model {name}: no local file or folder, and not on the hub ({reason})") from None
        if os.path.isfile(os.path.join(folder, "tokenizer.json")):
            self._load_local(folder)
            return
        transformers = require("transformers", purpose)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as error:
            reason = (str(error) or repr(error)).splitlines()[0]
            raise TokenizerFileError(
                f"--tokenizer-model {name}: has no tokenizer.json, and transformers has none for it ({reason})"
            ) from None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise TokenizerFileError(f"--tokenizer-model {name}: has no fast tokenizer (tokenizer.json)")
        self.paths = []
        self.unique_identifiers["tokenizer_json"] = hashlib.sha256(self._backend.to_str().encode()).hexdigest()
        self._names = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        self.chat_template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None

    def _special_names(self) -> dict[str, str]:
        return self._names

    @cached_property
    def _closing_ids(self) -> frozenset[int]:
        return frozenset(token for token, added in self._backend.get_added_tokens_decoder().items() if added.special)

    @cached_property
    def _plain_backend(self) -> Any:
        """Adds nothing to a text, and leaves no blanks out of the places of tokens."""
        tokenizers = require("tokenizers", "a chat template")
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        return backend

    def _tokenize_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._plain_backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _fingerprint_kind(self) -> str:
        return "HuggingFaceTokenizer"


class SFTTokenizer(HuggingFaceTokenizer):
    """HuggingFaceTokenizer for conversations. prompt_format: see chat_template.PROMPT_FORMATS; "default" is the tokenizer's own template.

    Raises ValueError where the format's special tokens are not in the vocabulary, or there is no such format.
    """

    def __init__(self, pretrained_model_name_or_path: str, prompt_format: str = OWN_FORMAT, **options: Any) -> None:
        super().__init__(pretrained_model_name_or_path, **options)
        if options.get("chat_template") is None:
            self.chat_template = template_of_format(prompt_format, self.chat_template)
        rule = f"--sft-tokenizer-prompt-format {prompt_format}: {pretrained_model_name_or_path} has"
        if self.chat_template is None:
            raise ValueError(f"{rule} no chat template; give one by --chat-template FILE, or the format identity")
        marks = [f"<SPECIAL_{number}>" for number in (10, 11, 12) if f"<SPECIAL_{number}>" in self.chat_template]
        if missing := [mark for mark in marks if self._backend.token_to_id(mark) is None]:
            works = "default takes the tokenizer's own chat template, identity needs no special tokens but EOS"
            raise ValueError(f"{rule} no token {', '.join(missing)}; {works}")
        if "eos_token" in self.chat_template and self.eos is None:
            raise ValueError(f"{rule} no token that ends a text (EOS), which that format writes; choose a tokenizer that has one")


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
