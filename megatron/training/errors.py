"""How a run ends when it fails: the user's faults in one line, ours with a traceback, both in torchrun's table."""

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from megatron.core import device, parallel_state
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.utils import get_world_rank
from megatron.training import failure, phase
from megatron.training.argument_utils import UsageError
from megatron.training.arguments import exit_with_usage_error, record_for_elastic
from megatron.training.global_vars import unset_global_variables
from megatron.training.training_log import print_line

# What a user can mend: bad values and files. Everything else is a fault of ours and shows its traceback.
USERS_FAULTS = (ValueError, OSError, MemoryError)


@contextmanager
def reported() -> Iterator[None]:
    """Run the enclosed work; on failure print and record why, and end the process: 2 for the command line, 1 for all else, 130 for Ctrl-C.

    The message names rank, phase and iteration of what failed first, on whichever rank (failure.py), and the rank that found out prints
    it. Nothing is saved, and no other rank is waited for.
    """
    try:
        yield
        _meet()
    except UsageError as error:
        with suppress(SystemExit):
            exit_with_usage_error(error)
        _leave(2)
    except KeyboardInterrupt:
        text = "interrupted: nothing was saved after the last checkpoint"
        _first_failure(text, KeyboardInterrupt())
        _say(text)
        _leave(130)
    except Exception as error:
        own = f"rank {_rank_of(error)}, {phase.where()}: {type(error).__name__}: {error}{_advice(error)}"
        first, is_ours_to_tell = _first_failure(own, error)
        if is_ours_to_tell:  # torchrun's table shows as the cause who left a record first
            record_for_elastic(first)
        if first == own and not _is_users(error):
            traceback.print_exc()
        if is_ours_to_tell:
            _say(f"ERROR: {first}")
        _leave(1)
    _shut_down()


def _rank_of(error: BaseException) -> int:
    """Whose failure it is: some exceptions were agreed on by all ranks."""
    for exception in (error, error.__cause__):
        if (rank := getattr(exception, "failed_rank", None)) is not None:
            return rank
    return get_world_rank()


def _first_failure(own: str, error: BaseException) -> tuple[str, bool]:
    """(what failed first, whether this rank prints it)."""
    watch = failure.watch()
    return (own, True) if watch is None else (watch.first_failure(own, error), watch.to_tell)


def _is_users(error: Exception) -> bool:
    from megatron.training.callbacks.interval_log import NonFiniteError

    return isinstance(error, (*USERS_FAULTS, NonFiniteError))


def _advice(error: Exception) -> str:
    if type(error).__name__ == "OutOfMemoryError":
        return f". Peak so far: {device.peak_memory_bytes() / 2**30:.1f} GiB; a smaller --micro-batch-size or --seq-length needs less"
    return ""


def _say(message: str) -> None:
    sys.stdout.flush()
    print_line(message, sys.stderr)


def _meet() -> None:
    """Wait until every rank has come to its end: one that left first would take with it what others still use, a store for example."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with phase.phase("leaving"):
            if (watch := failure.watch()) is not None:
                watch.expect_end()
            dist.barrier()


def _shut_down() -> None:
    """Leave the process as it was before: groups, counters and globals gone."""
    failure.stop()
    device.release_graphs()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        alone = dist.get_world_size() == 1
        dist.destroy_process_group()
        if not alone:
            # A group ends with the last reference to it, and models refer to themselves. The threads of one that lives on free what they
            # worked on when they get to it; if Python is ending just then, it ends such a thread amid a destructor: terminate, SIGABRT.
            gc.collect()
    unset_num_microbatches_calculator()
    unset_global_variables()
    phase.reset()


def _leave(code: int) -> None:
    """End now. A process group is not torn down: its peers may be waiting in a collective that will never come."""
    if (watch := failure.watch()) is not None:
        watch.leave(code)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _shut_down()
    raise SystemExit(code)
