"""Attention of a rank's queries over keys that come in portions: results and gradients of blocks put together."""

from dataclasses import dataclass

import torch

from megatron.core.context_parallel.block_attention import attend, attend_backward
from megatron.core.context_parallel.block_plan import Block, Mask, plan_for_ranks
from megatron.core.packed_seq_params import Document

Span = tuple[int, int]


def by_head(tensor: torch.Tensor) -> torch.Tensor:
    """[s, b, heads, d] -> [b, heads, s, d], a view."""
    return tensor.permute(1, 2, 0, 3)


def by_token(tensor: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, d] -> [s, b, heads, d], a view."""
    return tensor.permute(2, 0, 1, 3)


def dense_last_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels want d last without gaps (an expanded gradient has none)."""
    return tensor if tensor.stride(-1) == 1 and tensor.stride(0) else tensor.contiguous()


@dataclass(frozen=True)
class Geometry:
    """Which queries this rank has, and which keys they see.

    documents: the sequences (one where nothing is packed), cut over `size` ranks. attention_mask: bool, True = hidden, [1 or b, 1, this
    rank's queries, all keys in the order of the sequence]; it holds in addition to `mask`.
    """

    documents: tuple[Document, ...]
    rank: int
    size: int
    mask: Mask
    attention_mask: torch.Tensor | None = None

    def blocks(self, key_rank: int | None) -> tuple[Block, ...]:
        """The blocks of this rank's queries and the keys of `key_rank` (None: all, in the order of the sequence)."""
        return plan_for_ranks(self.documents, self.size, self.rank, key_rank, self.mask, self.attention_mask is not None)

    @property
    def few_parts(self) -> bool:
        """Whether a query's result is made of two blocks at most, so that adding them in the tensors' own precision rounds once."""
        return self.size <= 2 and self.attention_mask is None and not self.mask.is_window

    def hidden(self, block: Block, device: torch.device) -> torch.Tensor | None:
        """True where a query of the block does not see a key; None for what the block's kind says."""
        hidden = hidden_by_position(block, self.mask, device) if block.kind == "masked" else None
        if self.attention_mask is None:
            return hidden
        columns = slice(block.key_start, block.key_start + block.keys[1] - block.keys[0])
        given = self.attention_mask[:, :, slice(*block.queries), columns]
        return given if hidden is None else given | hidden


def hidden_by_position(block: Block, mask: Mask, device: torch.device) -> torch.Tensor:
    """bool [queries, keys] of a masked block."""
    query = torch.arange(block.queries[1] - block.queries[0], device=device)[:, None] + block.offset
    key = torch.arange(block.keys[1] - block.keys[0], device=device)
    hidden = torch.zeros(len(query), len(key), dtype=torch.bool, device=device)
    if mask.right is not None:
        hidden |= key > query + mask.right
    if mask.left is not None:
        hidden |= key < query - mask.left
    return hidden


class _Spans:
    """Which places were written before."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def first_time(self, span: Span) -> bool:
        """Whether none of the span was written; from here on it is."""
        new = all(span[1] <= first or end <= span[0] for first, end in self.spans)
        self.spans.append(span)
        return new


class PartialSum:
    """A tensor like `like` [b, heads, s, d] that is added up in `dtype` by stretches of s; nothing added is zero."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype, self.spans = like, dtype, _Spans()
        self.total: torch.Tensor | None = None

    def add(self, span: Span, part: torch.Tensor) -> None:
        """The sum may keep `part` itself."""
        new = self.spans.first_time(span)
        if self.total is None:
            if span == (0, self.like.shape[2]):
                self.total = part.to(self.dtype)
                return
            self.total = zeros_by_token(self.like, self.dtype)
        place = self.total[:, :, slice(*span)]
        place.copy_(part) if new else place.add_(part)

    def result(self) -> torch.Tensor:
        return zeros_by_token(self.like, self.dtype) if self.total is None else self.total


