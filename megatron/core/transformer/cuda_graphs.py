"""CUDA graphs: the kernels of a layer (`local`; of one with experts, those before them) or of a whole step (`full_iteration`) recorded
once and launched together afterwards.

A graph runs the same kernels on the same memory each time. So its inputs and outputs are static tensors that are copied into, random
states are registered with it, and nothing inside may read the device from the host; what cannot keep to that is refused by
cuda_graph_rules. Transfers of context and tensor parallelism are recorded too: NCCL's stream leaves the one that is recorded, and
joins it again where they are waited for, so that who starts one inside must wait for it inside.
What Python does beside the kernels (gradients that are marked ready, say) is done again at each launch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron.core import device
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.tensor_parallel.weight_grad import add_to_main_grad, mark_written, note_written

Run = Callable[..., tuple[torch.Tensor, ...]]


def _random_states() -> list[Any]:
    return get_cuda_rng_tracker().generators()


class _Slot:
    """One micro batch in flight through one recorded part: its static tensors, its forward and its backward."""

    def __init__(self, run: Run, parameters: list[torch.nn.Parameter], hidden: torch.Tensor, arguments: dict[str, Any], pool: Any) -> None:
        self.busy = False
        # the output of the graph before stays where it is: no copy
        self.hidden = (hidden.detach() if getattr(hidden, "is_graph_output", False) else hidden.detach().clone()).requires_grad_()
        self.tensors = {name: value.clone() for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self.arguments = {**arguments, **self.tensors}
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.grad_outputs: tuple[torch.Tensor, ...] = ()
        self.grad_input = hidden  # its place until it is recorded
        self.written: list[torch.nn.Parameter] = []

        def forward() -> None:
            with torch.enable_grad():
                self.outputs = run(self.hidden, **self.arguments)

        def backward() -> None:
            self.written.clear()
            with note_written(self.written):
                leaves = [self.hidden, *parameters]
                grads = torch.autograd.grad(self.outputs, leaves, self.grad_outputs, allow_unused=True, retain_graph=True)
                self.grad_input = grads[0]
                for param, grad in zip(parameters, grads[1:]):
                    if grad is not None:  # others went into main_grad
                        add_to_main_grad(param, grad)

        self.replay_forward = device.capture_graph(forward, pool, _random_states())
        self.grad_outputs = tuple(map(torch.empty_like, self.outputs))
        self.replay_backward = device.capture_graph(backward, pool, _random_states())

    def load(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> None:
        if hidden.data_ptr() != self.hidden.data_ptr():
            self.hidden.detach().copy_(hidden)
        for name, static in self.tensors.items():
            static.copy_(arguments[name])


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slot: _Slot, hidden: torch.Tensor, arguments: dict[str, Any], copy_grad: bool) -> tuple[torch.Tensor, ...]:
        ctx.slot, ctx.copy_grad = slot, copy_grad
        slot.load(hidden, arguments)
        slot.replay_forward()
        slot.busy = True
        return tuple(output.detach() for output in slot.outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        slot = ctx.slot
        for static, grad in zip(slot.grad_outputs, grads, strict=True):
            static.copy_(grad)
        slot.replay_backward()
        slot.busy = False
        for param in slot.written:
            mark_written(param)
        # a pipeline may still be sending it when the next micro batch's backward writes there
        return None, slot.grad_input.clone() if ctx.copy_grad else slot.grad_input, None, None


class LayerGraphs:
    """The graphs of a layer, or of its part before the experts: a pair, forward and backward, for each micro batch in flight. `usable` says
    when they stand in for it.

    run: what is recorded, hidden [s, b, h] and arguments to outputs, all of them differentiable. besides: the part of `layer` that `run`
    leaves out, and that runs as usual between graphs.

    Gradients of parameters are added to their main_grad, which must hold zeros or what earlier micro batches gave when a backward runs
    (DistributedDataParallel.zero_grad_buffer sees to it).

    The graphs of a slot share memory with those of the same slot of the chunk's other layers. That is safe because they are launched in
    the order of their recording: the scratch memory of a layer's backward may be what later layers keep for theirs, which is over by then.
    """

    _pools: dict[tuple[int, int], Any] = {}  # by (chunk, slot)

    def __init__(self, layer: torch.nn.Module, run: Run, config: Any, chunk: int, besides: torch.nn.Module | None = None) -> None:
        self.layer, self.run, self.chunk, self.besides = layer, run, chunk, besides
        self.warmups_left = config.cuda_graph_warmup_steps
        self.copy_grad = config.pipeline_model_parallel_size > 1
        self.slots: list[_Slot] = []
        self._signature: Any = None

    def usable(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> bool:
        """Whether this call is a step of training, after the warm-up, of the shape that the graphs have."""
        if not (torch.is_grad_enabled() and self.layer.training and hidden.requires_grad):
            return False
        if arguments.get("packed_seq_params") is not None or not hasattr(next(self.layer.parameters()), "main_grad"):
            return False
        if self.warmups_left > 0:
            hidden.register_hook(self._one_backward_done)
            return False
        shapes = {name: (value.shape, value.dtype) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        signature = (hidden.shape, hidden.dtype, shapes)
        if self._signature is None:
            self._signature = signature
        return self._signature == signature

    def _one_backward_done(self, grad: torch.Tensor) -> None:
        self.warmups_left -= 1

    def __call__(self, hidden: torch.Tensor, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        slot = next((slot for slot in self.slots if not slot.busy), None)
        if slot is None:
            key = (self.chunk, len(self.slots))
            pool = self._pools.get(key) or self._pools.setdefault(key, device.graph_pool())
            slot = _Slot(self.run, self._parameters(), hidden, arguments, pool)
            self.slots.append(slot)
        outputs = _Replay.apply(slot, hidden, arguments, self.copy_grad)
        for output in outputs:
            output.is_graph_output = True
        return outputs

    def _parameters(self) -> list[torch.nn.Parameter]:
        left_out = set() if self.besides is None else set(self.besides.parameters())
        return [param for param in self.layer.parameters() if param.requires_grad and param not in left_out]


class _RecordedStep:
    """A step's forwards and backwards over static micro batches."""

    def __init__(self, run: Callable[..., list], batches: Sequence[dict[str, torch.Tensor]], where: torch.device) -> None:
        self.batches = [{name: value.to(where, copy=True) for name, value in batch.items()} for batch in batches]
        self.reports: list = []

        def work() -> None:
            self.reports = run(iter(self.batches))

        self.replay = device.capture_graph(work, device.graph_pool(), _random_states())

    def load(self, batches: Sequence[dict[str, torch.Tensor]]) -> None:
        for static, batch in zip(self.batches, batches, strict=True):
            for name, value in static.items():
                value.copy_(batch[name], non_blocking=True)


