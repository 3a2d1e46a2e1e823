"""After the distributed optimizer's update: every rank collects the parts of the parameters that the others updated."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.distributed.param_and_grad_buffer import GradBucket, ParamAndGradBuffer
from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import get_pg_size


class ParamGather:
    """The gathers of a module's buffers, bucket by bucket.

    With `overlap` they run in the background, those that the forward needs first (the last registered in the buffers) first. A module waits
    for the buckets of its own parameters, and of parameters that it is called with (a tied head is given the embedding's), just before its
    forward: so the order in which modules run matters for speed alone, never for what they compute with. Parameters of modules that were
    never called (something else reads them) are waited for before the whole module's forward.

    A bucket is gathered while the bucket before it is computed with, not earlier: with CUDA_DEVICE_MAX_CONNECTIONS=1 kernels begin in the
    order of their launch, and computation would wait behind a row of gathers that wait for each other. Those of experts start at once,
    because not every rank calls the same experts, and all ranks must start the same gathers in the same order.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], module: nn.Module, overlap: bool) -> None:
        self.buffers = buffers
        self.overlap = overlap and any(get_pg_size(buffer.group) > 1 for buffer in buffers)
        if not self.overlap:
            return
        self._in_turn = [  # one row for each buffer whose buckets are gathered one after the other; (bucket, what starts its gather)
            [(buffer.buckets[index], partial(buffer.gather_bucket, index, async_op=True)) for index in reversed(range(len(buffer.buckets)))]
            for buffer in buffers
            if not any(is_expert(param) for param in buffer.params)
        ]
        self._turn_of = {id(bucket): (row, place) for row, turns in enumerate(self._in_turn) for place, (bucket, _) in enumerate(turns)}
        self._started = [len(turns) for turns in self._in_turn]  # of each row
        self._bucket_of = {id(param): bucket for buffer in buffers for bucket in buffer.buckets for param in bucket.params}
        self._uncalled: dict[int, list[GradBucket]] = {}
        for part in module.modules():
            own = {id(bucket): bucket for param in part.parameters(recurse=False) if (bucket := self._bucket_of.get(id(param)))}
            self._uncalled[id(part)] = list(own.values())
            part.register_forward_pre_hook(self._waits_for(list(own.values()), part is module), with_kwargs=True)
        module.register_forward_hook(lambda *_: self._start_all())

    def _waits_for(self, own: list[GradBucket], is_whole: bool) -> Any:
        def wait(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            # in the first step, when who is called is learnt, nothing has been gathered yet
            self._uncalled.pop(id(module), None)
            for bucket in own if not is_whole else [*own, *(bucket for others in self._uncalled.values() for bucket in others)]:
                self._finish(bucket)
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter) and id(value) in self._bucket_of:
                    self._finish(self._bucket_of[id(value)])

        return wait

    def start(self) -> None:
        """Collect all buckets; in the background with overlap, where the first of a buffer starts now and the next while it is used."""
        for buffer in self.buffers:
            for index in reversed(range(len(buffer.buckets))):
                if not self.overlap or id(buffer.buckets[index]) not in self._turn_of:
                    buffer.gather_bucket(index, async_op=self.overlap)
        if self.overlap:
            self._started = [0] * len(self._in_turn)
            for row in range(len(self._in_turn)):
                self._start(row, 1)

    def _start(self, row: int, count: int) -> None:
        """The first `count` of a row."""
        for _, gather in self._in_turn[row][self._started[row] : count]:
            gather()
        self._started[row] = max(self._started[row], min(count, len(self._in_turn[row])))

    def _start_all(self) -> None:
        for row, turns in enumerate(self._in_turn):
            self._start(row, len(turns))

    def _finish(self, bucket: GradBucket) -> None:
        """Make a bucket's gather precede what follows, and start the next one's."""
        row, place = self._turn_of.get(id(bucket), (None, 0))
        if row is not None:
            self._start(row, place + 1)
        _wait(bucket)
        if row is not None:
            self._start(row, place + 2)

    def finish(self) -> None:
        """Make all gathers precede what follows."""
        if self.overlap:
            self._start_all()
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                _wait(bucket)


def _wait(bucket: GradBucket) -> None:
    if bucket.gather_work is not None:
        bucket.gather_work.wait()
        bucket.gather_work = None
