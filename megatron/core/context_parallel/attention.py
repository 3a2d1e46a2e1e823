"""From a layer's kind of exchange to the attention that does it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from megatron.core.context_parallel.all_to_all import Attend, all_to_all_attention
from megatron.core.context_parallel.block_attention import choose_kernel
from megatron.core.context_parallel.block_plan import Mask
from megatron.core.context_parallel.combinations import COMM_TYPES, unsupported
from megatron.core.context_parallel.gathered import gathered_attention
from megatron.core.context_parallel.partial_attention import Geometry
from megatron.core.context_parallel.ring import ring_attention
from megatron.core.context_parallel.sequence_split import check_packed, sequence_order
from megatron.core.packed_seq_params import Document
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.utils import Group, get_pg_rank, get_pg_size


@dataclass(frozen=True)
class _Request:
    """What a layer asks for beside the tensors. geometry: of the whole group; alone: one rank's attention over whole sequences."""

    geometry: Geometry
    scale: float
    kernel: str
    alone: Attend
    by_copies: bool


Kind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, _Request], torch.Tensor]


def _p2p(groups: ProcessGroupCollection) -> Kind:
    return lambda q, k, v, asked: ring_attention(q, k, v, asked.geometry, groups.cp, asked.scale, asked.kernel, asked.by_copies)


def _all_gather(groups: ProcessGroupCollection) -> Kind:
    return lambda q, k, v, asked: gathered_attention(q, k, v, asked.geometry, groups.cp, asked.scale, asked.kernel)


def _a2a(groups: ProcessGroupCollection) -> Kind:
    return lambda q, k, v, asked: _exchanging(groups.cp, q, k, v, asked, asked.alone)


def _a2a_p2p(groups: ProcessGroupCollection) -> Kind:
    levels = list(groups.hcp or ())
    if len(levels) != 2:
        raise ValueError(
            "cp_comm_type a2a+p2p needs two levels of groups (pg_collection.hcp); give hierarchical_context_parallel_sizes to "
            "initialize_model_parallel"
        )
    heads, ring = levels

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Request) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
            geometry = replace(asked.geometry, rank=get_pg_rank(ring), size=get_pg_size(ring), attention_mask=rows)
            return ring_attention(q, k, v, geometry, ring, asked.scale, asked.kernel, asked.by_copies)

        return _exchanging(heads, query, key, value, asked, attend)

    return attention


def _exchanging(group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: _Request, attend: Attend) -> torch.Tensor:
    """Heads for tokens between the ranks of `group`, which are neighbours."""
    whole, inner = asked.geometry, get_pg_size(group)
    first = whole.rank // inner * inner
    order = sequence_order(whole.documents, tuple(range(first, first + inner)), whole.size, query.device)
    return all_to_all_attention(query, key, value, whole.attention_mask, group, order, attend)


# A kind of combinations.COMM_TYPES -> its attention for these groups. Raises ValueError for groups that it cannot do with.
KINDS: dict[str, Callable[[ProcessGroupCollection], Kind]] = {
    "p2p": _p2p,
    "all_gather": _all_gather,
    "a2a": _a2a,
    "a2a+p2p": _a2a_p2p,
}


def _features(mask: Mask, packed: bool, attention_mask: bool) -> list[str]:
    """The rows of combinations.SUPPORTED that a call needs."""
    asked = {
        "a causal mask": mask.right == 0,
        "no mask": mask.right != 0 and not mask.is_window,
        "a sliding window": mask.is_window,
        "packed sequences": packed,
        "an attention mask": attention_mask,
    }
    return [feature for feature, wanted in asked.items() if wanted]


def of_one_width(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors whose last dimensions differ, filled with zeros to the widest: messages and kernels have one width. Zeros add nothing to
    scores, and make columns of the output that are cut off."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [tensor if tensor.shape[-1] == widest else F.pad(tensor, (0, widest - tensor.shape[-1])) for tensor in tensors]


@dataclass
class ContextParallelAttention:
    """Attention over sequences that the ranks of `groups.cp` share. Gives what one rank with the whole sequence does.

    by_copies: a ring's transfers go by copy engines, where the ranks' GPUs share memory.
    """

    comm_type: str
    groups: ProcessGroupCollection
    scale: float
    backend: AttnBackend
    by_copies: bool = False

    def __post_init__(self) -> None:
        if self.comm_type not in KINDS:
            raise ValueError(f"cp_comm_type {self.comm_type!r} must be one of {', '.join(COMM_TYPES)}")
        self.rank, self.size = get_pg_rank(self.groups.cp), get_pg_size(self.groups.cp)
        self.attention = KINDS[self.comm_type](self.groups)

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
        """query [s / cp, b, heads, d], key and value [s / cp, b, groups, d] -> like query, with the width of the values.

        documents: of a packed batch, with their whole lengths. attention_mask: [1 or b, 1, this rank's queries, all keys].
        alone(query, key, value, attention mask) is one rank's attention over whole sequences. Raises ValueError for what the kind does
        not do, and for tensors that do not fit together.
        """
        for feature in _features(mask, documents is not None, attention_mask is not None):
            if reason := unsupported(feature, self.comm_type):
                raise ValueError(reason)
        sequence = len(query) * self.size
        if documents is None:
            documents = (Document(0, sequence, sequence),)
        check_packed(documents, self.size)
        held = sum(document.padded for document in documents)
        if held != sequence:
            raise ValueError(f"packed sequences of {held} tokens, but the ranks hold {self.size} x {len(query)}: cu_seqlens count all")
        self._check_mask(attention_mask, len(query), sequence)
        geometry = Geometry(documents, self.rank, self.size, mask, attention_mask)
        width = value.shape[-1]
        query, key, value = of_one_width(query, key, value)
        kernel = choose_kernel(self.backend, query, key)
        out = self.attention(query, key, value, _Request(geometry, self.scale, kernel, alone, self.by_copies))
        return out[..., :width]

    def _check_mask(self, attention_mask: torch.Tensor | None, queries: int, keys: int) -> None:
        if attention_mask is not None and tuple(attention_mask.shape[-2:]) != (queries, keys):
            raise ValueError(
                f"attention_mask {list(attention_mask.shape)}: with context parallelism it has the rows of this rank's {queries} queries "
                f"and the columns of all {keys} keys; get_batch_on_this_cp_rank cuts it so"
            )
