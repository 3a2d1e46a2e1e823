"""What is left to do for gradients after the last backward: reduce, add up partial ones, divide by the number of tokens. Routers close
their step."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.transformer.moe.router import finish_router_step
from megatron.core.utils import get_pg_size


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Complete the main gradients of `model`, a list of DistributedDataParallel chunks.

    Args:
        num_tokens: this rank's tokens that counted in the loss, all micro batches together (0-d tensor); then gradients, which are sums
            over tokens, are divided by the number over all ranks. None when losses were means already. Of a pipeline's stages the last
            one's number counts; the others give one too, any.
    """
    pg_collection = default_pg_collection(pg_collection)
    for chunk in model:
        chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    params = [param for chunk in model for param in chunk.module.parameters() if param.requires_grad]
    _sum_partial_gradients(params, pg_collection)
    _sum_tied_gradients(params, pg_collection)
    finish_router_step(model, pg_collection)
    if num_tokens is not None:
        total = _tokens_of_pipeline(num_tokens, params[0].device, pg_collection)
        if get_pg_size(pg_collection.dp_cp) > 1:
            dist.all_reduce(total, group=pg_collection.dp_cp)
        # a batch without one valid token has zero gradients: they stay zero
        scale = 1.0 / total.clamp(min=1).to(torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32)
        for chunk in model:
            chunk.scale_gradients(scale.reshape(()))


def _sum_partial_gradients(params: Iterable[torch.nn.Parameter], pg_collection: ProcessGroupCollection) -> None:
    """Add up gradients of which each rank of an axis holds a part, as the sharding records say; one collective an axis and dtype."""
    parts: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
    for param in params:
        sharding: Any = getattr(param, "sharding", None)
        for axis in getattr(sharding, "grad_partial", ()):
            if axis == "tp" and sharding.is_expert:
                axis = "expt_tp"
            if get_pg_size(getattr(pg_collection, axis)) > 1:
                grad = param.main_grad  # type: ignore[attr-defined]
                parts.setdefault((axis, grad.dtype), []).append(grad)
    for (axis, _), grads in sorted(parts.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=getattr(pg_collection, axis))
        sums = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(sums, grads)])


def _sum_tied_gradients(params: Iterable[torch.nn.Parameter], pg_collection: ProcessGroupCollection) -> None:
    """Add up the gradients of a weight that the first and the last stage hold each for themselves; each of them calls it."""
    if get_pg_size(pg_collection.pp) == 1:
        return
    tied = [param for param in params if getattr(getattr(param, "sharding", None), "shared_with", None)]
    if tied and get_pg_size(pg_collection.embd) == 1:
        raise ValueError(
            "a weight is tied across pipeline stages, but pg_collection.embd, the group of the stages that hold it, was not given: give "
            "it, or add --untie-embeddings-and-output-weights"
        )
    for param in tied:
        dist.all_reduce(param.main_grad, group=pg_collection.embd)  # type: ignore[attr-defined]


def _tokens_of_pipeline(num_tokens: torch.Tensor, device: torch.device, pg_collection: ProcessGroupCollection) -> torch.Tensor:
    """This pipeline's tokens on each of its ranks: only the last stage computes losses, and says how many."""
    if get_pg_size(pg_collection.pp) == 1:
        return num_tokens.detach().clone()
    total = num_tokens.detach().reshape(()).to(device, torch.float64, copy=True)  # one dtype on all stages, exact for whole numbers
    last = dist.get_process_group_ranks(pg_collection.pp)[-1]  # type: ignore[arg-type]
    dist.broadcast(total, src=last, group=pg_collection.pp)
    return total
