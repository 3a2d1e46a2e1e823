"""The public entry to forward and backward over a step's micro batches."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, put_off_weight_grads, write_weight_grad
from megatron.core.transformer.moe.aux_loss_scale import MoEAuxLossAutoScaler, balance_loss_scale
from megatron.core.utils import Group, get_model_config, get_pg_rank, get_pg_size, unwrap_model

from .p2p_communication import P2PCommunicator
from .schedule_plan import no_pipelining, pipeline_plans
from .schedule_runner import run_plan


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None) -> Callable:
    """The function that runs one step's micro batches over `pp_size` pipeline stages (None: those of `schedule_pg_collection`).

    How many chunks a stage has it sees from the model that it is given; `vp_size` is only checked.
    """
    if pp_size is None:
        pp_size = get_pg_size(default_pg_collection(schedule_pg_collection).pp)
    if pp_size == 1:
        if (vp_size or 1) > 1:
            raise ValueError(f"virtual pipeline size {vp_size} needs more than 1 pipeline stage; leave it out")
        return forward_backward_no_pipelining
    return forward_backward_pipelining


def _only(value: Any, what: str) -> Any:
    """`value`, or the one element of a list (callers with model chunks pass lists)."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"without pipelining there is one {what}, not {len(value)}")
        return value[0]
    return value


