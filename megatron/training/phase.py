"""Where this process is right now, for error messages and profilers: the phase's name and the iteration."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import device
from megatron.core.timers import Timers

_current: dict[str, Any] = {"phase": "start-up", "iteration": 0}
_timers: list[Timers] = []  # one, once `time_with` was called


@contextmanager
def phase(name: str, iteration: int | None = None, timed: bool = True) -> Iterator[None]:
    """Name the enclosed work. When it raises, the name stays: an error message says in which phase it happened.

    The iteration stays also afterwards, until another is named. `timed`: as `time_with` says.
    """
    before = _current["phase"]
    _current["phase"] = name
    if iteration is not None:
        _current["iteration"] = iteration
    timer = _timers[0](name, log_level=1) if _timers and timed else None
    if timer is not None:
        timer.start()
    with device.profiler_range(name):
        yield
    if timer is not None:
        timer.stop()
    _current["phase"] = before


def time_with(timers: Timers) -> None:
    """From now on every phase is timed (at log level 1: a phase then waits for the device at its start and end)."""
    _timers[:] = [timers]


def reset() -> None:
    """Back to the beginning, for the next run in this process."""
    _current.update(phase="start-up", iteration=0)
    _timers.clear()


def current() -> tuple[str, int]:
    """(phase, iteration) of this moment."""
    return _current["phase"], _current["iteration"]


def outside(name: str) -> None:
    """From now on what no phase encloses is called `name`. Call outside of phases."""
    _current["phase"] = name


def where() -> str:
    """ "phase P, iteration N" of this moment."""
    return f"phase {_current['phase']}, iteration {_current['iteration']}"
