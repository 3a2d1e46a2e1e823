"""Attention over one block of queries and keys: (output, logsumexp), and gradients from the logsumexp over ALL keys of a query.

Shapes: query and output [b, heads, s, d], key and value [b, groups, t, d] (any strides with d last), logsumexp [b, heads, s] in at least
fp32. A query's results over several blocks add up weighted by exp(logsumexp) (Milakov & Gimelshein 2018; Liu et al. 2023, ring attention);
with the logsumexp and output over all of them a block's gradients need no other block.

Kernels: cudnn and flash on a GPU in half precision, torch's flash attention on a CPU; `plain` is their twin, and does masked blocks.
"""

import warnings
from functools import lru_cache
from typing import Any

import torch

from megatron.core import device
from megatron.core.transformer.enums import AttnBackend

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
# Largest error, relative to the largest value, that a kernel may have against the plain twin in fp32. Half precision rounds
# probabilities and outputs to 8 (11) bits: errors of 2^-8 that the gradients' two products add up.
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-9}


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str, hidden: torch.Tensor | None, scale: float, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """kind "full", "causal" (as many queries as keys), or "masked" by `hidden` (bool, True = not seen, broadcast to [b, 1, s, t])."""
    if hidden is not None or kernel == "plain":
        return attend_plain(query, key, value, _hidden(kind, hidden, query, key), scale)
    causal = kind == "causal"
    if kernel == "cpu_flash":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    if kernel == "cudnn":
        out, lse = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, causal, False, scale=scale)[:2]
    else:
        assert kernel == "flash", kernel
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]
    return out, lse.reshape(query.shape[:3])


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kind: str,
    hidden: torch.Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of query, key and value; `grad`, `out` and `lse` are of the whole attention of these queries."""
    if hidden is not None or kernel == "plain":
        return attend_plain_backward(grad, query, key, value, out, lse, _hidden(kind, hidden, query, key), scale)
    causal, lengths = kind == "causal", (query.shape[2], key.shape[2])
    lse = lse.contiguous()
    if kernel == "cpu_flash":
        arguments = (grad, query, key, value, out, lse, 0.0, causal)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, scale=scale)
    else:
        no_seed = torch.empty((), dtype=torch.int64, device=query.device)  # read by dropout alone
        if kernel == "cudnn":
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                grad, query, key, value, out, lse.unsqueeze(-1), no_seed, no_seed, None, None, None, *lengths, 0.0, causal, scale=scale
            )
        else:
            grads = aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, no_seed, no_seed, scale=scale
            )
    return grads[0], _sum_of_groups(grads[1], key), _sum_of_groups(grads[2], value)


def _sum_of_groups(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient by group from one by head, should a kernel give that."""
    if grad.shape == like.shape:
        return grad
    batch, groups, tokens, width = like.shape
    return grad.view(batch, groups, -1, tokens, width).sum(dim=2)


# --- the plain twin ---


def _hidden(kind: str, hidden: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    if kind != "causal":
        return hidden
    triangle = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu_(1)
    return triangle if hidden is None else hidden | triangle


def _grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, d] -> [b, groups, heads of a group, s, d], in the precision that the twin computes in."""
    batch, heads, tokens, width = query.shape
    return query.reshape(batch, key.shape[1], heads // key.shape[1], tokens, width).to(_wide(query))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _rows(query: torch.Tensor, key: torch.Tensor) -> int:
    """Queries of which the scores are held at once."""
    return max(1, device.block_elements(query) // max(1, query.shape[0] * query.shape[1] * key.shape[2]))


def _scores(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = (query * scale) @ key.unsqueeze(2).transpose(-1, -2)
    return scores if hidden is None else scores.masked_fill_(hidden.unsqueeze(-3), float("-inf"))


def _some_rows(hidden: torch.Tensor | None, first: int, end: int) -> torch.Tensor | None:
    """Rows of a mask as [b or 1, 1, rows, keys]."""
    if hidden is None:
        return None
    return hidden[..., first:end, :] if hidden.dim() == 4 else hidden[None, None, first:end]


def attend_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A query that sees nothing gets 0 and -inf. Some rows at a time: no [s, t] tensor but `hidden`."""
    wide, keys, values = _grouped(query, key), key.to(_wide(key)), value.to(_wide(value))
    out, lse = torch.empty(query.shape, dtype=query.dtype, device=query.device), wide.new_empty(query.shape[:3])
    for first in range(0, query.shape[2], rows := _rows(query, key)):
        end = min(first + rows, query.shape[2])
        scores = _scores(wide[..., first:end, :], keys, _some_rows(hidden, first, end), scale)
        total = scores.logsumexp(dim=-1)
        probabilities = scores.sub_(total.masked_fill(total == float("-inf"), 0.0).unsqueeze(-1)).exp_()
        out[:, :, first:end] = (probabilities @ values.unsqueeze(2)).flatten(1, 2).to(out.dtype)
        lse[:, :, first:end] = total.flatten(1, 2)
    return out, lse


