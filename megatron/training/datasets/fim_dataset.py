"""Fill in the middle (Bavarian et al. 2022): GPTDataset's samples with some documents rearranged, so that a model learns to write a middle
when it has seen what comes before and after.

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle

A sample keeps its length, and so does each document in it: the marks take the place of the suffix's last tokens, and ends of documents
stay where they are. Positions, masks and document borders are GPTDataset's.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

MARKS = 3  # tokens that a rearranged document has more
USUAL_NAMES = {"prefix": "<fim_prefix>", "middle": "<fim_middle>", "suffix": "<fim_suffix>", "pad": "<fim_pad>", "eod": "<|endoftext|>"}
OWN_OTHERWISE = ("pad", "eod")  # under its usual name such a token may be missing: the tokenizer's own takes its place


@dataclass
class FIMTokens:
    """Ids of the marks, of what fills a document that came out shorter, and of what ends one."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings of GPTFIMDataset, beside GPTDataset's. Raises ValueError for names that are no tokens, all in one message."""

    fim_data: bool = True
    """False: samples as GPTDataset's"""
    fim_rate: float = 0.5
    """share of documents that are rearranged"""
    fim_spm_rate: float = 0.5
    """share of those in SPM order"""
    fim_extra_tokens: dict[str, str] | None = None
    """names of the tokens prefix, middle, suffix, pad and eod"""
    fim_split_sample: str | None = None
    """token at which documents are cut; each fragment is rearranged by itself"""
    fim_fragment_rate: float | None = None
    """share of fragments that are rearranged, None: fim_rate"""
    fim_no_prefix: str | None = None
    """fragments that begin with this text are left as they are"""

    def problems(self) -> list[str]:
        found = super().problems()
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                found.append(f"{name} {value} must be between 0 and 1, for example 0.5")
        if self.tokenizer is not None:
            wanted = {role: name for role, name in self.fim_names().items() if role not in OWN_OTHERWISE or name != USUAL_NAMES[role]}
            names = {f"--fim-{role}-token": name for role, name in wanted.items()}
            if self.fim_split_sample is not None:
                names["--fim-split-sample"] = self.fim_split_sample
            for flag, name in names.items():
                if name not in self.tokenizer.vocab:
                    works = f"name one that is, or add it (--tokenizer-special-tokens {name})"
                    found.append(f"{flag} {name} is no token of the tokenizer: {works}")
        return found

    def fim_names(self) -> dict[str, str]:
        return USUAL_NAMES | (self.fim_extra_tokens or {})

    def token_ids(self) -> FIMTokens:
        """Padding and the end of documents are the tokenizer's own where it lacks the usual names."""
        vocab, tokenizer, names = self.tokenizer.vocab, self.tokenizer, self.fim_names()
        eod = vocab.get(names["eod"], tokenizer.eod)
        pad = vocab.get(names["pad"], eod if tokenizer.pad is None else tokenizer.pad)
        return FIMTokens(vocab[names["prefix"]], vocab[names["middle"]], vocab[names["suffix"]], pad, eod)


