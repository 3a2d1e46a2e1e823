"""Named random states, on GPU and CPU alike, and activation checkpointing that replays them.

The default state is the same on all tensor-parallel ranks (dropout on activations that each of them holds whole); the state
"model-parallel-rng" differs by tensor-parallel rank (dropout on what is split: heads, tokens under sequence parallelism).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core import device

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
EXPERT_RNG = _EXPERT_PARALLEL_RNG_TRACKER_NAME = "expert-parallel-rng"
_DATA_PARALLEL_RNG_TRACKER_NAME = "data-parallel-rng"


class CudaRNGStatesTracker:
    """Random states of the device by name; `fork(name)` runs on one of them.

    With `recordable` a state is a generator on the GPU, which CUDA graphs can record and move on; it draws the same numbers.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}  # tensors, or generators
        self.seeds_: set[int] = set()
        self.recordable = False

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def reset(self, recordable: bool = False) -> None:
        self.states_, self.seeds_ = {}, set()
        self.recordable = recordable and device.has_accelerator()

    def generators(self) -> list[torch.Generator]:
        """The states that a CUDA graph is to register."""
        return list(self.states_.values()) if self.recordable else []

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: state.get_state() if self.recordable else state for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        if not self.recordable:
            self.states_ = dict(states)
            return
        for name, state in states.items():  # in place: graphs know the generators
            self.states_.setdefault(name, device.new_generator(0)).set_state(state)

    def add(self, name: str, seed: int) -> None:
        """A new state, seeded. Raises ValueError when the name or the seed is already there."""
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(
                f"random state {name!r}, seed {seed}: both must be new; there are {sorted(self.states_)} with {sorted(self.seeds_)}"
            )
        self.seeds_.add(seed)
        if self.recordable:
            self.states_[name] = device.new_generator(seed)
            return
        before = device.get_rng_state()
        cpu_before = torch.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        torch.set_rng_state(cpu_before)
        device.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the state `name` inside, then go back to the state before. Raises ValueError for an unknown name."""
        if name not in self.states_:
            raise ValueError(f"random state {name!r} does not exist; call model_parallel_cuda_manual_seed(seed) first")
        if self.recordable:
            with device.default_generator_drawing_from(self.states_[name]):
                yield
            return
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """The tracker of this process. It also serves a CPU. `use_cudagraphable_rng` counts when it is seeded."""
    _refuse_other_trackers(use_te_rng_tracker, inference_rng_tracker)
    return _tracker


def dropout_state(config: Any, dropout: float) -> contextlib.AbstractContextManager:
    """The random state for dropout on the residual stream: each rank its own where it holds its own tokens (config.sequence_parallel)."""
    return get_cuda_rng_tracker().fork() if config.sequence_parallel and dropout else contextlib.nullcontext()


def _refuse_other_trackers(te: bool, inference: bool) -> None:
    for name, value in (("te_rng_tracker", te), ("inference_rng_tracker", inference)):
        if value:
            raise ValueError(f"{name} is not built yet; leave it out")


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the default state with `seed` and the named states with offsets of it by rank (Megatron's offsets).

    `use_cudagraphable_rng`: see CudaRNGStatesTracker. Ranks left None come from `parallel_state`. Data-parallel replicas get the same
    states: add to `seed` where they should differ.
    """
    from megatron.core import parallel_state

    _refuse_other_trackers(te_rng_tracker, inference_rng_tracker)
    tp_rank = parallel_state.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    ep_rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    etp_rank = parallel_state.get_expert_tensor_parallel_rank() if etp_rank is None else etp_rank
    _tracker.reset(recordable=use_cudagraphable_rng)
    device.manual_seed(seed)
    _tracker.add(_DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    _tracker.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)
    _tracker.add(_EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 * ep_rank + etp_rank)


def _all_states() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return torch.get_rng_state(), device.get_rng_state(), _tracker.get_states()


def _set_all_states(states: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]) -> None:
    torch.set_rng_state(states[0])
    device.set_rng_state(states[1])
    _tracker.set_states(states[2])


