"""Every kind of tokenizer, on tiny models made here."""

import base64
import json
import subprocess
import sys
from functools import cache
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import TOKENIZER_TYPES, build_tokenizer, byte_bpe, vocab_size_with_padding

TEXTS = ["the quick brown fox", "", "Grüße, 日本 🙂\n\ttabs  and  blanks", "def f(x):\n    return x + 1\n"]
LOSSY = ("BertWordPieceLowerCase", "BertWordPieceCase")  # by BERT's design
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
    write_word_pieces(folder)
    return folder


def write_word_pieces(folder):
    """A WordPiece vocab.txt with every letter of LINES, alone and inside a word."""
    letters = sorted({letter for line in [*LINES, *TEXTS] for letter in line if not letter.isspace()})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "the", "quick", "##ox"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")


def make(models, kind, **changes):
    by_kind: dict[str, dict] = {
        "GPT2BPETokenizer": {"vocab_file": str(models / "vocab.json"), "merge_file": str(models / "merges.txt")},
        "HuggingFaceTokenizer": {"tokenizer_model": str(models)},
        "TikTokenizer": {"tokenizer_model": str(models / "tekken.json"), "tiktoken_num_special_tokens": 10},
        "NullTokenizer": {"vocab_size": 50},
        "BertWordPieceLowerCase": {"vocab_file": str(models / "vocab.txt")},
        "BertWordPieceCase": {"vocab_file": str(models / "vocab.txt")},
        "SFTTokenizer": {"tokenizer_model": str(models), "sft_tokenizer_prompt_format": "identity"},
    }
    arguments = by_kind.get(kind, {"tokenizer_model": str(models / "sp.model")})
    return build_tokenizer(tokenizer_type=kind, **(arguments | changes))


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_round_trip_batches_and_vocabulary(models, kind):
    tokenizer = make(models, kind)
    texts = ["3 1 4", "", "15", "9 26"] if kind == "NullTokenizer" else TEXTS
    ids = [tokenizer.tokenize(text) for text in texts]
    if kind not in LOSSY:
        assert [tokenizer.detokenize(tokens) for tokens in ids] == texts
    assert tokenizer.tokenize_batch(texts) == ids == tokenizer.tokenize_batch(texts, threads=2)
    assert all(0 <= token < tokenizer.vocab_size for tokens in ids for token in tokens)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    vocab, inverse = tokenizer.vocab, tokenizer.inv_vocab
    assert set(inverse) == set(range(tokenizer.vocab_size)) and len(vocab) == len(inverse)
    assert all(inverse[vocab[name]] == name for name in vocab), "no id is shifted twice"
    assert [[vocab[inverse[token]] for token in tokens] for tokens in ids] == ids
    assert len(tokenizer.fingerprint) == 64 and tokenizer.fingerprint == make(models, kind).fingerprint


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_offsets_are_where_tokens_begin(models, kind):
    tokenizer = make(models, kind)
    for text in ["3 14  15"] if kind == "NullTokenizer" else TEXTS:
        ids = tokenizer.tokenize(text)
        starts = tokenizer.offsets(ids, text)
        assert len(starts) == len(ids) and starts == sorted(starts) and all(0 <= start <= len(text) for start in starts)
        for token, begin, end in zip(ids, starts, [*starts[1:], len(text)]):
            alone = tokenizer.detokenize([token])
            if "\N{REPLACEMENT CHARACTER}" not in alone and token not in (tokenizer.bos, tokenizer.unk) and kind not in LOSSY:
                assert alone.strip() == text[begin:end].strip()
        with pytest.raises(ValueError, match="these ids are not those of the text"):
            tokenizer.offsets([*ids, 0], text)


def test_identity(models):
    tokenizer = make(models, "SentencePieceTokenizer", vocab_extra_ids=3)
    assert list(tokenizer.unique_identifiers.items()) == [
        ("class", "megatron.core.tokenizers.sentencepiece_tokenizers.SentencePieceTokenizer"),
        ("tokenizer_path", str(models / "sp.model")),
        ("vocab_extra_ids", "3"),
    ]
    same = [{"SentencePieceTokenizer", "GPTSentencePieceTokenizer"}, {"HuggingFaceTokenizer", "SFTTokenizer"}]
    prints = {kind: make(models, kind).fingerprint for kind in TOKENIZER_TYPES}
    assert len(set(prints.values())) == len(TOKENIZER_TYPES) - len(same), "kinds that give the same ids, and only they, are one"
    assert all(len({prints[kind] for kind in kinds}) == 1 for kinds in same)
    assert tokenizer.fingerprint == prints["SentencePieceTokenizer"], "sentinels behind the vocabulary are in no text"


