"""What docs/performance.md holds against Megatron-LM with Transformer Engine, one table: `python tools/benchmark/peer_table.py`.

Each row is a training by train.py, of one GPU or two, in the layout and with the global batch of the peer's; printed is the median of the
last 10 of --iterations. Rows for more GPUs than this host has are left out by name. --list prints the rows and runs nothing. --json FILE
has every row as soon as it is measured and keeps those of earlier runs on the same kind of machine: rows can go one by one into one table.
What the trainers print goes to the folder FILE.logs. Exit code 1: a row failed; the table comes all the same.
"""

import argparse
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from breakdown import floor_of
from command_line import check_can_be_written, count, end_on_sigterm
from results import Results
from train import LAST, RunFailed, run

GRAPHS, LAYER_GRAPHS = "--cuda-graph-impl full_iteration", "--cuda-graph-impl local"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LONG = f"--global-batch-size 4 --context-parallel-size 2 --seq-length 16384 --max-position-embeddings 16384 {SHARDED}"
TP2 = "--global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--global-batch-size 16 --pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class Row:
    """A training; what the peer takes for it on such GPUs (ms an iteration, GiB a GPU), our target.

    On two GPUs the target is 1.10 times the peer's throughput, at no more memory.
    """

    name: str
    configuration: str  # of train.py
    gpus: int
    flags: str
    peer_ms: float | None
    peer_gib: float | None = None
    target_ms: float | None = None
    target_gib: float | None = None

    @property
    def floor_ms(self) -> int | None:
        """Of the libraries' kernels on one GPU."""
        return sum(floor_of(self.configuration).values()) or None if self.gpus == 1 else None

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """(ms, GiB) of the target."""
        if self.gpus == 1 or self.peer_ms is None:
            return self.target_ms, self.target_gib
        return self.peer_ms / 1.10, self.peer_gib


ROWS = (
    Row("llama8L", "llama8L", 1, GRAPHS, 934, 66.8, 850, 56),
    Row("llama8L, no graphs", "llama8L", 1, "", 934, 66.8, 850, 56),
    Row("llama8L, FP8 delayed", "llama8L-fp8-delayed", 1, GRAPHS, 731, 68.9, 640),
    Row("llama8L, FP8 tensorwise", "llama8L-fp8-tensorwise", 1, GRAPHS, 741, 68.6, 650),
    Row("llama8L, FP8 blockwise", "llama8L-fp8-blockwise", 1, GRAPHS, 790, 68.6, 700),
    Row("gpt345m", "gpt345m", 1, GRAPHS, 555, 25.9, 360),
    Row("moe8x", "moe8x", 1, "", 594, 61.2, 400),
    Row("moe8x, FP8 delayed", "moe8x-fp8-delayed", 1, LAYER_GRAPHS, None),
    Row("moe8x, FP8 blockwise", "moe8x-fp8-blockwise", 1, LAYER_GRAPHS, None),
    Row("llama8L DP2, distributed optimizer", "llama8L", 2, f"--global-batch-size 8 {SHARDED}", 943, 51.1),
    Row("llama8L TP2, sequence parallel", "llama8L", 2, TP2, 1045, 33.5),
    Row("llama8L TP2, sequence parallel, by copies", "llama8L", 2, f"{TP2} --tp-comm-overlap", 1031, 33.5),
    Row("llama8L PP2", "llama8L", 2, PP2, 2328, 32.9),
    Row("llama8L PP2, 2 layers a virtual stage", "llama8L", 2, f"{PP2} --num-layers-per-virtual-pipeline-stage 2", 2274, 35.2),
    Row("llama8L PP2, zero-bubble", "llama8L", 2, f"{PP2} --pipeline-schedule zero-bubble", 2328, 32.9),
    Row("llama8L CP2, sequence 16384", "llama8L", 2, LONG, 1105, 51.1),
    Row("llama8L CP2, sequence 16384, by copies", "llama8L", 2, f"{LONG} --cp-comm-overlap", 1105, 51.1),
    Row("moe8x EP2", "moe8x", 2, f"--global-batch-size 16 --expert-model-parallel-size 2 {SHARDED}", 700, 36.2),
)


# --- the table ---

HEADINGS = (
    "run", "GPUs", "ms / iteration", "TFLOP/s per GPU", "MFU", "peak memory", "launch to first iteration", "floor", "peer", "time / peer's",
    "target",
)  # fmt: skip


