"""Ctrl-C and SIGTERM end a tool in order, once."""

import signal
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_stopped_by = ""  # a signal's name


class Stopped(BaseException):
    """A signal asked the program to end. The message is the signal's name."""


def catch_stop_signals() -> None:
    """From now on a stop signal raises Stopped in the main thread."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def check_stopped() -> None:
    """Raises Stopped if a signal came: what a handler raises inside of a finalizer is lost."""
    if _stopped_by:
        raise Stopped(_stopped_by)


def _stop(number: int, _: Any) -> NoReturn:
    global _stopped_by
    for other in STOP_SIGNALS:  # once is enough: a second one must not cut the cleaning short
        signal.signal(other, signal.SIG_IGN)
    _stopped_by = signal.Signals(number).name
    raise Stopped(_stopped_by)
