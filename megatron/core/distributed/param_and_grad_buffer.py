"""Main gradients in contiguous buffers, cut in buckets that are reduced one by one; with the distributed optimizer parameters too.

Layout (checkpoints of the distributed optimizer depend on it): parameters in reverse order of registration, because backward fills them
in about that order; each starts at a multiple of 64 elements; a bucket ends at a multiple of the data-parallel size and of 128 elements.
Of each bucket the distributed optimizer gives rank r the r-th of data-parallel-size equal parts. With several optimizer instances both
sizes are those of one instance.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import get_pg_rank, get_pg_size

PARAM_ALIGNMENT = 64  # elements; so every view starts on a 128-byte boundary in bf16 too
BUCKET_ALIGNMENT = 128
HIGH_BANDWIDTH_ALIGNMENT = 2**16
LARGE_GRAD_NORM = 1e10


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """Where a parameter's gradient lies: elements [start, end) of the buffer."""

    name: str
    start: int
    end: int
    bucket: int


@dataclass(frozen=True)
class BucketSlot:
    """Elements [start, end) of the buffer, of which `numel_unpadded` come before the padding at the end."""

    start: int
    end: int
    numel_unpadded: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class BufferLayout:
    params: tuple[ParamSlot, ...]
    buckets: tuple[BucketSlot, ...]
    numel: int


def default_bucket_size(dp_size: int) -> int:
    """Elements: large enough that a bucket's latency is small beside its transfer, growing with the number of ranks."""
    return max(40_000_000, 1_000_000 * dp_size)


def compute_buffer_layout(
    params: Sequence[tuple[str, int]],
    bucket_size: int | None,
    dp_size: int,
    high_bandwidth_padding: bool = False,
    alone: Collection[str] = (),
) -> BufferLayout:
    """Place parameters, given as (name, number of elements) in registration order.

    A bucket closes once it holds at least `bucket_size` elements (None: one bucket for all). Each parameter named in `alone` has a bucket
    of its own. Pure: no tensor, no process group.
    """
    alignment = math.lcm(dp_size, BUCKET_ALIGNMENT, HIGH_BANDWIDTH_ALIGNMENT if high_bandwidth_padding else 1)
    slots: list[ParamSlot] = []
    buckets: list[BucketSlot] = []
    names: list[str] = []
    bucket_start = end = 0

    def close_bucket() -> None:
        nonlocal bucket_start, end, names
        padded_end = bucket_start + _round_up(end - bucket_start, alignment)
        buckets.append(BucketSlot(bucket_start, padded_end, end - bucket_start, tuple(names)))
        bucket_start = end = padded_end
        names = []

    for name, numel in reversed(params):
        if name in alone and names:
            close_bucket()
        start = _round_up(end, PARAM_ALIGNMENT)
        end = start + numel
        slots.append(ParamSlot(name, start, end, len(buckets)))
        names.append(name)
        if name in alone or (bucket_size is not None and end - bucket_start >= bucket_size):
            close_bucket()
    if names:
        close_bucket()
    return BufferLayout(tuple(slots), tuple(buckets), buckets[-1].end if buckets else 0)


class GradBucket:
    """A part of a gradient buffer that is reduced in one collective."""

    def __init__(
        self, names: tuple[str, ...], params: list[torch.nn.Parameter], grad_data: torch.Tensor, param_data: torch.Tensor | None = None
    ) -> None:
        self.names = names
        self.params = params
        self.grad_data = grad_data  # a flat view, padding included
        self.param_data = param_data  # likewise, with the distributed optimizer
        self.work: Any = None  # of a reduction that goes on in the background: has wait()
        self.gather_work: dist.Work | None = None
        self.dispatched = False