def loss_and_tokens(
    result: tuple, num_microbatches: int, per_token: bool, cp_group: Group = None
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """What a loss function returned, as (loss to run backward from, valid tokens, report).

    (loss, report): a mean already; it is divided by the number of micro batches.
    (loss sum, number of valid tokens, report): the sum is divided by the tokens (a micro batch without any contributes 0) and by the
    number of micro batches, or, with per-token loss, left as it is: the gradients are divided by the step's tokens at its end.

    With context parallelism the sum is over this rank's tokens and the tokens are those of all ranks of `cp_group`: their masks differ.
    The ranks' gradients are averaged with those of data parallelism, so that each is scaled by their number first.
    Raises ValueError for a mean there: one over some of a micro batch's tokens says nothing of all.
    """
    ranks = get_pg_size(cp_group)
    if len(result) == 2:
        if ranks > 1:
            raise ValueError(
                "with context parallelism the loss function must return (loss sum, number of tokens, report) of its rank's tokens, not "
                "(mean, report)"
            )
        loss, report = result
        return loss / num_microbatches, None, report
    loss, num_tokens, report = result
    if not per_token:
        total = num_tokens
        if ranks > 1:
            total = num_tokens.detach().clone()
            dist.all_reduce(total, group=cp_group)
        loss = loss * ranks / total.clamp(min=1) / num_microbatches
    return loss, num_tokens, report


class _Root(torch.autograd.Function):
    """A scalar in place of what a stage sends on: its backward begins with the gradient that came back, from `box`.

    The graph is kept without the tensor, whose memory goes back once it was received.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, box: list[torch.Tensor]) -> torch.Tensor:
        ctx.box = box
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.box.pop(), None


class _Stage:
    """Forward and backward of this rank's model chunks (a schedule_runner.StageWork).

    forward_step_func(data_iterator, model) -> (output tensor, loss_func); loss_func(output tensor) as `loss_and_tokens` reads it.
    """

    def __init__(
        self,
        forward_step_func: Callable,
        chunks: Sequence[torch.nn.Module],
        iterators: Sequence[Iterator],
        num_microbatches: int,
        *,
        has_loss: bool,
        forward_only: bool,
        collect_non_loss_data: bool,
        cp_group: Group = None,
    ) -> None:
        self.forward_step_func, self.chunks, self.iterators = forward_step_func, chunks, iterators
        self.num_microbatches, self.forward_only, self.collect_non_loss_data = num_microbatches, forward_only, collect_non_loss_data
        self.config = get_model_config(chunks[0])
        self.per_token = bool(getattr(self.config, "calculate_per_token_loss", False))
        self.cp_group = cp_group
        self.loss_chunk = len(chunks) - 1 if has_loss else None
        self.reports: list[Any] = []
        self.tokens: list[torch.Tensor] = []
        self._in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor, list[torch.Tensor]]] = {}
        self._put_off: dict[tuple[int, int], WeightGradQueue] = {}
        added_losses = ("num_moe_experts", "mtp_num_layers")
        if not forward_only and any(getattr(self.config, name, None) is not None for name in added_losses):
            like = next(chunks[0].parameters())
            MoEAuxLossAutoScaler.set_loss_scale(balance_loss_scale(self.config, num_microbatches, like))

    def forward(self, chunk: int, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        model = self.chunks[chunk]
        if activation is not None:
            activation.requires_grad_(not self.forward_only)
            unwrap_model(model).set_input_tensor(activation)
        output, loss_func = self.forward_step_func(self.iterators[chunk], model)
        box: list[torch.Tensor] = []
        root = self._loss(output, loss_func) if chunk == self.loss_chunk else _Root.apply(output, box)
        if not self.forward_only:
            self._in_flight[chunk, microbatch] = (activation, root, box)
        return None if chunk == self.loss_chunk else output.detach()

    def _loss(self, output: torch.Tensor, loss_func: Callable) -> torch.Tensor:
        """The loss to run backward from; notes the report and the tokens."""
        if self.collect_non_loss_data:
            self.reports.append(loss_func(output, non_loss_data=True))
            return output
        loss, num_tokens, report = loss_and_tokens(loss_func(output), self.num_microbatches, self.per_token, self.cp_group)
        self.reports.append(report)
        if num_tokens is not None:
            self.tokens.append(num_tokens)
        return loss

    def backward(self, chunk: int, microbatch: int, gradient: torch.Tensor | None, split: bool) -> torch.Tensor | None:
        activation, root, box = self._in_flight.pop((chunk, microbatch))
        if gradient is not None:
            box.append(gradient)
        elif self.config.grad_scale_func is not None:
            root = self.config.grad_scale_func(root)
        queue: WeightGradQueue = []
        with put_off_weight_grads(queue) if split else nullcontext():
            if root.requires_grad:  # a frozen stage has nothing to do
                root.backward()
        if split:
            self._put_off[chunk, microbatch] = queue
        return None if activation is None else activation.grad

    @torch.no_grad()
    def weights(self, chunk: int, microbatch: int) -> None:
        for arguments in self._put_off.pop((chunk, microbatch)):
            write_weight_grad(*arguments)

    def num_tokens(self) -> torch.Tensor | None:
        """Tokens of this rank's losses, 0 on a stage without a loss; None unless gradients are to be divided by them."""
        if not self.per_token:
            return None
        if self.loss_chunk is None:
            return torch.zeros((), dtype=torch.int64)
        return torch.stack(self.tokens).sum() if self.tokens else None


def _refuse_adjusted_shapes(adjust_tensor_shapes_fn: Callable | None) -> None:
    if adjust_tensor_shapes_fn is not None:
        raise ValueError("adjust_tensor_shapes_fn is not built yet; leave it out")


def forward_backward_no_pipelining(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list,
    model: torch.nn.Module | list,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **unused: Any,
) -> list[Any]:
    """Run every micro batch forward and, unless `forward_only`, backward; return the loss function's report of each.

    forward_step_func(data_iterator, model) -> (output tensor, loss_func); loss_func(output tensor) as `loss_and_tokens` reads it.
    The model's config may hold grad_scale_func (fp16), no_sync_func and finalize_model_grads_func(model chunks, number of tokens).
    """
    _refuse_adjusted_shapes(adjust_tensor_shapes_fn)
    chunk, iterator = _only(model, "model chunk"), _only(data_iterator, "data iterator")
    stage = _Stage(
        forward_step_func,
        [chunk],
        [iterator],
        num_microbatches,
        has_loss=True,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        cp_group=default_pg_collection(pg_collection).cp,
    )
    with torch.inference_mode() if forward_only else nullcontext():
        run_plan(no_pipelining(num_microbatches, forward_only), stage, _no_sync_of(stage.config), grad_sync=_grad_sync_of(stage.config))
    if not forward_only and stage.config.finalize_model_grads_func is not None:
        stage.config.finalize_model_grads_func([chunk], stage.num_tokens())
    return stage.reports


def forward_backward_pipelining(
    *,
    forward_step_func: Callable,
    data_iterator: Iterator | list,
    model: torch.nn.Module | list,
    num_microbatches: int,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **unused: Any,
) -> list[Any]:
    """The same for a model spread over the stages of a pipeline; the reports are on the last stage, other stages return none.

    Args:
        model: this stage's chunks (several: interleaved), which take their input by `set_input_tensor`.
        data_iterator: one for each chunk, each giving every micro batch, or one for all.
        seq_length, micro_batch_size: what stages send each other is [seq_length, micro_batch_size, hidden size].
    Raises ValueError for numbers of micro batches and chunks that the config's pipeline_schedule does not do.
    """
    _refuse_adjusted_shapes(adjust_tensor_shapes_fn)
    chunks = list(model) if isinstance(model, list | torch.nn.ModuleList) else [model]
    groups = default_pg_collection(pg_collection)
    config = get_model_config(chunks[0])
    stages, rank = get_pg_size(groups.pp), get_pg_rank(groups.pp)
    assert groups.pp is not None
    stage = _Stage(
        forward_step_func,
        chunks,
        _iterators(data_iterator, len(chunks)),
        num_microbatches,
        has_loss=rank == stages - 1,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
        cp_group=groups.cp,
    )
    shape = _activation_shape(config, decoder_seq_length or seq_length, micro_batch_size)
    group_size = config.microbatch_group_size_per_vp_stage
    plan = pipeline_plans(config.pipeline_schedule, stages, len(chunks), num_microbatches, forward_only, group_size)[rank]
    with torch.inference_mode() if forward_only else nullcontext():
        communicator = P2PCommunicator(groups.pp, shape, config.pipeline_dtype or config.params_dtype, config.overlap_p2p_comm)
        run_plan(plan, stage, _no_sync_of(config), communicator, _grad_sync_of(config))
    if not forward_only and config.finalize_model_grads_func is not None:
        tokens = stage.num_tokens()
        if stage.per_token and tokens is None:
            raise ValueError("calculate_per_token_loss: the loss function must return (loss sum, number of tokens, report)")
        config.finalize_model_grads_func(chunks, tokens)
    return stage.reports


forward_backward_pipelining_without_interleaving = forward_backward_pipelining_with_interleaving = forward_backward_pipelining


def _iterators(data_iterator: Any, num_chunks: int) -> list[Any]:
    """An iterator for each chunk. One for all is read once a micro batch."""
    if not isinstance(data_iterator, list):
        return [data_iterator] if num_chunks == 1 or data_iterator is None else list(itertools.tee(data_iterator, num_chunks))
    if len(data_iterator) != num_chunks:
        raise ValueError(f"{len(data_iterator)} data iterators for {num_chunks} model chunks: give one for each, or one that is no list")
    return data_iterator


def _activation_shape(config: Any, seq_length: int | None, micro_batch_size: int | None) -> tuple[int, int, int]:
    """Of this rank's part of the hidden states between two stages."""
    if seq_length is None or micro_batch_size is None:
        raise ValueError(f"pipeline stages need seq_length ({seq_length}) and micro_batch_size ({micro_batch_size}): give both")
    length = seq_length // config.context_parallel_size
    return (length // config.tensor_model_parallel_size if config.sequence_parallel else length, micro_batch_size, config.hidden_size)


def _no_sync_of(config: Any) -> Callable[[int], AbstractContextManager]:
    """The context of a chunk's backwards that are not its last."""
    functions = config.no_sync_func
    if functions is None:
        return lambda chunk: nullcontext()
    return lambda chunk: (functions[chunk] if isinstance(functions, list | tuple) else functions)()


def _grad_sync_of(config: Any) -> Callable[[int], None]:
    """What starts the reductions of a chunk's gradients that its backward has not started."""
    functions = config.grad_sync_func
    if functions is None:
        return lambda chunk: None
    return lambda chunk: (functions[chunk] if isinstance(functions, list | tuple) else functions)()
