"""What a step waits for on one GPU, from the trace that torch's profiler writes: the trainer's `--profile --use-pytorch-profiler`.

A trace is a list of events; those of categories KERNELS ran on the GPU, `ts` and `dur` in microseconds.
"""

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from breakdown import kind_of

Interval = tuple[float, float]  # start, end

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
ALL_TO_ALL = re.compile(r"all_?to_?all", re.IGNORECASE)
SEND_RECEIVE = re.compile(r"sendrecv", re.IGNORECASE)  # NCCL's name of the kernel of an all-to-all, and of sends between pipeline stages


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def exposed(waiting: Iterable[Interval], working: Iterable[Interval]) -> float:
    """How long something of `waiting` goes on while nothing of `working` does."""
    working = list(working)
    return covered([*waiting, *working]) - covered(working)


@dataclass(frozen=True)
class Waiting:
    """Milliseconds of the traced GPU in a step. Communication includes its waiting for other ranks, so also a pipeline's bubble."""

    communication_ms: float
    exposed_ms: float  # of it, while no other kernel ran
    all_to_all_ms: float
    idle_ms: float  # no kernel at all, between the first and the last
    profiled_ms: float  # from the first to the last: profiled steps take longer than others, so shares are of these


def is_all_to_all(event: dict) -> bool:
    """By the collective's name where the trace has it, else by the kernel's."""
    collective = event.get("args", {}).get("Collective name")
    return bool(ALL_TO_ALL.search(collective) if collective else SEND_RECEIVE.search(event["name"]))


def waiting(events: Iterable[dict], steps: int) -> Waiting | None:
    """Of a trace of that many steps; None where it has no kernels of a GPU."""
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") in KERNELS]
    if not kernels:
        return None
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in kernels]
    communicates = [kind_of(event["name"]) == "communication" for event in kernels]
    communication = [span for span, yes in zip(spans, communicates) if yes]
    work = [span for span, yes in zip(spans, communicates) if not yes]
    all_to_all = [span for span, event, yes in zip(spans, kernels, communicates) if yes and is_all_to_all(event)]
    span = max(end for _, end in spans) - min(start for start, _ in spans)
    times = (covered(communication), exposed(communication, work), covered(all_to_all), span - covered(spans), span)
    return Waiting(*(time / 1e3 / steps for time in times))


def read(trace: Path) -> list[dict]:
    """The events of a trace, .json or .json.gz."""
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as file:
        return json.load(file)["traceEvents"]