def fim_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, as fields of GPTFIMDatasetConfig."""
    tokens = {"prefix": args.fim_prefix_token, "middle": args.fim_middle_token, "suffix": args.fim_suffix_token}
    return {
        "fim_data": args.fim_data,
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": tokens | {"pad": args.fim_pad_token, "eod": args.fim_eod_token},
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
    }


class GPTFIMDataset(GPTDataset):
    """GPTDataset whose samples have some documents rearranged. Sample i depends on the seed and on i alone: not on the loader's workers,
    nor on what was read before. What fills a document that came out shorter bears no loss."""

    config: GPTFIMDatasetConfig

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        if not self.config.fim_data:
            return sample
        if not hasattr(self, "_fim"):  # the first sample is read while GPTDataset is being built
            self._fim = FillInTheMiddle(self.config)
        counted = np.flatnonzero(sample["loss_mask"].numpy())
        filled = int(counted[-1]) + 2 if len(counted) else 0  # tokens and the last label; behind them is padding
        text = np.append(sample["tokens"].numpy(), sample["labels"].numpy()[-1])
        random = np.random.default_rng([self.config.random_seed, idx])
        text[:filled], padding = self._fim.rearrange(text[:filled], random)
        sample["tokens"], sample["labels"] = torch.from_numpy(text[:-1].copy()), torch.from_numpy(text[1:].copy())
        for place in padding:
            sample["loss_mask"][max(place - 1, 0)] = 0.0  # no loss where the label fills
        return sample


class FillInTheMiddle:
    """Rearranges the documents of samples."""

    def __init__(self, config: GPTFIMDatasetConfig) -> None:
        self.config, self.tokenizer, self.ids = config, config.tokenizer, config.token_ids()
        self.split_id = None if config.fim_split_sample is None else self.tokenizer.vocab[config.fim_split_sample]
        self.fragment_rate = config.fim_rate if config.fim_fragment_rate is None else config.fim_fragment_rate
        self.by_characters = joins_up(self.tokenizer)

    def rearrange(self, text: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, list[int]]:
        """text [n] ids -> ids [n], and the places of those that only fill. Documents end with `eod`, which stays in its place."""
        result = text.copy()
        padding: list[int] = []
        for begin, end in _between(text, self.ids.eod):
            if self.split_id is not None and self.split_id in text[begin:end]:
                pieces = [(begin + first, begin + last) for first, last in _between(text[begin:end], self.split_id)]
                rate = self.fragment_rate
            else:
                pieces, rate = [(begin, end)], self.config.fim_rate
            for first, last in pieces:
                draw = random.random()  # of each, so that one fragment's fate does not move the next's
                if draw < rate and not self._stays(text[first:last]):
                    result[first:last], fillers = self._permute(text[first:last], random)
                    padding += range(last - fillers, last)
        return result, padding

    def _stays(self, piece: np.ndarray) -> bool:
        prefix = self.config.fim_no_prefix
        return prefix is not None and self.tokenizer.detokenize(piece.tolist()).startswith(prefix)

    def _permute(self, piece: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """One document, or a fragment, rearranged [n], and how many fillers stand at its end. As it was where the suffix has no room for
        the marks."""
        prefix, middle, suffix = self._cut(piece, random)
        is_spm = random.random() < self.config.fim_spm_rate
        excess = len(prefix) + len(middle) + len(suffix) + MARKS - len(piece)
        if excess > len(suffix):
            return piece, 0
        suffix = suffix[: len(suffix) - excess] if excess > 0 else suffix
        ids = self.ids
        if is_spm:
            parts = [[ids.prefix, ids.suffix], suffix, [ids.middle], prefix, middle]
        else:
            parts = [[ids.prefix], prefix, [ids.suffix], suffix, [ids.middle], middle]
        fillers = max(0, -excess)
        return np.concatenate([*parts, [ids.pad] * fillers]).astype(piece.dtype), fillers

    def _cut(self, piece: np.ndarray, random: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
        """Prefix, middle and suffix, cut at two random characters; at two random tokens where the tokens do not make up a text."""
        ids = piece.tolist()
        text = self.tokenizer.detokenize(ids) if self.by_characters else None
        if text is None or self.tokenizer.tokenize(text) != ids:
            first, last = np.sort(random.integers(0, len(ids) + 1, size=2)).tolist()
            return ids[:first], ids[first:last], ids[last:]
        first, last = np.sort(random.integers(0, len(text) + 1, size=2)).tolist()
        prefix, middle, suffix = self.tokenizer.tokenize_batch([text[:first], text[first:last], text[last:]])
        return prefix, middle, suffix


def joins_up(tokenizer: Any) -> bool:
    """Whether the tokens of two texts, one behind the other, are tokens of both texts joined: nothing is put before or behind a text."""
    try:
        parts = tokenizer.tokenize_batch(["", "ab", "c d"])
        return not parts[0] and tokenizer.detokenize(parts[1] + parts[2]) == "abc d"
    except ValueError:  # NullTokenizer's text is numbers
        return False


def _between(text: np.ndarray, separator: int) -> list[tuple[int, int]]:
    """[begin, end) of the stretches between separators that are not empty."""
    places = np.flatnonzero(text == separator).tolist()
    begins, ends = [0, *(place + 1 for place in places)], [*places, len(text)]
    return [(begin, end) for begin, end in zip(begins, ends) if end > begin]
