"""The GPUs of one host: layouts checked against one GPU, whole models, scaling. `python tools/benchmark/eight_gpus.py [--part NAME]`.

Four parts, each at most --minutes long; a row that would not end in time is skipped, by name, and a part can be run by itself:
  layouts   rows of tests/parallel_equivalence over NCCL in fp32 and bf16: losses and gradient norms against one GPU
  llama8b   LLaMA-3 8B, bf16 and FP8: context and data parallel, data parallel
  mixtral   Mixtral 8x7B, as many layers as fit, bf16 and FP8: expert parallel, pipeline and expert parallel
  scaling   llama8L (train.py) on one GPU and on 2, 4, 8 by each axis; communication that nothing hides, of rank 0
            (`by copies`: --tp-comm-overlap, --cp-comm-overlap)
Two, four or eight GPUs: what is there, or --gpus. --dry: the same rows with tiny models, processes on the CPU over gloo, to try the script.
--list prints the rows and runs nothing. --json FILE has every row as soon as it is measured and keeps those of earlier runs: parts can go
one by one into one file. What the trainers print goes to the folder FILE.logs. Exit code 1: a row failed; the table comes all the same.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import step_trace
from command_line import check_can_be_written, end_on_sigterm, positive
from eight_gpus_results import ALONE, add_efficiency, table
from results import SKIPPED, Results
from train import COMMON, CONFIGURATIONS, PROFILED, RunFailed, run

SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FP8 = "--fp8-format hybrid --fp8-recipe delayed"
TINY = (  # of --dry, after all other flags; eight ranks divide it along every axis
    "--num-layers 8 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --num-query-groups 8 --kv-channels 8 --seq-length 64 "
    "--max-position-embeddings 64 --vocab-size 255 --num-workers 0"
)
USABLE = 0.8  # of a GPU's memory: what the estimate counts; the rest is for buffers and uneven experts
# Rows of the table of layouts, by the ranks that they take
LAYOUTS = {
    2: ("dp2 sharded overlap", "tp2 sp", "pp2", "cp2", "ep2 grouped"),
    4: ("tp4 sp", "tp2 sp pp2", "tp2 sp dp2 sharded", "pp4 vpp2", "cp4", "cp4 hierarchical", "dp4 sharded per-token", "ep4")
    + ("tp2 sp ep2 etp1",),
    8: ("tp8 sp", "tp4 sp pp2", "tp2 sp pp2 dp2 sharded", "pp8", "pp4 vpp2 dp2", "cp8", "cp8 a2a", "cp8 hierarchical", "dp8 sharded")
    + ("ep8", "ep4 etp2", "tp2 sp ep4"),
}
LAYOUT_SECONDS = 40  # that a row of the layouts is expected to take at most
LATE = 90  # seconds beyond what a row is expected to take, after which it is ended: one that hangs must not take all others' time
H200_GIB = 139.0


@dataclass(frozen=True)
class Row:
    """A training to measure."""

    name: str
    configuration: str  # of train.py
    gpus: int
    flags: str
    seconds: int  # that it is expected to take: it begins only if the part has these left
    warmup: int = 2  # iterations before those that count
    iterations: int = 4
    profile: bool = False
    goal: tuple[str, float] | None = None  # (number of the row, at least)
    optional: str = ""  # flags of a feature that may not be built


# --- the rows ---


def llama8b_rows(gpus: int, memory_gib: float) -> Iterator[Row]:
    for layout, flags in ((f"CP2 DP{gpus // 2}", "--context-parallel-size 2"), (f"DP{gpus}", "")):
        flags = f"{flags} {SHARDED} --global-batch-size {16 * gpus}"
        yield from both_precisions(f"LLaMA-3 8B, {layout}", Row("", "llama8B", gpus, flags, 110), memory_gib, ("mfu", 0.55))


def mixtral_rows(gpus: int, memory_gib: float) -> Iterator[Row]:
    layouts = {
        f"EP{gpus}": f"--expert-model-parallel-size {gpus}",
        f"PP2 EP{gpus // 2}": f"--pipeline-model-parallel-size 2 --expert-model-parallel-size {gpus // 2}",
    }
    for layout, flags in layouts.items():
        flags = f"{flags} {SHARDED} --global-batch-size {8 * gpus}"
        yield from both_precisions(f"Mixtral 8x7B, {layout}", Row("", "mixtral8x7B", gpus, flags, 110, profile=True), memory_gib)


def both_precisions(name: str, row: Row, memory_gib: float, goal: tuple[str, float] | None = None) -> Iterator[Row]:
    """The row in bf16, which the goal is for, and in FP8, with as many layers as fit."""
    fitting, whole = layers_that_fit(row, memory_gib)
    if fitting < whole:
        name, flags = f"{name}, {fitting} of {whole} layers", f"{row.flags} --num-layers {fitting}"
    else:
        flags = row.flags
    settings = asdict(row) | {"flags": flags}
    yield Row(**settings | {"name": f"{name}, bf16", "goal": goal})
    yield Row(**settings | {"name": f"{name}, FP8", "optional": FP8})


# axis -> flags on n GPUs. Work grows with them: samples of a step; along CP the sequence, with the attention that this takes.
AXES: dict[str, Callable[[int], str]] = {
    "DP": lambda n: f"{SHARDED} --global-batch-size {4 * n}",
    "TP": lambda n: f"--tensor-model-parallel-size {n} --sequence-parallel --global-batch-size {4 * n}",
    "TP by copies ": lambda n: f"--tensor-model-parallel-size {n} --sequence-parallel --tp-comm-overlap --global-batch-size {4 * n}",
    "PP": lambda n: f"--pipeline-model-parallel-size {n} --global-batch-size {8 * n}",
    "CP": lambda n: _along_the_sequence(n),
    "CP by copies ": lambda n: f"{_along_the_sequence(n)} --cp-comm-overlap",
}


def _along_the_sequence(n: int) -> str:
    return f"--context-parallel-size {n} {SHARDED} --seq-length {8192 * n} --max-position-embeddings {8192 * n}"


GOALS = {"DP": ("efficiency", 0.95), "TP": ("efficiency", 0.75)}  # of the kinds of them, on eight GPUs


def scaling_rows(gpus: int, memory_gib: float) -> Iterator[Row]:
    """One GPU first, then the most: what time is left for is what says most. Fewer GPUs than all by copies: last."""
    common: dict[str, Any] = {"configuration": "llama8L", "warmup": 3, "iterations": 6, "profile": True}
    yield Row(ALONE, gpus=1, flags="", seconds=36, **common)
    order = [(n, axis) for n in (8, 4, 2) for axis in AXES if n <= gpus]
    for n, axis in sorted(order, key=lambda pair: pair[0] < gpus and "copies" in pair[1]):
        goal = GOALS.get(axis[:2]) if n == 8 else None
        yield Row(f"llama8L, {axis}{n}", gpus=n, flags=AXES[axis](n), seconds=36 + LONGER.get(axis[:2], 0) * (n - 1), goal=goal, **common)


# seconds that each GPU more adds: along PP a step has twice the samples and waits for the output head, along CP attention grows
LONGER = {"PP": 5, "CP": 2}

ROWS = {"llama8b": llama8b_rows, "mixtral": mixtral_rows, "scaling": scaling_rows}
PARTS = ("layouts", *ROWS)


# --- what fits ---


def resolved(row: Row, flags: str = "") -> argparse.Namespace:
    """The trainer's arguments of the row, checked. Raises ValueError with all that is wrong with its command line."""
    from megatron.training.arguments import parse_args, validate_args
    from pretrain_llama import LLAMA_DEFAULTS

    line = f"{COMMON} {CONFIGURATIONS[row.configuration][1]} {row.flags} {row.optional} {flags} --train-iters 10"
    argv = shlex.split(f"{line} --check-config --check-config-world-size {row.gpus}")
    return validate_args(parse_args(argv=argv, defaults=LLAMA_DEFAULTS), LLAMA_DEFAULTS)


