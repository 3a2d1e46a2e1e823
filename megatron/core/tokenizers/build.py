"""From what the command line says to a tokenizer. The keyword arguments are the flags' destinations."""

import math
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.base import MegatronTokenizer
from megatron.core.tokenizers.bert_tokenizers import BertWordPieceCase, BertWordPieceLowerCase
from megatron.core.tokenizers.bpe_tokenizers import GPT2BPETokenizer, HuggingFaceTokenizer, SFTTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizers import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer

# type -> flags it cannot do without
TOKENIZER_TYPES: dict[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
    "SFTTokenizer": ("tokenizer_model",),
}
# for which types a flag has a meaning, where it is not for all
WITH_EXTRA_IDS = ("SentencePieceTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
WITH_SPECIAL_TOKENS = ("HuggingFaceTokenizer", "SFTTokenizer", "TikTokenizer")
WITH_CHAT_TEMPLATE = ("HuggingFaceTokenizer", "SFTTokenizer")


def build_tokenizer(
    *,
    tokenizer_type: str | None,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
    special_tokens: Sequence[str] | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    null_tokenizer_eod_id: int | None = None,
    null_tokenizer_pad_id: int = -1,
    tokenizer_hf_no_include_special_tokens: bool = False,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    sft_tokenizer_prompt_format: str = "nemotron-h-aligned",
) -> MegatronTokenizer:
    """The tokenizer that these flags name. Raises ValueError that names flags, or files that are missing or broken."""
    given = {"tokenizer_model": tokenizer_model, "vocab_file": vocab_file, "merge_file": merge_file, "vocab_size": vocab_size}
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(f"--tokenizer-type {tokenizer_type} is not one of those there are: {', '.join(TOKENIZER_TYPES)}")
    missing = [f"--{name.replace('_', '-')}" for name in TOKENIZER_TYPES[tokenizer_type] if given[name] is None]
    if missing:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs {' and '.join(missing)}")
    for flag, value, types in (
        ("--vocab-extra-ids", vocab_extra_ids, WITH_EXTRA_IDS),
        ("--tokenizer-special-tokens", special_tokens, WITH_SPECIAL_TOKENS),
        ("--chat-template", chat_template, WITH_CHAT_TEMPLATE),
    ):
        if value and tokenizer_type not in types:
            raise ValueError(f"{flag} {value} is for {', '.join(types)}; leave it out with {tokenizer_type}")
    if tokenizer_type == "NullTokenizer":
        assert vocab_size is not None
        return NullTokenizer(vocab_size, null_tokenizer_eod_id, null_tokenizer_pad_id)
    if tokenizer_type == "GPT2BPETokenizer":
        assert vocab_file is not None and merge_file is not None
        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_type in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        assert vocab_file is not None
        lower = tokenizer_type == "BertWordPieceLowerCase"
        return (BertWordPieceLowerCase if lower else BertWordPieceCase)(vocab_file, vocab_extra_ids)
    assert tokenizer_model is not None
    if tokenizer_type in WITH_CHAT_TEMPLATE:
        options: dict[str, Any] = {
            "include_special_tokens": not tokenizer_hf_no_include_special_tokens,
            "special_tokens": special_tokens or (),
            "trust_remote_code": trust_remote_code,
            "chat_template": chat_template,
        }
        if tokenizer_type == "SFTTokenizer":
            return SFTTokenizer(tokenizer_model, sft_tokenizer_prompt_format, **options)
        return HuggingFaceTokenizer(tokenizer_model, **options)
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(tokenizer_model, tiktoken_pattern, tiktoken_num_special_tokens, special_tokens, vocab_size)
    if tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(tokenizer_model, vocab_extra_ids)
    return {"GPTSentencePieceTokenizer": GPTSentencePieceTokenizer, "Llama2Tokenizer": Llama2Tokenizer}[tokenizer_type](tokenizer_model)


def vocab_size_with_padding(orig_vocab_size: int, make_vocab_size_divisible_by: int = 128, tensor_model_parallel_size: int = 1) -> int:
    """The model's vocabulary: `orig_vocab_size` rounded up, so that each tensor-parallel rank has an equal, aligned part."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return math.ceil(orig_vocab_size / multiple) * multiple
