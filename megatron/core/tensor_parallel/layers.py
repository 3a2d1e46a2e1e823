"""Linear layers and the embedding, split over the tensor-parallel ranks.

Activations are [s, b, h]. Under sequence parallelism what lies between the split regions is divided over the ranks in dim 0.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core import device
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.activated_linear import ActivatedLinear, Activation
from megatron.core.tensor_parallel.comm_overlap import (
    LinearReduceScatter,
    gather_matmul,
    matmul_reduce_scatter,
    start_gather,
    start_reduce_scatter,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_first_dim,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    start_gather_first_dim,
    start_reduce_scatter_first_dim,
)
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, declare, local_shape
from megatron.core.tensor_parallel.utils import VocabUtility
from megatron.core.tensor_parallel.weight_grad import weight_grad, write_embedding_grad
from megatron.core.utils import Group, divide, get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none


def resolve_tp_group(tp_group: Group, pg_collection: ProcessGroupCollection | None, is_expert: bool = False) -> Group:
    """The (expert) tensor-parallel group of a layer: of the collection, else the one given, else that of `parallel_state`."""
    if pg_collection is not None:
        return pg_collection.expt_tp if is_expert else pg_collection.tp
    return get_tensor_model_parallel_group_if_none(tp_group, is_expert)


def empty_parameter(sharding: ParamSharding, config: ModelParallelConfig, tp_size: int) -> torch.nn.Parameter:
    """An unset parameter of this rank's shape, in config.params_dtype on the device (the CPU with use_cpu_initialization)."""
    where = torch.device("cpu") if config.use_cpu_initialization else device.current_device()
    return torch.nn.Parameter(torch.empty(local_shape(sharding, tp_size), dtype=config.params_dtype, device=where))