@contextlib.contextmanager
def _replayed(states: tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]) -> Iterator[None]:
    """Inside, every generator stands where `states` says, and gradients are recorded; then all go back."""
    now = _all_states()
    _set_all_states(states)
    try:
        with torch.enable_grad():
            yield
    finally:
        _set_all_states(now)


def _needs_gradients(args: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable, *args: Any) -> Any:
        ctx.function, ctx.states = function, _all_states()
        ctx.is_tensor = [isinstance(arg, torch.Tensor) for arg in args]
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        args = [next(saved).detach() if tensor else other for tensor, other in zip(ctx.is_tensor, ctx.others)]
        for arg, needed in zip(args, ctx.needs_input_grad[1:]):
            if needed:
                arg.requires_grad_()
        with _replayed(ctx.states):
            outputs = ctx.function(*args)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if isinstance(out, torch.Tensor) and out.requires_grad]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        return (None, *(arg.grad if isinstance(arg, torch.Tensor) else None for arg in args))


def checkpoint(function: Callable, distribute_saved_activations: bool, *args: Any) -> Any:
    """`function(*args)` without keeping its activations: the backward runs it again, on the random states of the first time.

    Positional tensors get gradients, and so do the parameters that `function` uses; other tensors that it closes over do not. Where no
    argument needs a gradient nothing is dropped. `distribute_saved_activations` is not built yet (ValueError).
    """
    if distribute_saved_activations:
        raise ValueError("distribute_saved_activations = True is not built yet; leave it at False")
    # A Function of inputs without gradients is a constant to autograd: the parameters inside would get none either.
    return _Checkpoint.apply(function, *args) if _needs_gradients(args) else function(*args)


class _RunAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: "RecomputedOutput", function: Callable, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.owner = owner
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs, out = ctx.owner.take()
        torch.autograd.backward(out, grads[0])
        return None, None, *(inp.grad for inp in inputs)


class RecomputedOutput:
    """The output of a cheap function of tensors, freed after the forward and made again when the backward first needs it.

    Unlike `checkpoint`, which keeps the output and drops what is inside, this frees the output itself, also for those who saved it for
    their own backward. The function must return a new contiguous tensor. `active` False: `run` is a plain call, and nothing is freed.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self._again: Callable[[], tuple[list[torch.Tensor], torch.Tensor]] | None = None
        self._storage: torch.UntypedStorage | None = None
        self._size = 0
        self._pair: tuple[list[torch.Tensor], torch.Tensor] | None = None

    def run(self, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        self.active = self.active and _needs_gradients(inputs)
        if not self.active:
            return function(*inputs)
        states, detached = _all_states(), [inp.detach() for inp in inputs]

        def again() -> tuple[list[torch.Tensor], torch.Tensor]:
            leaves = [inp.detach().requires_grad_() for inp in detached]
            with _replayed(states):
                return leaves, function(*leaves)

        self._again = again
        output = _RunAgain.apply(self, function, *inputs)
        self._storage, self._size = output.untyped_storage(), output.untyped_storage().nbytes()
        return output

    def free_until_backward_of(self, result: torch.Tensor) -> None:
        """Free the output now. `result`, made from it, gets its gradient before any user of the output does: the sign to run again."""
        if self.active:
            assert self._storage is not None
            self._storage.resize_(0)
            result.register_hook(self._fill)

    def _fill(self, grad: torch.Tensor) -> None:
        assert self._again is not None and self._storage is not None
        self._pair = self._again()
        # of storages, not of tensors: autograd must not take it for a change of what was saved
        self._storage.resize_(self._size)
        self._storage.copy_(self._pair[1].untyped_storage())
        self._storage = self._again = None

    def take(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(inputs, output) of the second run, with a graph between them; the first one is made where nothing was freed."""
        pair, self._pair = self._pair, None
        if pair is None:
            assert self._again is not None, "the backward of a recomputed output ran twice"
            pair = self._again()
        return pair
