"""Delayed scaling: a tensor's scale follows from the largest magnitudes of the steps before, so that quantizing takes one pass.

A step raises `amax` of each tensor as it quantizes it; `update`, once at the step's end, shifts amax into the history and sets the scale of
the next step. Nothing is read by the host. All tensors of a model share one state (`joined`), updated by a handful of operations.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.core.fp8.formats import E4M3, E5M2, LARGEST, scale_for
from megatron.core.fp8.settings import Fp8Settings
from megatron.core.utils import Group, get_pg_size

INPUT, WEIGHT, GRADIENT = range(3)  # a linear's tensors
ROLES = 3
ALIGNED = 4  # cuBLAS reads a scale from an address that is a multiple of 16 bytes


def dtype_of(settings: Fp8Settings, role: int) -> torch.dtype:
    return E5M2 if settings.hybrid and role == GRADIENT else E4M3


class DelayedScaling:
    """amax, scale, inverse [tensors] and history [history_len, tensors], the newest first, all fp32.

    A tensor without a history (`is_known` False) takes its first scale from its first values: gradients of a mean loss lie far below what a
    scale of 1 can hold.
    """

    def __init__(self, settings: Fp8Settings, linears: int, where: torch.device) -> None:
        tensors = linears * ROLES
        self.settings = settings
        self.amax = torch.zeros(tensors, dtype=torch.float32, device=where)
        self.scale = torch.ones(tensors, dtype=torch.float32, device=where)
        self.inverse = torch.ones(tensors, ALIGNED, dtype=torch.float32, device=where)[:, 0]
        self.history = torch.zeros(settings.history_len, tensors, dtype=torch.float32, device=where)
        limits = [LARGEST[dtype_of(settings, role)] for role in range(ROLES)]
        self.largest = torch.tensor(limits * linears, dtype=torch.float32, device=where)
        self.is_known = [False] * tensors

    def part(self, linear: int) -> "DelayedScaling":
        """The state of one linear, in this one's memory."""
        view = DelayedScaling(self.settings, 0, self.amax.device)
        place = slice(linear * ROLES, (linear + 1) * ROLES)
        for name in ("amax", "scale", "inverse", "largest"):
            setattr(view, name, getattr(self, name)[place])
        view.history = self.history[:, place]
        view.is_known = self.is_known[place]
        return view

    def first_scale(self, tensor: int, amax: torch.Tensor) -> None:
        """Set the scale of a tensor without a history from its amax (0-d)."""
        one = slice(tensor, tensor + 1)
        self.scale[one] = scale_for(amax, self.largest[one]) * 2.0**-self.settings.margin
        self.inverse[one] = self.scale[one].reciprocal()
        self.is_known[tensor] = True

    @torch.no_grad()
    def update(self, shared: Sequence[tuple[slice, Group]] = ()) -> None:
        """The end of a step; first the largest amax is taken of the ranks of each group, of the tensors that they share. A collective.

        A tensor that had no values, or some that are not finite, keeps its scale; one whose first values were not begins anew with 1.
        """
        for tensors, group in shared:
            if get_pg_size(group) > 1:
                dist.all_reduce(self.amax[tensors], op=dist.ReduceOp.MAX, group=group)
        self.amax.masked_fill_(self.amax.isinf(), 0.0)
        if self.settings.history_len > 1:
            self.history[1:] = self.history[:-1].clone()
        self.history[0] = self.amax
        self._scale_by(self.history)
        self.amax.zero_()

    def _scale_by(self, history: torch.Tensor) -> None:
        newest = history.amax(dim=0) if self.settings.algo == "max" else history[0]
        scale = scale_for(newest, self.largest) * 2.0**-self.settings.margin
        self.scale.copy_(torch.where(newest > 0, scale, torch.where(self.scale > 0, self.scale, 1.0)))
        torch.reciprocal(self.scale, out=self.inverse)

    def state(self) -> dict[str, torch.Tensor]:
        """What goes on in another run. Waits for the device."""
        return {"amax_history": self.history.cpu(), "scale": self.scale.cpu()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take what `state` gave, also of another history length: what is missing is 0. Scales become those of this run's format."""
        history = state["amax_history"][: len(self.history)]
        self.history.zero_()
        self.history[: len(history)].copy_(history)
        self.scale.copy_(state["scale"])
        self._scale_by(state["amax_history"].to(self.scale.device))
        self.is_known[:] = (state["amax_history"] > 0).any(dim=0).tolist()  # others were never seen, or not lately


def joined(states: Sequence[DelayedScaling]) -> tuple[DelayedScaling, list[DelayedScaling]]:
    """(one state with the values of all, a part of it for each)."""
    whole = DelayedScaling(states[0].settings, len(states), states[0].amax.device)
    parts = [whole.part(index) for index in range(len(states))]
    for state, part in zip(states, parts, strict=True):
        for name in ("amax", "scale", "inverse", "history"):
            getattr(part, name).copy_(getattr(state, name))
        part.is_known[:] = state.is_known
    return whole, parts
