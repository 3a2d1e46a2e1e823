"""Every real tokenizer gives back real text: English, German, Japanese, code. CONTRIBUTING says how to fill MEGATRON_REAL_DATA."""

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers import MegatronTokenizer, build_tokenizer

LANGUAGES = ("en", "de", "ja", "code")
GPT2 = {"vocab_file": "gpt2/vocab.json", "merge_file": "gpt2/merges.txt"}
SENTENCEPIECE = (
    "mistral/tokenizer.model.v1",
    "mistral/mistral_instruct_tokenizer_240216.model.v2",
    "mistral/mistral_instruct_tokenizer_240323.model.v3",
    "mistral/mistral_instruct_tokenizer_241114.model.v7",
    "mistral/mistral_instruct_tokenizer_241114.model.v7m1",
)
TIKTOKEN = (
    "mistral/tekken_240718.json",
    "mistral/tekken_240911.json",
    "gpt2/gpt2.tiktoken",
    "openai/r50k_base.tiktoken",
    "openai/p50k_base.tiktoken",
    "openai/cl100k_base.tiktoken",
    "openai/o200k_base.tiktoken",
    "qwen/qwen.tiktoken",
    "qwen/qwen3_6.tiktoken",
    "llama3/tokenizer.model",
    "llama4/tokenizer.model",
)
LOSSLESS = [
    ("GPT2BPETokenizer", GPT2),
    *[("GPTSentencePieceTokenizer", {"tokenizer_model": name}) for name in SENTENCEPIECE],
    ("SentencePieceTokenizer", {"tokenizer_model": SENTENCEPIECE[0]}),
    ("Llama2Tokenizer", {"tokenizer_model": SENTENCEPIECE[0]}),
    *[("TikTokenizer", {"tokenizer_model": name}) for name in TIKTOKEN],
    *[("HuggingFaceTokenizer", {"tokenizer_model": name}) for name in ("qwen3", "deepseek", "smollm2")],
]
LOSSY = [
    *[
        ("GPTSentencePieceTokenizer", {"tokenizer_model": f"sentencepiece/{name}.model"})
        for name in ("botchan_en_bpe_1000", "kyoto_ja_unigram_8000")
    ],
    ("BertWordPieceLowerCase", {"vocab_file": "bert/vocab.txt"}),
]


def real(name: str) -> Path:
    """A file of MEGATRON_REAL_DATA, or a skip that says which is missing."""
    folder = os.environ.get("MEGATRON_REAL_DATA")
    if not folder:
        pytest.skip("MEGATRON_REAL_DATA is not set: see CONTRIBUTING")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"MEGATRON_REAL_DATA has no {name}")
    return path


@cache
def texts(language: str) -> list[str]:
    with open(real(f"texts/{language}.jsonl"), encoding="utf-8") as file:
        return [json.loads(line)["text"][:6000] for line in itertools.islice(file, 0, 200, 20)]


def make(kind: str, files: dict[str, str], **options: Any) -> MegatronTokenizer:
    options |= {flag: str(real(f"tokenizers/{name}")) for flag, name in files.items()}
    return build_tokenizer(tokenizer_type=kind, **options)


def names(cases):
    return [f"{kind}-{'-'.join(files.values())}" for kind, files in cases]


@pytest.mark.parametrize("kind, files", LOSSLESS, ids=names(LOSSLESS))
def test_text_comes_back_equal(kind, files):
    tokenizer = make(kind, files)
    for language in LANGUAGES:
        documents = texts(language)
        ids = tokenizer.tokenize_batch(documents)
        assert [tokenizer.detokenize(tokens) for tokens in ids] == documents
        assert ids == tokenizer.tokenize_batch(documents, threads=2) and max(map(max, ids)) < tokenizer.vocab_size
        starts = tokenizer.offsets(ids[0], documents[0])
        assert len(starts) == len(ids[0]) and starts == sorted(starts)


@pytest.mark.parametrize("kind, files", [*LOSSLESS, *LOSSY], ids=names([*LOSSLESS, *LOSSY]))
def test_vocabularies_are_one_to_one(kind, files):
    tokenizer = make(kind, files)
    vocab, inverse = tokenizer.vocab, tokenizer.inv_vocab
    assert len(vocab) == len(inverse) <= tokenizer.vocab_size and max(inverse) == tokenizer.vocab_size - 1
    assert all(inverse[token] == name for name, token in vocab.items())
    ids = tokenizer.tokenize(texts("en")[0])
    assert [vocab[inverse[token]] for token in ids] == ids and 0 <= tokenizer.eod < tokenizer.vocab_size


def test_gpt2_by_tiktoken_is_gpt2_by_its_merges():
    import tokenizers

    from megatron.core.tokenizers.bpe_tokenizers import PROVEN, _bytes, _read_merges, _read_vocab, sha256_of_file
    from megatron.core.tokenizers.byte_bpe import byte_of_letter, merges_follow_ids

    vocab_file, merge_file = (str(real(f"tokenizers/{name}")) for name in GPT2.values())
    assert tuple(map(sha256_of_file, (vocab_file, merge_file))) == PROVEN
    letters, ids = byte_of_letter(), _read_vocab(vocab_file)
    merges = [(_bytes(left, letters), _bytes(right, letters)) for left, right in _read_merges(merge_file)]
    assert merges_follow_ids(merges, {_bytes(token, letters): number for token, number in ids.items() if token != "<|endoftext|>"})
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab_file, merge_file))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = make("GPT2BPETokenizer", GPT2)
    for language in LANGUAGES:
        assert tokenizer.tokenize_batch(texts(language)) == [encoding.ids for encoding in backend.encode_batch_fast(texts(language))]


def test_bert_ids_are_those_of_its_own_tokenizer_json():
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(real("tokenizers/bert/tokenizer.json")))
    backend.no_truncation()
    backend.no_padding()
    tokenizer = make("BertWordPieceLowerCase", {"vocab_file": "bert/vocab.txt"})
    for language in LANGUAGES:
        expected = [encoding.ids for encoding in backend.encode_batch_fast(texts(language), add_special_tokens=False)]
        assert tokenizer.tokenize_batch(texts(language)) == expected


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_chat_templates_that_models_carry(name):
    tokenizer = make("SFTTokenizer", {"tokenizer_model": name}, sft_tokenizer_prompt_format="default")
    messages = [{"role": "user", "content": "Wie geht's?"}, {"role": "assistant", "content": "Gut, 日本 🙂\n  so"}]
    ids, answer = tokenizer.tokenize_conversation(messages)
    said = tokenizer.detokenize([token for token, mine in zip(ids, answer) if mine])
    assert "Gut, 日本 🙂\n  so" in said and "Wie" not in said and "user" not in said.lower()
    assert [token for token, mine in zip(ids, answer) if mine][-1] in tokenizer._closing_ids, "the end of the turn is learned"
    several = tokenizer.tokenize_conversation([*messages, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
    said = tokenizer.detokenize([token for token, mine in zip(*several) if mine])
    assert said.startswith("Gut, 日本 🙂\n  so<|im_end|>") and said.endswith("4<|im_end|>") and "2+2" not in said
