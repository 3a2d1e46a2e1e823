"""The device this process computes on, and every fact that depends on it. No other module says `cuda`.

A process has one device: the accelerator that `set_device` chose, or the CPU.
"""

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

# Dense matrix peak in TFLOP/s, by a part of the device's name and dtype (vendors' datasheets). None elsewhere: no MFU is printed.
PEAK_TFLOPS: dict[str, dict[torch.dtype, float]] = {
    "GB200": {torch.bfloat16: 2450.0, torch.float16: 2450.0, torch.float32: 80.0},
    "B200": {torch.bfloat16: 2250.0, torch.float16: 2250.0, torch.float32: 75.0},
    "H200": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "H100": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "A100": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.float32: 19.5},
}


# Elements of the blocks that row-wise work on large tensors goes by: a CPU's cache holds one, a GPU's launch costs little beside one.
BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}


def has_accelerator() -> bool:
    """Whether a CUDA GPU is visible (CUDA_VISIBLE_DEVICES= makes a GPU machine compute on its CPU)."""
    return torch.cuda.is_available()


def has_fast_bf16() -> bool:
    """Whether bf16 is computed in hardware here; a CPU without takes a hundred times as long for it as for fp32."""
    return has_accelerator() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def device_type() -> str:
    return "cuda" if has_accelerator() else "cpu"


def current_device() -> torch.device:
    """The device that parameters and batches live on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_accelerator() else torch.device("cpu")


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Whether the tensor lives on a GPU: NCCL reduces it, and its matrix products can write fp32 from half precision."""
    return tensor.is_cuda


def block_elements(tensor: torch.Tensor) -> int:
    """Elements of a block for work on the tensor that goes block by block."""
    return BLOCK_ELEMENTS.get(tensor.device.type, 1 << 24)


def gpus_are_shared() -> bool:
    """Whether several processes may have one GPU, which NCCL allows from 2.30 on with this variable of its own."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def set_device(local_rank: int) -> torch.device:
    """Choose the accelerator of this process, by its rank on this host: one a process, or in turn where GPUs are shared. Nothing to choose
    on a CPU."""
    if has_accelerator():
        count = torch.cuda.device_count()
        if local_rank >= count and not gpus_are_shared():
            raise ValueError(
                f"local rank {local_rank} has no GPU: this host shows {count}; "
                f"start at most {count} processes a host (torchrun --nproc-per-node {count}), or, to try a layout out slowly, "
                "let them share GPUs by NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later)"
            )
        torch.cuda.set_device(local_rank % count)
    return current_device()


def distributed_backend() -> str:
    """The torch.distributed backend for this device: collectives on GPU tensors by NCCL, on CPU tensors by gloo."""
    return "cpu:gloo,cuda:nccl" if has_accelerator() else "gloo"


def set_deterministic() -> None:
    """From here on torch uses deterministic kernels, and raises RuntimeError where it has none. Call it before the device is first used.

    Environment variables that cuBLAS, NCCL and Transformer Engine read for it are set where they are not.
    """
    for name, value in (("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("NCCL_ALGO", "Ring"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")):
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def synchronize() -> None:
    """Wait until all that was queued on the device is done."""
    if has_accelerator():
        torch.cuda.synchronize()


def device_name() -> str:
    return torch.cuda.get_device_name() if has_accelerator() else "CPU"


def peak_tflops(dtype: torch.dtype) -> float | None:
    """The device's dense matrix peak for `dtype` in TFLOP/s, None where the table does not know it."""
    name = device_name()
    for part, peaks in PEAK_TFLOPS.items():
        if part in name:
            return peaks.get(dtype)
    return None


def peak_memory_bytes() -> int:
    """Peak of allocated bytes so far: of the device's allocator, or of this process (resident) on a CPU."""
    if has_accelerator():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_stats() -> dict[str, int]:
    """Allocator statistics under the names that the logs use, in bytes and counts; empty on a CPU."""
    if not has_accelerator():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def empty_cache() -> None:
    if has_accelerator():
        torch.cuda.empty_cache()


def get_rng_state() -> torch.Tensor:
    """The state of the device's default generator (uint8, on the CPU)."""
    return torch.cuda.get_rng_state() if has_accelerator() else torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    if has_accelerator():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the default generators of CPU and device."""
    torch.manual_seed(seed)


@contextmanager
def seeded(where: torch.device, seed: int) -> Iterator[None]:
    """Run with the default generators of the CPU and of the device `where` seeded, then put their states back."""
    devices = [] if where.type == "cpu" else [where]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if where.type == "cpu" else where.type):
        torch.manual_seed(seed)
        yield


def compute_capability() -> tuple[int, int]:
    """Of the current NVIDIA GPU; there must be one."""
    return torch.cuda.get_device_capability()


def stream_handle() -> int:
    """The present stream of the current NVIDIA GPU, as CUDA's libraries take it."""
    return torch.cuda.current_stream().cuda_stream


