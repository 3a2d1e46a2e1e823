"""The public entry to forward and backward over a step's micro batches."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from megatron.core.utils import get_model_config

from .schedule_plan import no_pipelining
from .schedule_runner import run_plan


def get_forward_backward_func(pp_size: int | None = None, vp_size: int | None = None, schedule_pg_collection: Any = None) -> Callable:
    """The function that runs one step's micro batches for this pipeline layout; only one stage exists so far."""
    if (pp_size or 1) > 1 or (vp_size or 1) > 1:
        raise ValueError(f"pipeline parallel size {pp_size}, virtual {vp_size}: pipeline parallelism is not built yet; use 1")
    return forward_backward_no_pipelining


def _only(value: Any, what: str) -> Any:
    """`value`, or the one element of a list (callers with model chunks pass lists)."""
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"without pipelining there is one {what}, not {len(value)}")
        return value[0]
    return value


def loss_and_tokens(result: tuple, num_microbatches: int, per_token: bool) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """What a loss function returned, as (loss to run backward from, valid tokens, report).

    (loss, report): a mean already; it is divided by the number of micro batches.
    (loss sum, number of valid tokens, report): the sum is divided by the tokens (a micro batch without any contributes 0) and by the
    number of micro batches, or, with per-token loss, left as it is: the gradients are divided by the step's tokens at its end.
    """
    if len(result) == 2:
        loss, report = result
        return loss / num_microbatches, None, report
    loss, num_tokens, report = result
    if not per_token:
        loss = loss / num_tokens.clamp(min=1) / num_microbatches
    return loss, num_tokens, report


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
    **unused: Any,
) -> list[Any]:
    """Run every micro batch forward and, unless `forward_only`, backward; return the loss function's report of each.

    forward_step_func(data_iterator, model) -> (output tensor, loss_func); loss_func(output tensor) as `loss_and_tokens` reads it.
    The model's config may hold grad_scale_func (fp16), no_sync_func and finalize_model_grads_func(model chunks, number of tokens).
    """
    chunk, iterator = _only(model, "model chunk"), _only(data_iterator, "data iterator")
    config = get_model_config(chunk)
    per_token = bool(getattr(config, "calculate_per_token_loss", False))
    total_tokens: list[torch.Tensor] = []

    def forward(_: int, __: int) -> tuple[torch.Tensor, Any]:
        output, loss_func = forward_step_func(iterator, chunk)
        if collect_non_loss_data:
            return output, loss_func(output, non_loss_data=True)
        loss, num_tokens, report = loss_and_tokens(loss_func(output), num_microbatches, per_token)
        if num_tokens is not None:
            total_tokens.append(num_tokens)
        return loss, report

    def backward(loss: torch.Tensor) -> None:
        (config.grad_scale_func(loss) if config.grad_scale_func is not None else loss).backward()

    plan = no_pipelining(num_microbatches, forward_only)
    with torch.inference_mode() if forward_only else nullcontext():
        reports = run_plan(plan, forward, backward, config.no_sync_func or nullcontext)
    if not forward_only and config.finalize_model_grads_func is not None:
        tokens = torch.stack(total_tokens).sum() if per_token and total_tokens else None
        config.finalize_model_grads_func([chunk], tokens)
    return reports
