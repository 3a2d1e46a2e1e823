"""Memory that the GPUs of a host share, for copies between them by copy engines.

NCCL's kernels take multiprocessors from the computation that they should hide behind; copies between GPUs take none, and signals are stream
operations of the driver, not kernels. Who uses it: tensor_parallel/exchange.py, context_parallel/ring_exchange.py. They work by turns: turn
t takes half t % 2 of the memory, and a signal carries the turn's number.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.utils import get_pg_rank, get_pg_size

logger = logging.getLogger(__name__)
Wait = Callable[[], None]
Made = TypeVar("Made")
ALIGNMENT = 4096  # bytes, of a piece's place
FLAG_BYTES = 32
ARRIVED, READ = range(2)  # what a signal says of a turn: the piece has come; its place may be written again


class Memory(Protocol):
    """What an exchange needs: places that other ranks write to, and signals in the order of the present stream."""

    rank: int
    size: int
    capacity: int  # bytes of a piece

    def places(self, owner: int, half: int) -> torch.Tensor:
        """The memory of rank `owner`, bytes [places, capacity]."""
        ...

    def signal(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        """Tell `peer`, once all before is done and visible there, that this rank's piece has come, or that `peer`'s was read."""
        ...

    def wait(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        """What follows on the present stream waits until `peer` has signalled the turn or a later one. It may be waited for twice."""
        ...


Allocate = Callable[[int], Memory]


class PeerMemory:
    """Memory of the GPUs of one host, mapped into each other's. places: in each half."""

    def __init__(self, group: dist.ProcessGroup | None, capacity: int, places: int) -> None:
        assert group is not None
        self.rank, self.size, self.capacity = get_pg_rank(group), get_pg_size(group), capacity
        self._places, self._flags = places, 2 * places * capacity
        nbytes = self._flags + self.size * 2 * FLAG_BYTES
        own = _on_all(group, lambda: _allocate(nbytes))  # none waits in the rendezvous for a rank that has no memory
        from torch.distributed import _symmetric_memory

        self._handle = _symmetric_memory.rendezvous(own, group)
        assert self._handle is not None
        self._own = own
        self._bytes = [self._handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(self.size)]

    def places(self, owner: int, half: int) -> torch.Tensor:
        length = self._places * self.capacity
        return self._bytes[owner].narrow(0, half * length, length).view(self._places, self.capacity)

    def _flag(self, owner: int, source: int, what: int) -> int:
        return self._bytes[owner].data_ptr() + self._flags + (2 * source + what) * FLAG_BYTES

    def signal(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        device.stream_write(self._flag(peer, self.rank, what), turn)

    def wait(self, peer: int, turn: int, what: int = ARRIVED) -> None:
        device.stream_wait_at_least(self._flag(self.rank, peer, what), turn)


def _allocate(nbytes: int) -> torch.Tensor:
    """Zeros that other GPUs can map."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # torch would map it for multicast too, which nothing here uses
    if device.gpus_are_shared():
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    from torch._C._distributed_c10d import _SymmetricMemory

    own = _SymmetricMemory.empty_strided_p2p((nbytes,), [1], torch.uint8, device.current_device())
    own.zero_()
    device.synchronize()  # flags are zero before any rank can reach them
    return own


def aligned(nbytes: int) -> int:
    """At least so many, as many as a piece's place takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


_exchanges: "WeakKeyDictionary[dist.ProcessGroup, dict[type, Any]]" = WeakKeyDictionary()
_on = True


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, there is no exchange: for tests and benchmarks that compare."""
    global _on
    before, _on = _on, False
    try:
        yield
    finally:
        _on = before


class ExchangeKind(Protocol):
    """What is made of shared memory, once for a group: for whom it says in the log, how many places it has in a half, for so many ranks."""

    purpose: str

    def __init__(self, allocate: Allocate, nbytes: int, stream: Callable[[], Any], current: Callable[[], Any]) -> None: ...

    @staticmethod
    def places(ranks: int) -> int: ...


Kind = TypeVar("Kind", bound=ExchangeKind)


def exchange_of(kind: type[Kind], group: Any, tensor: torch.Tensor, nbytes: int) -> Kind | None:
    """The group's exchange of that kind for pieces of `nbytes` on the tensor's device; None where the ranks' GPUs do not share memory.

    All ranks call it at once: the first time they agree whether there is one, which the log says once.
    """
    if not _on or not device.on_accelerator(tensor):
        return None
    of_group = _exchanges.setdefault(group, {})
    if kind not in of_group:
        of_group[kind] = _find(kind, group, nbytes)
    return of_group[kind]


def _find(kind: type[Kind], group: dist.ProcessGroup, nbytes: int) -> Kind | None:
    mine = (socket.gethostname(), device.current_device().index, device.reachable_devices(), device.card())
    ranks: list[Any] = [None] * get_pg_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    problem, found = _obstacle(ranks), None
    if problem is None:
        to_group, places = ref(group), kind.places(len(ranks))  # a group that its exchange held would never go

        def exchange() -> Kind:
            return kind(lambda capacity: PeerMemory(to_group(), capacity, places), nbytes, device.copy_stream, device.current_stream)

        try:
            found = _on_all(group, exchange)
        except RuntimeError as error:
            problem = str(error)
    if get_pg_rank(group) == 0:
        how = "copy engines and symmetric memory" if problem is None else f"over NCCL, not symmetric memory: {problem}"
        logger.info("%s, ranks %s: %s", kind.purpose, dist.get_process_group_ranks(group), how)
    return found


def _on_all(group: dist.ProcessGroup, make: Callable[[], Made]) -> Made:
    """What `make` returns. Where it fails on one rank, RuntimeError on all of them, with the first one's problem. A collective."""
    problem: str | None = None
    try:
        made = make()
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        problem = (str(error) or type(error).__name__).splitlines()[0]
    ranks: list[Any] = [None] * get_pg_size(group)
    dist.all_gather_object(ranks, problem, group=group)
    if problems := [each for each in ranks if each is not None]:
        raise RuntimeError(problems[0])
    return made


def _obstacle(ranks: list[tuple[str, int, frozenset[int], str]]) -> str | None:
    """Why the ranks, each given by host, device, the devices that it reaches and its card, cannot share memory; None if they can."""
    hosts, devices = {host for host, _, _, _ in ranks}, {index for _, index, _, _ in ranks}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if len(devices) < len({card for _, _, _, card in ranks}):
        return "ranks see their devices by the same number; let each see all devices of the host"
    for _, index, reached, _ in ranks:
        if not devices - {index} <= reached:
            return f"device {index} reaches only devices {sorted(reached)} of the host"
    return None
