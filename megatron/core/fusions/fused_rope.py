"""Rotary embedding (Su et al. 2021): turns pairs of channels of queries and keys by angles that grow with the position.

Pairs are (i, i + d/2), or neighbours (2i, 2i + 1) when interleaved. Channels beyond the angles' width pass unchanged.
"""

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron.core import device
from megatron.core.fusions.kernels import kernels_run_on


class _Rotate(torch.autograd.Function):
    """Keeps cosines and sines alone, each times the same factor: the gradient is turned back by the same angles, and multiplied."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(t, cos, sin, interleaved, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.interleaved, back=True), None, None, None


def _turned(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool) -> torch.Tensor:
    """By the angles, or back by them; by Triton's kernel where it runs. t [s, b, heads, d]."""
    if kernels_run_on(t) and t.stride(-1) == 1:
        from megatron.core.fusions.kernels.rope import turn

        return turn(t, cos, sin, interleaved, back)
    return _turn(t, cos, -sin if back else sin, interleaved, torch.empty(t.shape, dtype=t.dtype, device=t.device))


class _SplitAndRotate(torch.autograd.Function):
    """The split's gradient is made here too: queries' and keys' are turned back to their places in it. Nothing holds on to `packed`."""

    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads_per_group: int, interleaved: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.shape, ctx.heads_per_group, ctx.interleaved = packed.shape, heads_per_group, interleaved
        if kernels_run_on(packed) and packed.stride(-1) == 1:
            from megatron.core.fusions.kernels.rope import split_and_turn

            return split_and_turn(packed, heads_per_group, cos, sin, interleaved)
        query, key, value = (part.flatten(2, 3) for part in _parts(packed, heads_per_group))
        query, key = (_turned(part, cos, sin, interleaved, back=False) for part in (query, key))
        return query, key, value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        packed = torch.empty(ctx.shape, dtype=grads[0].dtype, device=grads[0].device)
        if kernels_run_on(packed):
            from megatron.core.fusions.kernels.rope import turn_back_and_join

            rows = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
            turn_back_and_join(rows, packed, cos, sin, ctx.interleaved)
            return packed, None, None, None, None
        cos, sin = cos.unsqueeze(2), -sin.unsqueeze(2)
        query, key, value = parts = _parts(packed, ctx.heads_per_group)
        query_grad, key_grad, value_grad = (grad.unflatten(2, part.shape[2:4]) for grad, part in zip(grads, parts, strict=True))
        _turn(query_grad, cos, sin, ctx.interleaved, query)
        _turn(key_grad, cos, sin, ctx.interleaved, key)
        value.copy_(value_grad)
        return packed, None, None, None, None


def _parts(packed: torch.Tensor, heads_per_group: int) -> tuple[torch.Tensor, ...]:
    """Views: queries [s, b, groups, heads of one, d], keys and values [s, b, groups, 1, d]."""
    width = packed.shape[-1] // (heads_per_group + 2)
    return packed.unflatten(-1, (heads_per_group + 2, width)).split([heads_per_group, 1, 1], dim=3)


def _pairs(t: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return t[..., ::2], t[..., 1::2]
    return t.chunk(2, dim=-1)  # type: ignore[return-value]


def _turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, out: torch.Tensor) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    first, second = _pairs(t[..., :width], interleaved)
    out_first, out_second = _pairs(out[..., :width], interleaved)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    if width < t.shape[-1]:
        out[..., width:] = t[..., width:]
    return out


def fused_apply_rotary(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool, mscale: float = 1.0) -> torch.Tensor:
    """t [s, b, heads, d], freqs [s, 1, 1, width <= d] in radians, each angle twice as RotaryEmbedding makes them -> like t.

    mscale: the channels that turn are multiplied by it.
    """
    return _Rotate.apply(t, *_cos_sin_of_pairs(freqs, t.dtype, interleaved, mscale), interleaved)


def fused_split_and_rotate(
    packed: torch.Tensor, freqs: torch.Tensor, heads_per_group: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed [s, b, groups, (heads of one + 2) d], a group's queries, its key, its value; freqs as fused_apply_rotary takes them ->
    query [s, b, heads, d] and key [s, b, groups, d], turned, and value [s, b, groups, d], all contiguous and none a view of packed.

    Its plain twin: the three of torch.split, of which apply_rotary_plain turns the first two.
    """
    return _SplitAndRotate.apply(packed, *_cos_sin_of_pairs(freqs, packed.dtype, interleaved, 1.0), heads_per_group, interleaved)


# Angles -> ((what else cosines and sines depend on), (cosines, sines)): made once for the layers of all micro batches that get the same
# tensor of angles, and gone with it.
_made = WeakTensorKeyDictionary()


def _cos_sin_of_pairs(freqs: torch.Tensor, dtype: torch.dtype, interleaved: bool, mscale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[s, 1, 1, width / 2] each, contiguous.

    A CUDA graph makes its own: it must not read what was made outside, of angles that are copied into place anew at each launch, nor
    leave outside what is there after a launch alone. So does inference mode, whose tensors no backward may keep.
    """

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = _cos_sin(_pairs(freqs, interleaved)[0], dtype, mscale)
        return cos.contiguous(), sin.contiguous()

    if device.is_recording(freqs) or freqs.is_inference() or torch.is_inference_mode_enabled():
        return make()
    key = (freqs._version, dtype, interleaved, mscale)
    made = _made.get(freqs)
    if made is None or made[0] != key:
        with torch.no_grad():
            made = _made[freqs] = (key, make())
    return made[1]


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