class _Linear(torch.autograd.Function):
    """x W^T + b, whose backward writes dW into the gradient buffer.

    Backward overlaps what it communicates: the gathering of x with the product for dx, the reduction of dx with the product for dW.
    With sequence_parallel, by comm_overlap.py: all of it and the gathering in forward with `overlap_gather`, the reduction of dx with its
    own product with `overlap_scatter`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fuse_weight_grad: bool,
        reduce_input_grad: bool,
        sequence_parallel: bool,
        group: Group,
        overlap_gather: bool = False,
        overlap_scatter: bool = False,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.settings = fuse_weight_grad, reduce_input_grad, sequence_parallel, overlap_gather, overlap_scatter, group
        if sequence_parallel and overlap_gather:
            out, _ = gather_matmul(x, weight.t(), group, keep=False)
            return out if bias is None else out.add_(bias)
        return F.linear(gather_first_dim(x, group) if sequence_parallel else x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, (fuse_weight_grad, reduce_input_grad, sequence_parallel, overlap_gather, overlap_scatter, group) = ctx.weight, ctx.settings
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grads[0].contiguous()
        gathered, gathering, grad_input, reduced = x, None, None, None
        if sequence_parallel and needs_weight:
            gathered, gathering = (start_gather if overlap_gather else start_gather_first_dim)(x, group)
        if needs_input and sequence_parallel and overlap_scatter:
            grad_input, reduced = matmul_reduce_scatter(grad, weight, group)
        elif needs_input:
            grad_input = grad.matmul(weight)
            if sequence_parallel:
                whole = grad_input  # must live until it is reduced
                grad_input, reduced = (start_reduce_scatter if overlap_gather else start_reduce_scatter_first_dim)(whole, group)
            elif reduce_input_grad:
                reduced = dist.all_reduce(grad_input, group=group, async_op=True).wait
        grad_weight = None
        grad_2d = grad.view(-1, grad.shape[-1])
        if needs_weight:
            if gathering is not None:
                gathering()
            grad_weight = weight_grad(weight, grad_2d, gathered.reshape(-1, gathered.shape[-1]), fuse_weight_grad)
        grad_bias = grad_2d.sum(dim=0) if needs_bias and ctx.has_bias else None
        if reduced is not None:
            reduced()
        return grad_input, grad_weight, grad_bias, *[None] * 6


def linear_with_grad_accumulation_and_async_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Group = None,
) -> torch.Tensor:
    """input [s, b, in] times weight [out, in] transposed, plus bias.

    allreduce_dgrad: sum the input's gradient over the group.
    sequence_parallel: gather the input's tokens first, reduce-scatter its gradient.
    gradient_accumulation_fusion: write the weight's gradient into weight.main_grad, where there is one.
    """
    if grad_output_buffer is not None or wgrad_deferral_limit:
        raise ValueError("grad_output_buffer and wgrad_deferral_limit (deferred embedding gradients) are not built yet; leave them out")
    group = get_tensor_model_parallel_group_if_none(tp_group)
    alone = get_pg_size(group) == 1
    return _Linear.apply(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad and not alone, sequence_parallel and not alone, group
    )


class _ShareOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parts: int) -> torch.Tensor:
        return x / parts

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def share_of_sum(x: torch.Tensor, parts: int) -> torch.Tensor:
    """x / parts, for a value that `parts` ranks hold each whole and whose shares will be summed over them; each gets the whole gradient."""
    return x if parts == 1 else _ShareOfSum.apply(x, parts)


class ColumnParallelLinear(torch.nn.Module):
    """y = x A^T + b with the rows of A (the outputs) split over the ranks.

    forward: [s, b, input_size] (tokens split under sequence parallelism) -> ([s, b, output_size / tp], bias or None); the bias is returned
    instead of added when `skip_bias_add`. `stride`: the outputs are that many equal segments, each split by itself;
    `segments` (ours) names and sizes them instead. `disable_grad_reduce`: the caller sums the input's gradient.
    `logical_size` (ours): outputs beyond it are padding. `shared_with` (ours): the checkpoint key of the tied weight.
    `is_expert`: split over `expt_tp` and communicating nothing, the dispatcher does; `experts` (ours) says which expert it is.
    `fp8`: an fp8.linear.Fp8Linear that computes in its place, set by the decoder layer that it is a part of.
    """

    fp8: Any = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list | None = None,
        grad_output_buffer: list | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        segments: tuple[tuple[str, int], ...] | None = None,
        logical_size: int | None = None,
        shared_with: str | None = None,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.config, self.gather_output, self.skip_bias_add = config, gather_output, skip_bias_add
        self.tp_group = resolve_tp_group(tp_group, pg_collection, is_expert)
        rank, size = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        self.output_size_per_partition = divide(output_size, size)
        self.sequence_parallel = config.sequence_parallel and size > 1 and not is_expert
        self.allreduce_dgrad = size > 1 and not self.sequence_parallel and not disable_grad_reduce and not is_expert
        expert: dict[str, Any] = {"is_expert": is_expert, "experts": experts}
        if self.sequence_parallel and gather_output:
            raise ValueError("ColumnParallelLinear: gather_output cannot be used with sequence_parallel; turn one off")
        names = segments or tuple((f"rows{index}", divide(output_size, stride)) for index in range(stride))
        rows = tuple(Segment(segment, length, "tp") for segment, length in names)
        self.weight: Any = None
        if not skip_weight_param_allocation:
            sharding = ParamSharding((output_size, input_size), 0, rows, logical_size, shared_with=shared_with, **expert)
            self.weight = empty_parameter(sharding, config, size)
            declare(self.weight, sharding, init_method, tp_rank=rank, tp_size=size)
        if bias:
            sharding = ParamSharding((output_size,), 0, rows, logical_size, **expert)
            self.bias = empty_parameter(sharding, config, size)
            declare(self.bias, sharding, torch.nn.init.zeros_, tp_rank=rank, tp_size=size)
        else:
            self.register_parameter("bias", None)

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`weight`: used in the place of the layer's own (tied embeddings). `runtime_gather_output` overrides gather_output."""
        weight = self.weight if weight is None else weight
        if weight is None:
            raise ValueError("ColumnParallelLinear was built with skip_weight_param_allocation: pass forward a weight")
        if tuple(weight.shape) != (self.output_size_per_partition, self.input_size):
            raise ValueError(f"weight of shape {tuple(weight.shape)} given, expected {(self.output_size_per_partition, self.input_size)}")
        config, bias = self.config, None if self.skip_bias_add else self.bias
        if self.fp8 is not None and weight is self.weight:
            output = self.fp8(
                input_,
                bias,
                fuse_weight_grad=config.gradient_accumulation_fusion,
                reduce_input_grad=self.allreduce_dgrad,
                sequence_parallel=self.sequence_parallel,
                group=self.tp_group,
                training=self.training,
            )
        else:
            output = _Linear.apply(
                input_,
                weight,
                bias,
                config.gradient_accumulation_fusion,
                self.allreduce_dgrad,
                self.sequence_parallel,
                self.tp_group,
                config.tp_comm_overlap and config.tp_comm_overlap_ag,
                config.tp_comm_overlap and config.tp_comm_overlap_rs_dgrad,
            )
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size} (columns split), bias {self.bias is not None}"


