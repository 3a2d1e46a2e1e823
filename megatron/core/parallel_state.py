"""The façade that other projects call: one process-wide layout and its groups. Core itself is given groups as arguments.

Every getter works before `initialize_model_parallel` as in a world of one rank, except those that hand out groups (RuntimeError).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron.core.process_groups_config import create_groups, group_ranks
from megatron.core.rank_grid import Layout, make_layout
from megatron.core.utils import GlobalMemoryBuffer, Group, get_pg_rank, get_pg_size


@dataclass
class _State:
    layout: Layout
    rank: int
    groups: dict[str, Any]
    rank_offset: int = 0
    virtual_size: int | None = None
    virtual_rank: int | None = None
    memory_buffer: GlobalMemoryBuffer = field(default_factory=GlobalMemoryBuffer)


_state: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Factorize the world (or `local_world_size` ranks from `rank_offset`) and create all groups of the table.

    Raises ValueError when the sizes do not divide, and for what is not built yet; RuntimeError when called twice.
    `create_gloo_process_groups` changes nothing: the groups' backend handles CPU tensors too.
    """
    global _state
    if _state is not None:
        raise RuntimeError("model parallel groups are already initialized; call destroy_model_parallel() first")
    refused = {
        "use_sharp": use_sharp or sharp_enabled_group,
        "hybrid_context_parallel": hybrid_context_parallel,
        "nccl_communicator_config_path": nccl_communicator_config_path,
        "high_priority_stream_groups": high_priority_stream_groups,
        "pipeline_model_parallel_comm_backend": pipeline_model_parallel_comm_backend,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(f"{name} {value!r} is not built yet; leave it out")
    distributed = dist.is_initialized()
    layout = make_layout(
        local_world_size or (dist.get_world_size() if distributed else 1),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
        hierarchical_cp=tuple(hierarchical_context_parallel_sizes or ()),
        optimizer_instances=num_distributed_optimizer_instances,
    )
    rank = dist.get_rank() - rank_offset if distributed else 0
    if not 0 <= rank < layout.world_size:
        return
    groups = (
        create_groups(
            layout,
            rank,
            timeout_minutes=distributed_timeout_minutes,
            rank_offset=rank_offset,
            embd_ranks=get_embedding_ranks,
            pos_embd_ranks=get_position_embedding_ranks,
        )
        if distributed
        else {}
    )
    virtual_rank = None if virtual_pipeline_model_parallel_size is None else 0
    _state = _State(layout, rank, groups, rank_offset, virtual_pipeline_model_parallel_size, virtual_rank)


def destroy_model_parallel() -> None:
    """Forget the layout and its groups (their communicators end with torch.distributed)."""
    global _state
    _state = None


def is_initialized() -> bool:
    return _state is not None


def model_parallel_is_initialized() -> bool:
    return _state is not None


def all_groups() -> dict[str, Any]:
    """Name -> group, for the names of the groups table; empty before initialization."""
    return {} if _state is None else dict(_state.groups)


def get_group(name: str, check_initialized: bool = True) -> Group:
    """The group `name` of the table. None in a world without torch.distributed."""
    if _state is None:
        if check_initialized:
            raise RuntimeError(f"process group {name!r} asked for before initialize_model_parallel()")
        return None
    return _state.groups.get(name)


def _size(name: str) -> int:
    return 1 if _state is None else get_pg_size(_state.groups.get(name))


def _rank(name: str) -> int:
    return 0 if _state is None else get_pg_rank(_state.groups.get(name))


def _global_ranks(name: str) -> list[int]:
    if _state is None:
        return [0]
    return [rank + _state.rank_offset for rank in group_ranks(_state.layout, name, _state.rank)]


# Groups


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("tp", check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("pp", check_initialized)


def get_model_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("mp", check_initialized)


def get_context_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("cp", check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[dist.ProcessGroup] | None:
    return get_group("hcp", check_initialized)  # type: ignore[return-value]


def get_embedding_group(check_initialized: bool = True) -> Group:
    return get_group("embd", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> Group:
    return get_group("pos_embd", check_initialized)


def _data_parallel_name(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    return ("intra_" if partial_data_parallel else "") + ("dp_cp" if with_context_parallel else "dp")


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    return get_group(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    """The same group: its backend takes CPU tensors through gloo."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Group:
    return get_group("inter_dist_opt", check_initialized)


def get_tensor_and_data_parallel_group(check_initialized: bool = True, with_context_parallel: bool = False) -> Group:
    return get_group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("tp_cp", check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("ep", check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("expt_tp", check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("tp_ep", check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(check_initialized: bool = True) -> Group:
    return get_group("tp_ep_pp", check_initialized)


def get_expert_data_parallel_group(check_initialized: bool = True, partial_expert_data_parallel: bool = False) -> Group:
    return get_group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


# Sizes and ranks


def get_tensor_model_parallel_world_size() -> int:
    return _size("tp")


def get_tensor_model_parallel_rank() -> int:
    return _rank("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first rank of this tensor-parallel group."""
    return _global_ranks("tp")[0]


def get_pipeline_model_parallel_world_size() -> int:
    return _size("pp")


def get_pipeline_model_parallel_rank() -> int:
    return _rank("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    return _global_ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    return _global_ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    ranks = _global_ranks("pp")
    return ranks[(get_pipeline_model_parallel_rank() + 1) % len(ranks)]


def get_pipeline_model_parallel_prev_rank() -> int:
    return _global_ranks("pp")[get_pipeline_model_parallel_rank() - 1]


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _size(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _rank(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return _global_ranks(_data_parallel_name(with_context_parallel, False))[0]


def get_context_parallel_world_size() -> int:
    return _size("cp")


def get_context_parallel_rank() -> int:
    return _rank("cp")


def get_context_parallel_global_ranks() -> list[int]:
    return _global_ranks("cp")


def get_tensor_and_context_parallel_world_size() -> int:
    return _size("tp_cp")


def get_tensor_and_context_parallel_rank() -> int:
    return _rank("tp_cp")


def get_expert_model_parallel_world_size() -> int:
    return _size("ep")


def get_expert_model_parallel_rank() -> int:
    return _rank("ep")


def get_expert_tensor_parallel_world_size() -> int:
    return _size("expt_tp")


def get_expert_tensor_parallel_rank() -> int:
    return _rank("expt_tp")


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    return _size("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    return _rank("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


# Stages of the pipeline


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return None if _state is None else _state.virtual_size


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    assert _state is not None, "initialize_model_parallel() comes first"
    _state.virtual_size = size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    return None if _state is None else _state.virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    assert _state is not None, "initialize_model_parallel() comes first"
    _state.virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (its chunk `vp_stage`, unless `ignore_virtual`) holds the embedding."""
    stage = get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage
    return get_pipeline_model_parallel_rank() == 0 and (ignore_virtual or stage in (None, 0))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (its chunk `vp_stage`, unless `ignore_virtual`) holds the output layer."""
    stage, size = (
        get_virtual_pipeline_model_parallel_rank() if vp_stage is None else vp_stage,
        get_virtual_pipeline_model_parallel_world_size(),
    )
    last_chunk = size is None or stage is None or stage == size - 1
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1 and (ignore_virtual or last_chunk)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    assert _state is not None, "initialize_model_parallel() comes first"
    return _state.memory_buffer
