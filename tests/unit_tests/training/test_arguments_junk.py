"""Whatever is typed: either a valid configuration or a UsageError that names the flag, never another exception."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.training.argument_utils import UsageError, all_fields, spellings
from tests.unit_tests.training.lines import TINY, checked

FLAGS = sorted(s for field in all_fields().values() for s in spellings(field) if s not in ("--yaml-cfg", "--check-config"))
numbers = st.one_of(st.integers(-(10**20), 10**20), st.integers(-3, 9), st.floats()).map(str)
values = st.one_of(numbers, st.text(max_size=8), st.sampled_from(["", "0", "1", "-1", "nan", "1e400", "rope", "adam", "/", "0.5", "1,1"]))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(FLAGS), st.lists(values, max_size=3)), max_size=4))
def test_junk_values(pairs: list[tuple[str, list[str]]]) -> None:
    line = [word for flag, words in pairs for word in [flag, *words]]
    try:
        checked([*TINY, *line])
    except UsageError as error:
        assert error.problems and all(problem.rule for problem in error.problems)
        assert all(problem.flag.startswith("-") or problem.flag == "command line" for problem in error.problems)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=12), min_size=1, max_size=6))
def test_junk_words(words: list[str]) -> None:
    try:
        checked([*TINY, *words])
    except UsageError as error:
        assert str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FLAGS), st.text(alphabet="xyz!?", min_size=1, max_size=6))
def test_a_value_of_the_wrong_kind_names_its_flag(flag: str, junk: str) -> None:
    field = next(f for f in all_fields().values() if flag in spellings(f))
    if (field.type is str or str(field.type).startswith(("str", "list[str]"))) and not field.metadata["choices"]:
        return
    with pytest.raises(UsageError) as caught:
        checked([*TINY, flag, junk])
    assert any(problem.flag == flag and problem.given == junk for problem in caught.value.problems)
