"""GPUs of one host on which nothing is done when it is issued, in one process: queued work runs later, in an order that chance picks.

What is queued in one stream keeps its order, and streams wait for each other where the program says so: every order that real devices may
take is possible, so a missing wait shows in results. Allocated memory holds NaN until something is written.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.core.symmetric_memory import ARRIVED

aten = torch.ops.aten
QUEUED = {aten.copy_.default, aten.mm.out, aten.add.out, aten.sum.IntList_out, aten.fill_.Scalar}
ALLOCATING = {aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default}


class Stream:
    """Of one rank: (whether it may run, what it does) in order."""

    def __init__(self, rank: "Rank") -> None:
        self.rank, self.issued, self.done = rank, 0, 0

    def put(self, work: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.issued += 1
        self.rank.queue_of(self).append((self, ready, work))

    def record_event(self) -> tuple["Stream", int]:
        return self, self.issued

    def wait_event(self, event: tuple["Stream", int]) -> None:
        other, count = event
        self.put(lambda: None, lambda: other.done >= count)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def __enter__(self) -> None:
        self.rank.entered.append(self)

    def __exit__(self, *_: object) -> None:
        assert self.rank.entered.pop() is self


class Rank:
    """shared_queue: all streams stand in one hardware queue, whose first element holds up the others."""

    def __init__(self, shared_queue: bool) -> None:
        self.queues: dict[Stream | None, deque] = {}
        self.shared_queue = shared_queue
        self.entered: list[Stream] = []
        self.main = Stream(self)
        self.entered.append(self.main)

    def stream(self) -> Stream:
        """A new one."""
        return Stream(self)

    def queue_of(self, stream: Stream) -> deque:
        return self.queues.setdefault(None if self.shared_queue else stream, deque())

    def current(self) -> Stream:
        return self.entered[-1]


class SharedMemory:
    """One rank's view of memory that all ranks write to: an exchange's Memory."""

    def __init__(self, device: Rank, rank: int, places: torch.Tensor, flags: list[list[list[int]]]) -> None:
        self.rank, self.size, self.capacity = rank, len(flags), places.shape[-1]
        self._device, self._places, self._flags = device, places, flags

    def places(self, owner: int, half: int) -> torch.Tensor:
        return self._places[owner, half]

    def signal(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        self._device.current().put(lambda: self._flags[peer][self.rank].__setitem__(what, turn))

    def wait(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        self._device.current().put(lambda: None, lambda: self._flags[self.rank][peer][what] >= turn)


class Host(TorchDispatchMode):
    """Inside, work is queued on the present stream of the rank that `issue` was told."""

    def __init__(self, size: int, shared_queue: bool) -> None:
        super().__init__()
        self.ranks = [Rank(shared_queue) for _ in range(size)]
        self.issuing = self.ranks[0]
        self.allocated: list[torch.Tensor] = []
        self._memories: list[tuple[torch.Tensor, list[list[list[int]]]]] = []
        self._asked = [0] * size

    def allocate(self, rank: int, capacity: int, places: int) -> SharedMemory:
        """The rank's next memory, of so many places in a half: all ranks ask for the same, in the same order."""
        index, size = self._asked[rank], len(self.ranks)
        self._asked[rank] += 1
        if index == len(self._memories):
            with _disable_current_modes():
                memory = torch.full((size, 2, places, capacity), 255, dtype=torch.uint8)  # NaN, whatever the dtype
            self._memories.append((memory, [[[0, 0] for _ in range(size)] for _ in range(size)]))
        assert self._memories[index][0].shape[-1] == capacity
        return SharedMemory(self.ranks[rank], rank, *self._memories[index])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in QUEUED:
            self.issuing.current().put(lambda: func(*args, **kwargs))
            return kwargs.get("out", args[0])
        if func in ALLOCATING:
            made = func(*args, **kwargs).fill_(float("nan"))
            self.allocated.append(made)
            return made
        if func is aten.clone.default:
            made = torch.empty(args[0].shape, dtype=args[0].dtype)
            self.issuing.current().put(lambda: made.copy_(args[0]))
            self.allocated.append(made)
            return made
        assert func.is_view, f"{func} is neither queued nor a view"
        return func(*args, **kwargs)

    def run(self, chance: random.Random) -> None:
        """Do what was queued. Some queues are much slower than others."""
        queues = [queue for rank in self.ranks for queue in rank.queues.values()]
        speeds = {id(queue): chance.choice([1.0, 0.1, 0.001]) for queue in queues}
        while any(queues):
            ready = [queue for queue in queues if queue and queue[0][1]()]
            assert ready, "all that is left waits for each other"
            (queue,) = chance.choices(ready, [speeds[id(each)] for each in ready])
            stream, _, work = queue.popleft()
            work()
            stream.done += 1
