"""Which tokens of a sequence a context-parallel rank holds.

Zigzag: the sequence is cut in 2 * cp chunks, and rank r holds chunks r and 2 * cp - 1 - r. Under a causal mask a chunk's work grows with
its place, so that each rank has the same. In a packed batch every sequence is cut so, and a rank holds its two chunks of each, side by
side.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from megatron.core.packed_seq_params import Document, PackedSeqParams, packed_documents
from megatron.core.utils import Group, get_pg_rank, get_pg_size


def chunk_length(length: int, cp_size: int) -> int:
    """Tokens of a chunk. Raises ValueError when the sequence does not divide."""
    if length % (2 * cp_size):
        raise ValueError(
            f"a sequence of {length} tokens does not divide over {cp_size} context-parallel ranks: it must be a multiple of "
            f"2 x {cp_size}; {-(-length // (2 * cp_size)) * 2 * cp_size} works"
        )
    return length // (2 * cp_size)


def runs_of_rank(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """[first, end) of the stretches of positions that the rank holds, in order: two, or one where its chunks are neighbours."""
    if cp_size == 1:
        return [(0, length)]
    chunk = chunk_length(length, cp_size)
    early, late = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return [(early, late + chunk)] if early + chunk == late else [(early, early + chunk), (late, late + chunk)]


def positions_of_rank(seq: int, cp_rank: int, cp_size: int, device: torch.device | str | None = None) -> torch.Tensor:
    """int64 [seq / cp_size]: where in the sequence each of the rank's tokens stands.

    Raises ValueError when `seq` is not a multiple of 2 * cp_size.
    """
    return torch.cat([torch.arange(first, end, device=device) for first, end in runs_of_rank(seq, cp_rank, cp_size)])


def split_for_context_parallel(tensor: torch.Tensor, dim: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    """The rank's part of `tensor`, of which dimension `dim` is the whole sequence; contiguous. The tensor itself for one rank."""
    if cp_size == 1:
        return tensor
    parts = [tensor.narrow(dim, first, end - first) for first, end in runs_of_rank(tensor.shape[dim], cp_rank, cp_size)]
    return torch.cat(parts, dim=dim) if len(parts) > 1 else parts[0].contiguous()


def join_from_context_parallel(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole from what each rank holds: the inverse of split_for_context_parallel."""
    if len(parts) == 1:
        return parts[0]
    halves = [part.chunk(2, dim=dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim=dim)


def split_batch(batch: dict[str, Any], cp_group: Group, packed: PackedSeqParams | None = None) -> dict[str, Any]:
    """`batch` with this rank's part of each tensor: dimension 1 is the sequence ([b, s]); of an attention mask [b, 1, s, s] dimension 2.

    A mask keeps all its keys, for queries of this rank see keys of all. What is no tensor is passed on. packed: of each of its sequences
    the rank's part.
    """
    rank, size = get_pg_rank(cp_group), get_pg_size(cp_group)

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if packed is not None:
            return split_packed(value, 1, packed, rank, size)
        return split_for_context_parallel(value, 2 if name == "attention_mask" else 1, rank, size)

    return batch if size == 1 else {name: part(name, value) for name, value in batch.items()}


# --- packed sequences ---


def check_packed(documents: Sequence[Document], cp_size: int) -> None:
    """Raises ValueError unless each sequence, with its padding, divides over the ranks."""
    wrong = [document.padded for document in documents if document.padded % (2 * cp_size)]
    if cp_size > 1 and wrong:
        raise ValueError(
            f"context parallelism: each sequence must be padded to a multiple of 2*CP = {2 * cp_size}, but padded lengths are {wrong[:8]}; "
            f"give cu_seqlens_q_padded in which {wrong[0]} is {-(-wrong[0] // (2 * cp_size)) * 2 * cp_size}"
        )


def packed_positions_of_rank(
    documents: Sequence[Document], cp_rank: int, cp_size: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """int64 [tokens / cp_size]: where in the packed batch (padding counted) each of the rank's tokens stands."""
    check_packed(documents, cp_size)
    parts = [positions_of_rank(document.padded, cp_rank, cp_size, device) + document.start for document in documents]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def positions_in_documents(
    documents: Sequence[Document], cp_rank: int, cp_size: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """int64 [tokens / cp_size]: where in its own sequence each of the rank's tokens stands."""
    check_packed(documents, cp_size)
    parts = [positions_of_rank(document.padded, cp_rank, cp_size, device) for document in documents]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def split_packed(tensor: torch.Tensor, dim: int, params: PackedSeqParams, cp_rank: int, cp_size: int) -> torch.Tensor:
    """The rank's part of a packed tensor, of which dimension `dim` holds all tokens, padding included."""
    positions = packed_positions_of_rank(packed_documents(params), cp_rank, cp_size, tensor.device)
    return tensor.index_select(dim, positions)


def shift_packed_labels(tokens: torch.Tensor, params: PackedSeqParams, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token labels of packed tokens [tokens] or [1, tokens], and whether each counts (float, 1 or 0).

    Each sequence is shifted by itself: its last token, and padding, have no label (`ignored`, weight 0). Shift before the split over
    context-parallel ranks, whose borders are not those of the sequences.
    """
    flat = tokens.reshape(-1)
    labels, counts = torch.full_like(flat, ignored), torch.zeros(flat.shape, dtype=torch.float32, device=flat.device)
    for document in packed_documents(params):
        last = document.start + max(document.length - 1, 0)
        labels[document.start : last] = flat[document.start + 1 : last + 1]
        counts[document.start : last] = 1.0
    return labels.view_as(tokens), counts.view_as(tokens)


@lru_cache(maxsize=16)
def sequence_order(documents: tuple[Document, ...], ranks: tuple[int, ...], cp_size: int, device: torch.device) -> torch.Tensor:
    """Indices that put the tokens of `ranks`, laid one rank after the other, in the order of the sequence.

    Made once, on the host: what CUDA graphs record only reads it.
    """
    return torch.cat([packed_positions_of_rank(documents, rank, cp_size) for rank in ranks]).argsort().to(device)
