"""The one runner that executes any schedule plan."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from .schedule_plan import Kind, Step, in_batches


class StageWork(Protocol):
    """What a stage computes, by (model chunk, micro batch)."""

    def forward(self, chunk: int, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """`activation`: of the slot before, None in the first. Returns what the next slot gets, None in the last."""

    def backward(self, chunk: int, microbatch: int, gradient: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        """`gradient`: of the loss by what forward returned, None in the last slot. Returns that by `activation`.

        split: put off the gradients of weights until `weights`.
        """

    def weights(self, chunk: int, microbatch: int) -> None:
        """Compute what a split backward put off."""


class Communicator(Protocol):
    """See p2p_communication.P2PCommunicator."""

    def exchange(self, transfers: Sequence[tuple[torch.Tensor | None, int]]) -> Sequence[Any]: ...

    def finish(self) -> None: ...


def run_plan(
    plan: Iterable[Step],
    work: StageWork,
    no_sync: Callable[[int], AbstractContextManager],
    communicator: Communicator | None = None,
    grad_sync: Callable[[int], None] = lambda chunk: None,
) -> None:
    """Execute `plan`. `communicator` may be None for a plan without transfers.

    All but a chunk's last backward (and W) run under `no_sync(chunk)`: gradients accumulate locally there. `grad_sync(chunk)` follows
    its last.
    """
    plan = list(plan)
    split = any(step.kind is Kind.WEIGHT for step in plan)
    incoming: dict[tuple[Kind | None, int, int], Any] = {}
    outgoing: dict[tuple[Kind | None, int, int], torch.Tensor | None] = {}

    def received(kind: Kind, step: Step) -> torch.Tensor | None:
        arriving = incoming.pop((kind, step.chunk, step.microbatch), None)
        return None if arriving is None else arriving.wait()

    def exchange(batch: Sequence[Step]) -> None:
        """The communicator alone keeps what is sent: memory goes back once it is received."""
        assert communicator is not None
        transfers = []
        for step in batch:
            tensor = outgoing.pop((step.payload, step.chunk, step.microbatch)) if step.kind is Kind.SEND else None
            assert step.peer is not None and (tensor is not None or step.kind is Kind.RECV)
            transfers.append((tensor, step.peer))
        receives = [(step.payload, step.chunk, step.microbatch) for step in batch if step.kind is Kind.RECV]
        incoming.update(zip(receives, communicator.exchange(transfers), strict=True))

    for batch in in_batches(plan):
        step = batch[0]
        chunk, microbatch = step.chunk, step.microbatch
        if step.payload is not None:
            exchange(batch)
        elif step.kind is Kind.FORWARD:
            outgoing[step.kind, chunk, microbatch] = work.forward(chunk, microbatch, received(step.kind, step))
        else:
            with nullcontext() if step.last_backward else no_sync(chunk):
                if step.kind is Kind.WEIGHT:
                    work.weights(chunk, microbatch)
                else:
                    gradient = received(step.kind, step)
                    outgoing[step.kind, chunk, microbatch] = work.backward(chunk, microbatch, gradient, split)
            if step.last_backward and (step.kind is Kind.WEIGHT or not split):
                grad_sync(chunk)
    if communicator is not None:
        communicator.finish()
