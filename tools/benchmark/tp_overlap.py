"""The linears of a LLaMA layer under tensor and sequence parallelism, with and without their communication hidden.

    torchrun --nproc-per-node 2 tools/benchmark/tp_overlap.py

Each runs forward and backward through its module: with collectives before or after whole products (`nccl`), in chunks (`chunks`), with copy
engines and symmetric memory (`symmetric`; `halves`: dgrad in a product for each rank), and as products without communication (`products`).
Before that, what symmetric memory gives is compared with what `nccl` gives, on changing inputs and with random delays.
It ends with a traceback after --limit seconds, whatever waits.
"""

import argparse
import faulthandler
import logging
import os
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.core import device, parallel_state, symmetric_memory
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.comm_overlap import start_gather, start_reduce_scatter
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_grad import weight_grad

LINEARS = {  # name -> (column-parallel, inputs, outputs), in parts of the hidden size
    "qkv": (True, 1.0, 1.5),
    "proj": (False, 1.0, 1.0),
    "fc1": (True, 1.0, 7.0),
    "fc2": (False, 3.5, 1.0),
}
WAYS: dict[str, dict[str, bool]] = {
    "nccl": {},
    "chunks": {"tp_comm_overlap": True},
    "symmetric": {"tp_comm_overlap": True},
    "halves": {"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True},
}


def settings(way: str) -> AbstractContextManager:
    return symmetric_memory.disabled() if way == "chunks" else nullcontext()


class Clock:
    """Milliseconds between marks on the device's queue; of the host on a CPU."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark(self) -> None:
        if device.has_accelerator():
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(device.Stopwatch().started * 1e3)

    def times(self) -> list[float]:
        device.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [first.elapsed_time(last) if device.has_accelerator() else last - first for first, last in pairs]


class Case:
    """One linear, its input and the gradient of its output."""

    def __init__(self, name: str, way: str, tokens: int, hidden: int) -> None:
        column, inputs, outputs = LINEARS[name]
        size = dist.get_world_size()
        self.way, self.tokens = way, tokens
        config = ModelParallelConfig(
            params_dtype=torch.bfloat16,
            tensor_model_parallel_size=size,
            sequence_parallel=True,
            gradient_accumulation_fusion=True,
            **WAYS[way],  # type: ignore[arg-type]
        )
        sizes = {"input_size": int(inputs * hidden), "output_size": int(outputs * hidden)}
        common: dict[str, Any] = {"config": config, "init_method": init_method_normal(0.02), "bias": False, **sizes}
        torch.manual_seed(1)
        self.linear: Any = (
            ColumnParallelLinear(**common) if column else RowParallelLinear(**common, input_is_parallel=True, skip_bias_add=False)
        )
        weight: Any = self.linear.weight
        weight.main_grad = torch.zeros(weight.shape, device=device.current_device())
        weight.main_grad_filled = True
        rows, whole = tokens // size, tokens
        self.x_shape = (rows, 1, sizes["input_size"]) if column else (whole, 1, sizes["input_size"] // size)
        self.grad_shape = (whole, 1, sizes["output_size"] // size) if column else (rows, 1, sizes["output_size"])

    def inputs(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = device.new_generator(seed * 100 + dist.get_rank())
        make = {"device": device.current_device(), "generator": generator}
        x, grad = (torch.randn(shape, **make).bfloat16() for shape in (self.x_shape, self.grad_shape))  # type: ignore[call-overload]
        return x, grad

    def run(self, x: torch.Tensor, grad: torch.Tensor, between: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        with settings(self.way):
            out = self.linear(x)[0]
            between()
            out.backward(grad)
        assert x.grad is not None
        return out.detach(), x.grad

    def products(self, x: torch.Tensor, grad: torch.Tensor, between: Callable[[], None]) -> None:
        """The same on tensors that are whole from the start."""
        x, grad = (tensor.view(self.tokens, -1) for tensor in (x, grad))
        x.matmul(self.linear.weight.t())
        between()
        grad.matmul(self.linear.weight)
        weight_grad(self.linear.weight, grad, x, True)


def check(name: str, way: str, options: argparse.Namespace) -> str:
    """Compare with `nccl`; what differs most, in parts of the reference's root mean square."""
    plain, other = (Case(name, each, options.tokens, options.hidden) for each in ("nccl", way))
    worst = 0.0
    chance = random.Random(dist.get_rank())
    for round_ in range(options.rounds):
        given = [plain.inputs(4 * round_ + index) for index in range(4)]

        def delay() -> None:
            if device.has_accelerator() and chance.random() < 0.5:
                torch.cuda._sleep(int(chance.random() * 4e6))  # up to 2 ms

        results = []
        for case in (plain, other):
            case.linear.weight.main_grad.zero_()
            found: list[torch.Tensor] = []
            for x, grad in given:  # nothing waits for the device between them
                if case is other:
                    delay()
                found.extend(case.run(x, grad, delay if case is other else lambda: None))
            results.append([*found, case.linear.weight.main_grad.clone()])
        for index, (expected, got) in enumerate(zip(*results, strict=True)):
            scale = expected.float().square().mean().sqrt()
            difference = ((got.float() - expected.float()).abs() - 2**-7 * expected.float().abs()).max() / scale
            worst = max(worst, difference.item())
            # the sum of two numbers that were rounded to bf16 each, of a size like its own
            assert difference < 0.04, f"{name}, {way}: result {index} of round {round_} is off by {difference.item():.3f} of its size"
    return f"{worst:.4f}"


def measure(run: Callable[[Callable[[], None]], object], options: argparse.Namespace) -> list[float]:
    """Median ms of forward and backward, of the slowest rank. All is issued before it begins: what the host takes for it does not count."""
    clocks = []
    together = torch.zeros(1, device=device.current_device())
    for index in range(options.warmup + options.repeats):
        clock = Clock()
        if device.has_accelerator():
            torch.cuda._sleep(int(options.ahead * 2e6))
        dist.all_reduce(together)
        clock.mark()
        run(clock.mark)
        clock.mark()
        if index >= options.warmup:
            clocks.append(clock)
    times = [clock.times() for clock in clocks]
    found = torch.tensor([statistics.median(column) for column in zip(*times, strict=True)], device=device.current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


def whole(case: Case, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and gradient with all tokens."""
    x, grad = (tensor.repeat(case.tokens // tensor.shape[0], 1, 1) for tensor in case.inputs(seed))
    return x, grad


def transfers(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Gathering and scattering with nothing to hide behind."""
    group, size = parallel_state.get_tensor_model_parallel_group(), dist.get_world_size()
    make: dict[str, Any] = {"device": device.current_device(), "dtype": torch.bfloat16}
    rows = torch.randn(options.tokens // size, 1, options.hidden, **make)
    all_rows = torch.randn(options.tokens, 1, options.hidden, **make)

    def both(between: Callable[[], None]) -> None:
        start_gather(rows, group)[1]()
        between()
        start_reduce_scatter(all_rows, group)[1]()

    say(f"{'alone, ms':12}{'gather':>10}{'scatter':>10}")
    for way in ("chunks", "symmetric"):
        with settings(way):
            times = measure(both, options)
        say(f"{'nccl' if way == 'chunks' else way:12}" + "".join(f"{time:10.3f}" for time in times))


def table(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    say(f"\n{'ms':22}" + "".join(f"{way:>11}" for way in (*WAYS, "products")))
    total = [0.0] * (len(WAYS) + 1)
    for name in LINEARS:
        columns = []
        for way in WAYS:
            case = Case(name, way, options.tokens, options.hidden)
            x, grad = case.inputs(0)
            columns.append(measure(lambda between, case=case, x=x, grad=grad: case.run(x, grad, between), options))  # type: ignore[misc]
        x, grad = whole(case, 0)
        with torch.no_grad():
            columns.append(measure(lambda between, case=case, x=x, grad=grad: case.products(x, grad, between), options))  # type: ignore[misc]
        for index, what in enumerate(("forward", "backward")):
            say(f"{name + ' ' + what:22}" + "".join(f"{column[index]:11.3f}" for column in columns))
        total = [before + sum(column) for before, column in zip(total, columns, strict=True)]
    say(f"{'all':22}" + "".join(f"{time:11.3f}" for time in total))


def trace(options: argparse.Namespace) -> None:
    """What runs when, in a few steps of each linear, for a browser's viewer: a file for each rank, all issued before it begins."""
    cases = [Case(name, "symmetric", options.tokens, options.hidden) for name in LINEARS]
    given = [case.inputs(0) for case in cases]
    together = torch.zeros(1, device=device.current_device())
    with torch.profiler.profile() as profile:
        dist.barrier()
        if device.has_accelerator():
            torch.cuda._sleep(int(12 * options.ahead * 2e6))
        dist.all_reduce(together)
        for case, (x, grad) in [*zip(cases, given, strict=True)] * 3:
            case.run(x, grad, lambda: None)
        device.synchronize()
    profile.export_chrome_trace(f"{options.trace}.rank{dist.get_rank()}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=6, help="of comparisons, four inputs each")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--ahead", type=float, default=3.0, help="about how many ms the host is given to issue a linear's work")
    parser.add_argument("--limit", type=int, default=300, help="seconds until it gives up")
    parser.add_argument("--trace", help="write profiles of the symmetric way to this path, with .rank0.json and so on added, too")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ or not device.has_accelerator():
        parser.error("it runs on GPUs, started by: python -m torch.distributed.run --nproc-per-node 2 tools/benchmark/tp_overlap.py")
    faulthandler.dump_traceback_later(options.limit, exit=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(device.distributed_backend())
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    say(f"torch {torch.__version__}, {dist.get_world_size()} x {device.device_name()}")
    if options.rounds:
        for name in LINEARS:
            found = [f"{way} {check(name, way, options)}" for way in ("chunks", "symmetric", "halves")]
            say(f"{name:6} differs from nccl beyond rounding, in parts of its size, by: {', '.join(found)}")
    transfers(options, say)
    table(options, say)
    if options.trace:
        trace(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
