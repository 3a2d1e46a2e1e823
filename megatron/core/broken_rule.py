"""What is wrong with a setting, for the command line and for configs made in Python, each of which says it in its own words. No torch."""

from typing import Any, NamedTuple


class BrokenRule(NamedTuple):
    """setting: TransformerConfig's name of it, as are those in `rule`; works: a value that works, "" where it is to be left out."""

    setting: str
    rule: str
    works: Any = ""


def config_sentence(config: Any, broken: BrokenRule) -> str:
    """To who made `config` in Python: the value, the rule, what works."""
    works = "leave it out" if broken.works == "" else f"{broken.works!r} works"
    return f"{broken.setting} {getattr(config, broken.setting)!r}: {broken.rule}; {works}"
