"""From a layer's kind of exchange to the attention that does it."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.context_parallel.all_to_all import Attend, all_to_all_attention
from megatron.core.context_parallel.block_attention import choose_kernel
from megatron.core.context_parallel.block_plan import Mask
from megatron.core.context_parallel.combinations import COMM_TYPES
from megatron.core.context_parallel.gathered import gathered_attention
from megatron.core.context_parallel.partial_attention import Geometry
from megatron.core.context_parallel.ring import ring_attention
from megatron.core.context_parallel.sequence_split import check_packed, sequence_order
from megatron.core.packed_seq_params import Document
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import get_pg_rank, get_pg_size


@dataclass
class ContextParallelAttention:
    """Attention over sequences that the ranks of `groups.cp` share. Gives what one rank with the whole sequence does."""

    comm_type: str
    groups: ProcessGroupCollection
    scale: float
    backend: AttnBackend

    def __post_init__(self) -> None:
        if self.comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type {self.comm_type!r} must be one of {', '.join(COMM_TYPES)}")
        self.rank, self.size = get_pg_rank(self.groups.cp), get_pg_size(self.groups.cp)
        levels: list[Any] = [self.groups.cp] if self.comm_type == "a2a" else []
        if self.comm_type == "a2a+p2p":
            levels = list(self.groups.hcp or ())
            if len(levels) != 2:
                raise ValueError(
                    "cp_comm_type a2a+p2p needs two levels of groups (pg_collection.hcp); give hierarchical_context_parallel_sizes to "
                    "initialize_model_parallel"
                )
        self.levels = levels

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        documents: tuple[Document, ...] | None,
        attention_mask: torch.Tensor | None,
        alone: Attend,
    ) -> torch.Tensor:
        """query [s / cp, b, heads, d], key and value [s / cp, b, groups, d] -> like query.

        documents: of a packed batch, with their whole lengths. attention_mask: [1 or b, 1, this rank's queries, all keys].
        alone(query, key, value, attention mask) is one rank's attention over whole sequences.
        """
        sequence = len(query) * self.size
        if documents is None:
            documents = (Document(0, sequence, sequence),)
        check_packed(documents, self.size)
        held = sum(document.padded for document in documents)
        if held != sequence:
            raise ValueError(f"packed sequences of {held} tokens, but the ranks hold {self.size} x {len(query)}: cu_seqlens count all")
        self._check_mask(attention_mask, len(query), sequence)
        kernel = choose_kernel(self.backend, query, key)
        if not self.levels:
            attention = ring_attention if self.comm_type == "p2p" else gathered_attention
            geometry = Geometry(documents, self.rank, self.size, mask, attention_mask)
            return attention(query, key, value, geometry, self.groups.cp, self.scale, kernel)

        inner, whole = get_pg_size(self.levels[0]), documents
        first = self.rank // inner * inner
        order = sequence_order(documents, tuple(range(first, first + inner)), self.size, query.device)
        attend = alone
        if len(self.levels) == 2:

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
                geometry = Geometry(whole, get_pg_rank(self.levels[1]), get_pg_size(self.levels[1]), mask, rows)
                return ring_attention(q, k, v, geometry, self.levels[1], self.scale, kernel)

        return all_to_all_attention(query, key, value, attention_mask, self.levels[0], order, attend)

    def _check_mask(self, attention_mask: torch.Tensor | None, queries: int, keys: int) -> None:
        if attention_mask is not None and tuple(attention_mask.shape[-2:]) != (queries, keys):
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)}: with context parallelism it has the rows of this rank's {queries} queries "
                f"and the columns of all {keys} keys; get_batch_on_this_cp_rank cuts it so"
            )