def attend_plain_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, keys, values, grads = _grouped(query, key), key.to(_wide(key)), value.to(_wide(value)), _grouped(grad, key)
    delta = (grads * _grouped(out, key)).sum(dim=-1, keepdim=True)
    totals = lse.masked_fill(lse == float("-inf"), 0.0).view(*wide.shape[:-1]).unsqueeze(-1)
    dq, dk, dv = torch.empty_like(wide), torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, query.shape[2], rows := _rows(query, key)):
        some = (..., slice(first, first + rows), slice(None))
        scores = _scores(wide[some], keys, _some_rows(hidden, first, first + rows), scale)
        probabilities = scores.sub_(totals[some]).exp_()
        dv += (probabilities.transpose(-1, -2) @ grads[some]).sum(dim=2)
        dscores = (grads[some] @ values.unsqueeze(2).transpose(-1, -2)).sub_(delta[some]).mul_(probabilities).mul_(scale)
        dq[some] = dscores @ keys.unsqueeze(2)
        dk += (dscores.transpose(-1, -2) @ wide[some]).sum(dim=2)
    return dq.flatten(1, 2).to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


# --- the choice ---


def choose_kernel(backend: AttnBackend, query: torch.Tensor, key: torch.Tensor) -> str:
    """The kernel for blocks of these tensors. One that fails its self-check is not used, and said so; a backend by name is or is not."""
    if backend in (AttnBackend.unfused, AttnBackend.local):
        return "plain"
    if not device.on_accelerator(query):
        return "cpu_flash"
    width = query.shape[-1]
    fits = query.dtype in HALF and width % 8 == 0
    order = [AttnBackend.fused, AttnBackend.flash] if backend is AttnBackend.auto else [backend]
    for candidate in order:
        name, widest = {AttnBackend.fused: ("cudnn", 128), AttnBackend.flash: ("flash", 256)}[candidate]
        if name == "cudnn" and backend is AttnBackend.auto and torch.are_deterministic_algorithms_enabled():
            continue
        if fits and width <= widest and is_sound(name, query.device, query.dtype, width, query.shape[1] // key.shape[1]):
            return name
    if backend is not AttnBackend.auto:
        raise ValueError(
            f"attention_backend {backend.name}: no kernel for {query.dtype} and heads of {width} channels; use auto or unfused"
        )
    return "plain"


@lru_cache(maxsize=64)
def is_sound(kernel: str, where: torch.device, dtype: torch.dtype, width: int, heads_per_group: int) -> bool:
    """Whether the kernel runs, and passes its self-check, on tensors of this kind; warns when not."""
    try:
        errors = self_check(kernel, where, dtype, width, heads_per_group)
    except RuntimeError as error:
        warnings.warn(f"attention kernel {kernel} is not used, it does not run on {where} in {dtype}: {error}", stacklevel=2)
        return False
    bad = {name: error for name, error in errors.items() if not error <= BOUNDS[dtype]}
    if bad:
        warnings.warn(f"attention kernel {kernel} is not used: errors {bad} against fp32 are above {BOUNDS[dtype]}", stacklevel=2)
    return not bad


def self_check(
    kernel: str, where: torch.device | str, dtype: torch.dtype, width: int = 64, heads_per_group: int = 2, tokens: int = 128
) -> dict[str, float]:
    """Largest errors of output, dQ, dK and dV against the plain twin in fp32 (fp64 for fp32 and fp64), relative to the largest value.

    As the ring uses the kernel: a triangle and a full block in one softmax, gradients from the logsumexp of both. Draws no random number
    of the default generators.
    """
    generator = torch.Generator().manual_seed(1)

    def draw(heads: int, length: int) -> torch.Tensor:  # strides as in the model, [s, b, heads, d]
        return torch.randn(length, 2, heads, width, generator=generator).to(where, dtype).permute(1, 2, 0, 3)

    heads = 2 * heads_per_group
    query, grad = draw(heads, tokens), draw(heads, tokens)
    own, other = (draw(2, tokens), draw(2, tokens)), (draw(2, tokens // 2), draw(2, tokens // 2))
    exact = torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32
    results: list[dict[str, Any]] = []
    for name, precision in ((kernel, dtype), ("plain", exact)):
        q, g, (k1, v1), (k2, v2) = query.to(precision), grad.to(precision), *((k.to(precision), v.to(precision)) for k, v in (own, other))
        (out1, lse1), (out2, lse2) = attend(q, k1, v1, "causal", None, 0.1, name), attend(q, k2, v2, "full", None, 0.1, name)
        lse = torch.logaddexp(lse1, lse2)
        out = (out1 * (lse1 - lse).exp().unsqueeze(-1) + out2 * (lse2 - lse).exp().unsqueeze(-1)).to(precision)
        first = attend_backward(g, q, k1, v1, out, lse, "causal", None, 0.1, name)
        second = attend_backward(g, q, k2, v2, out, lse, "full", None, 0.1, name)
        results.append({"out": out, "dQ": first[0].to(exact) + second[0].to(exact)})
        results[-1].update({f"d{letter} of the {block}": part for block, grads in (("triangle", first), ("rest", second))
                            for letter, part in zip("KV", grads[1:])})  # fmt: skip
    got, want = results
    return {name: float((got[name].to(exact) - value).abs().max() / value.abs().max()) for name, value in want.items()}