class _SumInFp32:
    """A reduce-scatter whose sum is made in fp32: the ranks exchange their parts, and each adds up its own.

    It moves what a reduce-scatter in the gradients' dtype does, without rounding after every addition.
    """

    def __init__(self, own_part: torch.Tensor, data: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self.own_part = own_part
        self.parts = torch.empty_like(data)
        self.work = dist.all_to_all_single(self.parts, data, group=group, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.own_part.copy_(self.parts.view(-1, self.own_part.numel()).sum(dim=0, dtype=torch.float32))


class ParamAndGradBuffer:
    """The main gradients of parameters that share dtypes and a reduction group.

    Args:
        params: (name, parameter) in registration order.
        grad_dtype: dtype of the gradients.
        group: the ranks to reduce over (of one optimizer instance); None means alone.
        bucket_size: see compute_buffer_layout.
        scale: factor on the local gradients before they are summed (1 / data-parallel size for a mean).
        average_in_collective: let NCCL average; then `scale` is the factor beyond the mean.
        count_nonfinite: keep, on the device, how often each local gradient was not finite before its reduction.
        distributed: reduce-scatter instead of all-reduce: of each bucket only this rank's part is reduced. Parameters move into a
            contiguous buffer of the same layout, so that their updated parts can be gathered in place.
        instance_group: with `distributed`, the ranks of the other optimizer instances that have the same part: it is summed over them too.
        sum_in_fp32: with `distributed` and gradients of 16 bits: see _SumInFp32.

    Sets `main_grad` (a view with the parameter's shape) and `main_grad_filled` (False) on each parameter.
    """

    def __init__(
        self,
        params: list[tuple[str, torch.nn.Parameter]],
        grad_dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        bucket_size: int | None,
        *,
        scale: float = 1.0,
        average_in_collective: bool = False,
        count_nonfinite: bool = False,
        count_large: bool = False,
        high_bandwidth_padding: bool = False,
        distributed: bool = False,
        instance_group: dist.ProcessGroup | None = None,
        sum_in_fp32: bool = False,
    ) -> None:
        assert distributed or instance_group is None, "only the distributed optimizer has instances"
        self.group = group
        self.instance_group = instance_group
        self.distributed = distributed
        self.sum_in_fp32 = sum_in_fp32 and distributed and grad_dtype.itemsize < 4
        self._within_instance: list[GradBucket] = []  # reduced there, not yet over the instances
        self.scale = scale
        self.average_in_collective = average_in_collective
        self.largest_norm = LARGE_GRAD_NORM if count_large else torch.inf
        # A weight that lives in two pipeline stages: alone in its bucket, so that both stages give the same rank the same part of it.
        tied = {name for name, param in params if distributed and getattr(getattr(param, "sharding", None), "shared_with", None)}
        self.layout = compute_buffer_layout(
            [(name, param.numel()) for name, param in params], bucket_size, get_pg_size(group), high_bandwidth_padding, tied
        )
        by_name = dict(params)
        assert len(by_name) == len(params), "parameter names must be unique"
        # zeros once: padding is summed with the rest and must stay finite
        self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=params[0][1].device)
        self.param_data = torch.zeros_like(self.grad_data, dtype=params[0][1].dtype) if distributed else None
        for slot in self.layout.params:
            param = by_name[slot.name]
            if self.param_data is not None:
                place = self.param_data[slot.start : slot.end].view(param.shape)
                place.copy_(param.detach())
                param.data = place
            param.main_grad = self.grad_data[slot.start : slot.end].view(param.shape)  # type: ignore[attr-defined]
            param.main_grad_filled = False  # type: ignore[attr-defined]
        self.buckets = [
            GradBucket(
                bucket.names,
                [by_name[name] for name in bucket.names],
                self.grad_data[bucket.start : bucket.end],
                None if self.param_data is None else self.param_data[bucket.start : bucket.end],
            )
            for bucket in self.layout.buckets
        ]
        self.params = [by_name[slot.name] for slot in self.layout.params]
        self.nonfinite_counts = (
            [torch.zeros(len(bucket.names), dtype=torch.int32, device=self.grad_data.device) for bucket in self.buckets]
            if count_nonfinite
            else None
        )
        self._nonfinite_reported = [[0] * len(bucket.names) for bucket in self.buckets]

    def reset(self, cleared: bool = False) -> None:
        """Begin a step: the next write to each main_grad overwrites it, and no memory is touched; `cleared`: all hold zeros to add to."""
        if cleared:
            self.grad_data.zero_()
        for param in self.params:
            param.main_grad_filled = cleared  # type: ignore[attr-defined]
        for bucket in self.buckets:
            assert bucket.work is None, "a new step began before finish_grad_sync"
            bucket.dispatched = False

    def note_reduced(self) -> None:
        """What a step does to the gradients was done elsewhere."""
        for param in self.params:
            param.main_grad_filled = True  # type: ignore[attr-defined]
        for bucket in self.buckets:
            bucket.dispatched = True

    def zero_unfilled(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Zero the main_grad of parameters that nothing wrote in this step."""
        for param in params:
            if not param.main_grad_filled:  # type: ignore[attr-defined]
                param.main_grad.zero_()  # type: ignore[attr-defined]
                param.main_grad_filled = True  # type: ignore[attr-defined]

    def reduce_bucket(self, index: int, async_op: bool) -> None:
        """Zero what was not written, and start the bucket's reduction; once a step."""
        bucket = self.buckets[index]
        assert not bucket.dispatched
        bucket.dispatched = True
        self.zero_unfilled(bucket.params)
        if self.num_ranks > 1 and self.nonfinite_counts is not None:
            norms = torch.stack(torch._foreach_norm([param.main_grad for param in bucket.params])).float()  # type: ignore[attr-defined]
            self.nonfinite_counts[index] += ~(norms <= self.largest_norm) | ~norms.isfinite()
        if self.scale != 1.0:  # experts on expert-parallel ranks of their own have it without anybody to sum with
            bucket.grad_data.mul_(self.scale)
        if get_pg_size(self.group) > 1:
            work = self._reduce(bucket, async_op)
            bucket.work = work if async_op else None
        if get_pg_size(self.instance_group) > 1:
            self._reduce_over_instances(async_op)
            self._within_instance.append(bucket)

    @property
    def num_ranks(self) -> int:
        """Ranks whose gradients are summed."""
        return get_pg_size(self.group) * get_pg_size(self.instance_group)

    @property
    def _op(self) -> Any:
        return dist.ReduceOp.AVG if self.average_in_collective else dist.ReduceOp.SUM

    def _reduce(self, bucket: GradBucket, async_op: bool) -> Any:
        if not self.distributed:
            return dist.all_reduce(bucket.grad_data, op=self._op, group=self.group, async_op=async_op)
        own = self.own_part(bucket.grad_data)
        if not self.sum_in_fp32:
            return dist.reduce_scatter_tensor(own, bucket.grad_data, op=self._op, group=self.group, async_op=async_op)
        work = _SumInFp32(own, bucket.grad_data, self.group)
        if not async_op:
            work.wait()
        return work

    def _reduce_over_instances(self, async_op: bool) -> None:
        """Sum over the instances the parts of buckets that were reduced within this one.

        Called when the next bucket is on its way: so the device waits for a reduce-scatter that is likely over, and all ranks issue these
        sums in one order.
        """
        while self._within_instance:
            bucket = self._within_instance.pop(0)
            if bucket.work is not None:
                bucket.work.wait()
            work = dist.all_reduce(self.own_part(bucket.grad_data), op=self._op, group=self.instance_group, async_op=async_op)
            bucket.work = work if async_op else None

    def own_part(self, bucket_data: torch.Tensor) -> torch.Tensor:
        """Of a bucket's flat data the part that this rank reduces and updates."""
        size = bucket_data.numel() // get_pg_size(self.group)
        return bucket_data.narrow(0, get_pg_rank(self.group) * size, size)

    def own_range(self, slot: ParamSlot) -> tuple[int, int]:
        """[start, end) of the flattened parameter that this rank updates; start == end when none of it."""
        bucket = self.layout.buckets[slot.bucket]
        size = (bucket.end - bucket.start) // get_pg_size(self.group)
        first = bucket.start + get_pg_rank(self.group) * size
        start, end = max(first, slot.start), min(first + size, slot.end)
        return (start - slot.start, end - slot.start) if start < end else (0, 0)

    def gather_bucket(self, index: int, async_op: bool) -> None:
        """Collect the updated parameters of a bucket from the ranks that updated them."""
        bucket = self.buckets[index]
        assert bucket.param_data is not None and bucket.gather_work is None
        if get_pg_size(self.group) == 1:
            return
        work = dist.all_gather_into_tensor(bucket.param_data, self.own_part(bucket.param_data), group=self.group, async_op=async_op)
        bucket.gather_work = work if async_op else None

    def wait(self) -> None:
        """Make all reductions that were started precede what follows."""
        self._reduce_over_instances(async_op=True)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def nonfinite_report(self) -> list[tuple[str, int]]:
        """(parameter, steps) of this rank's own gradients that were not finite since the last call. Waits for the device."""
        found = []
        for index, (bucket, reported) in enumerate(zip(self.buckets, self._nonfinite_reported)):
            if self.nonfinite_counts is None:
                break
            counts = self.nonfinite_counts[index].tolist()
            found += [(name, now - before) for name, now, before in zip(bucket.names, counts, reported) if now > before]
            self._nonfinite_reported[index] = counts
        return found


def group_params(
    params: list[tuple[str, torch.nn.Parameter]], grad_dtype_of: Callable[[torch.dtype], torch.dtype]
) -> dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, torch.nn.Parameter]]]:
    """Parameters by (parameter dtype, gradient dtype, is an expert's), each in registration order; frozen ones are left out."""
    grouped: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, param in params:
        if param.requires_grad:
            grouped.setdefault((param.dtype, grad_dtype_of(param.dtype), is_expert(param)), []).append((name, param))
    return grouped
