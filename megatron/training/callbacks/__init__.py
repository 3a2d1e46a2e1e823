"""What a run does besides training: log, evaluate, save, stop. Each attaches at phase boundaries (see `base`).

Saving is in `checkpoint`, which is imported where it is used: see training.py.
"""

from .base import Callback
from .evaluate import Evaluate
from .exit import ExitConditions
from .garbage_collection import GarbageCollection
from .interval_log import IntervalLog, LogSink
from .plot import PlotCurves
from .profiler import Profile
from .sinks import ConsoleSink, MetricsFileSink, ProgressLine, TensorBoardSink, WandbSink

__all__ = [
    "Callback",
    "ConsoleSink",
    "Evaluate",
    "ExitConditions",
    "GarbageCollection",
    "IntervalLog",
    "LogSink",
    "MetricsFileSink",
    "PlotCurves",
    "Profile",
    "ProgressLine",
    "TensorBoardSink",
    "WandbSink",
]
