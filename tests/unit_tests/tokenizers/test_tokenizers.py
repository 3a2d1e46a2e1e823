"""Every kind of tokenizer, on tiny models made here."""

import base64
import json
import subprocess
import sys

import pytest

from megatron.core.tokenizers import TOKENIZER_TYPES, build_tokenizer, vocab_size_with_padding

TEXTS = ["the quick brown fox", "", "Grüße, 日本 🙂\n\ttabs  and  blanks", "def f(x):\n    return x + 1\n"]
LINES = ["the quick brown fox jumps over the lazy dog", "Grüße aus 日本", "def f(x): return x + 1", "hello world, hello tokens"] * 5


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a small model of each kind."""
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("tokenizers")
    for name, eos_id in (("sp", 2), ("no_eos", -1)):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_prefix=str(folder / name), vocab_size=320, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2, eos_id=eos_id,
        )  # fmt: skip
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(LINES, vocab_size=300, special_tokens=["<|endoftext|>"])
    bpe.save_model(str(folder))
    bpe._tokenizer.add_special_tokens(["<s>", "<pad>"])
    bpe.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<s>"}, "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None} for rank, token in enumerate(tokens)]
    (folder / "tekken.json").write_text(json.dumps(entries))
    (folder / "ranks.tiktoken").write_text("".join(f"{entry['token_bytes']} {entry['rank']}\n" for entry in entries))
    return folder


def make(models, kind, **changes):
    by_kind: dict[str, dict] = {
        "GPT2BPETokenizer": {"vocab_file": str(models / "vocab.json"), "merge_file": str(models / "merges.txt")},
        "HuggingFaceTokenizer": {"tokenizer_model": str(models)},
        "TikTokenizer": {"tokenizer_model": str(models / "tekken.json"), "tiktoken_num_special_tokens": 10},
        "NullTokenizer": {"vocab_size": 50},
    }
    arguments = by_kind.get(kind, {"tokenizer_model": str(models / "sp.model")})
    return build_tokenizer(tokenizer_type=kind, **(arguments | changes))


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZER_TYPES if kind != "NullTokenizer"])
def test_round_trip_and_batches(models, kind):
    tokenizer = make(models, kind)
    ids = [tokenizer.tokenize(text) for text in TEXTS]
    assert [tokenizer.detokenize(tokens) for tokens in ids] == TEXTS
    assert tokenizer.tokenize_batch(TEXTS) == ids == tokenizer.tokenize_batch(TEXTS, threads=2)
    assert all(0 <= token < tokenizer.vocab_size for tokens in ids for token in tokens)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert len(tokenizer.fingerprint) == 64 and tokenizer.fingerprint == make(models, kind).fingerprint


def test_identity(models):
    tokenizer = make(models, "SentencePieceTokenizer", vocab_extra_ids=3)
    assert list(tokenizer.unique_identifiers.items()) == [
        ("class", "megatron.core.tokenizers.sentencepiece_tokenizers.SentencePieceTokenizer"),
        ("tokenizer_path", str(models / "sp.model")),
        ("vocab_extra_ids", "3"),
    ]
    prints = {make(models, kind).fingerprint for kind in TOKENIZER_TYPES}
    assert len({*prints, tokenizer.fingerprint}) == len(TOKENIZER_TYPES) + 1


def test_sentencepiece_special_ids(models):
    plain = make(models, "SentencePieceTokenizer")
    assert plain.eod == plain.eos == 2 and plain.bos == 1 and plain.pad is None
    extra = make(models, "SentencePieceTokenizer", vocab_extra_ids=2)
    assert extra.vocab_size == plain.vocab_size + 2
    assert extra.detokenize([*plain.tokenize("the"), plain.vocab_size + 1]) == "the<extra_id_1>"
    assert make(models, "Llama2Tokenizer").tokenize("the") == [1, *plain.tokenize("the")]


def test_a_tokenizer_without_a_document_end_says_so(models):
    tokenizer = make(models, "SentencePieceTokenizer", tokenizer_model=str(models / "no_eos.model"))
    with pytest.raises(ValueError, match=r"no_eos\.model has no token that ends a document"):
        _ = tokenizer.eod


def test_huggingface_special_ids(models, tmp_path):
    tokenizer = make(models, "HuggingFaceTokenizer", special_tokens=["<|user|>"])
    ids = [tokenizer.bos, tokenizer.eos, tokenizer.pad]
    assert [tokenizer.detokenize([token]) for token in ids] == ["<s>", "<|endoftext|>", "<pad>"]
    assert tokenizer.tokenize("<|user|>") == [tokenizer.vocab_size - 1]
    (tmp_path / "tokenizer.json").write_bytes((models / "tokenizer.json").read_bytes())
    assert make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json")).eod == tokenizer.eod


def test_huggingface_adds_what_the_tokenizer_says_unless_told_not_to(models, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_file(str(models / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    backend.save(str(tmp_path / "tokenizer.json"))
    with_bos = make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    without = make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path), tokenizer_hf_no_include_special_tokens=True)
    assert with_bos.tokenize("the") == [backend.token_to_id("<s>"), *without.tokenize("the")]
    assert with_bos.fingerprint != without.fingerprint


def test_gpt2_takes_special_tokens_in_a_text_as_text(models):
    tokenizer = make(models, "GPT2BPETokenizer")
    assert tokenizer.eod not in tokenizer.tokenize("a<|endoftext|>b")


def test_tiktoken_ids(models):
    tokenizer = make(models, "TikTokenizer")
    assert tokenizer.vocab_size == 258 + 10 and (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert tokenizer.tokenize("the") == [257 + 10] and tokenizer.detokenize([1, 267, 5]) == "<s>the<SPECIAL_5>"
    assert make(models, "TikTokenizer", tokenizer_model=str(models / "ranks.tiktoken")).tokenize("the x") == tokenizer.tokenize("the x")
    assert make(models, "TikTokenizer", vocab_size=267).tokenize("the") == [256 + 10, ord("e") + 10]
    v1, v2 = (make(models, "TikTokenizer", tiktoken_pattern=pattern) for pattern in ("v1", "v2"))
    assert v1.detokenize(v1.tokenize("CamelCase")) == v2.detokenize(v2.tokenize("CamelCase")) == "CamelCase"


def test_null_tokenizer():
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=50)
    assert tokenizer.vocab_size == 51 and tokenizer.eod == 50
    assert tokenizer.tokenize(" 3 1\n4 ") == [3, 1, 4] and tokenizer.detokenize([3, 1, 4]) == "3 1 4"
    for text in ("3 x", "51", "-1"):
        with pytest.raises(ValueError, match="NullTokenizer"):
            tokenizer.tokenize(text)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokenizer_type": "Nothing"}, "--tokenizer-type Nothing"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "GPT2BPETokenizer needs --merge-file"),
        ({"tokenizer_type": "NullTokenizer"}, "NullTokenizer needs --vocab-size"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/no/such.model"}, "--tokenizer-model /no/such.model: no such file"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "vocab_extra_ids": 1}, "--vocab-extra-ids 1"),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": __file__}, "not a SentencePiece model"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": __file__}, "not a tokenizer.json"),
        ({"tokenizer_type": "TikTokenizer", "tokenizer_model": __file__}, "neither a JSON list"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__}, "not a GPT-2 vocabulary"),
    ],
)
def test_what_is_wrong_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_tokenizer(**arguments)


def test_vocab_size_with_padding():
    assert vocab_size_with_padding(1000) == 1024
    assert vocab_size_with_padding(50257, 128, 8) == 51200
    assert vocab_size_with_padding(1024, 128, 8) == 1024


def test_torch_is_not_imported(models):
    program = f"""
import sys
from megatron.core.tokenizers import build_tokenizer
build_tokenizer(tokenizer_type="HuggingFaceTokenizer", tokenizer_model={str(models)!r}).tokenize("x")
build_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model={str(models / "sp.model")!r}).tokenize("x")
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
