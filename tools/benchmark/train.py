"""Run a named configuration through the trainer and print what it reaches: `python tools/benchmark/train.py gpt345m`.

The command is the one that a user would type, on mock data; times are read from its --metrics-file. Printed: seconds from launch to the
end of the first iteration, then medians of the last 10 of 20 iterations (ms, TFLOP/s per GPU, MFU, tokens per second) and peak memory.
Flags that are not its own go to the trainer: `train.py llama8L --cuda-graph-impl full_iteration`.
--breakdown adds two steps after those, profiled: their kernels by kind, against the floor. --profile FOLDER keeps the trace, for Perfetto.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from breakdown import breakdown, table
from command_line import check_can_be_written, check_there_are_gpus, count, end_on_sigterm

ROOT = Path(__file__).resolve().parents[2]
LAST = 10
PROFILED = 2  # steps

COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --no-create-attention-mask-in-dataloader --lr 1e-4 --lr-decay-style constant "
    "--clip-grad 1.0 --weight-decay 0.1 --attention-dropout 0 --hidden-dropout 0 --bf16 --transformer-impl local --log-interval 1 "
    "--log-throughput --eval-iters 0"
)
# name -> (script, flags); see docs/performance.md for the peer's numbers on the same shapes
CONFIGURATIONS = {
    "gpt345m": (
        "pretrain_gpt.py",
        "--num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 8 --global-batch-size 32 --vocab-size 50256",
    ),
    "llama8L": (
        "pretrain_llama.py",
        "--num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000 "
        "--micro-batch-size 1 --global-batch-size 4 --vocab-size 128255",
    ),
    "moe8x": (
        "pretrain_llama.py",
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 7168 --num-attention-heads 16 --group-query-attention --num-query-groups 4 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 8 --vocab-size 31999 --num-experts 8 "
        "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion",
    ),
    "tiny": (
        "pretrain_gpt.py",
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 2 --global-batch-size 4 --vocab-size 255",
    ),
}
CONFIGURATIONS |= {
    f"llama8L-fp8-{recipe}": ("pretrain_llama.py", f"{CONFIGURATIONS['llama8L'][1]} --fp8-format hybrid --fp8-recipe {recipe}")
    for recipe in ("delayed", "tensorwise", "blockwise")
} | {
    f"moe8x-fp8-{recipe}": ("pretrain_llama.py", f"{CONFIGURATIONS['moe8x'][1]} --fp8-format hybrid --fp8-recipe {recipe}")
    for recipe in ("delayed", "tensorwise", "blockwise")
}

# shapes of whole models, for several GPUs
CONFIGURATIONS |= {
    "llama8B": ("pretrain_llama.py", f"{CONFIGURATIONS['llama8L'][1]} --num-layers 32 --global-batch-size 128"),
    "mixtral8x7B": (
        "pretrain_llama.py",
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
        "--kv-channels 128 --seq-length 4096 --max-position-embeddings 4096 --rotary-base 1000000 --micro-batch-size 1 "
        "--global-batch-size 64 --vocab-size 31999 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 2e-2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --moe-permute-fusion",
    ),
}


class RunFailed(SystemExit):
    """The trainer ended with an error, or did not end in time: says which, and ends a program that does not ask."""


def run(
    name: str,
    iterations: int,
    processes: int,
    extra: list[str],
    profile: Path | None = None,
    limit_s: float = inf,
    last: int = LAST,
    log: Path | None = None,
) -> dict:
    """Run it and return the numbers, medians of the `last` iterations.

    `profile`: a folder for the kernels of two steps more. `limit_s`: seconds after which it is ended. `log`: a file for the trainer's
    output, which goes to ours otherwise. Raises RunFailed.
    """
    script, flags = CONFIGURATIONS[name]
    last_step = iterations
    if profile is not None:
        last_step += PROFILED
        steps = f"--profile-step-start {iterations} --profile-step-end {last_step}"
        extra = [*extra, *f"--profile --use-pytorch-profiler {steps} --tensorboard-dir".split(), str(profile.absolute())]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, script, *shlex.split(COMMON), *shlex.split(flags), "--train-iters", str(last_step)]
        command += ["--metrics-file", str(metrics), *extra]
        print("$ " + shlex.join(command), flush=True)
        first = _train(name, command, metrics, limit_s, log)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [row for row in rows if "elapsed_ms" in row and row["iteration"] <= iterations][-last:]

    if not measured:
        raise RunFailed(f"{name} ended without an iteration that counts")

    def median(key: str) -> float | None:
        values = [row[key] for row in measured if row[key] is not None]
        return statistics.median(values) if values else None

    return {
        "name": name,
        "processes": processes,
        "seconds_to_first_iteration": first,
        **{key: median(key) for key in ("elapsed_ms", "tflops", "mfu", "tokens_per_second")},
        "peak_memory_gib": max(row["memory"] for row in measured) / 2**30,
        "last_loss": measured[-1]["lm_loss"],
        **({} if profile is None else {"kernels": breakdown(profile / "profile" / "kernels-rank-0.json")}),
    }


def _train(name: str, command: list[str], metrics: Path, limit_s: float, log: Path | None) -> float | None:
    """Seconds to the first iteration. Whatever ends us ends the trainer too: it holds GPUs."""
    first, started = None, time.time()
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("w"))
        errors = None if log is None else subprocess.STDOUT
        # in a session of its own: a Ctrl-C would reach the launcher twice, and a second signal cuts its cleaning up
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors, start_new_session=True, preexec_fn=_ends_with_parent)
        stack.callback(_end, process)
        while process.poll() is None:
            if first is None and metrics.exists() and metrics.stat().st_size:
                first = time.time() - started
            if time.time() - started > limit_s:
                raise RunFailed(f"{name} was ended after {limit_s:.0f} s")
            time.sleep(0.05)
        if process.returncode:
            raise RunFailed(f"{name} ended with code {process.returncode}" + ("" if log is None else f": {reason(log.read_text())}"))
    return first


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def _ends_with_parent() -> None:
    """In the launcher: it is asked to end when we are killed without being asked."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def reason(output: str) -> str:
    """The line of a failed trainer's output that says most: its own first error, else the last one that looks like an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("ERROR: ")]
    named = [line for line in lines if re.search(r"Error\b|exitcode *: -", line) and "ChildFailedError" not in line]
    return (own[:1] or named[-1:] or lines[-1:] or ["no output"])[0]


def _end(launcher: subprocess.Popen) -> None:
    """torchrun ends its processes when it is asked to end, and they hold GPUs: it gets time for it.

    Not by the object's methods: their lock stays taken where a signal's handler raised inside of one, and they would wait for it for ever.
    """
    if launcher.returncode is not None:
        return
    for number, seconds in ((signal.SIGTERM, 60), (signal.SIGKILL, inf)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher.pid, number)
        if _ended(launcher.pid, seconds):
            return


def _ended(process: int, seconds: float) -> bool:
    """Whether it does within that time; a child of ours."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if os.waitpid(process, os.WNOHANG) != (0, 0):
                return True
        except ChildProcessError:  # somebody has waited for it
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(CONFIGURATIONS))
    parser.add_argument("--iterations", type=count, default=20)
    parser.add_argument("--processes", type=count, default=1)
    parser.add_argument("--json", help="write the numbers to this file too")
    parser.add_argument("--breakdown", action="store_true", help="profile two steps more, and print their kernels by kind")
    parser.add_argument("--profile", metavar="FOLDER", help="the same, and keep the trace there")
    options, extra = parser.parse_known_args()
    check_there_are_gpus(parser, options.processes if options.name != "tiny" else 0)
    check_can_be_written(parser, options.json)
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.profile or scratch) if options.breakdown or options.profile else None
        numbers = run(options.name, options.iterations, options.processes, extra, folder)
    print(f"medians of the last {min(LAST, options.iterations)} of {options.iterations} iterations")
    kernels = numbers.get("kernels")
    for key, value in numbers.items():
        if key != "kernels":
            print(f"{key:>28}: {value:,.3f}" if isinstance(value, float) else f"{key:>28}: {value}")
    if kernels is not None:
        print(table(kernels, options.name, numbers["elapsed_ms"]))
    if options.json:
        Path(options.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