def zeros_by_token(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of the shape of `like` [b, heads, s, d], laid out as the model's [s, b, heads, d]."""
    batch, heads, tokens, width = like.shape
    return torch.zeros(tokens, batch, heads, width, dtype=dtype, device=like.device).permute(1, 2, 0, 3)


class PartialAttention:
    """The softmax over the keys seen so far: `add` portions of keys, then take `result`. Everything is [b, heads or groups, s, d]."""

    def __init__(self, query: torch.Tensor, geometry: Geometry, scale: float, kernel: str) -> None:
        self.query, self.geometry, self.scale, self.kernel = query, geometry, scale, kernel
        self.wide = torch.promote_types(query.dtype, torch.float32)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None
        self.spans = _Spans()

    def add(self, key_rank: int | None, key: torch.Tensor, value: torch.Tensor) -> None:
        for block in self.geometry.blocks(key_rank):
            keys = slice(*block.keys)
            hidden = self.geometry.hidden(block, key.device)
            query = self.query[:, :, slice(*block.queries)]
            self._merge(block.queries, *attend(query, key[:, :, keys], value[:, :, keys], block.kind, hidden, self.scale, self.kernel))

    def _merge(self, span: Span, out: torch.Tensor, lse: torch.Tensor) -> None:
        new = self.spans.first_time(span)
        if self.out is None or self.lse is None:
            dtype = self.query.dtype if self.geometry.few_parts else self.wide
            if span == (0, self.query.shape[2]):
                self.out, self.lse = out.to(dtype), lse
                return
            self.out = zeros_by_token(self.query, dtype)
            self.lse = torch.full(self.query.shape[:3], float("-inf"), dtype=self.wide, device=self.query.device)
        mine, old = self.out[:, :, slice(*span)], self.lse[:, :, slice(*span)]
        if new:
            mine.copy_(out)
            old.copy_(lse)
            return
        total = torch.logaddexp(old, lse)
        base = total.masked_fill(total == float("-inf"), 0.0)  # a query that saw nothing so far
        keep, take = (old - base).exp_().unsqueeze(-1), (lse - base).exp_().unsqueeze(-1)
        if mine.dtype == self.wide:
            mine.mul_(keep).addcmul_(out, take)
        else:
            torch.addcmul(mine * keep, out, take, out=mine)  # in fp32, rounded once
        old.copy_(total)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(output in the dtype of the query, logsumexp over all keys)."""
        if self.out is None or self.lse is None:
            self.out = zeros_by_token(self.query, self.query.dtype)
            self.lse = torch.full(self.query.shape[:3], float("-inf"), dtype=self.wide, device=self.query.device)
        return self.out.to(self.query.dtype), self.lse


class PartialGradient:
    """Gradients of keys and values by portions, and that of the queries added up over them."""

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        geometry: Geometry,
        scale: float,
        kernel: str,
    ) -> None:
        self.grad, self.query, self.out, self.lse = grad, query, out, lse
        self.geometry, self.scale, self.kernel = geometry, scale, kernel
        self.dtype = query.dtype if geometry.few_parts else torch.promote_types(query.dtype, torch.float32)
        self.query_sum = PartialSum(query, self.dtype)

    def of(self, key_rank: int | None, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank's queries add to the gradients of a portion of keys and values, in the precision of sums."""
        key_sum, value_sum = PartialSum(key, self.dtype), PartialSum(value, self.dtype)
        for block in self.geometry.blocks(key_rank):
            rows, keys = slice(*block.queries), slice(*block.keys)
            dq, dk, dv = attend_backward(
                self.grad[:, :, rows],
                self.query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                self.out[:, :, rows],
                self.lse[:, :, rows],
                block.kind,
                self.geometry.hidden(block, key.device),
                self.scale,
                self.kernel,
            )
            self.query_sum.add(block.queries, dq)
            key_sum.add(block.keys, dk)
            value_sum.add(block.keys, dv)
        return key_sum.result(), value_sum.result()

    def of_queries(self) -> torch.Tensor:
        return self.query_sum.result().to(self.query.dtype)
