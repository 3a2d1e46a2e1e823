"""Passing on tensors round a ring by copy engines, while the GPUs' multiprocessors compute.

A turn for each tensor: every rank copies its own into the next rank's memory, and takes what came from the previous rank out of its own
memory into a tensor that nobody else writes to. Turns alternate between the memory's halves, and two may be on their way at once. A half
is written again after the next rank has signalled that it took out what was there. It does that where it waits for that tensor, which is
before it starts the second turn after it: so a rank's wait for a free half never waits for something that comes later in the program.

Sending and receiving have a stream each. Queues may be shared (CUDA_DEVICE_MAX_CONNECTIONS=1): the signal that follows a copy is issued
after the computation that hides it. Memory: two pieces. Plain twin: `Ring` over torch.distributed (communication.py).
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megatron.core import device
from megatron.core.symmetric_memory import READ, Allocate, aligned


class _Turn(NamedTuple):
    number: int
    sent: torch.Tensor  # lives until it is
    received: torch.Tensor
    copied: Any  # event


class RingExchange:
    """Between the ranks of a group in a circle. All ranks start the same turns, and wait for them in the order of their starts; at most
    two are on their way.

    allocate: makes memory for pieces of so many bytes, on all ranks at once. stream: makes one. current: what says the present one.
    """

    purpose = "the ring of context parallelism"

    @staticmethod
    def places(ranks: int) -> int:
        """In a half of the memory: for what comes from the previous rank."""
        return 1

    def __init__(self, allocate: Allocate, nbytes: int, stream: Callable[[], Any], current: Callable[[], Any]) -> None:
        self._allocate, self._current = allocate, current
        self._sends, self._receives = stream(), stream()
        self.memory = allocate(aligned(nbytes))
        self._number = 0
        self._signalled = 0
        self._going: deque[_Turn] = deque()
        self._next, self._previous = (self.memory.rank + 1) % self.memory.size, (self.memory.rank - 1) % self.memory.size

    def start(self, tensor: torch.Tensor, room: int = 0) -> Callable[[], torch.Tensor]:
        """Begin to send `tensor` (contiguous) to the next rank. Returns what waits for one like it from the previous rank, and gives it.

        room: bytes of the largest that may be sent while this one is on its way.
        """
        assert tensor.is_contiguous() and len(self._going) < 2
        self._grow(max(room, tensor.nbytes))
        self._signal()
        self._number += 1
        received = torch.empty_like(tensor)
        self._receives.wait_stream(self._current())  # what `received` held before was read
        self._sends.wait_stream(self._current())  # the tensor is there
        with self._sends:
            if self._number > 2:
                self.memory.wait(self._next, self._number - 2, READ)
            self._place(self._next, self._number, tensor).copy_(tensor)
        turn = _Turn(self._number, tensor, received, self._sends.record_event())
        self._going.append(turn)
        return lambda: self._finish(turn)

    def _finish(self, turn: _Turn) -> torch.Tensor:
        assert self._going.popleft() is turn, "tensors are waited for in the order of their starts"
        self._signal()
        with self._receives:
            self.memory.wait(self._previous, turn.number)
            turn.received.copy_(self._place(self.memory.rank, turn.number, turn.received))
            self.memory.signal(self._previous, turn.number, READ)
        self._current().wait_event(self._receives.record_event())
        self._current().wait_event(turn.copied)  # before what was sent is freed
        return turn.received

    def _signal(self) -> None:
        """Tell the next rank of what was sent, unless it knows."""
        if self._signalled < self._number:
            with self._sends:
                self.memory.signal(self._next, self._number)
            self._signalled = self._number

    def _place(self, owner: int, number: int, like: torch.Tensor) -> torch.Tensor:
        return self.memory.places(owner, number % 2)[0, : like.nbytes].view(like.dtype).view(like.shape)

    def _grow(self, nbytes: int) -> None:
        if nbytes > self.memory.capacity:
            assert not self._going, "memory cannot grow under what is on its way"
            device.synchronize()  # all that other ranks sent here has come; what they still signal, they do before they allocate
            self.memory, self._number, self._signalled = self._allocate(aligned(nbytes)), 0, 0
