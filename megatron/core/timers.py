"""Named wall-clock timers with levels, gathered over ranks when logged.

A timer waits for the device when it starts and stops, so time only what that may cost; those above the chosen level do nothing.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.device import current_device, synchronize


class Timer:
    """Seconds between start and stop, added up; `active_time` is never reset."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = 0.0
        self._active = 0.0
        self._started: float | None = None

    @property
    def running(self) -> bool:
        return self._started is not None

    def start(self, barrier: bool = False) -> None:
        """Start; with `barrier`, after all ranks came here."""
        assert self._started is None, f"timer {self.name} runs already"
        _wait(barrier)
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        assert self._started is not None, f"timer {self.name} was not started"
        _wait(barrier)
        seconds = time.perf_counter() - self._started
        self._elapsed += seconds
        self._active += seconds
        self._started = None

    def reset(self) -> None:
        self._elapsed = 0.0
        self._started = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds so far; a running timer goes on."""
        was_running = self.running
        if was_running:
            self.stop(barrier=barrier)
        seconds = self._elapsed
        if reset:
            self.reset()
        if was_running:
            self.start(barrier=barrier)
        return seconds

    def active_time(self) -> float:
        """Seconds since the timer was made, resets or not."""
        return self._active


class DummyTimer(Timer):
    """What a name above the chosen level gets."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...


def _wait(barrier: bool) -> None:
    if barrier and dist.is_initialized():
        dist.barrier()
    synchronize()


class Timers:
    """`timers('forward', log_level=1).start()`; names get their level when first used.

    Args:
        log_level: 0 to 2; timers of a higher level do nothing.
        log_option: what log prints over ranks: 'max', 'minmax' or 'all'.
    """

    def __init__(self, log_level: int, log_option: str) -> None:
        if log_option not in ("max", "minmax", "all"):
            raise ValueError(f"timing log option {log_option!r} is not one of max, minmax, all")
        self.log_level = log_level
        self.log_option = log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._dummy = DummyTimer("dummy")

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        if name not in self._levels:
            level = 2 if log_level is None else log_level
            if not 0 <= level <= 2:
                raise ValueError(f"timer {name}: log level {level} is not 0, 1 or 2")
            self._levels[name] = level
        if self._levels[name] > self.log_level:
            return self._dummy
        return self._timers.setdefault(name, Timer(name))

    def _gather(self, names: list[str], reset: bool, barrier: bool) -> torch.Tensor:
        """Seconds as a tensor [ranks, names]; every rank must name the same timers."""
        if barrier and dist.is_initialized():
            dist.barrier()
        mine = torch.tensor([self._timers[name].elapsed(reset=reset) for name in names], dtype=torch.float64, device=current_device())
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return mine[None].cpu()
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def names(self) -> list[str]:
        """Those that were started on this rank, in order of their first start."""
        return list(self._timers)

    def _known(self, names: list[str] | None) -> list[str]:
        return [name for name in (list(self._timers) if names is None else names) if name in self._timers]

    def get_all_timers_string(
        self, names: list[str] | None = None, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> str | None:
        """Milliseconds / normalizer of the named timers (all known ones by default), None when there are none. A collective."""
        assert normalizer > 0
        known = self._known(names)
        if not known:
            return None
        milliseconds = self._gather(known, reset, barrier) * 1000.0 / normalizer
        kind = {"max": "max", "minmax": "(min, max)", "all": "all"}[self.log_option]
        lines = [f"{kind} time across ranks (ms):"]
        for name, column in zip(known, milliseconds.unbind(1)):
            label = f"    {name} ".ljust(50, ".")
            if self.log_option == "max":
                lines.append(f"{label}: {column.max():.2f}")
            elif self.log_option == "minmax":
                lines.append(f"{label}: ({column.min():.2f}, {column.max():.2f})")
            else:
                lines += [f"    {name}:", *(f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(column))]
        return "\n".join(lines)

    def log(
        self,
        names: list[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the named timers on `rank` (the last by default). A collective."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        world_size, mine = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if text is not None and mine == (world_size - 1 if rank is None else rank):
            print(text, flush=True)

    def write(
        self, names: list[str], writer: Any, iteration: int, normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> None:
        """Each timer's largest seconds over ranks as the scalar `<name>-time`; `writer` may be None on other ranks. A collective."""
        known = self._known(names)
        if not known:
            return
        seconds = self._gather(known, reset, barrier).max(0).values / normalizer
        if writer is not None:
            for name, value in zip(known, seconds.tolist()):
                writer.add_scalar(f"{name}-time", value, iteration)
