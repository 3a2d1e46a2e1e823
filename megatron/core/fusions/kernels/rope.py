"""Rotary embedding in one pass, from a slice of the packed projection to a tensor of its own. The formula is fused_rope's."""

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide


@triton.jit
def rope_turn(
    t, cos, sin, out, batch, heads, heads_each, half, width, stride_s, stride_b, stride_g, stride_h, sign,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # of s * batch
    position, sample = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    there = (head < heads) & (pair < half)
    c = tl.load(cos + position * half + pair, mask=pair < half, other=0.0).to(WIDE)
    s = tl.load(sin + position * half + pair, mask=pair < half, other=0.0).to(WIDE) * sign
    source = t + position * stride_s + sample * stride_b + (head // heads_each) * stride_g + (head % heads_each) * stride_h
    target = out + (token * heads + head) * width
    first = tl.where(INTERLEAVED, 2 * pair, pair)
    second = tl.where(INTERLEAVED, 2 * pair + 1, pair + half)
    a = tl.load(source + first, mask=there, other=0.0).to(WIDE)
    b = tl.load(source + second, mask=there, other=0.0).to(WIDE)
    tl.store(target + first, (a * c - b * s).to(out.dtype.element_ty), mask=there)
    tl.store(target + second, (b * c + a * s).to(out.dtype.element_ty), mask=there)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        kept = (head < heads) & (rest < width)
        tl.store(target + rest, tl.load(source + rest, mask=kept, other=0.0), mask=kept)


def turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool = False) -> torch.Tensor:
    """t [s, b, heads, d], or [s, b, groups, heads of one, d], its last dim contiguous; cos and sin [s, 1, 1, width / 2] contiguous, width
    <= d -> a new tensor [s, b, heads, d]. back: by the negative angles.
    """
    length, batch, width = t.shape[0], t.shape[1], t.shape[-1]
    t = t if t.dim() == 5 else t.unsqueeze(2)
    heads_each = t.shape[3]
    heads = t.shape[2] * heads_each
    half = cos.shape[-1]
    out = torch.empty(length, batch, heads, width, dtype=t.dtype, device=t.device)
    rest = width - 2 * half
    padded = triton.next_power_of_2(half)
    block = max(1, min(triton.next_power_of_2(heads), 2048 // padded))
    rope_turn[(length * batch, triton.cdiv(heads, block))](
        t, cos, sin, out, batch, heads, heads_each, half, width, *t.stride()[:4], -1.0 if back else 1.0,
        INTERLEAVED=interleaved, WIDE=wide(t), HEADS=block, HALF=padded,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return out
