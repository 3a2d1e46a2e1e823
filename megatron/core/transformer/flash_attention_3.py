"""FlashAttention-3's kernels for Hopper GPUs, where the package flash_attn_interface can be imported. Twins: dot_product_attention.py.

Versions of the package differ: some return (output, logsumexp) where others return the output, some have no window or no deterministic
backward pass. What a version's signature lacks is not asked of it.
"""

import inspect
import logging
from functools import cache, lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch

from megatron.core import device
from megatron.core.context_parallel.block_plan import Mask
from megatron.core.optional_imports import available, require
from megatron.core.packed_seq_params import Document

logger = logging.getLogger(__name__)
PACKAGE = "flash_attn_interface"
WIDEST = 256  # channels of a head; and a multiple of 8, so that rows begin at multiples of 16 bytes
HALF = (torch.float16, torch.bfloat16)


def on_hopper() -> bool:
    return device.has_accelerator() and device.compute_capability()[0] == 9


@cache
def package() -> ModuleType | None:
    """The package, where this process's GPU is one that it is for."""
    if not on_hopper() or not available(PACKAGE):
        return None
    try:
        return require(PACKAGE, "attention by FlashAttention-3")
    except Exception as error:  # whatever becomes of one that was built for another torch
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("%s cannot be imported (%s): attention goes on with torch's kernels", PACKAGE, reason)
        return None


@cache
def _takes(module: ModuleType, function: str) -> frozenset[str]:
    """Names of what the function takes; nothing where this version has no such function."""
    found = getattr(module, function, None)
    return frozenset() if found is None else frozenset(inspect.signature(found).parameters)


def has_windows() -> bool:
    """Whether sliding windows can be had here."""
    module = package()
    return module is not None and "window_size" in _takes(module, "flash_attn_func")


def problem(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    documents: tuple[Document, ...] | None,
    *,
    attention_mask: bool,
    dropout: float,
) -> str | None:
    """Why FlashAttention-3 cannot do this attention; None when it can. Tensors as in `attend`."""
    module = package()
    if module is None:
        return f"the package {PACKAGE} on a Hopper GPU is not here"
    wanted = {"causal", "softmax_scale"}
    wanted |= {"window_size"} if mask.is_window else set()
    wanted |= {"deterministic"} if torch.are_deterministic_algorithms_enabled() else set()
    missing = sorted(wanted - _takes(module, _function(documents)))
    width = max(query.shape[-1], value.shape[-1])
    reasons = {
        "an attention mask is a tensor": attention_mask,
        "it has no dropout": dropout > 0.0,
        "its tensors are on a GPU": query.device.type != device.device_type(),
        f"it computes in fp16 and bf16, not {query.dtype}": query.dtype not in HALF or not query.dtype == key.dtype == value.dtype,
        f"heads have at most {WIDEST} channels, a multiple of 8, not {width}": width > WIDEST or width % 8 > 0,
        "its mask for other numbers of queries than of keys is not relied on": len(query) != len(key) and mask != Mask(),
        "padding between documents needs a causal mask": _padded(documents) and mask.right != 0,
        f"this version of {PACKAGE} has no {', '.join(missing)}": bool(missing),
        "there are no tokens": not query.numel() or not key.numel(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _function(documents: tuple[Document, ...] | None) -> str:
    return "flash_attn_func" if documents is None else "flash_attn_varlen_func"


def _padded(documents: tuple[Document, ...] | None) -> bool:
    return any(document.length != document.padded for document in documents or ())


@lru_cache(maxsize=4)
def _counts(documents: tuple[Document, ...], where: torch.device) -> torch.Tensor:
    """int32 [documents + 1]: running counts of tokens, padding included; for all layers of a micro batch."""
    return torch.tensor([0, *accumulate(document.padded for document in documents)], dtype=torch.int32).to(where)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    documents: tuple[Document, ...] | None,
    scale: float,
) -> torch.Tensor:
    """query [s, b, heads, d], key and value [t, b, groups, d] -> like query, a view. Packed `documents` have b = 1.

    `problem` has been asked. Padding is behind its document: under a causal mask only its own queries see it.
    """
    module = package()
    assert module is not None
    name = _function(documents)
    asked: dict[str, Any] = {"softmax_scale": scale, "causal": mask.right == 0}
    if mask.is_window:
        asked["window_size"] = tuple(-1 if side is None else side for side in (mask.left, mask.right))
    if torch.are_deterministic_algorithms_enabled():
        asked["deterministic"] = True
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    if documents is None:
        out = module.flash_attn_func(*(tensor.transpose(0, 1) for tensor in (query, key, value)), **asked)  # [b, s, heads, d]
        return _output(out).transpose(0, 1)
    counts, longest = _counts(documents, query.device), max(document.padded for document in documents)
    lengths = {"cu_seqlens_q": counts, "cu_seqlens_k": counts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    out = getattr(module, name)(*(tensor.squeeze(1) for tensor in (query, key, value)), **lengths, **asked)  # [s, heads, d]
    return _output(out).unsqueeze(1)


def _output(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
