"""A small model with experts, a stand-in for a mixture of experts: who gets which token is given, so that every layout is comparable.

Each rank has tokens of its own. Tokens go to the experts' ranks and back by an all-gather and a sum over all of `tp_ep`.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.init import deferred_initialization, init_method_normal
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, declare, initialize_parameters, local_shape
from megatron.core.utils import get_pg_rank, get_pg_size

VOCAB, HIDDEN, FFN, EXPERTS = 24, 8, 12, 4


class _Gather(torch.autograd.Function):
    """[n, h] of each rank of the group -> [ranks * n, h]; back: the sum of the gradients of own rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _gather(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _sum_own(grads[0], ctx.group), None


class _Combine(torch.autograd.Function):
    """The opposite: sums of own rows; back: the gradients of all."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sum_own(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _gather(grads[0], ctx.group), None


def _parts(rows: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Every rank's. A collective that nothing of the program's own uses, so that tests can count those."""
    if get_pg_size(group) == 1:
        return [rows.clone()]
    parts = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return parts


def _gather(rows: torch.Tensor, group: Any) -> torch.Tensor:
    return torch.cat(_parts(rows, group))


def _sum_own(rows: torch.Tensor, group: Any) -> torch.Tensor:
    return torch.stack(_parts(rows, group)).sum(0).chunk(get_pg_size(group))[get_pg_rank(group)].contiguous()


class _Linear(nn.Module):
    def __init__(self, name: str, groups: ProcessGroupCollection, experts: Experts) -> None:
        super().__init__()
        shape, dim = ((FFN, HIDDEN), 0) if name == "fc1" else ((HIDDEN, FFN), 1)
        rank, size = get_pg_rank(groups.expt_tp), get_pg_size(groups.expt_tp)
        record = ParamSharding(shape, dim, (Segment(name, FFN, "tp"),), is_expert=True, experts=experts)
        self.weight = nn.Parameter(torch.empty(local_shape(record, size), dtype=torch.float64))
        declare(self.weight, record, init_method_normal(0.4), tp_rank=rank, tp_size=size)
        if name == "fc1":
            record = ParamSharding((FFN,), 0, (Segment(name, FFN, "tp"),), is_expert=True, experts=experts)
            self.bias = nn.Parameter(torch.empty(local_shape(record, size), dtype=torch.float64))
            declare(self.bias, record, init_method_normal(0.1), tp_rank=rank, tp_size=size)


class _Expert(nn.Module):
    def __init__(self, groups: ProcessGroupCollection, experts: Experts) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = _Linear("fc1", groups, experts), _Linear("fc2", groups, experts)


class _Layer(nn.Module):
    def __init__(self, config: Any, number: int, groups: ProcessGroupCollection, grouped: bool) -> None:
        super().__init__()
        self.config, self.layer_number, self.groups, self.grouped = config, number, groups, grouped
        self.sharded_state_dict_keys_map: dict[str, str] = {}
        count = EXPERTS // get_pg_size(groups.ep)
        self.first = get_pg_rank(groups.ep) * count
        self.mlp: Any = nn.Module()
        self.mlp.router = nn.Module()
        self.mlp.router.weight = _dense((EXPERTS, HIDDEN), groups)
        if grouped:
            self.mlp.experts = _Expert(groups, Experts(self.first, EXPERTS, count))
        else:
            self.mlp.experts = nn.Module()
            local = [_Expert(groups, Experts(index, EXPERTS)) for index in range(self.first, self.first + count)]
            self.mlp.experts.local_experts = nn.ModuleList(local)

    def weights(self) -> list[tuple[torch.Tensor, ...]]:
        """(fc1, its bias, fc2) of each expert of this rank."""
        experts: Any = self.mlp.experts
        if self.grouped:
            return list(zip(experts.linear_fc1.weight, experts.linear_fc1.bias, experts.linear_fc2.weight))
        return [(e.linear_fc1.weight, e.linear_fc1.bias, e.linear_fc2.weight) for e in experts.local_experts]

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """hidden: [n, h]; chosen: [n], the expert of each token. An expert without tokens takes no part at all."""
        gate = torch.sigmoid((hidden * self.mlp.router.weight[chosen]).sum(-1, keepdim=True))
        tokens, experts = _Gather.apply(hidden, self.groups.tp_ep), _gather(chosen, self.groups.tp_ep)
        out = torch.zeros_like(tokens) + 0 * tokens
        for index, (fc1, bias, fc2) in enumerate(self.weights()):
            (rows,) = torch.where(experts == self.first + index)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(tokens[rows] @ fc1.t() + bias) @ fc2.t())
        return hidden + gate * _Combine.apply(out, self.groups.tp_ep)


def _dense(shape: tuple[int, ...], groups: ProcessGroupCollection) -> nn.Parameter:
    """Every rank holds it; ranks that share a layer see other tokens (as with sequence parallelism)."""
    param = nn.Parameter(torch.empty(shape, dtype=torch.float64))
    partial = ("tp",) if get_pg_size(groups.tp) > 1 else ()
    declare(param, ParamSharding(shape, grad_partial=partial), init_method_normal(0.4))
    return param


class ExpertToy(nn.Module):
    """(tokens [n], expert of each token [n]) -> loss per token [n]. Layers are those of this rank's pipeline stage."""

    def __init__(self, grouped: bool, groups: ProcessGroupCollection, num_layers: int = 2, frequency: Any = 1) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=num_layers, num_moe_experts=EXPERTS, moe_layer_freq=frequency)
        stage, stages = get_pg_rank(groups.pp), get_pg_size(groups.pp)
        numbers = range(num_layers)[stage * num_layers // stages : (stage + 1) * num_layers // stages]
        with deferred_initialization():
            if stage == 0:
                self.table = _dense((VOCAB, HIDDEN), groups)
            self.decoder: Any = nn.Module()
            self.decoder.layers = nn.ModuleList(_Layer(self.config, number + 1, groups, grouped) for number in numbers)
        initialize_parameters(self, 7)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        hidden = self.table[tokens]
        for layer in self.decoder.layers:
            hidden = layer(hidden, (chosen + layer.layer_number) % EXPERTS)
        return nn.functional.cross_entropy(hidden @ self.table.t(), tokens, reduction="none")


def start_groups(**sizes: int) -> ProcessGroupCollection:
    """Groups of the whole world anew, sizes as in initialize_model_parallel without its `_model_parallel_size` and such."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "instances": "num_distributed_optimizer_instances",
    }
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{names[name]: size for name, size in sizes.items()})  # type: ignore[arg-type]
    return ProcessGroupCollection.use_mpu_process_groups()


def batch(step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the number from which their experts follow. Some experts have no tokens, in the first step others than later.

    Choices 0 and 1 in the first step, then also 2 (of the last two tokens alone), in the third step 0 and 2.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (size,), generator=generator)
    chosen = torch.randint(0, 1 if step == 2 else 2, (size,), generator=generator)
    if step > 0:
        chosen[-2:] = 2
    return tokens, chosen
