"""A batch on its way out of a loader's process: one buffer for all of its tensors.

Each tensor that a process sends costs the receiver a file descriptor and a connection, about as much time as reading some samples. One
buffer costs that once, is pinned as a whole, and the tensors are views into it.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

SENT_TOGETHER = 8  # samples that a process sends at once, where micro batches are smaller
ALIGNMENT = 64  # bytes; a view of another dtype must begin at a multiple of its item size


@dataclass
class PackedBatch:
    """`buffer` uint8 [bytes] with each field's tensor at `offset`."""

    buffer: torch.Tensor
    fields: dict[str, tuple[torch.dtype, tuple[int, ...], int]]  # name -> (dtype, shape, offset)

    def unpack(self) -> dict[str, torch.Tensor]:
        """The tensors, as views of the buffer."""
        found = {}
        for name, (dtype, shape, offset) in self.fields.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            found[name] = self.buffer[offset : offset + size].view(dtype).view(shape)
        return found

    def pin_memory(self, device: Any = None) -> "PackedBatch":
        """Called by the loader's pinning thread."""
        return PackedBatch(self.buffer.pin_memory(), self.fields)


def collate(samples: Sequence[Any], micro_batch_size: int) -> "PackedBatch | list[Any]":
    """Samples of some micro batches: packed when each is a dict of tensors, alike in all of them; else a list of collated micro batches."""
    if get_worker_info() is None or not _are_alike(samples):
        return [default_collate(list(samples[i : i + micro_batch_size])) for i in range(0, len(samples), micro_batch_size)]
    fields, size = {}, 0
    for name, value in samples[0].items():
        shape = (len(samples), *value.shape)
        fields[name] = (value.dtype, shape, size)
        size += -(-torch.Size(shape).numel() * value.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    storage = torch.UntypedStorage._new_shared(size, device="cpu")
    batch = PackedBatch(torch.empty(0, dtype=torch.uint8).set_(storage), fields)
    for name, tensor in batch.unpack().items():
        torch.stack([sample[name] for sample in samples], out=tensor)
    return batch


def _are_alike(samples: Sequence[Any]) -> bool:
    first = samples[0]
    if not isinstance(first, Mapping) or not all(isinstance(value, torch.Tensor) for value in first.values()):
        return False
    kinds = {name: (value.dtype, value.shape) for name, value in first.items()}
    return bool(kinds) and all({name: (value.dtype, value.shape) for name, value in sample.items()} == kinds for sample in samples[1:])


class _Grouped:
    """The lists of sample numbers of `sampler`, so many of them as one."""

    def __init__(self, sampler: Any, together: int) -> None:
        self.sampler = sampler
        self.together = together

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self.sampler)
        while group := list(itertools.islice(batches, self.together)):
            yield list(itertools.chain.from_iterable(group))


class UnpackingLoader(DataLoader):
    """A DataLoader of micro batches that come packed, and several at once when they are small.

    dataset         with dicts of tensors as samples, or anything that torch can collate
    batch_sampler   iterable of lists of sample numbers, each of `micro_batch_size` but for the last
    """

    def __init__(self, dataset: Any, *, batch_sampler: Any, micro_batch_size: int, num_workers: int, **options: Any) -> None:
        self.micro_batches = batch_sampler
        self.micro_batch_size = micro_batch_size
        self.together = max(1, SENT_TOGETHER // micro_batch_size) if num_workers else 1
        grouped = _Grouped(batch_sampler, self.together)
        options["collate_fn"] = partial(collate, micro_batch_size=micro_batch_size)
        super().__init__(dataset, batch_sampler=grouped, num_workers=num_workers, **options)

    def __len__(self) -> int:
        """Micro batches that are left."""
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return itertools.chain.from_iterable(map(self._micro_batches_of, super().__iter__()))

    def _micro_batches_of(self, group: PackedBatch | list[Any]) -> Iterable[Any]:
        if isinstance(group, list):
            return group
        tensors, size = group.unpack(), self.micro_batch_size
        total = len(next(iter(tensors.values())))
        return [{name: value[start : start + size] for name, value in tensors.items()} for start in range(0, total, size)]
