"""From dataclasses to a parser, and from a command line to checked tokens. Knows no particular flag.

argparse stops at its first error. So the command line is read here first, flag by flag, into a list of problems; what is right goes to
argparse, which also knows the arguments that a script added.
"""

import argparse
import dataclasses
import difflib
import enum
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from megatron.training import flag_aliases
from megatron.training.config import SECTIONS
from megatron.training.config.fields import spellings

_ARGPARSE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a negative number in a list
_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|-(inf|nan)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration, in the words of the command line."""

    flag: str
    given: str | None  # None: the flag was not given
    rule: str
    works: str = ""  # something that would work, as one would type it

    def __str__(self) -> str:
        head = self.flag if self.given is None else f"{self.flag} {self.given}".rstrip()
        return f"{head}: {self.rule}" + (f" (works: {self.works})" if self.works else "")


class UsageError(ValueError):
    """A command line or configuration file that cannot be used. `problems` holds all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the command line:"]
        return "\n".join(lines + [f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1)])


def all_fields() -> dict[str, dataclasses.Field]:
    """Every flag's field by its dest."""
    return {field.name: field for section in SECTIONS for field in dataclasses.fields(section)}


def value_type(field: dataclasses.Field) -> type:
    """int for `int | None`, str for `list[str]`, and so on."""
    kind: Any = field.type
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is list:
        (kind,) = typing.get_args(kind)
    return kind


def enum_by_name(kind: Any) -> Callable[[str], Any]:
    """A converter from a member's name to the member."""

    def convert(name: str) -> Any:
        if name not in kind.__members__:
            raise ValueError(name)
        return kind[name]

    convert.__name__ = f"enum:{kind.__name__}"
    return convert


class Parser(argparse.ArgumentParser):
    """argparse whose own errors are problems too."""

    def error(self, message: str) -> NoReturn:
        raise UsageError([Problem("command line", None, message)])


def build_parser(extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None) -> Parser:
    """The parser of all flags, and of those that `extra_args_provider(parser)` adds."""
    parser = Parser(description="Train a language model; flags as Megatron-LM's.", allow_abbrev=False, conflict_handler="resolve")
    for section in SECTIONS:
        add_section(parser, section)
    if extra_args_provider is not None:
        # returning the parser is the convention, forgetting to is common
        parser = extra_args_provider(parser) or parser
    return parser


def add_section(parser: argparse.ArgumentParser, section: Any, names: Iterable[str] | None = None) -> None:
    """Add the flags of one dataclass of SECTIONS, or those of its fields that `names` names, as a group."""
    group = parser.add_argument_group((section.__doc__ or section.__name__).splitlines()[0])
    for field in dataclasses.fields(section):
        if names is None or field.name in names:
            _add_flag(group, field)


def _add_flag(group: Any, field: dataclasses.Field) -> None:
    meta = field.metadata
    default = field.default
    assert default is not dataclasses.MISSING, f"{field.name} must have a plain default"
    notes = [meta["unit"]] if meta["unit"] else []
    if meta["built"] is not None and (missing := [c for c in meta["choices"] if c not in meta["built"]]):
        notes.append("not yet: " + ", ".join(missing))
    if meta["no_effect"]:
        notes.append(f"no effect: {meta['no_effect']}")
    kind = value_type(field)
    if isinstance(default, tuple):
        default = list(default)
        if default:
            notes.append(f"default: {' '.join(map(str, default))}")
    elif kind is not bool and default is not None:
        notes.append(f"default: {getattr(default, 'name', default)}")
    text = (meta["help"] + (f" [{'; '.join(notes)}]" if notes else "")).replace("%", "%%")
    if kind is bool:
        action = "store_false" if default is True else "store_true"
        group.add_argument(*spellings(field), dest=field.name, action=action, default=default, help=text)
        return
    convert: Any = kind
    choices: Any = meta["choices"]
    metavar = None
    if isinstance(meta["type"], enum.EnumMeta):
        convert, choices, metavar = enum_by_name(meta["type"]), list(meta["type"]), "NAME"
    elif meta["type"] is not None:
        convert, metavar = meta["type"], "TEXT"
    elif choices is None:
        metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    group.add_argument(
        *spellings(field), dest=field.name, type=convert, default=default, choices=choices, nargs=meta["nargs"], metavar=metavar, help=text
    )


@dataclasses.dataclass
class CheckedLine:
    """A command line after `check_tokens`."""

    argv: list[str]  # what argparse can take
    given: set[str]  # dests named on the line
    bad: set[str]  # dests whose value cannot be used
    problems: list[Problem]
    ignored: list[str]  # unknown flags left alone on request