class FullCudaGraphWrapper:
    """`forward_backward_func` whose training calls are one graph each, after `cuda_graph_warmup_steps` that run as usual.

    The micro batches are dicts of tensors. There is a graph for each number of micro batches; evaluations run as usual.
    """

    def __init__(self, forward_backward_func: Callable[..., list], cuda_graph_warmup_steps: int = 1) -> None:
        self.forward_backward_func = forward_backward_func
        self.warmups_left = cuda_graph_warmup_steps
        self._steps: dict[int, _RecordedStep] = {}

    def __call__(self, *, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool = False, **more: Any) -> list:
        more = {"model": model, "num_microbatches": num_microbatches, "forward_only": forward_only, **more}
        if forward_only or self.warmups_left > 0:
            self.warmups_left -= not forward_only
            return self.forward_backward_func(data_iterator=data_iterator, **more)
        for chunk in model:
            chunk.finish_param_sync()
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        batches = [next(iterator) for _ in range(num_microbatches)]
        step = self._steps.get(num_microbatches)
        if step is None:
            where = next(model[0].parameters()).device
            step = _RecordedStep(lambda static: self.forward_backward_func(data_iterator=static, **more), batches, where)
            self._steps[num_microbatches] = step
        step.load(batches)
        step.replay()
        for chunk in model:
            chunk.note_recorded_step()
        return tree_map_only(torch.Tensor, torch.clone, step.reports)
