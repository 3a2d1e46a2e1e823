"""What exchanges through shared memory need, between processes on CPUs: all is done when it is issued."""

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.symmetric_memory import ARRIVED


class Queue:
    """A stream of the CPU: all is done when it is issued."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FileMemory:
    """Memory that processes share through a file; an exchange's Memory."""

    def __init__(self, path: Path, capacity: int, places: int, group: Any = None) -> None:
        self.rank, self.size, self.capacity = dist.get_rank(group), dist.get_world_size(group), capacity
        shape = (self.size, 2, places, capacity)
        self._places = torch.from_file(f"{path}.{capacity}", True, math.prod(shape), dtype=torch.uint8).view(shape)
        flags = torch.from_file(f"{path}.{capacity}.flags", True, 2 * self.size**2, dtype=torch.int64)
        self._flags = flags.view(self.size, self.size, 2).numpy()

    def places(self, owner: int, half: int) -> torch.Tensor:
        return self._places[owner, half]

    def signal(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        self._flags[peer, self.rank, what] = turn

    def wait(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        end = time.monotonic() + 30
        while self._flags[self.rank, peer, what] < turn:
            assert time.monotonic() < end, f"no signal of rank {peer} for turn {turn}"
            time.sleep(0)
