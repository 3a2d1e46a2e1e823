"""A batch on its way out of a loader's process: one small buffer for all of its tensors.

Each tensor that a process sends costs the receiver a file descriptor and a connection, and each page of memory that two processes share a
page fault in both: together several times what reading the samples costs. So a batch is one buffer, integers travel in 32 bits where
they fit, and what is the same in all samples (positions, a mask of ones) travels once.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

SENT_TOGETHER = 16  # samples that a process sends at once, where micro batches are smaller
INT32 = torch.iinfo(torch.int32)
ALIGNMENT = 64  # bytes; a view of another dtype must begin at a multiple of its item size


class Field(NamedTuple):
    """A tensor of the batch, and how its bytes lie in the buffer."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes
    stored_dtype: torch.dtype
    rows: int  # stored: of each sample, or 1 for all

    @property
    def size(self) -> int:
        return self.rows * torch.Size(self.shape[1:]).numel() * self.stored_dtype.itemsize


@dataclass
class PackedBatch:
    """`buffer` uint8 [bytes] with all fields of a batch."""

    buffer: torch.Tensor
    fields: dict[str, Field]

    def stored(self, field: Field) -> torch.Tensor:
        """A field as it lies in the buffer: a view [rows, ...]."""
        return self.buffer[field.offset : field.offset + field.size].view(field.stored_dtype).view(field.rows, *field.shape[1:])

    def unpack(self, pin_memory: bool = False) -> dict[str, torch.Tensor]:
        """The tensors, with memory of their own unless they lie in the buffer as they are."""
        found = {}
        for name, field in self.fields.items():
            stored = self.stored(field)
            if pin_memory or stored.dtype != field.dtype or stored.shape != field.shape:
                stored = torch.empty(field.shape, dtype=field.dtype, pin_memory=pin_memory).copy_(stored)
            found[name] = stored
        return found

    def pin_memory(self, device: Any = None) -> dict[str, torch.Tensor]:
        """Called by the loader's pinning thread: the tensors, unpacked there and not in the thread that trains."""
        return self.unpack(pin_memory=True)


def collate(samples: Sequence[Any], micro_batch_size: int) -> "PackedBatch | list[Any]":
    """Samples of some micro batches: packed when each is a dict of tensors, alike in all of them; else a list of collated micro batches."""
    if get_worker_info() is None or not _are_alike(samples):
        return [default_collate(list(samples[i : i + micro_batch_size])) for i in range(0, len(samples), micro_batch_size)]
    fields, size = {}, 0
    for name in samples[0]:
        fields[name] = field = _field([sample[name] for sample in samples], size)
        size += -(-field.size // ALIGNMENT) * ALIGNMENT
    storage = torch.UntypedStorage._new_shared(size, device="cpu")
    batch = PackedBatch(torch.empty(0, dtype=torch.uint8).set_(storage), fields)
    for name, field in fields.items():
        for row, sample in zip(batch.stored(field), samples):
            row.copy_(sample[name])
    return batch


def _field(values: list[torch.Tensor], offset: int) -> Field:
    first = values[0]
    rows = 1 if all(torch.equal(value, first) for value in values[1:]) else len(values)
    stored_dtype = first.dtype
    if stored_dtype == torch.int64 and all(_fits_int32(value) for value in values[:rows]):
        stored_dtype = torch.int32
    return Field(first.dtype, (len(values), *first.shape), offset, stored_dtype, rows)


def _fits_int32(value: torch.Tensor) -> bool:
    if not value.numel():
        return True
    low, high = torch.aminmax(value)
    return bool(low >= INT32.min) and bool(high <= INT32.max)


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

    def _micro_batches_of(self, group: PackedBatch | dict[str, torch.Tensor] | list[Any]) -> Iterable[Any]:
        if isinstance(group, list):
            return group
        tensors, size = group.unpack() if isinstance(group, PackedBatch) else group, self.micro_batch_size
        total = len(next(iter(tensors.values())))
        return [{name: value[start : start + size] for name, value in tensors.items()} for start in range(0, total, size)]
