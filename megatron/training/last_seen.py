"""The last collective that this process called, for reports about runs that hang or fail.

While `recording`, the functions of torch.distributed that talk to other ranks note their name, message size and group before they begin.
A note costs about a microsecond. Nobody else is told: failure.py sends it on, once a second.
"""

import functools
import linecache
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

TORCH = str(Path(torch.__file__).parent)
# isend and irecv are not among them: batch_isend_irecv wants torch's own functions in its operations.
COLLECTIVES = (
    *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast", "reduce", "barrier"),
    *("all_gather", "gather", "scatter", "all_to_all", "send", "recv", "batch_isend_irecv"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
)
WAITS = (".wait(", ".item(", ".tolist(", ".cpu(", "synchronize(", "float(", "bool(")  # lines at which a process waits for its device too
# name, size of the message, ranks of the group; how many there were; whether it has not returned; when it began
_last: dict[str, Any] = {"name": "none yet", "size": "", "ranks": 0, "count": 0, "inside": 0, "time": 0.0}
_originals: dict[str, Callable] = {}


def _noted(name: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def function(*arguments: Any, **keywords: Any) -> Any:
        if _last["inside"]:  # part of a collective that is noted already
            return original(*arguments, **keywords)
        first = arguments[0] if arguments else None
        group = keywords.get("group")
        _last.update(
            name=name,
            size=tuple(first.shape) if isinstance(first, torch.Tensor) else "",
            ranks=group.size() if isinstance(group, dist.ProcessGroup) else 0,
            count=_last["count"] + 1,
            inside=1,
            time=time.monotonic(),
        )
        result = original(*arguments, **keywords)
        _last["inside"] = 0  # not in a `finally`: after a failure it stays the one that we were in
        return result

    return function


def record() -> None:
    """Begin to note collectives."""
    for name in COLLECTIVES:
        if name not in _originals and hasattr(dist, name):
            _originals[name] = getattr(dist, name)
            setattr(dist, name, _noted(name, _originals[name]))


def stop() -> None:
    """Give torch.distributed its own functions back, and forget."""
    for name, original in _originals.items():
        setattr(dist, name, original)
    _originals.clear()
    _last.update(name="none yet", size="", ranks=0, count=0, inside=0, time=0.0)


def collective() -> str:
    """What was called last, and where this process is with it."""
    size = f" {list(_last['size'])}" if _last["size"] else ""
    ranks = f" of {_last['ranks']} ranks" if _last["ranks"] else ""
    return f"{'in' if _last['inside'] else 'after'} {_last['name']}{size}{ranks} (call {_last['count']})"


def is_waiting() -> bool:
    """Whether the main thread is in a collective, or waits for one that it began: with NCCL that is where it first needs a number."""
    if _last["inside"]:
        return True
    frame = _main_frame()
    return frame is not None and any(call in linecache.getline(frame.f_code.co_filename, frame.f_lineno) for call in WAITS)


def line() -> str:
    """The line that the main thread is at, as file:number."""
    frame = _main_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def progress() -> tuple[int, int]:
    """Changes when collectives go on."""
    return _last["count"], _last["inside"]


def _main_frame() -> FrameType | None:
    """The main thread's innermost frame that is neither torch's nor this file's."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    return frame or innermost