def layers_that_fit(row: Row, memory_gib: float) -> tuple[int, int]:
    """(layers, a multiple of four, that memory of `memory_gib` a GPU has room for; layers of the whole model)."""
    from megatron.training.memory_estimate import memory_bytes

    whole = resolved(row).num_layers
    for layers in range(whole, 0, -4):
        if memory_bytes(resolved(row, f"--num-layers {layers}")) <= USABLE * memory_gib * 2**30:
            break
    return layers, whole


class Budget:
    """Seconds of a part."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self.end - self.clock()

    def refusal(self, seconds: float) -> str:
        """Why what takes `seconds` is not begun; empty: it is."""
        return "" if seconds <= self.left else f"{SKIPPED}: takes about {seconds:.0f} s, {max(0.0, self.left):.0f} s are left"


# --- running them ---

NOT_BUILT = ("unknown flag", "does not support yet")  # what the trainer says of a flag


def measure(row: Row, budget: Budget, dry: bool, logs: Path) -> dict[str, Any]:
    """The numbers of a row, or under "result" why there are none. `logs`: the folder for what the trainer prints."""
    try:
        resolved(row, TINY if dry else "")
    except ValueError as error:
        lacking = row.optional and any(text in str(error) for text in NOT_BUILT)
        return {"result": "not built" if lacking else f"refused: {error}"}
    if refusal := budget.refusal(min(row.seconds, 30) if dry else row.seconds):
        return {"result": refusal}
    extra = shlex.split(f"{row.flags} {row.optional} {TINY if dry else ''}")
    warmup, iterations = (1, 1) if dry else (row.warmup, row.iterations)
    limit_s = budget.left if dry else min(budget.left, row.seconds + LATE)
    log = logs / (re.sub(r"\W+", "_", row.name) + ".log")
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) if row.profile else None
        try:
            numbers = run(row.configuration, warmup + iterations, row.gpus, extra, profile, limit_s=limit_s, last=iterations, log=log)
        except RunFailed as error:
            return {"result": f"{'out of time' if budget.left <= 0 else 'failed'}: {error}"}
        traced, lack = waiting_of(profile / "profile" / "rank-0.json.gz") if profile else ({}, "")
    numbers["tokens_per_second_per_gpu"] = numbers["tokens_per_second"] / row.gpus
    return numbers | traced | {"flags": shlex.join(extra), "result": f"measured{lack}"}


def waiting_of(trace: Path) -> tuple[dict[str, float], str]:
    """(step_trace's numbers, none on a CPU, and what is wrong with the trace): the step's own numbers do not go with them."""
    try:
        found = step_trace.waiting(step_trace.read(trace), PROFILED)
        return ({} if found is None else asdict(found) | {"all_to_all_share": found.all_to_all_ms / found.profiled_ms}), ""
    except Exception as error:
        traceback.print_exc()
        return {}, f", without its trace: {type(error).__name__}: {error}"


def unless_it_raises(measuring: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns; where it raises, a row that says so: the rows after it are measured, and the table comes."""
    try:
        return measuring(*arguments)
    except Exception as error:
        traceback.print_exc()
        return {"result": f"failed: {type(error).__name__}: {error}"}


def measure_layout(name: str, budget: Budget, dry: bool) -> list[dict[str, Any]]:
    """A row of the table of layouts: for each dtype its largest differences, relative to one GPU."""
    from tests.parallel_equivalence import comparison, layouts

    layout = next(layout for layout in layouts.LAYOUTS if layout.name == name)
    if refusal := budget.refusal(LAYOUT_SECONDS):
        return [{"result": refusal}]
    dtypes, backend = layouts.GPU_TOLERANCES, "gloo" if dry else "nccl"
    try:
        limit_s = budget.left if dry else min(budget.left, LAYOUT_SECONDS + LATE)
        results = comparison.trained(layout, list(dtypes), backend=backend, timeout=limit_s)
        problems = comparison.report(layout, results, dtypes, backend)
        largest = comparison.largest(layout, results, backend)
    except AssertionError as error:
        print(error, flush=True)
        return [{"result": "failed: " + str(error).strip().splitlines()[-1]}]
    print(f"{name}: {len(problems)} differences above what is allowed", *problems[:20], sep="\n  ", flush=True)
    rows: list[dict[str, Any]] = []
    for dtype, allowed in dtypes.items():
        wrong = [problem for problem in problems if str(dtype) in problem]
        differences = {kind: largest[dtype][kind] for kind in allowed}
        result = "passed" if not wrong else f"failed: {len(wrong)} differences, first {wrong[0]}"
        rows.append({"dtype": str(dtype).removeprefix("torch."), "models": layout.models, "differences": differences, "result": result})
    return rows


def layout_names(gpus: int) -> Iterator[tuple[str, int]]:
    """(name, ranks): those of as many ranks as there are GPUs, and of half as many but at least four."""
    for ranks in sorted(LAYOUTS, reverse=True):
        if ranks == gpus or 4 <= ranks < gpus:
            yield from ((name, ranks) for name in LAYOUTS[ranks])


def names_of(part: str, options: argparse.Namespace) -> list[str]:
    if part == "layouts":
        return [name for name, _ in layout_names(options.gpus)]
    return [row.name for row in ROWS[part](options.gpus, options.memory_gib)]


def run_part(part: str, options: argparse.Namespace, logs: Path, keep: Callable[..., None]) -> None:
    budget = Budget(60 * options.minutes)

    def wanted(name: str) -> bool:
        return options.only is None or name in options.only

    if part == "layouts":
        for name, ranks in layout_names(options.gpus):
            if wanted(name):
                found = unless_it_raises(measure_layout, name, budget, options.dry)
                for row in [found] if isinstance(found, dict) else found:
                    keep(row=name, part=part, gpus=ranks, **row)
        if "tests.distributed" in sys.modules:  # the processes hold memory of the GPUs
            sys.modules["tests.distributed"].ranks("gloo" if options.dry else "nccl").close()
        return
    for row in ROWS[part](options.gpus, options.memory_gib):
        if wanted(row.name):
            found = unless_it_raises(measure, row, budget, options.dry, logs)
            keep(row=row.name, part=part, gpus=row.gpus, goal=row.goal, **found)


# --- the command line ---


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="of the parts' rows only these")
    parser.add_argument("--gpus", type=int, choices=sorted(LAYOUTS), help="default: the most that there are; 8 with --dry")
    parser.add_argument("--minutes", type=positive, default=8, help="that a part may take (default: 8)")
    parser.add_argument(
        "--memory-gib",
        type=positive,
        help=f"of a GPU: decides how many layers fit (default: what is there; --dry: {H200_GIB}, an H200's)",
    )
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too, after each")
    options = parser.parse_args()
    check_can_be_written(parser, options.json)
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast, which not every host lets a process use
    look_for_gpus(parser, options)
    options.part = list(dict.fromkeys(options.part))
    rows = {name for part in options.part for name in names_of(part, options)}
    if absent := set(options.only or ()) - rows:
        there = ", ".join(options.part)
        parser.error(f"not a row of {there} on {options.gpus} GPUs: {'; '.join(sorted(absent))} (--list prints the rows)")
    return options


