"""Masked, scaled softmax of attention scores [b, heads, queries, keys]; a boolean mask is True where a key is hidden."""

import torch


def scaled_masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, scale: float, *, in_fp32: bool) -> torch.Tensor:
    """softmax(scale * scores) over the keys that are not hidden, in the scores' dtype, computed in fp32 when `in_fp32` (fp64 stays).

    A query that sees no key at all gets zeros.
    """
    dtype = scores.dtype
    wide = scores.float() if in_fp32 and dtype in (torch.float16, torch.bfloat16) else scores
    wide = wide * scale
    if mask is None:
        return wide.softmax(dim=-1).to(dtype)
    probabilities = wide.masked_fill(mask, torch.finfo(wide.dtype).min).softmax(dim=-1)
    return probabilities.masked_fill(mask.all(dim=-1, keepdim=True), 0.0).to(dtype)


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], True where key > query; the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1 + keys - queries)
