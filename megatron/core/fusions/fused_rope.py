"""Rotary embedding (Su et al. 2021): turns pairs of channels of queries and keys by angles that grow with the position.

Pairs are (i, i + d/2), or neighbours (2i, 2i + 1) when interleaved. Channels beyond the angles' width pass unchanged.
"""

from typing import Any

import torch

from megatron.core.fusions.kernels import kernels_run_on


class _Rotate(torch.autograd.Function):
    """Keeps cosines and sines alone, each times the same factor: the gradient is turned back by the same angles, and multiplied."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.shape = interleaved, t.shape
        return _turned(t, cos, sin, interleaved, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.interleaved, back=True).view(ctx.shape), None, None, None


def _turned(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """By the angles, or back by them; by Triton's kernel where it runs. t [s, b, heads, d] or [s, b, groups, heads of one, d]."""
    if kernels_run_on(t) and t.stride(-1) == 1:
        from megatron.core.fusions.kernels.rope import turn

        return turn(t, cos, sin, interleaved, back)
    return _turn(t.flatten(2, -2), cos, -sin if back else sin, interleaved)


def _pairs(t: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return t[..., ::2], t[..., 1::2]
    return t.chunk(2, dim=-1)  # type: ignore[return-value]


def _turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    first, second = _pairs(t[..., :width], interleaved)
    out_first, out_second = _pairs(out[..., :width], interleaved)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    if width < t.shape[-1]:
        out[..., width:] = t[..., width:]
    return out


def fused_apply_rotary(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool, mscale: float = 1.0) -> torch.Tensor:
    """t [s, b, heads, d], freqs [s, 1, 1, width <= d] in radians, each angle twice as RotaryEmbedding makes them -> like t.

    t may be [s, b, groups, heads of one, d], as queries lie in a packed projection -> [s, b, heads, d] without a copy in between.
    mscale: the channels that turn are multiplied by it.
    """
    cos, sin = (part.contiguous() for part in _cos_sin(_pairs(freqs, interleaved)[0], t.dtype, mscale))
    return _Rotate.apply(t, cos, sin, interleaved)


def _cos_sin(angles: torch.Tensor, dtype: torch.dtype, mscale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Times mscale, which is rounded with them, once."""
    cos, sin = angles.cos(), angles.sin()
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    return cos.to(dtype), sin.to(dtype)


def apply_rotary_plain(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool, mscale: float = 1.0) -> torch.Tensor:
    """The plain twin of fused_apply_rotary."""
    width = freqs.shape[-1]
    turned, kept = t[..., :width], t[..., width:]
    first, second = _pairs(turned, interleaved)
    if interleaved:
        rotated = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        rotated = torch.cat((-second, first), dim=-1)
    cos, sin = _cos_sin(freqs, t.dtype, mscale)
    turned = turned * cos + rotated * sin
    return torch.cat((turned, kept), dim=-1)
