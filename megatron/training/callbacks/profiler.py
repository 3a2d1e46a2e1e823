"""--profile: what the steps between two iterations spend their time on, by torch's profiler or for Nsight Systems."""

import json
from pathlib import Path
from typing import Any

import torch

from megatron.core import device
from megatron.training.callbacks.base import Callback
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import print_line


class Profile(Callback):
    """Profiles the steps after iteration `start` up to iteration `end`.

    folder: of torch's profiler: `rank-R.json.gz` (a trace for Perfetto or chrome://tracing) and `kernels-rank-R.json` (name -> milliseconds
    and calls a step). None: no files; the range that `nsys profile --capture-range=cudaProfilerApi` records is marked instead.
    """

    def __init__(self, start: int, end: int, folder: Path | None, rank: int, shapes: bool = False, stacks: bool = False) -> None:
        self.start, self.end, self.folder, self.rank = start, end, folder, rank
        self.shapes, self.stacks = shapes, stacks
        self._profiler: Any = None

    def on_train_start(self, run: TrainingRun) -> None:
        self._maybe_begin(run.state.iteration)

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        if self._profiler is not None and record.iteration >= self.end:
            self._finish(record.iteration)
        self._maybe_begin(record.iteration)

    def on_train_end(self, run: TrainingRun) -> None:
        if self._profiler is not None:
            self._finish(run.state.iteration)

    def _maybe_begin(self, iteration: int) -> None:
        if iteration != self.start:
            return
        device.synchronize()
        if self.folder is None:
            self._profiler = device.mark_profile(True)
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.has_accelerator():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=self.shapes, with_stack=self.stacks)
        self._profiler.start()

    def _finish(self, iteration: int) -> None:
        device.synchronize()
        profiler, self._profiler = self._profiler, None
        if self.folder is None:
            device.mark_profile(False)
            return
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"rank-{self.rank}.json.gz"
        profiler.export_chrome_trace(str(trace))
        table = kernel_times(profiler, max(1, iteration - self.start))
        (self.folder / f"kernels-rank-{self.rank}.json").write_text(json.dumps(table, indent=1))
        print_line(f"  profile of iterations {self.start + 1} to {iteration}: {trace}")


def kernel_times(profiler: Any, steps: int) -> dict[str, dict[str, float]]:
    """Kernel (on a CPU: operator) -> {"ms", "calls"} a step, the longest first."""
    on_device = device.has_accelerator()
    found: dict[str, dict[str, float]] = {}
    for event in profiler.key_averages():
        if on_device == (event.device_type == torch.autograd.DeviceType.CPU):
            continue
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        if spent:
            entry = found.setdefault(event.key, {"ms": 0.0, "calls": 0.0})
            entry["ms"] += spent / 1e3 / steps
            entry["calls"] += event.count / steps
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))
