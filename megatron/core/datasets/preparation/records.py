"""From lines to ids: what a line of JSON must be, how a text is cut into sentences, and which records are refused, with the reason."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron.core.datasets.indexed_dataset import optimal_dtype
from megatron.core.datasets.preparation.text_input import Batch
from megatron.core.optional_imports import require
from megatron.core.tokenizers import MegatronTokenizer


class RecordError(ValueError):
    """What is wrong with one record."""


@dataclass(frozen=True)
class TextRules:
    """What decides, beside the tokenizer, which ids come out.

    json_keys        keys to take text from; each gives a pair of its own
    append_eod       end each document with the end-of-document token
    split_sentences  store each sentence as a sequence of its own, by nltk's Punkt model of `lang`
    keep_newlines    keep the white space between sentences
    """

    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    lang: str = "english"
    keep_newlines: bool = False

    @property
    def level(self) -> str:
        """What a sequence is, as it stands in the names of files."""
        return "sentence" if self.split_sentences else "document"


@dataclass(frozen=True)
class Encoded:
    """One key of a batch: ids back to back, the length of each sequence (int32), the number of sequences of each document (int32)."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray


@dataclass(frozen=True)
class EncodedBatch:
    """A batch's ids by key, and its records that were refused: line number and reason."""

    keys: list[Encoded]
    refused: list[tuple[int, str]]


class Encoder:
    """Lines to ids. Lives in the workers; what it needs comes by fork."""

    def __init__(self, tokenizer: MegatronTokenizer, rules: TextRules) -> None:
        self.tokenizer = tokenizer
        self.threads = 1  # of the tokenizer's own, set by workers.py
        self.rules = rules
        self.dtype = np.dtype(optimal_dtype(tokenizer.vocab_size))
        self.eod = tokenizer.eod if rules.append_eod else None
        self.split = sentence_splitter(rules.lang, rules.keep_newlines) if rules.split_sentences else None

    def encode(self, batch: Batch) -> EncodedBatch:
        """The ids of all good records, the same records for every key."""
        refused: list[tuple[int, str]] = []
        numbers: list[int] = []
        records: list[list[str]] = []
        for number, line in enumerate(batch.text.split(b"\n"), batch.first_line):
            if not line or line.isspace():
                continue
            try:
                records.append(parse_line(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, self.rules.json_keys))
                numbers.append(number)
            except RecordError as error:
                refused.append((number, str(error)))
        try:
            return EncodedBatch(self._encode(records), refused)
        except RecordError:
            good = []
            for number, record in zip(numbers, records):
                try:
                    self._encode([record])
                    good.append(record)
                except RecordError as error:
                    refused.append((number, str(error)))
            return EncodedBatch(self._encode(good), sorted(refused))

    def _encode(self, records: list[list[str]]) -> list[Encoded]:
        return [self._encode_texts([record[key] for record in records]) for key in range(len(self.rules.json_keys))]

    def _encode_texts(self, texts: list[str]) -> Encoded:
        if self.split is None:
            encoded = self._tokenize(texts)
            if self.eod is not None:
                for ids in encoded:
                    if ids:
                        ids.append(self.eod)
            encoded_parts = [[ids] if ids else [] for ids in encoded]  # an empty document stays one, of no sequences
        else:
            parts = [self.split(text) for text in texts]
            flat = iter(self._tokenize([part for document in parts for part in document]))
            encoded_parts = [[ids for ids in (next(flat) for _ in document) if ids] for document in parts]
            if self.eod is not None:
                for document in encoded_parts:
                    if document:
                        document[-1].append(self.eod)
        sequences = [ids for document in encoded_parts for ids in document]
        lengths = np.fromiter(map(len, sequences), dtype=np.int32, count=len(sequences))
        counts = np.fromiter(map(len, encoded_parts), dtype=np.int32, count=len(encoded_parts))
        return Encoded(self._as_ids(sequences, int(lengths.sum(dtype=np.int64))), lengths, counts)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        try:
            return self.tokenizer.tokenize_batch(texts, self.threads)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the panics of libraries written in Rust are no Exceptions
            own = isinstance(error, ValueError) and not isinstance(error, UnicodeError)
            raise RecordError(str(error) if own else f"the tokenizer cannot take this text: {error!r}") from None

    def _as_ids(self, sequences: list[list[int]], count: int) -> np.ndarray:
        try:
            ids = np.fromiter(chain.from_iterable(sequences), dtype=np.int32, count=count)
        except OverflowError as error:
            raise RecordError(f"the tokenizer gave an id beyond its vocabulary of {self.tokenizer.vocab_size}: {error}") from None
        if count and (ids.min() < 0 or ids.max() > np.iinfo(self.dtype).max):
            rule = f"do not fit {self.dtype}, the type of its vocabulary of {self.tokenizer.vocab_size}"
            raise RecordError(f"the tokenizer gave ids {ids.min()} to {ids.max()}, which {rule}")
        return ids.astype(self.dtype, copy=False)


def parse_line(line: bytes, keys: tuple[str, ...]) -> list[str]:
    """The texts under `keys` of the JSON object in `line`. Raises RecordError that says what is wrong with it."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise RecordError(f'a {type(record).__name__}, each line must be a JSON object such as {{"text": "..."}}')
    texts = []
    for key in keys:
        if key not in record:
            raise RecordError(f"has no key {key!r} (--json-keys), only {_names(record)}")
        text = record[key]
        if not isinstance(text, str):
            raise RecordError(f"key {key!r} holds a {type(text).__name__}, it must be text")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
                raise RecordError(f"key {key!r} is not valid Unicode: {error}") from None
        texts.append(text)
    return texts


def _names(record: dict[str, object]) -> str:
    names = [ascii(key)[:60] for key in list(record)[:10]]
    return ", ".join(names + (["..."] if len(record) > len(names) else [])) or "an empty object"


def sentence_splitter(language: str, keep_white_space: bool) -> Callable[[str], list[str]]:
    """Text to sentences by nltk's Punkt model of `language`."""
    punkt = require("nltk.tokenize.punkt", "--split-sentences")
    if not re.fullmatch(r"\w+", language):
        raise ValueError(f"--lang {language!r} must be the name of a language, for example english")
    try:
        model = punkt.PunktTokenizer(language)
    except (LookupError, OSError):
        where = f"set NLTK_DATA to a folder with tokenizers/punkt_tab/{language}"
        raise ValueError(f"--split-sentences: no Punkt model for --lang {language}; {where}") from None

    def split(text: str) -> list[str]:
        spans = list(model.span_tokenize(text))
        if keep_white_space:
            starts = [0, *(begin for begin, _ in spans[1:])]
            return [text[begin:end] for begin, end in zip(starts, [*starts[1:], len(text)])] if spans else [text]
        return [text[begin:end] for begin, end in spans]

    return split
