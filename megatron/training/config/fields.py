"""How one command-line flag is described: a dataclass field whose metadata says the rest.

The field's name is the argparse `dest`. Without `names` the spelling follows from it: `a_b` is `--a-b`; a bool that is True by default is
switched off by `--no-a-b` or `--disable-a-b`. The annotation gives the type (`int | None` reads as int, `list[str]` takes several values).
"""

import dataclasses
from typing import Any

# What --use-checkpoint-args does with a field.
ARCHITECTURE = "architecture"  # must equal the checkpoint's: another explicit value is refused
SETTING = "setting"  # explicit flag, then the checkpoint's value, then the default


def flag(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    unit: str = "",
    choices: tuple[str, ...] | None = None,
    nargs: str | int | None = None,
    type: Any = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    built: tuple[str, ...] | None = None,
    checkpoint: str | None = None,
    no_effect: str = "",
    ours: bool = False,
) -> Any:
    """A field for one flag.

    Args:
        names: spellings where the rule above does not give them.
        unit: what one unit of a number is, shown in the help.
        choices: every value that Megatron-LM knows.
        built: those of `choices` that this version supports; the others are refused by name.
        type: an enumeration, or a function that converts the text, where the annotation does not say it.
        minimum, maximum, above, below: bounds of a number (`above` and `below` are exclusive).
        checkpoint: ARCHITECTURE, SETTING or None, see above.
        no_effect: why another value than the default changes nothing here; the help and a note to who gives it say so.
        ours: not a flag of Megatron-LM.
    """
    metadata = {
        "help": help,
        "names": names,
        "unit": unit,
        "choices": choices,
        "nargs": nargs,
        "type": type,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "below": below,
        "built": built,
        "checkpoint": checkpoint,
        "no_effect": no_effect,
        "ours": ours,
    }
    return dataclasses.field(default=default, metadata=metadata)


def spellings(field: dataclasses.Field) -> tuple[str, ...]:
    """The option strings of a flag's field, the usual one first."""
    if field.metadata["names"]:
        return field.metadata["names"]
    dashed = field.name.replace("_", "-")
    return (f"--no-{dashed}", f"--disable-{dashed}") if field.default is True else (f"--{dashed}",)