def check_tokens(parser: argparse.ArgumentParser, tokens: Sequence[str], ignore_unknown: bool = False) -> CheckedLine:
    """Read `tokens` flag by flag: every unknown flag, missing, stray or malformed value becomes a problem. Never raises."""
    actions = parser._option_string_actions
    line = CheckedLine([], set(), set(), [], [])
    for name, values in _by_flag(tokens, actions):
        if name is None:
            if any(not action.option_strings for action in parser._actions):
                line.argv += values  # a script's positional arguments
            elif not ignore_unknown:
                line.problems.append(Problem("command line", " ".join(values), "a value that belongs to no flag", "remove it"))
            continue
        action = actions.get(name)
        if action is None:
            if ignore_unknown:
                line.ignored.append(name)
            else:
                line.problems.append(unknown_flag(name, values, actions))
            continue
        line.given.add(action.dest)
        problem = _values_problem(name, action, values)
        if problem is not None:
            line.bad.add(action.dest)
            line.problems.append(problem)
        elif len(values) == 1 and name.startswith("--"):
            line.argv.append(f"{name}={values[0]}")  # so a value may begin with a dash
        else:
            line.argv += [name, *values]
    return line


def _by_flag(tokens: Sequence[str], actions: dict[str, argparse.Action]) -> Iterable[tuple[str | None, list[str]]]:
    """Group a command line: (flag, its values); values before the first flag under None."""
    name: str | None = None
    values: list[str] = []
    for token in map(str, tokens):
        if token.startswith("--") or token in actions or (re.match(r"-[A-Za-z]", token) and not _NUMBER.fullmatch(token)):
            if name is not None or values:
                yield name, values
            name, equals, value = token.partition("=")
            values = [value] if equals else []
        else:
            values.append(token)
    if name is not None or values:
        yield name, values


def _values_problem(name: str, action: argparse.Action, values: list[str]) -> Problem | None:
    given = " ".join(values)
    example = example_value(action)
    if action.nargs == 0:
        if not values:
            return None
        hint = flag_aliases.MEANT_WITH_VALUE.get(name)
        mean = f"; did you mean {hint} {given}" if hint else ""
        return Problem(name, given, f"takes no value{mean}", f"{hint} {given}" if hint else name)
    fewest, most = _value_counts(action.nargs)
    if len(values) < fewest or (most is not None and len(values) > most):
        number = {(1, 1): "one value", (1, None): "at least one value", (0, 1): "at most one value"}.get((fewest, most), f"{most} values")
        return Problem(name, given, f"takes {number}, given {len(values) or 'none'}", f"{name} {example}")
    convert: Any = action.type or str
    for value in values:
        try:
            converted = convert(value)
        except (ValueError, TypeError, KeyError, OverflowError, argparse.ArgumentTypeError):
            other = f"one of {_choices(action)}" if action.choices else "another form"
            kind = {int: "a whole number", float: "a number"}.get(convert, other)
            return Problem(name, given, f"needs {kind}", f"{name} {example}")
        if action.choices is not None and converted not in action.choices:
            close = difflib.get_close_matches(value, [getattr(c, "name", str(c)) for c in action.choices], 1)
            return Problem(name, given, f"must be one of {_choices(action)}", f"{name} {close[0] if close else example}")
        if isinstance(converted, float) and not math.isfinite(converted):
            return Problem(name, given, "needs a finite number", f"{name} {example}")
        if len(values) > 1 and value.startswith("-") and not _ARGPARSE_NUMBER.fullmatch(value):
            return Problem(name, given, f"the value {value} looks like a flag", f"{name} {example}")
    return None


def _value_counts(nargs: int | str | None) -> tuple[int, int | None]:
    """Fewest and most values of a flag, None = any number."""
    if isinstance(nargs, int):
        return nargs, nargs
    return {"?": (0, 1), "+": (1, None), "*": (0, None)}.get(nargs, (0, None)) if nargs else (1, 1)


def _choices(action: argparse.Action) -> str:
    names = [getattr(c, "name", str(c)) for c in action.choices or ()]
    return ", ".join(names[:15]) + (", ..." if len(names) > 15 else "")


