"""What every tokenizer offers."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Span = tuple[int, int]


class TokenizerFileError(ValueError):
    """A tokenizer's file is missing or is not what it should be. The message names it."""


class Conversation(NamedTuple):
    """A conversation in ids, and for each whether it belongs to what the assistant says (its end of turn included)."""

    ids: list[int]
    answer: list[bool]


class MegatronTokenizer(ABC):
    """Maps text to ids 0 .. vocab_size - 1 and back.

    paths    the files (or one folder) it is made of
    options  whatever else decides which ids come out; part of the identity

    `unique_identifiers` (ordered: class, tokenizer_path, then the options as text) goes into the key of index caches.
    """

    chat_template: str | None = None
    """Jinja template that makes one text of a conversation, None where the tokenizer has none"""

    def __init__(self, *paths: str, **options: Any) -> None:
        self.paths = [str(path) for path in paths]
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict()
        self.unique_identifiers["class"] = f"{type(self).__module__}.{type(self).__qualname__}"
        self.unique_identifiers["tokenizer_path"] = self.paths[0] if len(self.paths) == 1 else self.paths
        for name, value in options.items():
            self.unique_identifiers[name] = str(value)

    # --- text and ids ---

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special ones included, before padding for the model."""

    @abstractmethod
    def tokenize_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """The ids of each text. Backends that can do so use `threads` threads. Raises ValueError for a text that has no ids."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`."""

    @abstractmethod
    def _token_names(self) -> Iterable[tuple[int, str]]:
        """Each id and what it stands for."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.tokenize_batch([text])[0]

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Where in `text`, in characters, each of `ids` begins; `ids` are those of the text. A token that begins inside a character is
        said to begin at that character. Raises ValueError where the tokenizer cannot tell."""
        raise ValueError(f"{type(self).__name__} keeps no places of its tokens in a text")

    @cached_property
    def inv_vocab(self) -> dict[int, str]:
        """Token of each id. All differ: a name that two ids share gets the second's number behind it."""
        names: dict[int, str] = {}
        taken: set[str] = set()
        for token, name in self._token_names():
            while name in taken:
                name = f"{name}<{token}>"
            names[token] = name
            taken.add(name)
        return names

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Id of each token."""
        return {name: token for token, name in self.inv_vocab.items()}

    # --- special ids ---

    @property
    def bos(self) -> int | None:
        """Id that begins a text, None where there is none."""
        return None

    @property
    def eos(self) -> int | None:
        """Id that ends a text, None where there is none."""
        return None

    @property
    def pad(self) -> int | None:
        """Id of padding, None where there is none."""
        return None

    @property
    def cls(self) -> int | None:
        """Id that stands for a whole text (BERT), None where there is none."""
        return None

    @property
    def sep(self) -> int | None:
        """Id between two texts (BERT), None where there is none."""
        return None

    @property
    def mask(self) -> int | None:
        """Id in the place of a token to guess (BERT), None where there is none."""
        return None

    @property
    def unk(self) -> int | None:
        """Id of what the vocabulary lacks, None where there is none."""
        return None

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the sentinels <extra_id_0>, ... (`--vocab-extra-ids`)."""
        return []

    @property
    def eod(self) -> int:
        """Id that ends a document: the one that ends a text. Raises ValueError where there is none."""
        if self.eos is None:
            name = f"{type(self).__name__} {self.unique_identifiers['tokenizer_path']}"
            raise ValueError(f"{name} has no token that ends a document (EOS): train or choose one that has")
        return self.eos

    # --- conversations ---

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The text of a conversation. messages: each with "role" and "content".

        add_generation_prompt: end with what precedes an answer. Raises ValueError for a conversation that the template refuses, or without
        a template.
        """
        return self._chat.render(messages, add_generation_prompt)

    def tokenize_conversation(self, messages: Sequence[Message]) -> Conversation:
        """Ids of a conversation and which of them the assistant says. A token that holds a character of an answer belongs to it."""
        text, answers = self._chat.render_with_answers(messages)
        ids, places = self._tokenize_rendered(text)
        return Conversation(ids, answer_mask(places, answers, [token in self._closing_ids for token in ids], text))

    @cached_property
    def _chat(self) -> Any:
        from megatron.core.tokenizers.chat_template import ChatTemplate

        if self.chat_template is None:
            name = f"{type(self).__name__} {self.unique_identifiers['tokenizer_path']}"
            raise ValueError(f"{name} has no chat template; give one by --chat-template FILE, or use --tokenizer-type SFTTokenizer")
        return ChatTemplate(self.chat_template, self._special_names())

    @cached_property
    def _closing_ids(self) -> frozenset[int]:
        """Ids of special tokens, which may end a turn."""
        return frozenset(token for token in (self.bos, self.eos, self.pad) if token is not None)

    def _special_names(self) -> dict[str, str]:
        """bos_token, eos_token, ... for chat templates."""
        roles = {"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.pad}
        return {role: self.inv_vocab[token] for role, token in roles.items() if token is not None}

    def _tokenize_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text that a template made, nothing added, and [begin, end) of the characters that each holds a part of."""
        ids = self.tokenize(text)
        starts = self.offsets(ids, text)
        return ids, [(start, max(end, start + 1)) for start, end in zip(starts, [*starts[1:], len(text)])]

    # --- identity ---

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over what decides the ids: kind, options, the id that ends documents, contents of the files. The same on every machine and
        in every folder. What decides none does not count: a chat template, padding, sentinels behind the vocabulary."""
        digest = hashlib.sha256(self._fingerprint_kind().encode())
        for name, value in sorted(self._fingerprint_options().items()):
            digest.update(f"\0{name}={value}".encode())
        try:
            eod: int | None = self.eod
        except ValueError:
            eod = None
        digest.update(f"\0{self.vocab_size - len(self.additional_special_tokens_ids)} {eod}".encode())
        for path in self.paths:
            digest.update(sha256_of_file(path).encode())
        return digest.hexdigest()

    def _fingerprint_kind(self) -> str:
        return type(self).__name__

    def _fingerprint_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.unique_identifiers.items() if name not in ("class", "tokenizer_path")}


def answer_mask(places: Sequence[Span], answers: Sequence[Span], closing: Sequence[bool], text: str) -> list[bool]:
    """Which tokens hold a character of an answer.

    places: [begin, end) of each token in `text`; answers: those of the answers, in order; closing: which tokens may end a turn.
    White space of the template's behind the token that ends a turn is no part of it: the model has stopped there.
    """
    mask = [False] * len(places)
    token = 0
    for begin, end in answers:
        while token < len(places) and places[token][1] <= begin:
            token += 1
        first, last = token, None
        while token < len(places) and places[token][0] < end:
            last = token if closing[token] and token > first else last
            token += 1
        if last is None or text[places[last][1] : end].strip():
            last = token - 1
        mask[first : last + 1] = [True] * (last + 1 - first)
    return mask


def need_file(path: str, flag: str) -> str:
    """`path` where it is a file; else TokenizerFileError that names the flag."""
    if not os.path.isfile(path):
        raise TokenizerFileError(f"{flag} {path}: no such file")
    return path


def sha256_of_file(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unicode_texts(texts: Sequence[str]) -> list[str]:
    """`texts` as a list. Raises ValueError for one with half of a surrogate pair: some libraries replace it without a word."""
    for text in texts:
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair"
            raise ValueError(f"the text is no Unicode: {where}; mend it where it was written") from None
    return list(texts)


def readable(token: bytes) -> str:
    """The text of a token's bytes; <0xE3><0x81> for those that are no text by themselves."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in token)


def starts_of_pieces(ids: Sequence[int], text: str, piece_of: Callable[[int], bytes], name: str) -> list[int]:
    """Where each token begins in `text`, given that the bytes of the tokens, one after the other, are the text."""
    data = text.encode()
    pieces = [piece_of(int(token)) for token in ids]
    if b"".join(pieces) != data:
        raise ValueError(f"{name}: these ids are not those of the text")
    starts, characters = [], 0  # characters that have begun
    for piece in pieces:
        goes_on = 0x80 <= piece[0] < 0xC0  # its first byte is inside a character
        starts.append(characters - goes_on)
        characters += sum(not 0x80 <= byte < 0xC0 for byte in piece)
    return starts