def look_for_gpus(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """How many GPUs the rows are for, and with how much memory; ends the program where there are too few."""
    if options.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    there = torch.cuda.device_count()
    if options.dry or (options.list and there < (options.gpus or min(LAYOUTS))):
        options.gpus = options.gpus or max(LAYOUTS)
        options.memory_gib = options.memory_gib or H200_GIB
        return
    fitting = [gpus for gpus in LAYOUTS if gpus <= there]
    options.gpus = options.gpus or max(fitting, default=0)
    if options.gpus not in fitting:
        parser.error(f"this host has {there} GPUs, and {options.gpus or min(LAYOUTS)} are needed; --dry needs none")
    smallest = min(torch.cuda.get_device_properties(index).total_memory for index in range(options.gpus))
    options.memory_gib = options.memory_gib or smallest / 2**30


def print_rows(options: argparse.Namespace) -> None:
    for part in options.part:
        if part == "layouts":
            for name, ranks in layout_names(options.gpus):
                print(f"{part:8} {name!r}: {ranks} GPUs, at most {LAYOUT_SECONDS} s")
            continue
        for row in ROWS[part](options.gpus, options.memory_gib):
            print(f"{part:8} {row.name!r}: {row.gpus} GPUs, about {row.seconds} s, {row.configuration} {row.flags} {row.optional}")


def main() -> int:
    """The exit code: 1 where a row failed."""
    options = parse()
    if options.list:
        print_rows(options)
        return 0
    import torch

    from megatron.core import device

    machine = {"device": device.device_name(), "gpus": options.gpus, "torch": torch.__version__, "dry": options.dry}
    try:
        results = Results(options.json, machine, add_efficiency)
    except ValueError as error:
        sys.exit(f"--json {error}")
    logs = Path(tempfile.mkdtemp(prefix="eight_gpus_")) if options.json is None else options.json.with_name(options.json.name + ".logs")
    logs.mkdir(exist_ok=True)
    print(f"what the trainers print: {logs}", flush=True)

    def keep(**row: Any) -> None:
        print(f"{row['row']}: {row['result']}", flush=True)
        try:
            results.keep(**row, at=time.strftime("%Y-%m-%d %H:%M:%S"))
        except OSError as error:  # a full disk must not end the measuring: the table is still to come
            print(f"--json {options.json}: not written: {error}", flush=True)

    end_on_sigterm()
    try:
        for part in options.part:
            run_part(part, options, logs, keep)
    finally:  # also when it is stopped
        print(machine, table(results.rows, options.dry), sep="\n", flush=True)
    if skipped := results.skipped():
        print("skipped, to be run by", shlex.join(["--only", *skipped]))
    if failed := results.failed():
        print("failed:", "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
