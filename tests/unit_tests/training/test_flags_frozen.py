"""Names, dests, types, defaults and choices of all flags, against a frozen list of Megatron-LM's (and of our own, marked `ours`)."""

import csv
import signal
from pathlib import Path

import pytest

from megatron.training import flag_aliases
from megatron.training.argument_utils import all_fields, build_parser

FROZEN = list(csv.DictReader((Path(__file__).parent / "flags_frozen.tsv").open(), delimiter="\t"))
PARSER = build_parser()
ACTIONS = {action.dest: action for action in PARSER._actions if action.dest != "help"}


@pytest.mark.parametrize("row", FROZEN, ids=[row["dest"] for row in FROZEN])
def test_flag_is_as_frozen(row: dict[str, str]) -> None:
    action = ACTIONS[row["dest"]]
    assert set(action.option_strings) == set(row["spellings"].split())
    kind = {"_StoreTrueAction": "store_true", "_StoreFalseAction": "store_false", "_StoreAction": "store"}[type(action).__name__]
    assert kind == row["action"].removeprefix("ours:")
    assert all_fields()[row["dest"]].metadata["ours"] == row["action"].startswith("ours:")
    if row["dest"] == "exit_signal":
        assert action.default is signal.SIGTERM and action.choices == list(signal.Signals)
        return
    if row["dest"] == "attention_backend":  # a name here, the enumeration's member in the config
        assert (row["type"], row["default"]) == ("enum:AttnBackend", "AttnBackend.auto") and action.default == "auto"
        assert [f"AttnBackend.{name}" for name in action.choices or ()] == row["choices"].split("|")
        return
    if kind == "store":
        assert getattr(action.type or str, "__name__", None) == row["type"]
    assert row["default"] in (repr(action.default), str(action.default))
    assert (action.default is None) == (row["default"] == "None")
    choices = row["choices"].replace("'", "").split("|") if row["choices"] else None
    assert choices == (None if action.choices is None else [str(c) for c in action.choices])
    assert row["nargs"] == ("" if action.nargs in (None, 0) else str(action.nargs))


def test_every_flag_is_frozen_and_described() -> None:
    assert set(ACTIONS) == {row["dest"] for row in FROZEN}
    assert all(action.help and action.help.rstrip("]")[-1] not in " ," for action in ACTIONS.values())


def test_no_spelling_is_both_known_and_refused() -> None:
    known = set(PARSER._option_string_actions)
    later, renamed, removed = flag_aliases.not_supported_yet(), set(flag_aliases.RENAMED), set(flag_aliases.REMOVED)
    for one, other in ((known, later), (known, renamed), (known, removed), (later, renamed), (later, removed), (renamed, removed)):
        assert not one & other


def test_advice_of_renamed_flags_names_real_flags() -> None:
    names = set(PARSER._option_string_actions) | flag_aliases.not_supported_yet()
    for advice in flag_aliases.RENAMED.values():
        for word in advice.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in names, word


def test_the_help_of_every_flag_prints() -> None:
    text = PARSER.format_help()
    assert "--num-layers" in text and "not yet: yarn" in text and "[samples]" in text