def test_sentencepiece_special_ids(models):
    plain = make(models, "SentencePieceTokenizer")
    assert plain.eod == plain.eos == 2 and plain.bos == 1 and plain.pad is None
    extra = make(models, "SentencePieceTokenizer", vocab_extra_ids=2)
    assert extra.vocab_size == plain.vocab_size + 2
    assert extra.detokenize([*plain.tokenize("the"), plain.vocab_size + 1]) == "the<extra_id_1>"
    assert make(models, "Llama2Tokenizer").tokenize("the") == [1, *plain.tokenize("the")]


def test_a_model_without_byte_pieces_loses_what_it_does_not_know_and_no_more(golden):
    tokenizer = build_tokenizer(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(golden / "tokens" / "sp1000.model"))
    text = "In the beginning God created the heaven and the earth."
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text and tokenizer.offsets(ids, text)[0] == 0
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad, tokenizer.unk) == (1, 2, None, 0) and tokenizer.vocab_size == 1000
    vocab, inverse = tokenizer.vocab, tokenizer.inv_vocab
    assert len(vocab) == len(inverse) == 1000 and [vocab[inverse[token]] for token in ids] == ids
    assert tokenizer.unk in tokenizer.tokenize("日本")


def test_a_tokenizer_without_a_document_end_says_so(models):
    tokenizer = make(models, "SentencePieceTokenizer", tokenizer_model=str(models / "no_eos.model"))
    with pytest.raises(ValueError, match=r"no_eos\.model has no token that ends a document"):
        _ = tokenizer.eod


def test_a_document_ends_with_eos_where_there_is_no_eod_and_a_note_says_so(models, tmp_path, caplog):
    tokenizer = make(models, "SentencePieceTokenizer")
    assert tokenizer.eod == tokenizer.eod == 2
    assert [record.message for record in caplog.records] == [f"{models / 'sp.model'} has no <eod>: </s> (id 2) ends documents"]
    caplog.clear()
    assert make(models, "GPTSentencePieceTokenizer").eod == 2 and not caplog.records, "no <eod> is asked of it"


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


