"""A linear layer whose weight every tensor-parallel rank holds whole: for outputs too narrow to be worth a split."""

from collections.abc import Callable

import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    empty_parameter,
    linear_with_grad_accumulation_and_async_allreduce,
    resolve_tp_group,
)
from megatron.core.tensor_parallel.param_sharding import declare, replicated
from megatron.core.utils import Group, get_pg_size


class DuplicatedLinear(torch.nn.Module):
    """y = x A^T + b without any communication. forward: [s, b, input_size] -> ([s, b, output_size], bias or None).

    Each rank computes with the tokens that it has. Under sequence parallelism these are its own, so that the weight's gradient is a partial
    sum over the tensor-parallel ranks; without it all ranks have the same tokens and must get the same whole gradient of the output, for
    which the caller cares: then all compute the same gradient of the weight. The bias is returned instead of added when `skip_bias_add`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable,
        bias: bool = False,
        skip_bias_add: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.fuse_weight_grad = config.gradient_accumulation_fusion
        self.tp_group = resolve_tp_group(tp_group, pg_collection)
        partial = ("tp",) if config.sequence_parallel and get_pg_size(self.tp_group) > 1 else ()
        sharding = replicated((output_size, input_size), grad_partial=partial)
        self.weight = empty_parameter(sharding, config, 1)
        declare(self.weight, sharding, init_method)
        if bias:
            sharding = replicated((output_size,), grad_partial=partial)
            self.bias = empty_parameter(sharding, config, 1)
            declare(self.bias, sharding, torch.nn.init.zeros_)
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            None if self.skip_bias_add else self.bias,
            gradient_accumulation_fusion=self.fuse_weight_grad,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size} (not split), bias {self.bias is not None}"
