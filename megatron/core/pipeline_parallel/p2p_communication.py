"""Activations and gradients between pipeline stages, one send and one receive at a time.

A plan (`schedule_plan`) gives all stages' transfers one order, so nothing here can deadlock: not with sends that block, not with
communicators that take one transfer after another. Works with gloo and NCCL.
"""

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device

# Sent tensors that may wait for their receivers; a stage that is further ahead waits. On a GPU it is the device that waits.
MOST_UNRECEIVED = 4


class Incoming:
    """A tensor that is on its way."""

    def __init__(self, tensor: torch.Tensor, work: Any) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there."""
        self._work.wait()
        return self._tensor


class P2PCommunicator:
    """Sends to and receives from other stages of `pp_group`. Peers are ranks within the group.

    Everything that is received has one shape and dtype: [s, b, h] hidden states or their gradients.
    """

    def __init__(self, pp_group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.group, self.shape, self.dtype = pp_group, shape, dtype
        self.ranks = dist.get_process_group_ranks(pp_group)
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()  # tensors must live until they are received

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Start to send `tensor`. Raises ValueError when it has not the shape and dtype that the other stage waits for."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"a pipeline stage made a {tensor.dtype} tensor of shape {tuple(tensor.shape)}, but the next stage waits for {self.dtype} "
                f"{self.shape} ([sequence, micro batch, hidden]): check the arguments seq_length and micro_batch_size and the config's "
                "pipeline_dtype"
            )
        data = tensor.detach().contiguous()
        self._sending.append((dist.isend(data, self.ranks[peer], group=self.group), data))
        while self._sending and (len(self._sending) > MOST_UNRECEIVED or self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()

    def receive(self, peer: int) -> Incoming:
        """Start to receive a tensor."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=device.current_device())
        work = dist.irecv(tensor, self.ranks[peer], group=self.group)
        return Incoming(tensor, work)

    def finish(self) -> None:
        """Wait until everything sent was received."""
        while self._sending:
            self._sending.popleft()[0].wait()
