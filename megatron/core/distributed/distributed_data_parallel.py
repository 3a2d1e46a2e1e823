"""Data parallelism: a module whose gradients gather in contiguous buffers and are averaged bucket by bucket."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core import device
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer, default_bucket_size, group_params
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.param_sharding import is_expert
from megatron.core.tensor_parallel.weight_grad import add_to_main_grad, mark_written
from megatron.core.utils import get_pg_size, strip_wrapper_prefix


class _BucketReadiness:
    """Starts the reduction of buckets in the order of `sequence`, as backward fills them.

    How many times a parameter's gradient is written in one backward (twice for tied embeddings, never for an unused one) is learnt in
    the first step, which does not overlap. Experts may have no tokens in one step and many in the next: of them at least one write is
    waited for. The order is fixed, over the buffers too, so that all ranks issue the same collectives in the same order, whichever
    experts their tokens chose.
    """

    def __init__(self, sequence: list[tuple[ParamAndGradBuffer, int]]) -> None:
        self.sequence = sequence
        buckets = [buffer.buckets[index] for buffer, index in sequence]
        self.place_of = {id(param): place for place, bucket in enumerate(buckets) for param in bucket.params}
        self.experts = [[id(param) for param in bucket.params if is_expert(param)] for bucket in buckets]
        self.writes: Counter = Counter()  # of each parameter in this step
        self.expected: list[int] | None = None
        self.reset()

    def reset(self) -> None:
        self.seen = [0] * len(self.sequence)
        self.next = 0
        self.writes.clear()

    def ready(self, param: nn.Parameter) -> None:
        place = self.place_of[id(param)]
        self.seen[place] += 1
        self.writes[id(param)] += 1
        buffer, index = self.sequence[place]
        if buffer.buckets[index].dispatched:
            raise RuntimeError(
                "a gradient was written after its bucket had been reduced, because this step runs parts of the model that the first did "
                "not: train without --overlap-grad-reduce"
            )
        while self.expected is not None and self.next < len(self.seen) and self.seen[self.next] >= self.expected[self.next] > 0:
            buffer, index = self.sequence[self.next]
            buffer.reduce_bucket(index, async_op=True)
            self.next += 1

    def finish(self) -> None:
        if self.expected is None:
            idle = [sum(self.writes[param] == 0 for param in experts) for experts in self.experts]
            self.expected = [seen + waited_for for seen, waited_for in zip(self.seen, idle, strict=True)]


class DistributedDataParallel(nn.Module):
    """Wrap `module`; every trainable parameter gets `main_grad`, `main_grad_filled` and `grad_ready`.

    A step: zero_grad_buffer(); forward and backward of each micro batch, all but the last within no_sync(); finish_grad_sync(). Then
    main_grad holds the mean over the data-parallel ranks (the sum with config.calculate_per_token_loss); with
    ddp_config.use_distributed_optimizer in the part of each bucket that this rank updates, and nothing of use elsewhere. After that
    update start_param_sync() collects the parameters, or beside it what param_syncs() gives.

    Args:
        config: the model's TransformerConfig; only `calculate_per_token_loss` is read.
        ddp_config: see DistributedDataParallelConfig.
        disable_bucketing: one bucket a buffer.
        pg_collection: `dp_cp` is reduced over (`expt_dp` for experts), with several optimizer instances `intra_dp_cp` and then
            `inter_dist_opt` (`intra_expt_dp` and `inter_expt_dp`); parallel_state's groups by default.

    Experts' gradients are summed over fewer ranks, and scaled as the others are: what their tokens on all data-parallel ranks give was
    brought to them already.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: None = None,
    ) -> None:
        super().__init__()
        if full_param_layout is not None:
            raise ValueError("full_param_layout is not built yet; leave it out")
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        groups = default_pg_collection(pg_collection)
        self.dp_cp_group = groups.dp_cp
        self.expt_dp_group = groups.expt_dp
        instances = ddp_config.num_distributed_optimizer_instances > 1
        # (ranks of a buffer's reduction within an optimizer instance, ranks of the same place in the others)
        self._dense_groups = (groups.intra_dp_cp, groups.inter_dist_opt) if instances else (groups.dp_cp, None)
        self._expert_groups = (groups.intra_expt_dp, groups.inter_expt_dp) if instances else (groups.expt_dp, None)
        self.is_last_microbatch = True
        self.grad_buffers = self._make_buffers(disable_bucketing)
        self._sequence = _reduction_order(self.grad_buffers, list(module.parameters()))
        self.bucket_groups = [buffer.buckets[index] for buffer, index in self._sequence]
        self._overlap = ddp_config.overlap_grad_reduce and any(buffer.num_ranks > 1 for buffer in self.grad_buffers)
        self._readiness = _BucketReadiness(self._sequence) if self._overlap else None
        graphs = getattr(config, "cuda_graph_impl", "none")
        # CUDA graphs of layers, and linears of Transformer Engine, add to main_grad whatever it holds
        self._cleared = graphs == "local" or any(getattr(param, "adds_to_main_grad", False) for param in module.parameters())
        # a graph cannot wait for what was started outside of it
        gather_in_background = ddp_config.overlap_param_gather and graphs == "none"
        forward_order = self._sequence[::-1]
        self._param_gather = ParamGather(forward_order, module, gather_in_background) if ddp_config.use_distributed_optimizer else None
        for buffer in self.grad_buffers:
            for param in buffer.params:
                param.grad_ready = self._grad_ready_function(param)  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(_move_to_main_grad)

    def _make_buffers(self, disable_bucketing: bool) -> list[ParamAndGradBuffer]:
        ddp_config = self.ddp_config

        def grad_dtype_of(dtype: torch.dtype) -> torch.dtype:
            return torch.float32 if ddp_config.grad_reduce_in_fp32 and dtype.itemsize < 4 else dtype

        named = [(strip_wrapper_prefix(name), param) for name, param in self.module.named_parameters()]
        dense_size = get_pg_size(self.dp_cp_group)
        per_token = bool(getattr(self.config, "calculate_per_token_loss", False))
        buffers = []
        for (_, grad_dtype, of_experts), params in group_params(named, grad_dtype_of).items():
            group, instance_group = self._expert_groups if of_experts else self._dense_groups
            num_ranks = get_pg_size(group) * get_pg_size(instance_group)
            numel = sum(param.numel() for _, param in params)
            bucket_size = ddp_config.bucket_size or default_bucket_size(dense_size)
            if ddp_config.num_buckets is not None:
                bucket_size = -(-numel // ddp_config.num_buckets)
            # Only NCCL can average; by a power of two it gives the same bits. The mean is over all data, also for experts, which fewer
            # ranks sum.
            average = (
                (ddp_config.average_in_collective or num_ranks.bit_count() == 1)
                and not ddp_config.reduce_scatter_with_fp32_accumulation
                and not per_token
                and num_ranks > 1
                and device.on_accelerator(params[0][1])
            )
            buffers.append(
                ParamAndGradBuffer(
                    params,
                    grad_dtype,
                    group,
                    None if disable_bucketing else bucket_size,
                    scale=1.0 if per_token else (num_ranks if average else 1.0) / dense_size,
                    average_in_collective=average,
                    count_nonfinite=ddp_config.check_for_nan_in_grad or ddp_config.check_for_large_grads,
                    count_large=ddp_config.check_for_large_grads,
                    high_bandwidth_padding=ddp_config.pad_buckets_for_high_nccl_busbw,
                    distributed=ddp_config.use_distributed_optimizer,
                    instance_group=instance_group,
                    sum_in_fp32=ddp_config.reduce_scatter_with_fp32_accumulation,
                )
            )
        return buffers

    @property
    def dense_shard_group(self) -> dist.ProcessGroup | None:
        """The ranks over which a distributed optimizer spreads what is not an expert's."""
        return self._dense_groups[0]

    @property
    def expert_shard_group(self) -> dist.ProcessGroup | None:
        return self._expert_groups[0]

    def _grad_ready_function(self, param: nn.Parameter) -> Callable[[], None]:
        def grad_ready() -> None:
            if self._readiness is not None and self.is_last_microbatch:
                self._readiness.ready(param)

        return grad_ready

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro batches within it only accumulate; the one after it is the step's last."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def zero_grad_buffer(self) -> None:
        """Begin a step. Gradients are not cleared but overwritten by their first writer, unless that can but add."""
        for buffer in self.grad_buffers:
            buffer.reset(cleared=self._cleared)
        if self._readiness is not None:
            self._readiness.reset()

    def note_recorded_step(self) -> None:
        """A CUDA graph has done what a step does to the gradients, finish_grad_sync included."""
        for buffer in self.grad_buffers:
            buffer.note_reduced()

    def start_grad_sync(self, *unused: Any) -> None:
        """Start the reductions that were not started yet; in the background with overlap_grad_reduce.

        A schedule calls it after the chunk's last backward of a step: a bucket that still waits for experts without tokens must not keep
        this rank's other chunks from the order in which all ranks reduce.
        """
        for buffer, index in self._sequence:
            if not buffer.buckets[index].dispatched:
                buffer.reduce_bucket(index, async_op=self._overlap)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete the step's reduction; main_grad of parameters that took no part is zero. Does nothing the second time."""
        self.start_grad_sync()
        for buffer in self.grad_buffers:
            buffer.wait()
        if self._readiness is not None:
            self._readiness.finish()

    def start_param_sync(self, *unused: Any, force_sync: bool = False) -> None:
        """Collect the parameters that the ranks updated, with the distributed optimizer; nothing to do otherwise.

        With overlap_param_gather each module waits for its own parameters when its next forward begins (unless `force_sync`).
        """
        if self._param_gather is not None:
            self._param_gather.start()
            if force_sync:
                self._param_gather.finish()

    def param_syncs(self) -> list[tuple[list[nn.Parameter], Callable[[], None]]]:
        """start_param_sync() in pieces, where it goes on in the background; empty elsewhere.

        (parameters of a bucket, what starts to collect them), to be called in this order, each after the update of its parameters.
        """
        return [] if self._param_gather is None else self._param_gather.one_by_one()

    def finish_param_sync(self) -> None:
        """Make every collection of parameters precede what follows: for who reads parameters without a forward."""
        if self._param_gather is not None:
            self._param_gather.finish()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all main gradients; the factor may be a 0-d tensor on the device."""
        for buffer in self.grad_buffers:
            buffer.grad_data.mul_(scaling_factor)

    def broadcast_params(self) -> None:
        """Give every data-parallel rank the values of the first."""
        for param in self.module.parameters():
            group = self.expt_dp_group if is_expert(param) else self.dp_cp_group
            if get_pg_size(group) > 1:
                dist.broadcast(param.detach(), src=dist.get_global_rank(group, 0), group=group)  # type: ignore[arg-type]

    def nonfinite_report(self) -> list[tuple[str, int]]:
        """(parameter, steps): this rank's own gradients that were not finite, since the last call. Waits for the device.

        Counted before the reduction, with check_for_nan_in_grad and more than one data-parallel rank; empty otherwise: the optimizer's
        report then says the same.
        """
        return [item for buffer in self.grad_buffers for item in buffer.nonfinite_report()]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's: the wrapper adds no prefix."""
        self.finish_param_sync()
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self.finish_param_sync()
        return self.module.state_dict_for_save_checkpoint(*args, **kwargs)  # type: ignore[operator]

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.finish_param_sync()
        return self.module.sharded_state_dict(*args, **kwargs)  # type: ignore[operator]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load in the wrapped module, in place: parameters keep their main_grad."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the parameters that the gradient buffers belong to")
        self.finish_param_sync()
        return self.module.load_state_dict(state_dict, strict=strict)


def _reduction_order(buffers: list[ParamAndGradBuffer], params: list[nn.Parameter]) -> list[tuple[ParamAndGradBuffer, int]]:
    """All buckets as (buffer, index), in about the order in which backward fills them: by the first registered of their parameters."""
    registered = {id(param): place for place, param in enumerate(params)}
    found = [
        (-min(registered[id(param)] for param in bucket.params), buffer, index)
        for buffer in buffers
        for index, bucket in enumerate(buffer.buckets)
    ]
    return [(buffer, index) for _, buffer, index in sorted(found, key=lambda entry: entry[0])]


def _move_to_main_grad(param: torch.Tensor) -> None:
    """After autograd has summed a parameter's gradient: take it over, and say that it is ready.

    torch calls this without a gradient where the weight's backward wrote main_grad itself; ours says so itself too.
    """
    if param.grad is not None:
        grad, param.grad = param.grad, None
        add_to_main_grad(param, grad)
    elif getattr(param, "adds_to_main_grad", False):
        mark_written(param)
