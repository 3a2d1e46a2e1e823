"""Tokens of another tokenizer are refused, by name and with both numbers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.tokenizers import build_tokenizer, check_fingerprint, tokenizer_record
from megatron.core.tokenizers.fingerprint import WrongTokenizerError
from tests.functional.runner import on, train, write_corpus


def null(vocab_size, **options):
    return build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=vocab_size, **options)


def pair(folder, name, record):
    (folder / f"{name}.meta.json").write_text(json.dumps({"tokenizer": record, "documents": 3}))
    return str(folder / name)


def test_the_same_tokenizer_and_pairs_without_a_record_pass(tmp_path):
    check_fingerprint([pair(tmp_path, "a", tokenizer_record(null(300))), str(tmp_path / "none")], null(300))
    check_fingerprint([pair(tmp_path, "b", tokenizer_record(null(300)))], null(300, null_tokenizer_pad_id=7))
    (tmp_path / "c.meta.json").write_text("{}")
    check_fingerprint([str(tmp_path / "c")], null(300))


def test_another_tokenizer_is_refused_and_every_pair_of_its_named(tmp_path):
    pairs = [pair(tmp_path, name, tokenizer_record(null(300))) for name in "ab"]
    fine = pair(tmp_path, "fine", tokenizer_record(null(200)))
    with pytest.raises(WrongTokenizerError) as caught:
        check_fingerprint([*pairs, fine, pairs[0]], null(200))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == pairs
    assert all("NullTokenizer of 301 ids" in line and "NullTokenizer of 201 ids" in line for line in lines)


def test_ids_alone_need_no_more_than_room(tmp_path):
    prefix = pair(tmp_path, "a", {"type": "HuggingFaceTokenizer", "fingerprint": "f" * 64, "vocab_size": 300})
    check_fingerprint([prefix], null(299))
    with pytest.raises(WrongTokenizerError, match=r"has 300 ids, NullTokenizer has 201; give --vocab-size 299"):
        check_fingerprint([prefix], null(200))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@settings(deadline=None, max_examples=50)
@given(
    st.binary()
    | st.fixed_dictionaries({"tokenizer": st.dictionaries(st.sampled_from(["type", "fingerprint", "vocab_size"]), json_values)}).map(
        lambda content: json.dumps(content).encode()
    )
)
def test_a_broken_record_is_named(tmp_path_factory, content):
    prefix = tmp_path_factory.getbasetemp() / "broken"
    prefix.with_suffix(".meta.json").write_bytes(content)
    try:
        check_fingerprint([str(prefix)], null(10))
    except WrongTokenizerError as error:
        assert str(error).startswith(str(prefix))


def test_the_trainer_stops_before_it_builds_a_model(tmp_path):
    """Data of 301 ids, a model of 101: no assertion on a device, but one line that names the pair and both numbers."""
    corpus = write_corpus(tmp_path / "data", vocab=300)
    pair(tmp_path, "data", tokenizer_record(null(300)))
    result = train(*on(corpus))
    assert result.code == 1 and "Traceback" not in result.err and "number of parameters" not in result.out
    assert f"{corpus}: made by NullTokenizer of 301 ids" in result.err and "NullTokenizer of 101 ids" in result.err
    (tmp_path / "data.meta.json").unlink()
    result = train(*on(corpus))
    assert result.code == 1 and f"{corpus}: sample 0 holds ids from" in result.err and "beyond the vocabulary of 101" in result.err
