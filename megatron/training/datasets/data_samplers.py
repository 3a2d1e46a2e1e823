"""Which samples each rank reads, in which order: a function of the number of consumed samples alone.

Training walks over a line of samples. With D data-parallel ranks and micro batches of m samples, rank r takes for micro batch j of a step
the m samples from position consumed + j * m * D + r * m on. So D and m may change on resume, and nothing is repeated or left out.
"""

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.datasets.batch_message import UnpackingLoader

DATALOADER_TYPES = ("single", "cyclic", "external")


class MegatronPretrainingSampler:
    """Micro batches (lists of sample numbers) in the dataset's own order, once over it. A last batch that is not full is left out
    (`drop_last`), or shared out short."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        _check(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        if consumed_samples >= total_samples:
            given = f"{consumed_samples} of the dataset's {total_samples} samples are consumed"
            raise ValueError(f"{given}, none is left; use more data, or --dataloader-type cyclic")
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.first = data_parallel_rank * micro_batch_size
        self.stride = micro_batch_size * data_parallel_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Micro batches that are left."""
        left = self.total_samples - self.consumed_samples
        return left // self.stride if self.drop_last else -(-left // self.stride)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed_samples, self.consumed_samples + len(self) * self.stride, self.stride):
            begin = min(start + self.first, self.total_samples)
            yield list(range(begin, min(begin + self.micro_batch_size, self.total_samples)))


class MegatronPretrainingRandomSampler:
    """Micro batches without end: the whole dataset in a random order, then in another one, and so on. Epoch e's is seeded by seed + e."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        seed: int = 0,
    ) -> None:
        _check(total_samples, consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.first = data_parallel_rank * micro_batch_size
        self.stride = micro_batch_size * data_parallel_size
        self.seed = seed

    def _line(self) -> Iterator[int]:
        first_epoch, position = divmod(self.consumed_samples, self.total_samples)
        for epoch in itertools.count(first_epoch):
            order = torch.randperm(self.total_samples, generator=torch.Generator().manual_seed(self.seed + epoch))
            for start in range(position, self.total_samples, 4096):
                yield from order[start : start + 4096].tolist()
            position = 0

    def __iter__(self) -> Iterator[list[int]]:
        line = self._line()
        while True:
            batch = list(itertools.islice(line, self.stride))
            yield batch[self.first : self.first + self.micro_batch_size]


def _check(total_samples: int, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int) -> None:
    if total_samples < 1:
        raise ValueError("the dataset has no samples")
    if micro_batch_size < 1:
        raise ValueError(f"micro batch size {micro_batch_size} must be at least 1")
    assert consumed_samples >= 0
    assert 0 <= data_parallel_rank < data_parallel_size


class BadSampleError(ValueError):
    """A sample that cannot be read, for reasons that are the user's to fix. Comes out of a loader's worker as its one line."""

    def __init__(self, message: str) -> None:
        # torch re-raises a worker's exception with the worker's traceback as its message; the last line is what was raised
        is_relayed = message.startswith("Caught ") and "Traceback" in message
        super().__init__(message.rstrip().splitlines()[-1].split("BadSampleError: ", 1)[-1] if is_relayed else message)


class _OneLineErrors(torch.utils.data.Dataset):
    """A dataset whose ValueErrors survive the way out of a worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except ValueError as error:
            raise BadSampleError(" ".join(str(error).splitlines())) from None


def _start_worker(_: int) -> None:
    """Signals to a whole job are for the main process: it decides to save and stop. Its workers obey only its own SIGTERM, which a thread
    waits for; it is blocked in all others, see `_Loader`."""
    gc.freeze()  # garbage of the parent's (a process group of an earlier run) would end here without its threads, which crashes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_when_parent_asks, daemon=True).start()


def _end_when_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


class _Loader(UnpackingLoader):
    """Its processes are born with SIGTERM blocked: torch starts threads in them before any code of ours runs, and one that is open to a
    signal from outside ends its process."""

    def _get_iterator(self) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return super()._get_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    dataloader_type: str = "single",
    num_workers: int = 2,
    seed: int = 0,
    pin_memory: bool = False,
    drop_last: bool = True,
) -> Any:
    """An iterable of this rank's micro batches, beginning after `consumed_samples` samples of the whole job. None for no dataset.

    dataloader_type  single: MegatronPretrainingSampler; cyclic: the random one, with `seed`; external: `dataset` is the iterable
    num_workers      processes that read ahead, forked at the first batch and kept; 0 reads in this process

    The batches are dicts of the dataset's tensors stacked: [micro_batch_size, ...]. They do not depend on num_workers, and reading them
    leaves torch's global random state alone.
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    position = (len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size)
    sampler: Any
    if dataloader_type == "single":
        sampler = MegatronPretrainingSampler(*position, drop_last=drop_last)
    elif dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(*position, seed=seed)
    else:
        raise ValueError(f"--dataloader-type {dataloader_type} is not one of {', '.join(DATALOADER_TYPES)}")
    return _Loader(
        _OneLineErrors(dataset),
        batch_sampler=sampler,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else starting the loader draws from the global one, and dropout would depend on num_workers
        worker_init_fn=_start_worker if num_workers else None,
        persistent_workers=num_workers > 0,
        multiprocessing_context="fork" if num_workers else None,
    )
