"""The distributed optimizer: each data-parallel rank keeps main parameters and moments of, and updates, one part of every gradient bucket.

The parts are those of the buffers' layout (distributed/param_and_grad_buffer.py): flat runs of elements, whose ends may lie inside a
parameter. Gradients arrive by reduce-scatter; after the update the parameters are gathered in their own dtype (ZeRO stage 1,
https://arxiv.org/abs/1910.02054); where that goes on in the background, bucket by bucket, beside the update of the next ones. Experts are
spread over the ranks that hold the same experts. With several optimizer instances each instance's ranks keep all parts among themselves,
and all instances make the same update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.optimizer.clip_grads import NormGroups, NormPlan
from megatron.core.optimizer.fused_optimizers import Part
from megatron.core.optimizer.optimizer import MegatronOptimizer, OptimizedParam
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.utils import get_pg_rank, get_pg_size

_HALF = (torch.float16, torch.bfloat16)


@dataclass
class ShardedParam(OptimizedParam):
    """A parameter of which this rank updates the flattened elements [start, end); start == end when none.

    replica: of the optimizer instances, which all have these elements, the number of this one.
    model_shard, grad_shard: these elements in the parameter and gradient buffers. main_param: model_shard itself, or its fp32 copy.
    """

    start: int
    end: int
    replica: int
    model_shard: torch.Tensor
    grad_shard: torch.Tensor

    @property
    def model_tensor(self) -> torch.Tensor:
        return self.model_shard


def shard_params(config: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]], model_chunks: Sequence[Any]) -> list[ShardedParam]:
    """This rank's part of each of the trainable parameters `named`.

    Raises ValueError unless the chunks are DistributedDataParallel with use_distributed_optimizer.
    """
    if not all(getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False) for chunk in model_chunks):
        raise ValueError(
            "a distributed optimizer needs model chunks wrapped in DistributedDataParallel with "
            "DistributedDataParallelConfig(use_distributed_optimizer=True)"
        )
    if config.overlap_param_gather and not all(chunk.ddp_config.overlap_param_gather for chunk in model_chunks):
        raise ValueError(
            "OptimizerConfig.overlap_param_gather is set and DistributedDataParallelConfig.overlap_param_gather is not: set both"
        )
    found = {}
    for chunk in model_chunks:
        for buffer in chunk.grad_buffers:
            for slot, param in zip(buffer.layout.params, buffer.params, strict=True):
                start, end = buffer.own_range(slot)
                place = slice(slot.start + start, slot.start + end)
                replica = get_pg_rank(buffer.instance_group)
                found[id(param)] = (start, end, replica, buffer.param_data[place], buffer.grad_data[place])
    entries = []
    for name, param in named:
        start, end, replica, model_shard, grad_shard = found[id(param)]
        main = model_shard.float() if param.dtype in _HALF else model_shard
        entries.append(ShardedParam(name, param, main, start, end, replica, model_shard, grad_shard))
    return entries


class DistributedOptimizer(MegatronOptimizer):
    """As its base, over this rank's parts of the parameters (ShardedParam). Every data-parallel rank must call each method."""

    params: list[ShardedParam]  # type: ignore[assignment]
    state_kind = "fully_reshardable"

    def __init__(self, *args: Any, model_chunks: Sequence[Any], **kwargs: Any) -> None:
        # the ranks over which dense parameters, and experts, are spread: of one optimizer instance
        self.shard_groups = (model_chunks[0].dense_shard_group, model_chunks[0].expert_shard_group)
        super().__init__(*args, model_chunks=model_chunks, **kwargs)
        self._by_param = {id(entry.model_param): entry for entry in self.params}
        self._parts = self._parts_of_update()

    def _parts_of_update(self) -> list[Part]:
        """Bucket by bucket, each with its gather, where gathers run in the background; nothing where one update does.

        What is gathered by nobody (of experts that no other rank has) is updated at the end, beside the last gathers.
        """
        rest = {id(entry.model_param): number for number, entry in enumerate(self.params)}
        parts: list[Part] = []
        for chunk in self.model_chunks:
            for params, gather in chunk.param_syncs():  # type: ignore[operator]
                # a bucket may have parameters of several groups, and some that were frozen since; in the optimizer's order
                parts.append((sorted(rest.pop(id(param)) for param in params if id(param) in rest), gather))
        if parts and rest:
            parts.append((list(rest.values()), None))
        return parts

    def _make_norm_plan(self, groups: ProcessGroupCollection) -> NormPlan:
        named = [(entry.name, entry.model_param) for entry in self.params]
        ranges = [(entry.start, entry.end) for entry in self.params]
        dense = NormGroups(groups.mp, groups.tp, self.shard_groups[0])
        experts = NormGroups(groups.tp_ep_pp, groups.expt_tp, self.shard_groups[1])
        return NormPlan(named, dense, groups.pp, ranges, experts)

    def prepare_grads(self) -> list[torch.Tensor]:
        """This rank's parts of the gradients, in the main parameters' dtypes and order."""
        for entry in self.params:
            filled = entry.model_param.main_grad_filled  # type: ignore[attr-defined]
            assert filled, f"main_grad of {entry.name} is not complete: call finish_grad_sync before step"
        return [entry.grad_shard.to(entry.main_param.dtype) for entry in self.params]

    def step_with_ready_grads(self, grads: Sequence[torch.Tensor], grad_scale: torch.Tensor | None, skip: torch.Tensor) -> None:
        for chunk in self.model_chunks:  # a gather that no forward waited for must not read what is written now
            chunk.finish_param_sync()  # type: ignore[operator]
        if self._parts:
            self._update(grads, grad_scale, skip, self._parts)
            return
        self._update(grads, grad_scale, skip)
        for chunk in self.model_chunks:
            chunk.start_param_sync()  # type: ignore[operator]

    def nonfinite_report(self) -> list[tuple[str, int]]:
        """As its base, over all data-parallel ranks' parts: a collective."""
        for of_experts, group in enumerate(self.shard_groups):
            places = [place for place, entry in enumerate(self.params) if is_expert(entry.model_param) == bool(of_experts)]
            if places and get_pg_size(group) > 1:
                counts = self._nonfinite_counts[places]
                dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=group)
                self._nonfinite_counts[places] = counts
        return super().nonfinite_report()

    # --- checkpoints ---

    def shard_range(self, param: nn.Parameter) -> tuple[int, int] | None:
        entry = self._by_param[id(param)]
        return entry.start, entry.end

    def shard_replica(self, param: nn.Parameter) -> int:
        return self._by_param[id(param)].replica

    def model_sharded_state(self, kind: str = "fully_reshardable") -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """(record of the parameter table, {state name: flat tensor of the elements that `shard_range` says}); the main one is `param`.

        Raises ValueError for a kind other than "fully_reshardable".
        """
        if kind != self.state_kind:
            raise ValueError(f"a distributed optimizer's state of kind {kind!r} is not built yet; use {self.state_kind!r}")
        for record, tensors in super().model_sharded_state("plain"):
            tensors.pop("fp32_param", None)
            yield record, {"param": self._by_param[id(record.param)].main_param, **tensors}

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("a distributed optimizer has no state for one file: save model_sharded_state() and common_state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("a distributed optimizer does not load one file: fill model_sharded_state() and call load_common_state_dict()")