def test_no_document_is_cut_or_padded_whatever_a_tokenizer_json_prescribes(models, tmp_path):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(models / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert tokenizer.tokenize_batch(LINES) == make(models, "HuggingFaceTokenizer").tokenize_batch(LINES)


def test_a_name_on_the_hub_is_its_files(models, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--acme--tiny" / "refs").mkdir()
    (tmp_path / "models--acme--tiny" / "refs" / "main").write_text("0")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_bytes((models / name).read_bytes())
    named, local = make(models, "HuggingFaceTokenizer", tokenizer_model="acme/tiny"), make(models, "HuggingFaceTokenizer")
    assert named.fingerprint == local.fingerprint and named.tokenize_batch(TEXTS) == local.tokenize_batch(TEXTS)
    assert (named.eod, named.pad, named.vocab_size) == (local.eod, local.pad, local.vocab_size)
    with pytest.raises(ValueError, match="acme/none: no local file or folder, and not on the hub"):
        make(models, "HuggingFaceTokenizer", tokenizer_model="acme/none")


def test_the_fingerprint_is_of_what_decides_ids(models, tmp_path):
    original = make(models, "HuggingFaceTokenizer").fingerprint
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((models / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "README.md").write_text("a copy elsewhere")
    assert make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).fingerprint == original
    assert make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path), special_tokens=["<x>"]).fingerprint != original
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert make(models, "HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).fingerprint != original, "another end of document"
    v1, v2 = (make(models, "TikTokenizer", tiktoken_pattern=pattern).fingerprint for pattern in ("v1", "v2"))
    assert v1 != v2 == make(models, "TikTokenizer").fingerprint, "v2 is the default"


def test_bert_word_pieces(models):
    lower, cased = make(models, "BertWordPieceLowerCase", vocab_extra_ids=2), make(models, "BertWordPieceCase")
    assert lower.detokenize(lower.tokenize("The QUICK fox")) == "the quick fox"
    assert lower.inv_vocab[lower.tokenize("Quick")[0]] == "quick" and cased.unk in cased.tokenize("Quick"), "no Q in this vocabulary"
    assert [lower.inv_vocab[token] for token in lower.tokenize("foxes")] == ["f", "##ox", "##e", "##s"]
    roles = (lower.pad, lower.unk, lower.cls, lower.sep, lower.mask)
    assert roles == (0, 1, 2, 3, 4) and lower.eod == lower.eos == lower.bos + 1 == cased.vocab_size - 1
    assert lower.additional_special_tokens_ids == [cased.vocab_size, cased.vocab_size + 1] and lower.vocab_size == cased.vocab_size + 2
    long = "x" * 50_000 + " " + "ab " * 20_000
    assert lower.tokenize(long).count(lower.unk) == 1, "a word of over 100 letters is unknown, and nothing behind it is cut off"
    assert len(lower.tokenize(long)) == 1 + 40_000


def test_gpt2_takes_special_tokens_in_a_text_as_text(models):
    tokenizer = make(models, "GPT2BPETokenizer")
    assert tokenizer.eod not in tokenizer.tokenize("a<|endoftext|>b")


@cache
def gpt2_by_merges(folder):
    """The plain twin: tokenizers' BPE, which merges by the list of pairs."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@cache
def gpt2(folder):
    tokenizer = make(folder, "GPT2BPETokenizer")
    assert tokenizer._bpe is not None, "the fast way"
    return tokenizer


@settings(deadline=None)
@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("theqxjd  \n'sllre1")), max_size=60))
def test_gpt2_ids_are_those_of_the_merges(models, text):
    ids = gpt2(models).tokenize(text)
    assert ids == gpt2_by_merges(models).encode(text).ids and gpt2(models).detokenize(ids) == text


def test_merges_that_ids_do_not_follow_are_carried_out_as_listed(models, tmp_path):
    """tiktoken merges by the union's id. Here the pair (a, bc) is listed and (ab, c) is not, though both make "abc"."""
    vocab = json.loads((models / "vocab.json").read_text())
    alphabet = [token for token in vocab if len(token) == 1]
    ids = {token: number for number, token in enumerate([*alphabet, "ab", "bc", "abc"])}
    (tmp_path / "vocab.json").write_text(json.dumps(ids | {"<|endoftext|>": len(ids)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nb c\na bc\n")
    tokenizer = make(tmp_path, "GPT2BPETokenizer")
    assert tokenizer._bpe is None and tokenizer.tokenize("abc") == [ids["ab"], ids["c"]] == gpt2_by_merges(tmp_path).encode("abc").ids
    assert tokenizer.detokenize(tokenizer.tokenize("abc bc")) == "abc bc"


def blanks(number):
    return "a" + " " * number + "the\n" + "\n" * number + " b" + "\t\n " * number


@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "TikTokenizer"])
def test_long_runs_of_blanks_have_the_same_ids_cut_otherwise(models, kind):
    tokenizer = make(models, kind)
    texts = [blanks(2_100), "the " * 600]
    expected = tokenizer.tokenize_batch(texts)
    with mock.patch.object(byte_bpe, "LONG_RUN", 2_000):
        assert tokenizer.tokenize_batch(texts) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "TikTokenizer"])
def test_a_million_blanks_in_a_row(models, kind):
    """The engine that cuts words panics at them: no ValueError, but a crash."""
    tokenizer, text = make(models, kind), blanks(1_100_000)
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZER_TYPES if kind != "NullTokenizer"])
def test_half_a_surrogate_pair_is_refused_not_replaced(models, kind):
    with pytest.raises(ValueError, match="character 5 is U\\+D800, half of a surrogate pair"):
        make(models, kind).tokenize_batch(["fine", "half \ud800 pair"])


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
        ({"tokenizer_type": "BertWordPieceCase"}, "BertWordPieceCase needs --vocab-file"),
        ({"tokenizer_type": "BertWordPieceCase", "vocab_file": __file__}, "needs .UNK., .CLS."),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 5, "chat_template": "x"}, "--chat-template x is for HuggingFaceTokenizer"),
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
