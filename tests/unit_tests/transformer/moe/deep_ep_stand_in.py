"""A stand-in for the package DeepEP: the calls that the flex dispatcher makes, in their stated semantics, by gloo's all-to-all.

It is stricter than it need be: dtypes, shapes, sizes of buffers and the use of handles are checked, tokens arrive in an order that nobody
may rely on, and what nobody may read is NaN or far away. Tokens may be of any floating dtype.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import optional_imports

RANKS = (2, 4, 8, 16)  # that there are configurations for


@dataclass(frozen=True)
class Config:
    factor: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.factor * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else self.factor * hidden_bytes


@dataclass(frozen=True)
class Handle:
    """What a dispatch tells the combine that belongs to it."""

    buffer: "Buffer"
    sent_tokens: torch.Tensor  # [S], the token of each row sent, by receiving rank
    sent: list[int]
    received: list[int]
    order: torch.Tensor  # of the rows that arrived, by sending rank: the one in which they are given
    num_tokens: int


class Buffer:
    made: list["Buffer"] = []  # for tests to look at
    calls: list[str] = []

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.size = group, group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        everyone = [torch.zeros(2, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(everyone, torch.tensor([num_nvl_bytes, num_rdma_bytes]), group=group)
        assert all(torch.equal(each, everyone[0]) for each in everyone), "ranks of one group made buffers of other sizes"
        Buffer.made.append(self)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(3)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(5)

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor, None]:
        Buffer.calls.append("layout")
        assert topk_idx.dtype is torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous() and num_experts % self.size == 0
        assert not topk_idx.numel() or (int(topk_idx.min()) >= -1 and int(topk_idx.max()) < num_experts)
        chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.int64)
        chosen = chosen.scatter_add(1, topk_idx.where(topk_idx >= 0, num_experts), torch.ones_like(topk_idx))[:, :num_experts]
        assert not (chosen > 1).any(), "a token chose an expert twice"
        in_rank = chosen.view(len(topk_idx), self.size, num_experts // self.size).sum(dim=2) > 0
        return in_rank.sum(dim=0).int(), None, chosen.sum(dim=0).int(), in_rank, None

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        Buffer.calls.append("dispatch" if handle is None else "dispatch again")
        self._check(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None and handle.buffer is self and len(x) == handle.num_tokens
            return self._send(x, handle), None, None, None, None, None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None and topk_idx is not None and topk_weights is not None
        assert num_tokens_per_rank is not None and torch.equal(num_tokens_per_rank, is_token_in_rank.sum(dim=0).int())
        assert topk_weights.dtype is torch.float32 and topk_weights.shape == topk_idx.shape and len(x) == len(topk_idx)
        local = len(num_tokens_per_expert) // self.size
        sent = is_token_in_rank.sum(dim=0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = Handle(
            self,
            is_token_in_rank.t().nonzero()[:, 1],
            sent.tolist(),
            received.tolist(),
            torch.arange(int(received.sum())).flip(0),
            len(x),
        )
        experts = self._send(topk_idx, handle) - self.group.rank() * local
        here = (experts >= 0) & (experts < local)
        experts = experts.where(here, -1)
        weights = self._send(topk_weights, handle).where(here, 0.0)
        counts = [int((experts == expert).sum()) for expert in range(local)]
        return self._send(x, handle), experts, weights, counts, handle, None

    def combine(self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None) -> tuple[Any, ...]:
        Buffer.calls.append("combine" if topk_weights is None else "combine weights")
        self._check(x)
        assert handle.buffer is self and len(x) == len(handle.order)
        if topk_weights is not None:
            assert topk_weights.dtype is torch.float32 and len(topk_weights) == len(x) and topk_weights.is_contiguous()
            topk_weights = self._return(topk_weights, handle)
        return self._return(x, handle), topk_weights, None

    def _check(self, x: torch.Tensor) -> None:
        assert x.dim() == 2 and x.is_contiguous() and not torch.is_grad_enabled()
        token = x.shape[1] * max(x.element_size(), 2)
        needed = max(each.get_nvl_buffer_size_hint(token, self.size) for each in (Config(3), Config(5)))
        assert self.num_nvl_bytes >= needed and self.num_rdma_bytes >= Config(5).get_rdma_buffer_size_hint(token, self.size)

    def _send(self, x: torch.Tensor, handle: Handle) -> torch.Tensor:
        out = x.new_empty(sum(handle.received), *x.shape[1:])
        dist.all_to_all_single(out, x[handle.sent_tokens].contiguous(), handle.received, handle.sent, group=self.group)
        return out[handle.order]

    def _return(self, x: torch.Tensor, handle: Handle) -> torch.Tensor:
        rows = torch.empty_like(x)
        rows[handle.order] = x
        out = x.new_empty(sum(handle.sent), *x.shape[1:])
        dist.all_to_all_single(out, rows, handle.sent, handle.received, group=self.group)
        return x.new_zeros(handle.num_tokens, *x.shape[1:]).index_add_(0, handle.sent_tokens, out)


@contextmanager
def installed() -> Iterator[type[Buffer]]:
    """The package deep_ep can be imported, and is this."""
    module: Any = ModuleType("deep_ep")
    module.__spec__, module.Buffer = ModuleSpec("deep_ep", None), Buffer
    assert "deep_ep" not in sys.modules
    sys.modules["deep_ep"] = module
    optional_imports.available.cache_clear()
    Buffer.made, Buffer.calls = [], []
    try:
        yield Buffer
    finally:
        del sys.modules["deep_ep"]
        optional_imports.available.cache_clear()
