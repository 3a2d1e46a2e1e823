"""How many micro batches make a global batch, as training goes on: constant, ramp-up, or a schedule over tokens.

Calculators are plain objects; the module keeps one for those who call the functions without an object.
Units: batch sizes and `consumed_samples` count samples (sequences), thresholds of a step schedule count tokens.
"""

import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ParamSpec

logger = logging.getLogger(__name__)

_TOKEN_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class NumMicroBatchesCalculator:
    """A constant global batch; subclasses change `_batch_size_at`.

    Raises ValueError when micro_batch_size * data_parallel_size does not divide a global batch that will be used, unless
    `decrease_batch_size_if_needed`: then the batch that runs is rounded down to a multiple.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
        rank: int = 0,
    ) -> None:
        for name, value in (
            ("global batch size", global_batch_size),
            ("micro batch size", micro_batch_size),
            ("data parallel size", data_parallel_size),
        ):
            if value is None or value < 1:
                raise ValueError(f"{name} is {value}: it must be a positive whole number")
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.rank = rank
        self.samples_per_pass = micro_batch_size * data_parallel_size  # one micro batch on every data-parallel rank
        self.current_global_batch_size = 0
        self.current_running_global_batch_size = 0
        self.num_micro_batches = 0

    def batch_sizes(self) -> list[int]:
        """Every global batch size that training will use, in order."""
        return [self.global_batch_size]

    def _batch_size_at(self, consumed_samples: int) -> int:
        return self.global_batch_size

    def is_final(self, consumed_samples: int) -> bool:
        """Whether the batch size stays as it is after `consumed_samples` samples."""
        return self._batch_size_at(consumed_samples) == self.batch_sizes()[-1]

    def _check(self) -> None:
        for size in self.batch_sizes():
            if size < self.samples_per_pass if self.decrease_batch_size_if_needed else size % self.samples_per_pass:
                below = size // self.samples_per_pass * self.samples_per_pass
                works = f"{below} or {below + self.samples_per_pass}" if below else str(self.samples_per_pass)
                raise ValueError(
                    f"global batch size {size} is not a multiple of micro batch size * data parallel size = "
                    f"{self.micro_batch_size} * {self.data_parallel_size} = {self.samples_per_pass}: {works} would work"
                    + ("" if not below else ", or --decrease-batch-size-if-needed to round down")
                )

    def get(self) -> int:
        """Micro batches per step on each data-parallel rank."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """The batch size that the schedule asks for."""
        return self.current_global_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """The batch size that really runs: the asked one, or rounded down under decrease_batch_size_if_needed."""
        return self.current_running_global_batch_size

    def get_micro_batch_size(self) -> int:
        return self.micro_batch_size

    def update(self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
        """Set the batch size for a step that starts after `consumed_samples` samples."""
        size = self._batch_size_at(consumed_samples)
        running = size // self.samples_per_pass * self.samples_per_pass
        if consistency_check and running != size and not self.decrease_batch_size_if_needed:
            raise ValueError(
                f"global batch size {size} at {consumed_samples} consumed samples is not a multiple of "
                f"micro batch size * data parallel size = {self.samples_per_pass}"
            )
        if verbose and self.rank == 0 and self.current_global_batch_size not in (0, size):
            logger.info("global batch size goes from %d to %d", self.current_global_batch_size, size)
        self.current_global_batch_size = size
        self.current_running_global_batch_size = running
        self.num_micro_batches = running // self.samples_per_pass

    @classmethod
    def create(cls, **kwargs: Any) -> "NumMicroBatchesCalculator":
        """Build, check all batch sizes of the schedule, and stand at 0 consumed samples."""
        calculator = cls(**kwargs)
        calculator._check()
        calculator.update(0)
        return calculator


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """The same global batch for the whole run."""


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """From `start_global_batch_size` up by `batch_size_increment`, in equal parts of `ramup_samples` samples.

    The first part uses the start size, and beyond `ramup_samples` samples the full size is used.
    """

    def __init__(self, *, start_global_batch_size: int, batch_size_increment: int, ramup_samples: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if start_global_batch_size < 1 or batch_size_increment < 1 or ramup_samples < 0:
            raise ValueError(
                f"ramp-up batch size {start_global_batch_size} {batch_size_increment} {ramup_samples}: start and increment must be "
                "positive and samples at least 0, for example 32 16 1000000"
            )
        difference = self.global_batch_size - start_global_batch_size
        if difference < 0 or difference % batch_size_increment:
            raise ValueError(
                f"ramp-up batch size from {start_global_batch_size} by {batch_size_increment} never meets global batch size "
                f"{self.global_batch_size}: global batch size - start must be a multiple of the increment, at least 0"
            )
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        self.num_increments = difference // batch_size_increment

    def batch_sizes(self) -> list[int]:
        return list(range(self.start_global_batch_size, self.global_batch_size + 1, self.batch_size_increment))

    def _batch_size_at(self, consumed_samples: int) -> int:
        if consumed_samples > self.ramup_samples or self.num_increments == 0 or self.ramup_samples == 0:
            return self.global_batch_size
        # whole-number arithmetic: the size must not depend on how a quotient of floats rounds
        increments = consumed_samples * self.num_increments // self.ramup_samples
        return min(self.start_global_batch_size + increments * self.batch_size_increment, self.global_batch_size)


class StepBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Batch sizes that change at given numbers of tokens: `0:384 200B:768`, tokens = samples * seq_length."""

    def __init__(self, *, step_batch_size_schedule: str, seq_length: int | None, **kwargs: Any) -> None:
        if not seq_length:
            raise ValueError(f"step batch size schedule {step_batch_size_schedule!r} counts tokens: it needs the sequence length too")
        self.schedule = parse_step_batch_size_schedule(step_batch_size_schedule)
        self.seq_length = seq_length
        super().__init__(**{**kwargs, "global_batch_size": self.schedule[-1][1]})

    def batch_sizes(self) -> list[int]:
        return [size for _, size in self.schedule]

    def _batch_size_at(self, consumed_samples: int) -> int:
        tokens = consumed_samples * self.seq_length
        return [size for threshold, size in self.schedule if threshold <= tokens][-1]

    def is_final(self, consumed_samples: int) -> bool:
        return consumed_samples * self.seq_length >= self.schedule[-1][0]  # the last size may have been in use before


