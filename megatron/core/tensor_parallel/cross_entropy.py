"""Cross-entropy over a vocabulary that is split over the tensor-parallel ranks.

The plain formula, which the tests compare with: loss = logsumexp(logits) - logits[target], in fp32 (fp64 for fp64 logits).
What is kept for the backward is the logits as they are and one number a row. On a GPU Triton kernels read the logits once forward and once
back; elsewhere rows are worked on a block at a time, so that fp32 copies of half-precision logits, and all temporaries, stay small.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.fusions.kernels import kernels_run_on
from megatron.core.utils import Group, get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group = None,
    *,
    num_valid: int | None = None,
    consume_logits: bool = False,
) -> torch.Tensor:
    """Loss per token, fp32, in the shape of `target` ([s, b]), from logits [s, b, vocabulary / tp].

    label_smoothing: as torch.nn.functional.cross_entropy's. num_valid: columns of the whole vocabulary beyond it never enter the softmax.
    consume_logits: the backward writes the gradient over the logits; nobody may read them afterwards.
    A target below 0 is ignored: loss 0, no gradient. A target outside of the vocabulary gives a loss of nan.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing {label_smoothing} must be in [0, 1)")
    group = get_tensor_model_parallel_group_if_none(tp_group)
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group, num_valid, consume_logits)


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


def _blocks(logits: torch.Tensor) -> range:
    rows = max(1, device.block_elements(logits) // max(1, logits.shape[-1]))
    return range(0, logits.shape[0], rows)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, smoothing: float, group: Group, num_valid: int | None, consume: bool
    ) -> torch.Tensor:
        flat, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        columns = flat.shape[-1]
        total = num_valid if num_valid is not None else columns * get_pg_size(group)
        first = columns * get_pg_rank(group)
        valid = min(max(total - first, 0), columns)  # this rank's columns that are not padding
        local = labels - first
        here = (local >= 0) & (local < valid)
        local = local.clamp(0, max(valid - 1, 0))

        log_norm, picked, row_sum = _statistics(flat, local, valid, bool(smoothing))
        picked = torch.where(here, picked, 0.0)
        if get_pg_size(group) > 1:
            log_norm, picked, row_sum = _combine(log_norm, picked, row_sum, group)

        loss = log_norm - picked
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing * (log_norm - row_sum / total)
        loss = torch.where(labels < 0, 0.0, torch.where(labels >= total, torch.nan, loss))
        ctx.save_for_backward(flat, labels, local, here, log_norm)
        ctx.settings = smoothing, total, valid, consume, logits.shape
        return loss.view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        flat, labels, local, here, log_norm = ctx.saved_tensors
        smoothing, total, valid, consume, shape = ctx.settings
        scale = torch.where(labels < 0, 0.0, grads[0].reshape(-1).to(log_norm.dtype))
        out = flat if consume else torch.empty_like(flat)
        if kernels_run_on(flat):
            from megatron.core.fusions.kernels import cross_entropy as kernels

            kernels.gradient(flat, torch.where(here, local, -1), log_norm, scale, out, valid, total, smoothing)
            return out.view(shape), None, None, None, None, None
        at_target = torch.where(here, scale * (smoothing - 1), 0.0)[:, None]
        blocks = _blocks(flat)
        for start in blocks:
            rows = slice(start, start + blocks.step)
            # softmax = exp(logit - log_norm); for fp32 logits that are consumed, all in place
            block = torch.sub(
                flat[rows, :valid], log_norm[rows, None], out=out[rows, :valid] if consume and out.dtype == log_norm.dtype else None
            )
            block.exp_()
            if smoothing:
                block.sub_(smoothing / total)
            block.mul_(scale[rows, None])
            if valid:
                block.scatter_add_(-1, local[rows, None], at_target[rows])
            if block.data_ptr() != out[rows].data_ptr():
                out[rows, :valid] = block
        out[:, valid:] = 0
        return out.view(shape), None, None, None, None, None


def _statistics(flat: torch.Tensor, local: torch.Tensor, valid: int, with_sum: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row [n, columns], over its first `valid`: logsumexp, the logit at `local` [n] and, `with_sum`, the sum."""
    if valid and kernels_run_on(flat):
        from megatron.core.fusions.kernels import cross_entropy as kernels

        return kernels.statistics(flat, local, valid, with_sum)
    dtype = _compute_dtype(flat)
    log_norm = torch.full_like(local, -torch.inf, dtype=dtype)
    picked, row_sum = torch.zeros_like(local, dtype=dtype), torch.zeros_like(local, dtype=dtype)
    blocks = _blocks(flat)
    for start in blocks if valid else ():
        rows = slice(start, start + blocks.step)
        block = flat[rows, :valid].to(dtype)
        log_norm[rows] = torch.logsumexp(block, dim=-1)
        picked[rows] = block.gather(-1, local[rows, None]).squeeze(-1)
        if with_sum:
            row_sum[rows] = block.sum(dim=-1)
    return log_norm, picked, row_sum


def _combine(log_norm: torch.Tensor, picked: torch.Tensor, row_sum: torch.Tensor, group: Group) -> tuple[torch.Tensor, ...]:
    """The whole vocabulary's numbers from each rank's: one reduction for the maximum, one for the sums."""
    largest = log_norm.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(log_norm - largest).exp(), picked, row_sum])
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1], sums[2]
