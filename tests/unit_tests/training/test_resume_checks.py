"""What a run and a checkpoint's arguments must have in common, by tables."""

import shlex
from argparse import Namespace
from typing import Any

import pytest

from megatron.training.arguments import parse_args, validate_args
from megatron.training.resume_checks import Taken, changed_flags, model_differences, refusals, vocabulary_differences

LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--train-iters 4 --lr 1e-2 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
EXPERTS = "--num-experts 4 --moe-router-load-balancing-type none"


def run(more: str = "", **values: Any) -> Namespace:
    args = validate_args(parse_args(argv=shlex.split(f"{LINE} {more}")))
    args.tokenizer_record = {"type": "SentencePieceTokenizer", "fingerprint": "a" * 64, "vocab_size": 100}
    args.provenance["padded_vocab_size"] = "derived"
    for name, value in values.items():
        setattr(args, name, value)
    return args


def saved(more: str = "", **values: Any) -> dict[str, Any]:
    return vars(run(more, **values))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("", "", []),
        (EXPERTS, EXPERTS, []),
        ("", EXPERTS, ["--num-experts is 4 here and None there"]),
        (EXPERTS, "", ["--num-experts is None here and 4 there"]),
        (EXPERTS, f"{EXPERTS} --moe-ffn-hidden-size 256", []),  # what it is without the flag
        (EXPERTS, f"{EXPERTS} --moe-ffn-hidden-size 48", ["--moe-ffn-hidden-size is 48 here and 256 there"]),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 32",
            EXPERTS,
            ["--moe-shared-expert-intermediate-size is None here and 32 there"],
        ),
        ("--qk-layernorm", "", ["--qk-layernorm is False here and True there"]),
        ("", "--add-qkv-bias", []),  # the linears have biases as it is
        ("", "--rotary-base 500000", []),
        (
            "--position-embedding-type rope",
            "--position-embedding-type rope --max-position-embeddings 128",
            [],
        ),
        ("", "--max-position-embeddings 128", ["--max-position-embeddings is 128 here and 64 there"]),
        ("--group-query-attention --num-query-groups 2", "", ["--group-query-attention is False here and True there"]),
    ],
)
def test_models(before: str, now: str, told: list[str]) -> None:
    assert model_differences(saved(before), run(now)) == told


def test_another_programs_arguments_may_lack_flags_and_have_others() -> None:
    theirs = {"num_layers": 2, "hidden_size": 64, "encoder_num_layers": 2, "window_size": None}
    assert model_differences(theirs, run()) == [] and list(changed_flags(theirs, run())) == []
    assert model_differences({}, run()) == [] and refusals(Taken(True, True, True, True), {}, run()) == []


RECORD = {"type": "SentencePieceTokenizer", "fingerprint": "a" * 64, "vocab_size": 100}


@pytest.mark.parametrize(
    ("there", "here", "is_right"),
    [
        ({"tokenizer_record": RECORD}, {}, True),
        ({"tokenizer_record": RECORD | {"fingerprint": "b" * 64}}, {}, False),
        ({"tokenizer_record": RECORD | {"type": "NullTokenizer", "fingerprint": "b" * 64}}, {}, True),  # ids alone
        ({"tokenizer_record": RECORD | {"type": "NullTokenizer", "vocab_size": 101}}, {}, False),
        ({"tokenizer_record": None, "padded_vocab_size": 128}, {}, True),
        ({"tokenizer_record": None, "padded_vocab_size": 256, "tensor_model_parallel_size": 2}, {}, True),
        ({"tokenizer_record": None, "padded_vocab_size": 256}, {}, False),  # 129 ids at least
        ({"tokenizer_record": None, "padded_vocab_size": 256}, {"padded_vocab_size": 256}, True),
        ({"tokenizer_record": None, "padded_vocab_size": 64, "make_vocab_size_divisible_by": 64}, {}, False),
        ({"tokenizer_record": None, "padded_vocab_size": None}, {}, True),
    ],
)
def test_vocabularies(there: dict[str, Any], here: dict[str, Any], is_right: bool) -> None:
    args = run(**here)
    if here:
        args.provenance["padded_vocab_size"] = "command line"
    assert (vocabulary_differences(saved(**there), args) == []) == is_right


def test_weights_alone_may_get_another_tokenizer_and_optimizer() -> None:
    there = saved("--optimizer sgd", tokenizer_record=RECORD | {"fingerprint": "b" * 64})
    goes_on = refusals(Taken.by_flags(run(), ""), there, run())
    assert len(goes_on) == 2 and "ids would stand for other texts" in goes_on[0] and "--optimizer is adam here and sgd" in goes_on[1]
    assert refusals(Taken.by_flags(run(), "--finetune"), there, run()) == []
    assert len(refusals(Taken.by_flags(run("--no-load-optim --load x"), ""), there, run())) == 1
