"""A data-parallel group's reduce-scatters and all-gathers by copy engines, through memory that its GPUs share (`nccl_ub`).

NCCL's kernels take multiprocessors from the matrix products that they run beside, and a product whose programs each hold a multiprocessor
from its start to its end then waits for them. Copies between GPUs take none; the sums are the only kernels here.

A bucket goes piece by piece, a turn each, all on one stream, in the order in which every rank asks. Why nothing is overwritten that is
still read: see tensor_parallel/symmetric_memory.py. What waits for a peer holds up all streams where they share a queue, so with
CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL does it. Plain twin: torch.distributed's collectives.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.tensor_parallel.symmetric_memory import Memory, PeerMemory, agreed
from megatron.core.utils import get_pg_size

SHARED_BYTES = 512 << 20  # of a rank, for the pieces of all


_of_groups: "WeakKeyDictionary[Any, PeerCopies | None]" = WeakKeyDictionary()


class Started:
    """What a collective returns: `wait` makes it precede what follows on the present stream."""

    def __init__(self, event: Any, current: Callable[[], Any]) -> None:
        self._event, self._current = event, current

    def wait(self) -> None:
        self._current().wait_event(self._event)


class PeerCopies:
    """The collectives of a group. `copies`: a stream; `current` says the present one."""

    def __init__(self, memory: Memory, copies: Any, current: Callable[[], Any]) -> None:
        self.memory, self._copies, self._current = memory, copies, current
        self.turn = 0
        rank, size = memory.rank, memory.size
        self._targets = [(rank + step) % size for step in range(1, size)]
        self._sources = [(rank - step) % size for step in range(1, size)]

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "PeerCopies | None":
        """Of a group whose GPUs share memory; None for others. All its ranks call it."""
        size = get_pg_size(group)
        if size == 1 or not device.has_accelerator():
            return None
        if group in _of_groups:
            return _of_groups[group]

        to_group = ref(group)  # a group that its copies held would never go

        def make() -> PeerCopies:
            return cls(PeerMemory(to_group(), SHARED_BYTES // (2 * size) & ~4095), device.copy_stream(), device.current_stream)

        problem = "CUDA_DEVICE_MAX_CONNECTIONS is 1" if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" else None
        _of_groups[group] = agreed(group, make, "data-parallel communication", "NCCL", problem)
        return _of_groups[group]

    def reduce_scatter(self, data: torch.Tensor, scale: float) -> Started:
        """data: flat, a part for each rank. This rank's part becomes `scale` times its sum over the ranks, added up in their order."""
        memory = self.memory
        self._copies.wait_stream(self._current())
        with self._copies:
            for pieces in self._pieces(data):
                for target in self._targets:
                    self._places(target, pieces)[memory.rank].copy_(pieces[target])
                    memory.signal(target, self.turn)
                self._wait()
                own, arrived = pieces[memory.rank], self._places(memory.rank, pieces)
                if memory.size == 2:
                    torch.add(own, arrived[1 - memory.rank], out=own)
                else:
                    arrived[memory.rank].copy_(own)
                    torch.sum(arrived, 0, out=own)
                if scale != 1.0:
                    own.mul_(scale)
        return Started(self._copies.record_event(), self._current)

    def all_gather(self, data: torch.Tensor) -> Started:
        """data: flat, a part for each rank; this rank's goes to the others, and theirs come."""
        memory = self.memory
        self._copies.wait_stream(self._current())
        with self._copies:
            for pieces in self._pieces(data):
                for target in self._targets:
                    self._places(target, pieces)[memory.rank].copy_(pieces[memory.rank])
                    memory.signal(target, self.turn)
                self._wait()
                arrived = self._places(memory.rank, pieces)
                for source in self._sources:
                    pieces[source].copy_(arrived[source])
        return Started(self._copies.record_event(), self._current)

    def _pieces(self, data: torch.Tensor) -> Iterator[torch.Tensor]:
        """[ranks, n] of each turn."""
        for pieces in data.view(self.memory.size, -1).split(self.memory.capacity // data.itemsize, dim=1):
            self.turn += 1
            yield pieces

    def _places(self, owner: int, pieces: torch.Tensor) -> torch.Tensor:
        """[ranks, n] of that rank's memory, for this turn."""
        places = self.memory.places(owner, self.turn % 2)[:, : pieces[0].nbytes]
        return places.view(pieces.dtype)

    def _wait(self) -> None:
        for source in self._sources:
            self.memory.wait(source, self.turn)
