"""Norms over the whole model, each parameter counted once whatever the layout; on the device, without waiting for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import get_pg_rank, get_pg_size

# On a CPU torch adds up squares of fp32 in fp32: over 14 million elements the norm is off by 6e-4. Over 64 Ki it is below 1e-6.
_CPU_PIECE = 2**16


def counted_parts(sharding: Any, tp_size: int, tp_rank: int, is_shared_copy: bool = False) -> list[tuple[int, int, bool] | bool]:
    """Which parts of a local shard enter a sum over the model-parallel ranks, so that each element of the model is counted once.

    One bool for the whole shard, or (start, length, counted) along the sharding's split_dim. Replicated parts count on tensor rank 0;
    `is_shared_copy`, of a tied parameter that another pipeline stage owns, does not count. `sharding` None means replicated.
    """
    if is_shared_copy:
        return [False]
    if sharding is None:
        return [tp_rank == 0]
    axes = {segment.axis for segment in sharding.segments}
    if sharding.split_dim is None or "tp" not in axes:
        return [tp_rank == 0]
    if axes == {"tp"} or tp_size == 1:
        return [True]
    parts: list[tuple[int, int, bool] | bool] = []
    start = 0
    for segment in sharding.segments:
        length = segment.size // tp_size if segment.axis == "tp" else segment.size
        parts.append((start, length, segment.axis == "tp" or tp_rank == 0))
        start += length
    return parts


@dataclass(frozen=True)
class NormGroups:
    """The ranks over which a kind of parameters (dense ones, or experts) is spread; a group not given is None, "alone".

    mp: those that together hold the parameters once (tensor x pipeline; of experts also expert parallel). tp: of them those that share
    each tensor. shard: those that share each rank's part, with the distributed optimizer.
    """

    mp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    shard: dist.ProcessGroup | None = None

    def to_sum_over(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.shard, self.mp) if group is not None and get_pg_size(group) > 1]


class NormPlan:
    """How the tensors of parameters (gradients, or the parameters themselves) are cut in pieces and which pieces count.

    Args:
        named_params: (name, model parameter with its `sharding` record).
        dense, experts: where the two kinds of parameters are spread.
        pp_group: stages; where one of them has experts all must make the plan with `experts` (they agree on it here).
        ranges: for each parameter the [start, end) of its flattened elements that this rank has, where they are spread over the
            data-parallel ranks of `shard` too; the tensors are then these parts, flat.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, torch.Tensor]],
        dense: NormGroups = NormGroups(),
        pp_group: dist.ProcessGroup | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        experts: NormGroups = NormGroups(),
    ) -> None:
        device = named_params[0][1].device
        self._piece_size = _CPU_PIECE if device.type == "cpu" else None
        self._cuts: list[list[tuple[int, int, int] | None]] = []  # for each parameter: (dim, start, length), or all of it
        owners: list[int] = []
        weights: list[list[float]] = [[], []]  # of each piece in the sums over dense parameters and over experts
        of_experts = [is_expert(param) for _, param in named_params]
        for index, (name, param) in enumerate(named_params):
            sharding: Any = getattr(param, "sharding", None)
            tp = (experts if of_experts[index] else dense).tp
            owner = getattr(sharding, "shared_with", None)
            is_copy = get_pg_size(pp_group) > 1 and owner is not None and not name.endswith(owner)
            cuts: list[tuple[int, int, int] | None] = []
            for part in counted_parts(sharding, get_pg_size(tp), get_pg_rank(tp), is_copy):
                cut = None if isinstance(part, bool) else (sharding.split_dim + sharding.expert_dims, part[0], part[1])
                tensor = param.detach()
                if ranges is not None:
                    start, end = ranges[index]
                    cut = _flat_cut(tensor.shape, cut, start, end)
                    tensor = tensor.reshape(-1)[start:end]
                    if (cut[2] if cut else tensor.numel()) == 0:
                        continue
                pieces = len(self._split(tensor, cut))
                cuts.append(cut)
                owners += [index] * pieces
                weight = float(part if isinstance(part, bool) else part[2])
                weights[of_experts[index]] += [weight] * pieces
                weights[not of_experts[index]] += [0.0] * pieces
            self._cuts.append(cuts)
        self.num_params = len(named_params)
        self.owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self.device = device
        self._sums: list[tuple[torch.Tensor, list[dist.ProcessGroup]]] = [
            (torch.tensor(weight, dtype=torch.float64, device=device), groups.to_sum_over())
            for weight, groups in zip(weights, (dense, experts) if self._any_experts(any(of_experts), pp_group) else (dense,))
        ]

    def _any_experts(self, here: bool, pp_group: dist.ProcessGroup | None) -> bool:
        """Whether a stage of the pipeline has experts: then all its ranks take part in their sum."""
        found = torch.tensor(float(here), device=self.device)
        if get_pg_size(pp_group) > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=pp_group)
        return bool(found.item())

    def _split(self, tensor: torch.Tensor, cut: tuple[int, int, int] | None) -> Sequence[torch.Tensor]:
        part = tensor if cut is None else tensor.narrow(*cut)
        if self._piece_size is None or part.numel() <= self._piece_size:
            return [part]
        return part.reshape(-1).split(self._piece_size)

    def _pieces(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [piece for tensor, cuts in zip(tensors, self._cuts, strict=True) for cut in cuts for piece in self._split(tensor, cut)]

    def _total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the pieces' values over all ranks. A value that is not finite makes it so, counted or not: 0 * nan is nan."""
        totals = []
        for weights, groups in self._sums:
            total = (values * weights).sum()
            for group in groups:
                dist.all_reduce(total, group=group)
            totals.append(total)
        return torch.stack(totals).sum()

    @torch.no_grad()
    def norm(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(2-norm over all ranks, 0-d fp64; which local tensors were not finite, int32 [len(tensors)]).

        One value that is not finite, on any rank, counted or not, makes the norm so on every rank of the group: nothing else needs to
        be exchanged. (fp32 values above 1.8e19 do so too: their squares overflow.)
        """
        pieces = self._pieces(tensors)
        norms = torch.stack(torch._foreach_norm(pieces)) if pieces else torch.zeros(0, device=self.device)
        squares = norms.double().square()
        bad = (~norms.isfinite()).to(torch.int32)
        nonfinite = torch.zeros(self.num_params, dtype=torch.int32, device=norms.device).index_add_(0, self.owners, bad)
        return self._total(squares).sqrt(), nonfinite.clamp_(max=1)

    @torch.no_grad()
    def count_zeros(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """How many elements are exactly 0, over all ranks: 0-d int64."""
        zeros = [piece.numel() - torch.count_nonzero(piece) for piece in self._pieces(tensors)]
        return self._total(torch.stack(zeros).double() if zeros else torch.zeros(0, dtype=torch.float64, device=self.device)).to(
            torch.int64
        )


def _flat_cut(shape: torch.Size, cut: tuple[int, int, int] | None, start: int, end: int) -> tuple[int, int, int] | None:
    """What of a cut of a tensor lies in the flattened elements [start, end), as a cut of those."""
    if cut is None:
        return None
    dim, first, rows = cut
    if dim != 0:
        raise ValueError(f"a parameter with replicated parts along dim {dim} is not built yet for the distributed optimizer; split dim 0")
    width = shape[1:].numel()
    low, high = max(start, first * width), min(end, (first + rows) * width)
    return 0, max(low - start, 0), max(high - low, 0)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What to multiply gradients of 2-norm `norm` with, so that it is at most `max_norm` (at most 1; 0-d tensor)."""
    return (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
