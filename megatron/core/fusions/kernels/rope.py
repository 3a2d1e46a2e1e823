"""Rotary embedding in one pass, from the packed projection to tensors of its own and back to its gradient. The formula is fused_rope's."""

import torch
import triton
import triton.language as tl

from megatron.core.fusions.kernels.precision import wide


@triton.jit
def turn_heads(
    together, apart, there, c, s, half, width,
    TURNS: tl.constexpr, JOIN: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One token's heads whose rows begin at `together` and at `apart` [heads, 1]; from the one to the other, or back (JOIN)."""
    if JOIN:
        source, target = apart, together
    else:
        source, target = together, apart
    pair = tl.arange(0, HALF)[None, :]
    mask = there & (pair < half)
    first = tl.where(INTERLEAVED, 2 * pair, pair)
    second = tl.where(INTERLEAVED, 2 * pair + 1, pair + half)
    a = tl.load(source + first, mask=mask, other=0.0)
    b = tl.load(source + second, mask=mask, other=0.0)
    if TURNS:
        x, y = a.to(c.dtype), b.to(c.dtype)
        a, b = (x * c - y * s).to(a.dtype), (y * c + x * s).to(b.dtype)
    tl.store(target + first, a, mask=mask)
    tl.store(target + second, b, mask=mask)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)[None, :]
        kept = there & (rest < width)
        tl.store(target + rest, tl.load(source + rest, mask=kept, other=0.0), mask=kept)


@triton.jit
def rope_turn(
    packed, query, key, value, cos, sin, batch, heads, groups, half, width, packed_s, packed_b, packed_h,
    query_s, query_b, query_h, key_s, key_b, key_h, value_s, value_b, value_h, sign, OTHERS: tl.constexpr, JOIN: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """One token's HEADS queries and, if there are OTHERS behind each group's, GROUPS keys and values."""
    token = tl.program_id(0).to(tl.int64)  # of s * batch
    position, sample = token // batch, token % batch
    pair = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + position * half + pair, mask=pair < half, other=0.0).to(WIDE)
    s = tl.load(sin + position * half + pair, mask=pair < half, other=0.0).to(WIDE) * sign
    packed += position * packed_s + sample * packed_b
    each = heads // groups
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    together = packed + (head // each * (each + OTHERS) + head % each) * packed_h
    apart = query + position * query_s + sample * query_b + head * query_h
    turn_heads(together, apart, head < heads, c, s, half, width, True, JOIN, INTERLEAVED, HALF, REST)
    if OTHERS > 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
        together = packed + (group * (each + OTHERS) + each) * packed_h
        apart = key + position * key_s + sample * key_b + group * key_h
        turn_heads(together, apart, group < groups, c, s, half, width, True, JOIN, INTERLEAVED, HALF, REST)
        apart = value + position * value_s + sample * value_b + group * value_h
        turn_heads(together + packed_h, apart, group < groups, c, s, half, width, False, JOIN, INTERLEAVED, HALF, REST)


def _launch(
    packed: torch.Tensor, apart: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, *, back: bool, join: bool
) -> None:
    """packed [s, b, slots, d]; apart: queries alone, or queries, keys and values, [s, b, heads, d] each. join: from apart to packed."""
    length, batch, _, width = packed.shape
    query, key, value = apart if len(apart) == 3 else apart * 3
    heads, groups = query.shape[2], key.shape[2] if len(apart) == 3 else 1
    half = cos.shape[-1]
    rest = width - 2 * half
    padded = triton.next_power_of_2(half)
    block = max(1, min(triton.next_power_of_2(heads), 2048 // padded))
    blocks = triton.cdiv(heads, block)
    rope_turn[(length * batch, blocks)](
        packed, query, key, value, cos, sin, batch, heads, groups, half, width,
        *(stride for tensor in (packed, query, key, value) for stride in tensor.stride()[:3]), -1.0 if back else 1.0,
        OTHERS=len(apart) - 1, JOIN=join, INTERLEAVED=interleaved, WIDE=wide(packed), HEADS=block,
        GROUPS=triton.next_power_of_2(triton.cdiv(groups, blocks)), HALF=padded, REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip


def turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool = False) -> torch.Tensor:
    """t [s, b, heads, d], its last dim contiguous; cos and sin [s, 1, 1, width / 2] contiguous, width <= d -> a new tensor like t.
    back: by the negative angles.
    """
    out = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    _launch(t, [out], cos, sin, interleaved, back=back, join=False)
    return out


def split_and_turn(
    packed: torch.Tensor, heads_per_group: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    """packed [s, b, groups, (heads of one + 2) d] -> new tensors: query [s, b, heads, d] and key [s, b, groups, d], turned, and value."""
    length, batch, groups, _ = packed.shape
    slots = packed.unflatten(-1, (heads_per_group + 2, -1)).flatten(2, 3)
    counts = (groups * heads_per_group, groups, groups)
    parts = [packed.new_empty(length, batch, count, slots.shape[-1]) for count in counts]
    _launch(slots, parts, cos, sin, interleaved, back=False, join=False)
    return tuple(parts)


def turn_back_and_join(grads: list[torch.Tensor], packed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Write the gradients of `split_and_turn`'s outputs, the last dim of each contiguous, where it took them from: packed, contiguous."""
    _launch(packed.view(*packed.shape[:2], -1, grads[0].shape[-1]), grads, cos, sin, interleaved, back=True, join=True)
