"""Conversations: loss on answers alone, packed without crossing, and nothing lost in silence."""

import json
import logging
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import cu_seqlens_of, packed_documents, packed_seq_params_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers import build_tokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.datasets.sft_dataset import ConversationFile, SFTDataset, SFTDatasetConfig, pack
from pretrain_gpt import get_batch
from tests.functional.runner import torchrun, train

MARKS = ["<|endoftext|>", "<s>", "<|user|>", "<|end|>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"]
# pad is EOS here: padding must be told by its place
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("sft")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["the quick brown fox user assistant\n"] * 4, vocab_size=290, special_tokens=MARKS)
    bpe._tokenizer.add_special_tokens(MARKS)
    bpe.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def make(folder, prompt_format="default", **options):
    return build_tokenizer(tokenizer_type="SFTTokenizer", tokenizer_model=str(folder), sft_tokenizer_prompt_format=prompt_format, **options)


def chat(*turns):
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(turns)]


def learned(tokenizer, messages):
    """The text that bears loss, answer by answer."""
    ids, answer = tokenizer.tokenize_conversation(messages)
    runs: list[list[int]] = []
    before = False
    for token, mine in zip(ids, answer):
        if mine:
            runs = [*runs, []] if not before else runs
            runs[-1].append(token)
        before = mine
    return [tokenizer.detokenize(run) for run in runs]


CHAT = chat("Hi the fox", "the quick", " and?\n", "  indented\n\n  日本 🙂")


def test_an_answer_is_what_the_assistant_says_and_its_end(folder):
    tokenizer = make(folder)
    text = tokenizer.apply_chat_template(CHAT)
    assert tokenizer.detokenize(tokenizer.tokenize_conversation(CHAT).ids) == text
    assert text.startswith("<|user|>user\nHi the fox<|end|>\n<|user|>assistant\nthe quick<|end|>\n")
    assert learned(tokenizer, CHAT) == ["the quick<|end|>", "  indented\n\n  日本 🙂<|end|>"], "the template's newline is no part of it"
    assert tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True).endswith("<|user|>assistant\n")


@pytest.mark.parametrize(
    "prompt_format, ending",
    [("nemotron-h-aligned", "\n<SPECIAL_11>"), ("nemotron-nano-v2", "\n<SPECIAL_12>"), ("identity", "<|endoftext|>")],
)
def test_prompt_formats(folder, prompt_format, ending):
    tokenizer = make(folder, prompt_format)
    assert learned(tokenizer, CHAT) == [CHAT[1]["content"] + ending, CHAT[3]["content"] + ending]
    asked = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT).startswith(asked), "what is asked at generation is what was trained"


@pytest.mark.parametrize("generation", [False, True], ids=["by prefixes", "by generation blocks"])
def test_both_ways_to_find_answers_agree(folder, generation):
    block = TEMPLATE.replace("message.content + '<|end|>\\n' }}", "message.content }}{{ '<|end|>\\n' }}")
    assert block != TEMPLATE
    if generation:
        said = "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
        block = TEMPLATE.replace(
            "message.role + '\\n' + message.content + '<|end|>\\n' }}",
            f"message.role + '\\n' }}}}{said}{{% else %}}{{{{ message.content + '<|end|>\\n' }}}}{{% endif %}}",
        )
    assert make(folder, chat_template=block).tokenize_conversation(CHAT) == make(folder).tokenize_conversation(CHAT)


def test_a_template_that_writes_the_last_turn_otherwise(folder):
    """As those of models that think: only the last answer shows its (empty) thoughts."""
    thinks = TEMPLATE.replace("message.role + '\\n' + ", "message.role + '\\n' + ('<think></think>' if loop.last else '') + ")
    assert thinks != TEMPLATE
    tokenizer = make(folder, chat_template=thinks)
    assert learned(tokenizer, CHAT) == ["the quick<|end|>", "<think></think>  indented\n\n  日本 🙂<|end|>"]
    assert learned(tokenizer, [CHAT[0], {"role": "assistant", "content": "x"}, *CHAT[2:]])[0] == "x<|end|>"


