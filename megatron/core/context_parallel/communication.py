"""What context-parallel ranks send each other."""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core.utils import Group, get_pg_rank, get_pg_size


class Transfer:
    """A tensor that is on its way from the previous rank of a ring."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works  # what is sent must live until it is

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there; on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._received


class Ring:
    """The ranks of `group` in a circle."""

    def __init__(self, group: Group) -> None:
        assert group is not None
        self.group, self.rank, self.size = group, get_pg_rank(group), get_pg_size(group)
        ranks = dist.get_process_group_ranks(group)
        self.next, self.previous = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]

    def start(self, tensor: torch.Tensor) -> Transfer:
        """Begin to send `tensor` (contiguous) to the next rank, and to receive one like it from the previous one."""
        received = torch.empty_like(tensor)
        operations = [
            dist.P2POp(dist.isend, tensor, self.next, self.group),
            dist.P2POp(dist.irecv, received, self.previous, self.group),
        ]
        return Transfer(tensor, received, dist.batch_isend_irecv(operations))


def exchange(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """parts [ranks, ...], one for each rank -> what each rank had for this one, in their order."""
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=group)
    return out
