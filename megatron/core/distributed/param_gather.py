"""Gathering of the parameters that the distributed optimizer updates, each rank a part of them: after its update, or with overlap bucket by
bucket beside it (FusedOptimizer.step starts them)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from megatron.core.distributed.param_and_grad_buffer import GradBucket, ParamAndGradBuffer
from megatron.core.utils import get_pg_size


class ParamGather:
    """The gathers of a module's buckets (buffer, index), in their order here: those that the forward needs first should be the first.

    With `overlap` they run in the background, each from its own update on: beside the updates of later buckets, and what is left of them
    beside the forward. A module waits for the buckets of its own parameters, and of parameters that it is called with (a tied head is given
    the embedding's), just before its forward: so the order in which modules run matters for speed alone, never for what they compute with.
    Who reads parameters without a call of their module says so (weight_grad.wait_until_gathered). Parameters that were never asked for are
    waited for before the whole module's forward.
    """

    def __init__(self, sequence: Sequence[tuple[ParamAndGradBuffer, int]], module: nn.Module, overlap: bool) -> None:
        self.sequence = [(buffer, index) for buffer, index in sequence if get_pg_size(buffer.group) > 1]
        self.overlap = overlap and bool(self.sequence)
        if not self.overlap:
            return
        buckets = [buffer.buckets[index] for buffer, index in self.sequence]
        self._bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
        self._unasked = dict(self._bucket_of)
        for part in module.modules():
            own = [param for param in part.parameters(recurse=False) if id(param) in self._bucket_of]
            for param in own:
                param.wait_until_gathered = partial(self._ask_for, param)  # type: ignore[attr-defined]
            part.register_forward_pre_hook(self._waits_for(own, part is module), with_kwargs=True)

    def _ask_for(self, param: nn.Parameter) -> None:
        # in the first step, when it is learnt what is asked for, nothing has been gathered yet
        self._unasked.pop(id(param), None)
        finish(self._bucket_of[id(param)])

    def _waits_for(self, own: list[nn.Parameter], is_whole: bool) -> Any:
        def wait(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            for param in own:
                self._ask_for(param)
            if is_whole:
                for bucket in self._unasked.values():
                    finish(bucket)
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter) and id(value) in self._bucket_of:
                    self._ask_for(value)

        return wait

    def start(self) -> None:
        """Collect all buckets; in the background with overlap."""
        for buffer, index in self.sequence:
            buffer.gather_bucket(index, async_op=self.overlap)

    def one_by_one(self) -> list[tuple[list[nn.Parameter], Callable[[], None]]]:
        """What `start` does with overlap, in its order: (a bucket's parameters, what starts to collect them). Nothing without overlap."""
        if not self.overlap:
            return []
        return [(buffer.buckets[index].params, partial(buffer.gather_bucket, index, async_op=True)) for buffer, index in self.sequence]

    def finish(self) -> None:
        """Make all gathers that were started precede what follows."""
        for buffer, index in self.sequence:
            finish(buffer.buckets[index])


def finish(bucket: GradBucket) -> None:
    if bucket.gather_work is not None:
        bucket.gather_work.wait()
        bucket.gather_work = None
