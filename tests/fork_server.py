"""Processes that begin with everything imported: forked, each a fresh one, from a server that has done nothing but import.

`context()` stands in for multiprocessing's spawn context: a process costs milliseconds instead of the seconds of `import torch`.
The server ends with the process that asked for it. Its children see no GPU: use "spawn" for those that need one.
"""

import multiprocessing
import os
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent  # not conftest's, which needs pytest: tools/benchmark/eight_gpus.py does without
METHOD = "forkserver"  # of multiprocessing
PRELOADED = "tests.preloaded"


@cache
def context() -> BaseContext:
    """The context of the server, which is started with this process's first call."""
    forkserver.set_forkserver_preload([PRELOADED])
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # the server does not look at our sys.path
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
        forkserver.ensure_running()
    return multiprocessing.get_context(METHOD)