def test_conversations_that_cannot_be_written_say_why(folder):
    tokenizer = make(folder)
    for messages, rule in [
        ([], "not empty"),
        ("Hi", "list of messages"),
        ([{"role": "user"}], "message 0 of the conversation must have a role and a content"),
        ([{"role": "bot", "content": "x"}], "role 'bot' is not one of system, user, assistant"),
        ([{"role": "user", "content": "\0<generation>\0"}], "holds a mark"),
        ([{"role": "user", "content": "Hi \ud800"}], "message 0 of the conversation is not valid Unicode"),
    ]:
        with pytest.raises(ValueError, match=rule):
            tokenizer.tokenize_conversation(messages)
    rewrites = "{% for m in messages %}{{ m.content if loop.last else m.content[:2] }}{% endfor %}"
    with pytest.raises(ValueError, match="writes a turn otherwise once others follow"):
        make(folder, chat_template=rewrites).tokenize_conversation(CHAT)
    with pytest.raises(ValueError, match="refuses the conversation: only users"):
        make(folder, chat_template="{{ raise_exception('only users') }}").tokenize_conversation(CHAT)
    with pytest.raises(ValueError, match="no Jinja template"):
        make(folder, chat_template="{% for %}").tokenize_conversation(CHAT)
    with pytest.raises(ValueError, match="--sft-tokenizer-prompt-format chatml is not one of nemotron-h-aligned"):
        make(folder, "chatml")


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": c} if n % 2 else c) + "\n" + "\n" * (n % 3 == 0) for n, c in enumerate(conversations)))
    return str(path)


def build(folder, path, size=None, **changes):
    tokenizer = make(folder)
    options = {"random_seed": 1, "sequence_length": 64, "blend": ([path], None), "split": "100,0,0", "tokenizer": tokenizer}
    config = SFTDatasetConfig(**(options | {"vocab_size": tokenizer.vocab_size, "create_attention_mask": False} | changes))
    return BlendedMegatronDatasetBuilder(SFTDataset, (size, 0, 0), lambda: True, config).build()[0]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "is not valid Unicode"),
        ("[" * 200_000, "no JSON"),
        ('{"text": "x"}', "no conversation"),
        ("[]", "not empty"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(folder, line, message):
    path = folder / "chats.jsonl"
    write(path, [chat("Hi", "the fox")])
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"chats\.jsonl:\d+: .*{message}"):
        build(folder, str(path))


CONVERSATIONS = [chat(f"Hi {number}", "the fox " * (1 + number % 4), *(("more", "quick") if number % 3 else ())) for number in range(23)]


def pairs_of(sample):
    """(context, label) of each place that bears loss; a context is what its own conversation has said so far."""
    found = []
    begins = sample["document_begins"].nonzero().reshape(-1).tolist()
    for place in sample["loss_mask"].nonzero().reshape(-1).tolist():
        first = max(begin for begin in begins if begin <= place)
        assert int(sample["position_ids"][place]) == place - first
        found.append((tuple(sample["tokens"][first : place + 1].tolist()), int(sample["labels"][place])))
    return found


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_and_alone_learn_the_same_pairs(folder, tmp_path, multiple):
    dataset = build(folder, write(tmp_path / "chats.jsonl", CONVERSATIONS), sequence_length=200, multiple=multiple)
    for sample in (dataset[number] for number in range(len(dataset))):
        assert (sample["document_begins"].nonzero() % multiple == 0).all()
    packed = Counter(pair for number in range(len(dataset)) for pair in pairs_of(dataset[number]))
    alone: Counter = Counter()
    for messages in CONVERSATIONS:
        ids, answer = make(folder).tokenize_conversation(messages)
        alone.update((tuple(ids[:place]), ids[place]) for place in range(1, len(ids)) if answer[place])
    assert packed == alone and len(dataset) < len(CONVERSATIONS) / 1.5