def verdict(row: Row, measured: dict[str, Any]) -> str:
    """The row's targets, and whether each is reached."""
    found = []
    for limit, key, unit in zip(row.limits, ("elapsed_ms", "peak_memory_gib"), ("ms", "GiB"), strict=True):
        if limit is None:
            continue
        over = measured[key] / limit - 1
        asked = f"{limit:.0f} ms" if unit == "ms" else f"{limit:.1f} GiB"
        found.append(f"{asked}: " + ("reached" if over <= 0 else f"missed by {100 * over:.1f} %"))
    return ", ".join(found)


def cells(row: Row, measured: dict[str, Any]) -> list[str]:
    peer = "" if row.peer_ms is None else f"{row.peer_ms:.0f} ms" + ("" if row.peer_gib is None else f", {row.peer_gib:.1f} GiB")
    mfu, first = measured["mfu"], measured["seconds_to_first_iteration"]
    return [
        row.name,
        str(row.gpus),
        f"{measured['elapsed_ms']:.1f}",
        f"{measured['tflops']:.1f}",
        # of products in FP8 it would be a share of the wrong peak
        "" if mfu is None or "fp8" in row.configuration else f"{100 * mfu:.1f} %",
        f"{measured['peak_memory_gib']:.1f} GiB",
        "" if first is None else f"{first:.1f} s",
        "" if row.floor_ms is None else f"{row.floor_ms:.0f} ms",
        peer,
        "" if row.peer_ms is None else f"{measured['elapsed_ms'] / row.peer_ms:.3f}",
        verdict(row, measured),
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, in the order of ROWS; rows that have no numbers say why."""
    by_name = {row["row"]: row for row in rows}
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in ROWS:
        found = by_name.get(row.name)
        if found is not None:
            good = "elapsed_ms" in found
            lines.append(tuple(cells(row, found)) if good else (row.name, str(row.gpus), found["result"], *[""] * (len(HEADINGS) - 3)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- running ---


def measure(row: Row, iterations: int, logs: Path) -> dict[str, Any]:
    """The numbers of a row, or under "result" why there are none."""
    log = logs / (re.sub(r"\W+", "_", row.name) + ".log")
    try:
        return run(row.configuration, iterations, row.gpus, shlex.split(row.flags), log=log) | {"result": "measured"}
    except RunFailed as error:
        return {"result": f"failed: {error}"}


def parse(there: int) -> tuple[argparse.Namespace, list[Row]]:
    """there: GPUs of this host."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=count, default=2 * LAST)
    parser.add_argument("--gpus", type=int, choices=(1, 2), help="only rows of so many GPUs")
    parser.add_argument("--only", nargs="+", choices=names, metavar="ROW", help=" | ".join(names))
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too, after each")
    options = parser.parse_args()
    check_can_be_written(parser, options.json)
    wanted = [row for row in ROWS if options.gpus in (None, row.gpus) and (options.only is None or row.name in options.only)]
    if not wanted:
        parser.error(f"none of --only is a row of {options.gpus} GPUs; leave --gpus out")
    rows = [row for row in wanted if row.gpus <= there]
    if not rows and not options.list:
        parser.error(f"this host has {there} GPUs, and {min(row.gpus for row in wanted)} are needed")
    if options.list:
        rows = wanted
    return options, rows


def main() -> int:
    """The exit code: 1 where a row failed."""
    import torch

    options, rows = parse(torch.cuda.device_count())
    if options.list:
        for row in rows:
            print(f"{row.name!r}: {row.gpus} GPUs, {row.configuration} {row.flags}")
        return 0
    from megatron.core import device

    machine = {
        "device": device.device_name(), "torch": torch.__version__, "triton": metadata.version("triton"), "iterations": options.iterations,
    }  # fmt: skip
    try:
        results = Results(options.json, machine)
    except ValueError as error:
        sys.exit(f"--json {error}")
    logs = Path(tempfile.mkdtemp(prefix="peer_table_")) if options.json is None else options.json.with_name(options.json.name + ".logs")
    logs.mkdir(exist_ok=True)
    print(f"what the trainers print: {logs}", flush=True)
    end_on_sigterm()
    try:
        for row in rows:
            found = measure(row, options.iterations, logs)
            print(f"{row.name}: {found['result']}" + (f", {found['elapsed_ms']:.1f} ms" if "elapsed_ms" in found else ""), flush=True)
            results.keep(row=row.name, part="peer", gpus=row.gpus, at=time.strftime("%Y-%m-%d %H:%M:%S"), **found)
    finally:  # also when it is stopped
        print(machine, f"medians of the last {min(LAST, options.iterations)} of {options.iterations} iterations", sep="\n")
        print(table(results.rows), flush=True)
    if left_out := [row.name for row in ROWS if row.gpus > torch.cuda.device_count()]:
        print("for two GPUs, left out:", "; ".join(left_out))
    return 1 if results.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