def profiler_range(name: str) -> AbstractContextManager:
    """A named range for profilers; nothing when there is no accelerator."""
    return torch.cuda.nvtx.range(name) if has_accelerator() else nullcontext()


class HostCopy:
    """A small tensor on its way to the host, which goes on meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: Any = None
        self._here = tensor
        if on_accelerator(tensor):
            self._here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tolist(self) -> list:
        """Its values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._here.tolist()


def mark_profile(on: bool) -> bool:
    """Begin or end what Nsight Systems records; True when there is a device to record."""
    if not has_accelerator():
        return False
    (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
    return True


@cache
def side_stream() -> Any:
    """One stream for work beside the main one's, the same for all who ask; None on a CPU."""
    return torch.cuda.Stream() if has_accelerator() else None


def copy_stream() -> Any:
    """A new stream for copies beside the main one's work, whose small kernels go first."""
    return torch.cuda.Stream(priority=-1)


def current_stream() -> Any:
    return torch.cuda.current_stream()


def reachable_devices() -> frozenset[int]:
    """The other GPUs, by number, whose memory this process's GPU reads and writes."""
    own, count = torch.cuda.current_device(), torch.cuda.device_count()
    return frozenset(other for other in range(count) if other != own and torch.cuda.can_device_access_peer(own, other))


def card() -> str:
    """The physical GPU of this process, whatever number it is seen by."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _stream_value(operation: str, address: int, value: int) -> None:
    # the last argument: for a wait "at least", in the order of a counter that wraps; for a write "after all before it is visible"
    stream, value = ctypes.c_void_p(stream_handle()), value & 0xFFFFFFFF
    status = getattr(_driver(), operation)(stream, ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))
    if status:
        raise RuntimeError(f"{operation} failed with CUDA driver error {status}")


def stream_write(address: int, value: int) -> None:
    """Write 32 bits to a GPU's memory once all that was queued on the present stream is done and visible. It takes no kernel."""
    _stream_value("cuStreamWriteValue32_v2", address, value)


def stream_wait_at_least(address: int, value: int) -> None:
    """What is queued after it on the present stream waits until the 32 bits at `address` are `value` or more. It takes no kernel."""
    _stream_value("cuStreamWaitValue32_v2", address, value)


def use_stream_of_its_own() -> None:
    """From here on this process queues its work on another stream than the default one, which CUDA graphs cannot record."""
    if has_accelerator():
        torch.cuda.set_stream(torch.cuda.Stream())


_graphs: list[weakref.ref] = []  # recorded by capture_graph


def graph_pool() -> Any:
    """Memory for CUDA graphs that are launched in the order in which they were recorded."""
    return torch.cuda.graph_pool_handle()


def capture_graph(work: Callable[[], None], pool: Any, random_states: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """Record the kernels that `work` launches, without running them; the returned function launches them all at once."""
    graph = torch.cuda.CUDAGraph()
    for state in random_states:
        graph.register_generator_state(state)
    # threads of NCCL and of data loaders go on with calls that a recording of the whole process would forbid
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        work()
    _graphs.append(weakref.ref(graph))
    return graph.replay


def is_recording(tensor: torch.Tensor) -> bool:
    """Whether kernels that are launched now on the tensor go into a CUDA graph instead of running."""
    return on_accelerator(tensor) and torch.cuda.is_current_stream_capturing()


def release_graphs() -> None:
    """Free all recorded graphs, which cannot be launched again. NCCL ends no communicator that a graph still uses: it waits for ever."""
    for reference in _graphs:
        graph = reference()
        if graph is not None:
            graph.reset()
    _graphs.clear()


def new_generator(seed: int) -> torch.Generator:
    """A generator of the device."""
    return torch.Generator(current_device()).manual_seed(seed)


@contextmanager
def default_generator_drawing_from(state: torch.Generator) -> Iterator[None]:
    """Inside, the device's default generator draws from `state` and moves it on. Unlike set_rng_state a CUDA graph can record it."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(state)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


class Stopwatch:
    """Wall-clock time in seconds between calls, with the device's queue drained when asked to."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def elapsed(self, *, wait_for_device: bool = False, reset: bool = True) -> float:
        if wait_for_device:
            synchronize()
        now = time.perf_counter()
        seconds = now - self.started
        if reset:
            self.started = now
        return seconds


def pin_memory(tensor: torch.Tensor) -> None:
    """Lock the memory of a CPU tensor, so that a GPU copies to it at full speed and in the background. Nothing to do without a GPU."""
    if has_accelerator() and tensor.nbytes:
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)  # type: ignore[attr-defined]  # slower if refused


def unpin_memory(tensor: torch.Tensor) -> None:
    """Undo `pin_memory`, before the memory goes."""
    if has_accelerator() and tensor.nbytes:
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[attr-defined]
