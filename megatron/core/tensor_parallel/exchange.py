"""Gathering and scattering of rows by copy engines, while the GPUs' multiprocessors multiply.

Each exchange is one turn, in which every rank sends a piece of equal size to every other (core/symmetric_memory.py).

Why nothing is overwritten that is still read: turns alternate between the memory's halves. Rank r writes into p's half again, in turn t,
only after it has seen p's piece of turn t - 1, and p sends that one only after all it did with turn t - 2: its copies stand on one stream,
which waits for the stream that computes before each of them. So a signal for arrival is enough, none says that a place is free.

Queues may be shared (CUDA_DEVICE_MAX_CONNECTIONS=1), so what waits is issued after what it may wait beside: the signal that follows a copy
after the product that hides it, and the wait for a piece right before the product that needs it.

Memory: two times the pieces of all ranks, that is of two gathered activations (2 x 64 MiB for 8192 tokens of 4096 in bf16), once per group.
Plain twin: comm_overlap.py's chunks over torch.distributed.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.core import device
from megatron.core.symmetric_memory import Allocate, Wait, aligned


class Exchange:
    """Of pieces among the ranks of a group, behind matrix products. All ranks call the same methods in the same order.

    allocate: makes memory for pieces of so many bytes, on all ranks at once. stream: makes one. current: what says the present one.
    """

    purpose = "tensor-parallel communication behind products"

    @staticmethod
    def places(ranks: int) -> int:
        """In a half of the memory: one for the piece of each rank."""
        return ranks

    def __init__(self, allocate: Allocate, nbytes: int, stream: Callable[[], Any], current: Callable[[], Any]) -> None:
        self._allocate, self._copies, self._current = allocate, stream(), current
        self.memory = allocate(aligned(nbytes))
        self.turn = 0
        self._views: dict[Any, torch.Tensor] = {}
        self._settle: Callable[[], None] | None = None  # a gathering whose copies are still to be issued
        self._summing = False
        rank, size = self.memory.rank, self.memory.size
        self.targets = [(rank + step) % size for step in range(1, size)]
        self.sources = [(rank - step) % size for step in range(1, size)]  # in the order in which their pieces come

    def _begin(self, nbytes: int) -> None:
        if self._settle is not None:
            self._settle()
        assert not self._summing, "an exchange began before the sum of the last was waited for"
        if nbytes > self.memory.capacity:
            device.synchronize()  # all pieces for this rank have come: nobody writes to the old memory any more
            self._views.clear()
            self.memory, self.turn = self._allocate(aligned(nbytes)), 0
        self.turn += 1

    def _places(self, owner: int, like: torch.Tensor) -> torch.Tensor:
        """[ranks, *shape of the piece `like`]"""
        key = owner, self.turn % 2, like.shape, like.dtype
        if key not in self._views:  # made once: five calls of the host otherwise
            places = self.memory.places(owner, self.turn % 2)[:, : like.nbytes]
            self._views[key] = places.view(like.dtype).view(self.memory.size, *like.shape)
        return self._views[key]

    def _send(self, target: int, piece: torch.Tensor) -> None:
        self._copies.wait_stream(self._current())  # the piece is there, and all that read earlier turns is done
        with self._copies:
            self._places(target, piece)[self.memory.rank].copy_(piece)

    def _signal(self, target: int) -> None:
        with self._copies:
            self.memory.signal(target, self.turn)

    def _send_all(self, pieces: list[torch.Tensor]) -> None:
        """To all targets; the last of them is still to be signalled."""
        for target, piece in zip(self.targets, pieces, strict=True):
            if target != self.targets[0]:
                self._signal(self.targets[self.targets.index(target) - 1])
            self._send(target, piece)

    def _keep(self, x: torch.Tensor, gathered: torch.Tensor) -> None:
        """Copy x [s, ...] and what came from the others to gathered [ranks, s, ...], beside the present stream."""
        places = self._places(self.memory.rank, x)
        with self._copies:
            gathered[self.memory.rank].copy_(x)
            for source in self.sources:
                self.memory.wait(source, self.turn)
                gathered[source].copy_(places[source])

    def gather_matmul(self, x: torch.Tensor, matrix: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [s / ranks, b, k], of all ranks, times matrix [k, n]: ([s, b, n], the gathered x [s, b, k] if `keep`)."""
        x = x.contiguous()
        self._begin(x.nbytes)
        memory = self.memory
        rows = x.view(-1, x.shape[-1])
        out = x.new_empty(memory.size, rows.shape[0], matrix.shape[1])
        gathered = x.new_empty(memory.size, *x.shape) if keep else None
        self._send_all([x] * len(self.targets))
        torch.mm(rows, matrix, out=out[memory.rank])
        self._signal(self.targets[-1])
        places = self._places(memory.rank, rows)
        for source in self.sources:
            memory.wait(source, self.turn)
            torch.mm(places[source], matrix, out=out[source])
        if gathered is not None:
            self._keep(x, gathered)
        self._current().wait_stream(self._copies)  # before x is freed and `gathered` read
        whole = (memory.size * x.shape[0], *x.shape[1:-1])
        return out.view(*whole, matrix.shape[1]), None if gathered is None else gathered.view(*whole, x.shape[-1])

    def start_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """(the rows [s, ...] of x [s / ranks, ...] of all ranks, what waits until they are there)."""
        x = x.contiguous()
        self._begin(x.nbytes)
        gathered = x.new_empty(self.memory.size, *x.shape)
        self._send_all([x] * len(self.targets))
        events: list[Any] = []

        def settle() -> None:
            self._settle = None
            self._signal(self.targets[-1])
            self._keep(x, gathered)
            events.append(self._copies.record_event())

        def wait() -> None:
            if not events:
                settle()
            self._current().wait_event(events[0])

        self._settle = settle
        return gathered.view(-1, *x.shape[1:]), wait

    def matmul_reduce_scatter(self, x: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """x [s, b, k] times matrix [k, n], summed over the ranks: (this rank's rows [s / ranks, b, n], what waits for the sum)."""
        size, x = self.memory.size, x.contiguous()
        parts = x.view(size, -1, x.shape[-1])
        products = x.new_empty(size, parts.shape[1], matrix.shape[1])
        self._begin(products[0].nbytes)
        before: int | None = None
        for target in (*self.targets, self.memory.rank):
            torch.mm(parts[target], matrix, out=products[target])
            if before is not None:
                self._signal(before)
            if target != self.memory.rank:
                self._send(target, products[target])
            before = target
        out = x.new_empty(x.shape[0] // size, *x.shape[1:-1], matrix.shape[1])
        return out, self._sum(products, out, self._current())

    def start_reduce_scatter(self, whole: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """The sum of whole [s, ...] over the ranks: (this rank's rows [s / ranks, ...], what waits for it)."""
        size, whole = self.memory.size, whole.contiguous()
        parts = whole.view(size, -1, whole.shape[-1])
        self._begin(parts[0].nbytes)
        self._send_all([parts[target] for target in self.targets])
        out = whole.new_empty(whole.shape[0] // size, *whole.shape[1:])
        return out, self._sum(parts, out, self._copies)

    def _sum(self, parts: torch.Tensor, out: torch.Tensor, where: Any) -> Wait:
        """What adds to this rank's of `parts` [ranks, rows, n] what comes from the others, in the order of ranks, rounded once.

        where: the stream that adds. On that of the copies the last target is still to be signalled, and parts are there.
        """
        self._summing, memory = True, self.memory

        def wait() -> None:
            own, places = parts[memory.rank], self._places(memory.rank, parts[0])
            if where is self._copies:
                self._signal(self.targets[-1])
            with where:
                for source in self.sources:
                    memory.wait(source, self.turn)
                if memory.size == 2:
                    torch.add(own, places[1 - memory.rank], out=out.view_as(own))
                else:
                    places[memory.rank].copy_(own)
                    torch.sum(places, 0, out=out.view_as(own))
            self._current().wait_stream(self._copies)  # before `parts` are freed
            self._summing = False

        return wait