def example_value(action: argparse.Action) -> str:
    """A value of the right kind for a flag."""
    if action.nargs == 0:
        return ""
    if isinstance(action.default, list) and action.default:
        return " ".join(map(str, action.default))
    if action.default not in (None, argparse.SUPPRESS, []):
        return str(getattr(action.default, "name", action.default))
    if action.choices:
        return str(next(iter(action.choices)))
    one = {int: "8", float: "0.1"}.get(action.type, getattr(action.type, "example", "TEXT"))  # type: ignore[call-overload]
    return " ".join([one] * action.nargs) if isinstance(action.nargs, int) else one


def unknown_flag(name: str, values: Sequence[str], known: Iterable[str]) -> Problem:
    """What to say of a flag that the parser does not have: removed, not supported yet, or the nearest one."""
    given = " ".join(values) or None
    later = flag_aliases.not_supported_yet()
    if name in flag_aliases.RENAMED:
        advice = flag_aliases.RENAMED[name]
        unbuilt = [word for word in re.findall(r"--[a-z0-9-]+", advice) if word in later]
        return Problem(name, given, f"is an old name; {advice}" + (f" ({' and '.join(unbuilt)}: not supported yet)" if unbuilt else ""))
    if name in flag_aliases.REMOVED:
        return Problem(name, given, "was removed from Megatron-LM and has no effect there any more", "leave it out")
    if name in later:
        return Problem(name, given, "is a Megatron-LM flag that this version does not support yet", "leave it out")
    spelled = "--" + name.lstrip("-").replace("_", "-")
    if spelled in known:
        return Problem(name, given, f"unknown flag; did you mean {spelled}", spelled)
    near = difflib.get_close_matches(spelled, [k for k in known if k.startswith("--")], 1, 0.5)
    near = near or difflib.get_close_matches(spelled, sorted(later), 1, 0.0)
    return Problem(name, given, f"unknown flag; the nearest known one is {near[0]}" if near else "unknown flag")


def yaml_tokens(path: str, parser: argparse.ArgumentParser) -> tuple[list[str], set[str], list[Problem]]:
    """A YAML file as command-line tokens, so that both pass the same checks.

    Keys are flags' names or dests, with dashes or underscores, at the top or nested under headings of the reader's choice.
    Returns: the tokens, the dests that the file names (also when it repeats a default), problems with the file itself.
    """
    from megatron.core import optional_imports

    if not optional_imports.available("yaml"):
        return [], set(), [Problem("--yaml-cfg", path, f"needs PyYAML: {optional_imports.INSTALL_COMMAND['yaml']}")]
    yaml = optional_imports.require("yaml", "--yaml-cfg")
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, Loader=yaml.BaseLoader)  # plain strings: the parser's own converters decide
    except RecursionError:
        return [], set(), [Problem("--yaml-cfg", path, "is nested too deeply")]
    except (OSError, UnicodeError, ValueError) as error:
        return [], set(), [Problem("--yaml-cfg", path, f"cannot be read: {getattr(error, 'strerror', None) or error}")]
    except yaml.YAMLError as error:
        return [], set(), [Problem("--yaml-cfg", path, "is not YAML: " + " ".join(str(error).split()))]
    if not isinstance(content, dict):
        return [], set(), [Problem("--yaml-cfg", path, "must be a mapping from flags to values", "num_layers: 12")]
    by_dest = {action.dest: action for action in parser._actions if action.option_strings}
    tokens: list[str] = []
    given: set[str] = set()
    for key, value in _leaves(content):
        spelled = "--" + key.lstrip("-").replace("_", "-")
        action = by_dest.get(key.lstrip("-").replace("-", "_")) or parser._option_string_actions.get(spelled)
        if value in ("null", "~", ""):
            continue  # not given
        values = [str(v) for v in value] if isinstance(value, list) else [str(value)]
        if action is None:
            switch = values[0].lower() in ("true", "false") if len(values) == 1 else False
            tokens += [spelled] if switch else _as_tokens(spelled, values)
            continue
        given.add(action.dest)
        if action.nargs == 0 and values[0].lower() in ("true", "false"):
            on = values[0].lower() == "true"
            if isinstance(action.const, bool) and spelled not in action.option_strings:
                on = on == action.const  # the key is the dest (`add_bias_linear: false`), not the flag (`disable_bias_linear: true`)
            tokens += [action.option_strings[0]] if on else []
        else:
            tokens += _as_tokens(action.option_strings[0], values)
    return tokens, given, []


def _as_tokens(name: str, values: list[str]) -> list[str]:
    return [f"{name}={values[0]}"] if len(values) == 1 else [name, *values]


def _leaves(mapping: dict, depth: int = 8) -> Iterable[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and depth > 0:  # an anchor may contain itself
            yield from _leaves(value, depth - 1)
        else:
            yield str(key), value
