"""Train on several ranks, each a process forked with everything imported (tests/fork_server.py): `on_ranks`, `each_rank`, `Ranks`.

For whatever is about training, also about how ranks end. What is about a launcher, about start-up or about how Python itself ends
takes real processes, at some seconds of imports each: runner.torchrun and runner.Processes.
"""

import os
import runpy
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megatron.training.callbacks.plot import PlotCurves
from tests import fork_server
from tests.conftest import ROOT
from tests.functional.runner import TINY, WAIT, Result, argv, environment, read_rows
from tests.ports import free_port

SHOWN = 3000  # characters of a rank's output in a message


class Ranks:
    """`python script words` as each of N ranks, side by side, with nobody who watches over them (as SLURM does).

    None of them outlives the `with` block. `processes[rank].pid` is there for signals.
    """

    def __init__(self, number: int, words: list[str], script: str = "pretrain_gpt.py") -> None:
        context: Any = fork_server.context()
        self._folder = tempfile.TemporaryDirectory()
        meet = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
        envs = [meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
        self.processes = [context.Process(target=_rank, args=(Path(self._folder.name), script, words, env)) for env in envs]

    def __enter__(self) -> "Ranks":
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def results(self, timeout: float = WAIT) -> list[Result]:
        """Each rank's, without rows. Raises AssertionError with every rank's output if one has not ended within `timeout` seconds."""
        running, end = {process.sentinel: rank for rank, process in enumerate(self.processes)}, time.monotonic() + timeout
        while running and (ended := wait(list(running), max(0.0, end - time.monotonic()))):
            for sentinel in ended:
                del running[sentinel]
        hung = sorted(running.values())
        assert not hung, f"ranks {hung} of {len(self.processes)} did not end within {timeout} s\n{self.written()}"
        return [Result(process.exitcode, *self._wrote(rank)) for rank, process in enumerate(self.processes)]

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def written(self) -> str:
        """The end of what each rank has written so far."""
        texts = [tuple(text[-SHOWN:] for text in self._wrote(rank)) for rank in range(len(self.processes))]
        return "\n".join(f"rank {rank} wrote:\n{out}\nand as errors:\n{err}" for rank, (out, err) in enumerate(texts))

    def _wrote(self, rank: int) -> tuple[str, str]:
        out, err = (Path(self._folder.name) / f"{rank}.{end}" for end in ("out", "err"))
        return out.read_text(errors="replace") if out.exists() else "", err.read_text(errors="replace") if err.exists() else ""


def _rank(folder: Path, script: str, words: list[str], env: dict[str, str]) -> None:
    """In the child: be the process that `python script words` would be."""
    for end, descriptor in (("out", 1), ("err", 2)):
        file = os.open(folder / f"{env['RANK']}.{end}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # os._exit and signals take no line along
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv = [script, *words]
    PlotCurves.draw = lambda self: None  # see conftest.py
    runpy.run_path(script, run_name="__main__")


def each_rank(number: int, *words: str | Path, script: str = "pretrain_gpt.py", base: str = TINY, timeout: float = WAIT) -> list[Result]:
    """Train with `script` on that many ranks: the results, rank by rank. All have the same rows, those of the run's --metrics-file."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        with Ranks(number, argv(*words, "--metrics-file", metrics, base=base), script) as ranks:
            results = ranks.results(timeout)
        rows = read_rows(metrics)
    return [replace(result, rows=rows) for result in results]


def joined(results: list[Result]) -> Result:
    """Of all ranks one result: the first exit code that is not 0, and what they wrote, one rank after the other."""
    code = next((one.code for one in results if one.code), 0)
    return Result(code, "".join(one.out for one in results), "".join(one.err for one in results), results[0].rows)


def on_ranks(number: int, *words: str | Path, script: str = "pretrain_gpt.py", base: str = TINY, timeout: float = WAIT) -> Result:
    """`each_rank`, joined to one result."""
    return joined(each_rank(number, *words, script=script, base=base, timeout=timeout))