def test_the_first_token_of_an_answer_bears_loss_and_padding_none_though_it_is_eos(folder, tmp_path):
    dataset = build(folder, write(tmp_path / "one.jsonl", [chat("p", "a<|endoftext|>b")]))
    sample, tokenizer = dataset[0], make(folder)
    ids, _ = tokenizer.tokenize_conversation(chat("p", "a<|endoftext|>b"))
    labels = sample["labels"][sample["loss_mask"] == 1]
    assert tokenizer.detokenize(labels.tolist()) == "a<|endoftext|>b<|end|>", "an EOS that is said counts"
    assert tokenizer.pad == tokenizer.eos and (sample["tokens"][len(ids) - 1 :] == tokenizer.pad).all()
    assert not sample["loss_mask"][len(ids) - 1 :].any()
    first = int(sample["loss_mask"].nonzero()[0])
    assert tokenizer.detokenize(sample["tokens"][: first + 1].tolist()).endswith("assistant\n")
    assert sample["document_begins"].nonzero().reshape(-1).tolist() == [0, len(ids) - 1]


def test_what_is_cut_or_left_out_is_counted(folder, tmp_path, caplog):
    long, none = chat("x", "the fox " * 60), chat("nobody answers")
    path = write(tmp_path / "chats.jsonl", [long, none, chat("y", "z"), [*none, *long[:1]]])
    for _ in range(2):  # the second time from the cache
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dataset = build(folder, path)
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            f"{path}, train: 1 of 4 conversations are longer than --seq-length 64, and are cut there",
            f"{path}, train: 2 of 4 conversations have no answer within --seq-length 64, and are left out",
        ]
    assert len(dataset) == 2 and sum(len(pairs_of(dataset[number])) for number in range(2)) > 40
    with pytest.raises(ValueError, match="none of its 1 conversations of the train split has an answer"):
        build(folder, write(tmp_path / "none.jsonl", [none]))


@pytest.mark.parametrize("line", [b"{", b"3", b'{"text": "x"}', b"\xff", b'[{"role": "user"}]', b"[]", b'{"messages": "x"}'])
def test_a_bad_line_is_named(folder, tmp_path, line):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError, match=r"chats\.jsonl:3: "):
        build(folder, str(path))
    assert len(ConversationFile(str(path))) == 2


def test_epochs_give_as_many_samples_as_are_asked_each_in_another_order(folder, tmp_path):
    path = write(tmp_path / "chats.jsonl", CONVERSATIONS)
    dataset = build(folder, path, 40)
    assert len(dataset) >= 40
    same = build(folder, path, 40)
    assert all(torch.equal(dataset[number]["tokens"], same[number]["tokens"]) for number in range(40))
    assert not torch.equal(dataset[0]["tokens"], build(folder, path, 40, random_seed=2)[0]["tokens"])
    changed = build(folder, write(tmp_path / "chats.jsonl", CONVERSATIONS[::-1]), 40)
    assert not torch.equal(dataset[0]["tokens"], changed[0]["tokens"]), "a changed file is read anew"


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60), st.none() | st.integers(1, 30), st.integers(0, 2**40))
def test_packing_fits_and_loses_nothing(lengths, capacity, wanted, seed):
    order, starts = pack(np.array(lengths), capacity, wanted, seed)
    assert starts[0] == 0 and starts[-1] == len(order) and (np.diff(starts) > 0).all()
    assert wanted is None or len(starts) - 1 >= wanted
    sums = [sum(lengths[c] for c in order[first:last]) for first, last in pairwise(starts)]
    assert max(sums) <= capacity
    assert all(total + lengths[order[last]] > capacity for total, last in zip(sums[:-1], starts[1:])), "a sample ends where no more fits"
    epochs = order.reshape(-1, len(lengths))
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in epochs.tolist())


def test_running_counts_of_packed_rows():
    begins = torch.tensor([[False, False, True, True], [False, False, False, True]])
    counts = cu_seqlens_of(begins)
    assert counts.dtype == torch.int32 and counts.tolist() == [0, 2, 3, 4, 7, 8], "a row begins a document"
    params = packed_seq_params_of(begins, "cpu")
    assert (params.max_seqlen_q, params.total_tokens) == (3, 8)
    known = packed_documents(params)
    params.__dict__.pop("_documents")
    assert packed_documents(params) == known


