"""Flags of context parallelism, windows and masks: what does not go together is refused on the command line, all at once."""

import pytest

from megatron.core.context_parallel import combinations
from megatron.training.argument_utils import UsageError, build_parser
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.config.converters import moe_freq_type, tuple_type
from tests.unit_tests.training.lines import TINY, checked

CP4 = "--context-parallel-size 4 --attention-dropout 0"
CP2_KINDS = "--context-parallel-size 2 --cp-comm-type all_gather all_gather a2a a2a"
HIERARCHICAL = "--hierarchical-context-parallel-sizes"
GROUPS = "--group-query-attention --num-query-groups 2"


def problems_of(monkeypatch, line, world=4):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UsageError) as caught:
        checked([*TINY, *line.split()])
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("line", "flag", "rule"),
    [
        ("--context-parallel-size 4", "--attention-dropout 0.1", "p2p does not go with attention dropout"),
        (CP2_KINDS, "--attention-dropout 0.1", "--cp-comm-type all_gather, a2a do not go with attention dropout"),
        ("--cp-comm-type ring", "--cp-comm-type ring", "knows no 'ring': the kinds are p2p, all_gather, a2a, a2a+p2p"),
        ("--cp-comm-type p2p a2a", "--cp-comm-type p2p a2a", "gives 2 kinds: one for all layers, or one for each of the 4"),
        (f"{CP4} --cp-comm-type a2a {GROUPS}", "--cp-comm-type a2a", "2 query groups of a rank"),
        (f"{CP4} --cp-comm-type a2a+p2p", HIERARCHICAL, f"product is 4 (works: {HIERARCHICAL} 2 2)"),
        (f"{CP4} --cp-comm-type a2a+p2p {HIERARCHICAL} 2 3", f"{HIERARCHICAL} 2 3", "whose product is 4"),
        (f"{HIERARCHICAL} 2 2", f"{HIERARCHICAL} 2 2", "is for --cp-comm-type a2a+p2p"),
        (f"{CP4} --seq-length 28", "--seq-length 28", "multiple of 2 x --context-parallel-size 4 = 8"),
        ("--cp-comm-overlap", "--cp-comm-overlap", "is for --cp-comm-type p2p or a2a+p2p with a context size above 1"),
        (f"{CP4} --cp-comm-type all_gather --cp-comm-overlap", "--cp-comm-overlap", "is for --cp-comm-type p2p or a2a+p2p"),
        ("--window-size 3", "--window-size (3)", "is two numbers"),
        ("--window-size (-2,0)", "--window-size (-2,0)", "at least -1"),
        ("--window-attn-skip-freq 2", "--window-attn-skip-freq 2", "needs a --window-size (works: leave it out)"),
        ("--window-size 3,0 --window-attn-skip-freq [1,0]", "--window-attn-skip-freq 1 0", "one 0 or 1 for each of the 4 layers"),
        ("--window-size 3,0 --attention-backend flash", "--attention-backend flash", "cannot honour a sliding window"),
        (
            "--reset-attention-mask --num-experts 4 --attention-backend flash",
            "--attention-backend flash",
            "cannot honour an attention mask",
        ),
        ("--reset-attention-mask --num-experts 4 --use-flash-attn", "--attention-backend flash", "cannot honour an attention mask"),
    ],
)
def test_refused_by_name(monkeypatch, line, flag, rule):
    (found,) = problems_of(monkeypatch, line)
    assert found.startswith(f"{flag}:") and rule in found, found


@pytest.mark.parametrize(
    ("row", "line", "flag", "rule"),
    [
        ("a sliding window", "--window-size (3,0)", "--window-size (3,0)", "a2a does not go with a sliding window; p2p does (works: leave"),
        (
            "an attention mask",
            "--reset-attention-mask",
            "--cp-comm-type p2p a2a p2p p2p",
            "an attention mask; p2p does (works: --cp-comm-type p2p)",
        ),
    ],
)
def test_a_kind_that_is_not_in_a_row_is_refused(monkeypatch, row, line, flag, rule):
    """Also where it is that of one layer, and not of the first."""
    monkeypatch.setitem(combinations.SUPPORTED, row, ("p2p",))
    (found,) = problems_of(monkeypatch, f"{CP4} --cp-comm-type p2p a2a p2p p2p {line}")
    assert found.startswith(f"{flag}:") and rule in found, found
    monkeypatch.setenv("WORLD_SIZE", "4")
    checked([*TINY, *f"{CP4} --cp-comm-type p2p a2a p2p p2p".split()])


def test_sequence_parallel_divides_a_ranks_tokens(monkeypatch):
    line = "--context-parallel-size 2 --attention-dropout 0 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 28"
    (found,) = problems_of(monkeypatch, line, world=8)
    assert found.startswith("--seq-length 28") and "14 tokens of a context-parallel rank by 4 (works: --seq-length 32)" in found


def test_all_problems_at_once(monkeypatch):
    found = problems_of(monkeypatch, "--context-parallel-size 4 --seq-length 30 --cp-comm-type a2a+p2p --window-size 1")
    assert len(found) == 4


def test_flags_reach_the_config(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{CP4} --cp-comm-type p2p a2a a2a+p2p all_gather {HIERARCHICAL} 2 2 --window-size (7,0) --window-attn-skip-freq [1,0]*2"
    config = core_transformer_config_from_args(checked([*TINY, *flags.split()]))
    assert config.cp_comm_type == ["p2p", "a2a", "a2a+p2p", "all_gather"] and config.hierarchical_context_parallel_sizes == [2, 2]
    assert config.window_size == (7, 0) and config.window_attn_skip_freq == [1, 0, 1, 0]
    plain = core_transformer_config_from_args(checked([*TINY]))
    assert list(plain.cp_comm_type) == ["p2p"] and plain.window_size is None


def test_the_help_names_every_kind():
    (action,) = (action for action in build_parser()._actions if action.dest == "cp_comm_type")
    assert ", ".join(combinations.COMM_TYPES) in str(action.help)


def test_converters():
    assert tuple_type("(128,0)") == tuple_type("128, 0") == (128, 0)
    assert moe_freq_type("4") == 4 and moe_freq_type("([1]*2+[0])*2") == [1, 1, 0, 1, 1, 0]
    for text in ("x", "[]", "[1]*[2]", "__import__('os')", "1.5", "[1]*1000000000", "[[1]]", ""):
        with pytest.raises(ValueError):
            moe_freq_type(text)
