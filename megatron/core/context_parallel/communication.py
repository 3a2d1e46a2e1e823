"""What context-parallel ranks send each other."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core.context_parallel.ring_exchange import RingExchange
from megatron.core.symmetric_memory import exchange_of
from megatron.core.utils import Group, get_pg_rank, get_pg_size

Arriving = Callable[[], torch.Tensor]  # what waits for a tensor (on a GPU the stream does, not the host) and gives it


class Ring:
    """The ranks of `group` in a circle. by_copies: copy engines send, where the ranks' GPUs share memory (ring_exchange.py)."""

    def __init__(self, group: Group, by_copies: bool = False) -> None:
        assert group is not None
        self.by_copies = by_copies
        self.group, self.rank, self.size = group, get_pg_rank(group), get_pg_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.next, self.previous = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def start(self, tensor: torch.Tensor) -> Arriving:
        """Begin to send `tensor` (contiguous) to the next rank, and to receive one like it from the previous one."""
        if self.by_copies:
            nbytes = tensor.numel() * max(tensor.element_size(), 4)  # sums of gradients are in fp32 at least
            copies = exchange_of(RingExchange, self.group, tensor, nbytes)
            if copies is not None:
                return copies.start(tensor, nbytes)
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self.next, self.group),
            dist.P2POp(dist.irecv, received, self.previous, self.group),
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return wait


def exchange(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """parts [ranks, ...], one for each rank -> what each rank had for this one, in their order."""
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out