def parse_step_batch_size_schedule(text: str) -> list[tuple[int, int]]:
    """`"0:384 200B:768"` -> [(0, 384), (200_000_000_000, 768)]: (tokens, global batch size), tokens with K, M, B or T.

    Raises ValueError when it does not start at 0 tokens or the thresholds do not rise.
    """
    example = "for example '0:384 200B:768'"
    steps = []
    for item in text.replace(",", " ").split():
        threshold, _, size = item.partition(":")
        factor = _TOKEN_SUFFIXES.get(threshold[-1:].upper(), 1)
        try:
            steps.append((round(float(threshold[:-1] if factor > 1 else threshold) * factor), int(size)))
        except ValueError:
            raise ValueError(f"step batch size schedule {text!r}: {item!r} is not TOKENS:BATCH_SIZE, {example}") from None
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] != 0 or any(b <= a for a, b in pairwise(thresholds)):
        raise ValueError(f"step batch size schedule {text!r} must start at 0 tokens and rise, {example}")
    return steps


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
    decrease_batch_size_if_needed: bool = False,
    step_batch_size_schedule: str | None = None,
    seq_length: int | None = None,
) -> NumMicroBatchesCalculator:
    """The calculator that these settings mean. A ramp is [start, increment, samples]; no global batch size means one micro batch.

    Raises ValueError for settings that exclude each other, and for sizes that are missing or do not divide.
    """
    if micro_batch_size is None or data_parallel_size is None:
        raise ValueError("micro batch size and data parallel size must be given")
    if rampup_batch_size is not None and step_batch_size_schedule is not None:
        raise ValueError("a batch ramp-up and a step batch size schedule were both given: keep one of them")
    if global_batch_size is None:
        global_batch_size = micro_batch_size * data_parallel_size
    common = {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "data_parallel_size": data_parallel_size,
        "decrease_batch_size_if_needed": decrease_batch_size_if_needed,
        "rank": rank,
    }
    if step_batch_size_schedule is not None:
        return StepBatchsizeNumMicroBatchesCalculator.create(
            step_batch_size_schedule=step_batch_size_schedule, seq_length=seq_length, **common
        )
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator.create(**common)
    if len(rampup_batch_size) != 3:
        raise ValueError(f"ramp-up batch size {rampup_batch_size} has {len(rampup_batch_size)} values: give start, increment and samples")
    start, increment, samples = (int(value) for value in rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator.create(
        start_global_batch_size=start, batch_size_increment=increment, ramup_samples=samples, **common
    )


Settings = ParamSpec("Settings")
_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None


def _calculator() -> NumMicroBatchesCalculator:
    assert _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None, "call init_num_microbatches_calculator first"
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _keep(build: Callable[Settings, NumMicroBatchesCalculator], doc: str, *, replace: bool) -> Callable[Settings, None]:
    """A function of `build`'s parameters that makes what it builds this process's calculator."""

    @functools.wraps(build, assigned=())
    def keep(*args: Settings.args, **kwargs: Settings.kwargs) -> None:
        global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
        taken = _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None and not replace
        assert not taken, "the micro-batch calculator is initialized already; use reconfigure or unset it"
        _GLOBAL_NUM_MICROBATCHES_CALCULATOR = build(*args, **kwargs)

    keep.__doc__ = doc
    return keep


init_num_microbatches_calculator = _keep(
    build_num_microbatches_calculator, "Make this process's calculator. An error when there is one.", replace=False
)
reconfigure_num_microbatches_calculator = _keep(build_num_microbatches_calculator, "Replace this process's calculator.", replace=True)


def unset_num_microbatches_calculator() -> None:
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Micro batches per step on each data-parallel rank, now."""
    return _calculator().get()


def get_current_global_batch_size() -> int:
    """Global batch size in samples that the schedule asks for, now."""
    return _calculator().get_current_global_batch_size()


def get_current_running_global_batch_size() -> int:
    """Global batch size in samples that runs, now."""
    return _calculator().get_current_running_global_batch_size()


def get_micro_batch_size() -> int:
    return _calculator().get_micro_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Move on to `consumed_samples` samples."""
    _calculator().update(consumed_samples, consistency_check, verbose)