class RowParallelLinear(torch.nn.Module):
    """y = x A^T + b with the columns of A (the inputs) split over the ranks.

    forward: [s, b, input_size / tp] (or whole, when not `input_is_parallel`) -> ([s, b, output_size], bias or None), summed over the ranks,
    and split by tokens under sequence parallelism. The bias is returned instead of added when `skip_bias_add`.
    `is_expert`: split over `expt_tp`; the output (and the bias) is this rank's part of the sum, which the dispatcher makes.
    `fp8`: as ColumnParallelLinear's.
    """

    fp8: Any = None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.config, self.input_is_parallel, self.skip_bias_add, self.is_expert = config, input_is_parallel, skip_bias_add, is_expert
        self.tp_group = resolve_tp_group(tp_group, pg_collection, is_expert)
        rank, size = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        self.input_size_per_partition = divide(input_size, size)
        self.sequence_parallel = config.sequence_parallel and size > 1 and not is_expert
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError("RowParallelLinear: sequence_parallel needs input_is_parallel")
        rows = tuple(Segment(f"columns{index}", divide(input_size, stride), "tp") for index in range(stride))
        expert: dict[str, Any] = {"is_expert": is_expert, "experts": experts}
        sharding = ParamSharding((output_size, input_size), 1, rows, **expert)
        self.weight = empty_parameter(sharding, config, size)
        declare(self.weight, sharding, init_method, tp_rank=rank, tp_size=size)
        if bias:
            # Added after the sum, so every rank has all of it; under sequence parallelism each sees the gradient of its own tokens alone.
            sharding = ParamSharding((output_size,), grad_partial=("tp",) if self.sequence_parallel else (), **expert)
            self.bias = empty_parameter(sharding, config, size)
            declare(self.bias, sharding, torch.nn.init.zeros_, tp_rank=rank, tp_size=size)
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: torch.Tensor, activation: Activation | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`activation` is applied to the input first, and its output not kept; not for experts."""
        if self.is_expert:
            assert activation is None
            if self.fp8 is None:
                output = _Linear.apply(input_, self.weight, None, self.config.gradient_accumulation_fusion, False, False, self.tp_group)
            else:
                output = self._in_fp8(input_, None)
            share = None if self.bias is None else share_of_sum(self.bias, get_pg_size(self.tp_group))
            return (output, share) if self.skip_bias_add or share is None else (output + share, None)
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        bias = None if self.skip_bias_add else self.bias
        alone, config = get_pg_size(self.tp_group) == 1, self.config
        overlaps = self.sequence_parallel and config.tp_comm_overlap and config.tp_comm_overlap_rs
        if activation is not None and self.fp8 is None and not overlaps:
            added, fuse = bias if alone else None, config.gradient_accumulation_fusion
            return self.summed(ActivatedLinear.apply(input_, self.weight, added, activation, fuse))
        if activation is not None:
            input_ = activation(input_)
        if overlaps:
            output = LinearReduceScatter.apply(
                input_, self.weight, config.gradient_accumulation_fusion, config.tp_comm_overlap_ag, self.tp_group
            )
            return output if bias is None else output + bias, self.bias if self.skip_bias_add else None
        added = bias if alone else None
        if self.fp8 is not None:
            output = self._in_fp8(input_, added)
        else:
            output = linear_with_grad_accumulation_and_async_allreduce(
                input_, self.weight, added, config.gradient_accumulation_fusion, False, False, tp_group=self.tp_group
            )
        return self.summed(output)

    def _in_fp8(self, input_: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.fp8(
            input_,
            bias,
            fuse_weight_grad=self.config.gradient_accumulation_fusion,
            reduce_input_grad=False,
            sequence_parallel=False,
            group=self.tp_group,
            training=self.training,
        )

    def summed(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `forward` returns, of this rank's part of the sum (which has the bias where there is one rank)."""
        if get_pg_size(self.tp_group) > 1:
            reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else reduce_from_tensor_model_parallel_region
            output = reduce(output, group=self.tp_group)
            output = output if self.skip_bias_add or self.bias is None else output + self.bias
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return f"{self.input_size} -> {self.output_size} (inputs split), bias {self.bias is not None}"


