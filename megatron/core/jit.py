"""`jit_fuser`: the decorator that other projects put on pointwise functions. The identity: compiling at run time costs start-up."""

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def jit_fuser(function: F) -> F:
    return function
