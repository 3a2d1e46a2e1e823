"""Small helpers that every folder of core uses. A process group of None means "alone": size 1, rank 0."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, which must be whole. Raises ValueError otherwise."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")
    return numerator // denominator


def get_pg_size(group: Group = None) -> int:
    """Number of ranks in `group`; 1 for None, whatever the world's size is."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: Group = None) -> int:
    """This process's rank in `group`; 0 for None."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def world_is_initialized() -> bool:
    """Whether this process is one of a world of torch.distributed, be it of one."""
    return dist.is_available() and dist.is_initialized()


def get_world_rank() -> int:
    """This process's rank in the world; 0 without torch.distributed."""
    return dist.get_rank() if world_is_initialized() else 0


def strip_wrapper_prefix(name: str) -> str:
    """A parameter's name in the innermost module, from its name in wrappers such as DDP and Float16Module."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def unbuilt_fields(config_class: Any, used: Iterable[str]) -> dict[str, Any]:
    """Name -> default of the fields that the dataclass itself declares and that are not among the `used` ones."""
    own = {field.name: field.default for field in fields(config_class) if field.name in config_class.__annotations__}
    used = set(used)
    assert used <= own.keys(), f"{config_class.__name__} does not declare {sorted(used - own.keys())}"
    return {name: default for name, default in own.items() if name not in used}


def unbuilt_problems(config: Any, unbuilt: dict[str, Any]) -> list[str]:
    """A sentence for each field of `unbuilt` (from unbuilt_fields) that is not at its default; None, False and empty are the same."""
    given = [(name, getattr(config, name), default) for name, default in unbuilt.items()]
    kind = type(config).__name__
    return [
        f"{kind}.{name} = {value!r} is not built yet; leave it at {default!r}"
        for name, value, default in given
        if value != default and (value or default)
    ]


def get_tensor_model_parallel_group_if_none(tp_group: Group, is_expert: bool = False, check_initialized: bool = True) -> Group:
    """`tp_group`, or the group that `parallel_state` holds for the (expert) tensor axis."""
    if tp_group is not None:
        return tp_group
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    return (
        parallel_state.get_expert_tensor_parallel_group(check_initialized)
        if is_expert
        else parallel_state.get_tensor_model_parallel_group(check_initialized)
    )


def get_batch_on_this_cp_rank(
    batch: dict[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: Group = None,
    hybrid_cp_group_func: Any = None,
    use_per_sequence_balancing: bool = False,
    *,
    packed_seq_params: Any = None,
) -> dict[str, Any]:
    """This rank's tokens of a batch, of each of its sequences where it is packed; `cp_group` None: parallel_state's.

    See context_parallel/sequence_split.py."""
    from megatron.core.context_parallel.sequence_split import split_batch
    from megatron.core.process_groups_config import default_pg_collection

    if is_hybrid_cp or hybrid_cp_group_func is not None or use_per_sequence_balancing:
        raise ValueError("get_batch_on_this_cp_rank: groups of varying size and balancing by sequence are not built yet; leave them out")
    return split_batch(batch, default_pg_collection(None).cp if cp_group is None else cp_group, packed_seq_params)


def unwrap_model(model: Any, module_instances: Any = None) -> Any:
    """The innermost module(s) of `model` (a module or a list of them), wrappers such as DDP and Float16Module removed.

    `module_instances`: the wrapper classes to remove; by default everything that is marked as a wrapper or torch's own DDP.
    """
    if isinstance(model, list):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    if module_instances is None:
        while hasattr(model, "module"):
            model = model.module
        return model
    while isinstance(model, module_instances):
        model = model.module
    return model


def get_model_config(model: Any) -> Any:
    """The TransformerConfig of a (wrapped) model."""
    return unwrap_model(model).config


class _ViewlessTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor) -> torch.Tensor:
        return _share_storage(inp)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def _share_storage(inp: torch.Tensor) -> torch.Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device)
    out.data = inp.data
    return out


def make_viewless_tensor(inp: torch.Tensor, requires_grad: bool, keep_graph: bool) -> torch.Tensor:
    """A tensor over the same memory that autograd does not see as a view, so that freeing its data frees the memory.

    `keep_graph` keeps the gradient path to `inp`; otherwise the result is a leaf with `requires_grad`.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        return _ViewlessTensor.apply(inp)
    return _share_storage(inp).requires_grad_(requires_grad)


def deprecate_inference_params(inference_context: Any, inference_params: Any) -> Any:
    """The inference context under its present name or its former one."""
    return inference_params if inference_context is None else inference_context


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Whether Transformer Engine is installed and at least `version` (newer than it when not `check_equality`)."""
    from importlib.metadata import version as installed_version

    from megatron.core.optional_imports import available

    if not available("transformer_engine"):
        return False
    have, want = (
        tuple(int(part) for part in text.split("+")[0].split(".")[:3]) for text in (installed_version("transformer_engine"), version)
    )
    return have >= want if check_equality else have > want


class WrappedTensor:
    """Holds a tensor that a caller gives up: `unwrap` hands it over and drops the reference, so that its memory can go early."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    def unwrap(self) -> torch.Tensor:
        assert self._tensor is not None, "this tensor was already handed over"
        tensor, self._tensor = self._tensor, None
        return tensor


class GlobalMemoryBuffer:
    """Named scratch buffers that grow and are reused, for collectives' outputs."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(self, tensor_shape: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
        from megatron.core import device

        shape = torch.Size(tensor_shape)
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < shape.numel():
            buffer = torch.empty(shape.numel(), dtype=dtype, device=device.current_device())
            self.buffers[(name, dtype)] = buffer
        return buffer[: shape.numel()].view(shape)