class _LookUp(torch.autograd.Function):
    """Adds the gradient to the rows that were looked up alone."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, outside: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids if outside is None else ids.masked_fill(outside, -1))
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        write_embedding_grad(ctx.weight, ids.flatten(), grads[0].flatten(0, -2))
        return None, None, None


class VocabParallelEmbedding(torch.nn.Module):
    """A table [num_embeddings, embedding_dim] whose rows are split over the ranks.

    forward: ids of any shape -> ids.shape + [embedding_dim]; with `reduce_scatter_embeddings` ids are [s, b] and each rank gets its tokens.
    On a CPU an id outside of the table raises ValueError (a GPU cannot check without waiting).
    `logical_size` (ours): rows beyond it are padding.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Group = None,
        pg_collection: ProcessGroupCollection | None = None,
        logical_size: int | None = None,
        shared_with: str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.fuse_weight_grad = config.gradient_accumulation_fusion
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tp_group = resolve_tp_group(tp_group, pg_collection)
        rank, size = get_pg_rank(self.tp_group), get_pg_size(self.tp_group)
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(num_embeddings, rank, size)
        rows = (Segment("vocabulary", num_embeddings, "tp"),)
        sharding = ParamSharding((num_embeddings, embedding_dim), 0, rows, logical_size, shared_with=shared_with)
        self.weight = empty_parameter(sharding, config, size)
        declare(self.weight, sharding, init_method, tp_rank=rank, tp_size=size)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if input_.device.type == "cpu" and input_.numel() and not 0 <= int(input_.min()) <= int(input_.max()) < self.num_embeddings:
            raise ValueError(
                f"token ids from {int(input_.min())} to {int(input_.max())} in a batch, but the model's vocabulary is 0 to "
                f"{self.num_embeddings - 1}; use the tokenizer that the data was made with, or a larger vocabulary"
            )
        if get_pg_size(self.tp_group) == 1:
            return self._look_up(input_)
        outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        embedded = self._look_up((input_ - self.vocab_start_index).masked_fill(outside, 0), outside)
        embedded = embedded.masked_fill(outside.unsqueeze(-1), 0.0)
        reduce = reduce_scatter_to_sequence_parallel_region if self.reduce_scatter_embeddings else reduce_from_tensor_model_parallel_region
        return reduce(embedded, group=self.tp_group)

    def _look_up(self, ids: torch.Tensor, outside: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the table; those of ids that are `outside` get no gradient."""
        if self.fuse_weight_grad and hasattr(self.weight, "main_grad") and kernels_run_on(self.weight):
            return _LookUp.apply(ids, outside, self.weight)
        return F.embedding(ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim} (rows split)"


__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to_tensor_model_parallel_region",
    "linear_with_grad_accumulation_and_async_allreduce",
]