FLAGS = (
    "--sft --vocab-size 290 --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format default --split 100,0,0 --micro-batch-size {micro} "
    "--global-batch-size 4 --position-embedding-type {position}"
)


def sft(folder, path, *more, micro=1, position="learned_absolute", run=train):
    flags = FLAGS.format(micro=micro, position=position)
    return run(flags, "--tokenizer-model", folder, "--data-path", path, "--data-cache-path", path.parent / "cache", *more)


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
def test_training_is_the_same_for_any_micro_batch(folder, tmp_path, position):
    path = tmp_path / "chats.jsonl"
    write(path, CONVERSATIONS)
    one, four = (sft(folder, path, "--calculate-per-token-loss", micro=micro, position=position) for micro in (1, 4))
    assert one.code == four.code == 0 and len(one.losses()) == 4, one.err + four.err
    assert one.losses() == pytest.approx(four.losses(), rel=1e-5)
    assert one.losses()[-1] < one.losses()[0]


def test_a_changed_conversation_changes_no_other_ones_loss(folder, tmp_path):
    dataset = build(folder, write(tmp_path / "chats.jsonl", CONVERSATIONS), sequence_length=200)
    sample = dataset[0]
    begins = sample["document_begins"].nonzero().reshape(-1).tolist()
    assert len(begins) > 2, "several conversations, and padding"
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(), 320, 200, pg_collection=ProcessGroupCollection())
    losses = []
    for shift in (0, 1):
        batch = {name: value.clone()[None] for name, value in sample.items()}
        batch["tokens"][0, begins[1] : begins[2]] = (batch["tokens"][0, begins[1] : begins[2]] + shift) % 290
        ids, labels, _, square, positions, packed = get_batch(iter([batch]))
        losses.append(model(ids, positions, square, labels=labels, packed_seq_params=packed)[0])
    differ = losses[0] != losses[1]
    assert differ[begins[1] : begins[2]].all() and not differ[: begins[1]].any() and not differ[begins[2] :].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "data"])
def test_two_ranks_learn_as_one(folder, tmp_path, kind):
    """Context parallelism fills conversations up, here of 57 to 60 places to 60: two to a sample, with it and without."""
    path, base = tmp_path / "chats.jsonl", len(make(folder).tokenize_conversation(chat("Hi", "")).ids) - 1
    conversations = [chat("Hi", "x" * (57 + number % 4 - base)) for number in range(9)]
    assert [len(make(folder).tokenize_conversation(c).ids) - 1 for c in conversations[:4]] == [57, 58, 59, 60]
    write(path, conversations)
    layout = {"tensor": "--tensor-model-parallel-size 2 --sequence-parallel"}.get(kind, f"--{kind}-model-parallel-size 2")
    layout = {"context": "--context-parallel-size 2", "data": ""}.get(kind, layout)
    more = ("--calculate-per-token-loss --seq-length 128 --max-position-embeddings 128",)
    alone = sft(folder, path, *more, position="rope")
    spread = sft(folder, path, *more, layout, position="rope", run=partial(torchrun, 2))
    assert alone.code == spread.code == 0, alone.err + spread.err
    assert spread.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert spread.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)


def test_what_does_not_go_with_conversations_is_refused_by_name(folder, tmp_path):
    path = tmp_path / "chats.jsonl"
    write(path, CONVERSATIONS)
    for more, rule in [
        ("--tokenizer-type NullTokenizer --vocab-size 9", "--tokenizer-type NullTokenizer: has no chat template"),
        ("--reset-position-ids", "--reset-position-ids: has no meaning with --sft"),
        (f"--data-path {tmp_path / 'none'}", "no such file"),
    ]:
        result = sft(folder, path, more)
        assert result.code == 2 and rule in result.err, result.err
    result = sft(folder, path, "--sft-tokenizer-prompt-format chatml")
    assert result.code == 1 and "is not one of nemotron-h-aligned" in result.err
