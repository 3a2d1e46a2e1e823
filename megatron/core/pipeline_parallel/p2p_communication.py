"""Activations and gradients between pipeline stages: what a stage sends and receives between two computations goes as one batch.

A plan (`schedule_plan`) gives all stages' transfers one order, so nothing here can deadlock: not with batches that are waited for at once,
not with a communicator that takes one batch after another. With NCCL all batches of a pipeline share one communicator; every transfer is
in a batch, also a single one, because others would meet on communicators of their own. Works with gloo and NCCL.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from megatron.core import device

# Batches with sent tensors that may wait for their receivers; a stage that is further ahead waits. On a GPU it is the device that waits.
MOST_UNRECEIVED = 4

Transfer = tuple[torch.Tensor | None, int]  # (what is sent, or None to receive; the stage at the other end)

_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def connect_neighbours(group: dist.ProcessGroup) -> None:
    """Let every stage of `group` talk to the stages beside it once, both ways, before any transfer that computations wait for.

    NCCL connects two ranks in the batch that first needs it, and holds the host up until both are at it: nothing of the batch is under way
    meanwhile, not even what the other rank waits for to get there. Once for each group; all its ranks must call it.
    """
    if group in _connected or not device.has_accelerator():
        return
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    operations = []
    for step in (1, -1):
        to, from_ = ranks[(own + step) % len(ranks)], ranks[(own - step) % len(ranks)]
        there, here = torch.zeros(2, 1, device=device.current_device())
        operations += [dist.P2POp(dist.isend, there, to, group=group), dist.P2POp(dist.irecv, here, from_, group=group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    device.synchronize()
    _connected.add(group)


class Incoming:
    """A tensor that is on its way."""

    def __init__(self, tensor: torch.Tensor, works: Sequence[Any]) -> None:
        self._tensor, self._works = tensor, works

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""
        for work in self._works:
            work.wait()
        return self._tensor


class P2PCommunicator:
    """Sends to and receives from other stages of `pp_group`. Peers are ranks within the group.

    Everything that is sent and received has one shape and dtype: [s, b, h] hidden states or their gradients. `overlap`: computations go on
    meanwhile; else each batch is waited for at once.
    """

    def __init__(self, pp_group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, overlap: bool = True) -> None:
        self.group, self.shape, self.dtype, self.overlap = pp_group, shape, dtype, overlap
        self.ranks = dist.get_process_group_ranks(pp_group)
        connect_neighbours(pp_group)
        self._sending: deque[tuple[list[Any], list[torch.Tensor]]] = deque()  # tensors must live until they are received

    def exchange(self, transfers: Sequence[Transfer]) -> list[Incoming]:
        """Start `transfers` together; return what is received, in their order.

        Raises ValueError when a tensor has not the shape and dtype that the other stage waits for.
        """
        operations, sent = [], []
        for tensor, peer in transfers:
            if tensor is None:
                data = torch.empty(self.shape, dtype=self.dtype, device=device.current_device())
            else:
                self._check(tensor)
                data = tensor.detach().contiguous()
                sent.append(data)
            operations.append(dist.P2POp(dist.irecv if tensor is None else dist.isend, data, self.ranks[peer], group=self.group))
        works = dist.batch_isend_irecv(operations)
        # gloo has a work for each transfer, which must be waited for once only; NCCL has one for all
        waits = [[work] for work in works] if len(works) == len(operations) else [works] * len(operations)
        if not self.overlap:
            for work in works:
                work.wait()
            waits = [[] for _ in operations]
        elif sent:
            sends = [wait for wait, (tensor, _) in zip(waits, transfers, strict=True) if tensor is not None]
            self._sending.append(([work for wait in sends for work in wait], sent))
            while self._sending and (len(self._sending) > MOST_UNRECEIVED or all(work.is_completed() for work in self._sending[0][0])):
                self._let_go()
        triples = zip(operations, waits, transfers, strict=True)
        return [Incoming(operation.tensor, wait) for operation, wait, (tensor, _) in triples if tensor is None]

    def _check(self, tensor: torch.Tensor) -> None:
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"a pipeline stage made a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, but the next stage waits for {self.dtype} "
                f"{self.shape} ([sequence, micro batch, hidden]): check the arguments seq_length and micro_batch_size and the config's "
                "pipeline_dtype"
            )

    def _let_go(self) -> None:
        """Wait until the oldest sent tensors were received, and forget them."""
        works, _ = self._sending.popleft()
        for work in works:
            work.wait()

    def finish(self) -> None:
        """Wait until everything sent was received."""
        while self._sending:
            self._let_go()
