"""Where the documents of a packed batch ([tokens, heads, dim], "thd") begin and end."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist


@dataclass
class PackedSeqParams:
    """cu_seqlens_*: int32 [documents + 1], running token counts that start at 0; `_padded`: the same with each document's padding."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: dist.ProcessGroup | None = None
    total_tokens: int | None = None


def document_begins(tokens: torch.Tensor, eod: int) -> torch.Tensor:
    """bool [b, s]: True at the first token of each row, and behind each token `eod` of tokens [b, s]."""
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == eod
    return begins


def cu_seqlens_of(begins: torch.Tensor) -> torch.Tensor:
    """int32 [documents + 1]: running token counts of the documents of begins [b, s], row behind row; each row begins a document."""
    begins = begins.clone()
    begins[:, :1] = True
    firsts = begins.reshape(-1).nonzero().reshape(-1)
    return torch.cat([firsts, firsts.new_tensor([begins.numel()])]).to(torch.int32)


def packed_seq_params_of(begins: torch.Tensor, where: torch.device | str) -> PackedSeqParams:
    """The parameters, on the device `where`, of a micro batch whose rows lie behind each other as [1, b s]. begins: bool [b, s], on a CPU.

    Its documents do not see each other, and no square mask is made. They are kept with the parameters: no layer asks the device for them.
    """
    counts = cu_seqlens_of(begins)
    longest = int(counts.diff().max())
    on_device = counts.to(where, non_blocking=True)
    params = PackedSeqParams("thd", on_device, on_device, max_seqlen_q=longest, max_seqlen_kv=longest, total_tokens=begins.numel())
    ends = counts.tolist()
    params.__dict__["_documents"] = tuple(Document(start, end - start, end - start) for start, end in pairwise(ends))
    return params


class Document(NamedTuple):
    """A sequence of a packed batch: its first token's place, its tokens, and those with the padding behind them."""

    start: int
    length: int
    padded: int


def packed_documents(params: PackedSeqParams) -> tuple[Document, ...]:
    """The sequences of a packed batch; read from the device once, and kept with `params`.

    Counts are those of the whole batch, before any split over context-parallel ranks. Raises ValueError for counts that say nothing
    possible, and for what attention does not do: keys of other lengths than queries.
    """
    kept = params.__dict__.get("_documents")
    if kept is not None:
        return kept
    if params.qkv_format not in (None, "thd") or params.cu_seqlens_q is None:
        raise ValueError(f"packed sequences: qkv_format {params.qkv_format!r} with cu_seqlens_q {params.cu_seqlens_q}; give 'thd' and both")
    ends = params.cu_seqlens_q.tolist()
    padded = ends if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.tolist()
    for name, own in (("cu_seqlens_kv", ends), ("cu_seqlens_kv_padded", padded)):
        other = getattr(params, name)
        if other is not None and other.tolist() != own:
            raise ValueError(f"packed sequences: {name} differs from that of the queries; self-attention has the same")
    lengths = [end - start for start, end in pairwise(ends)]
    room = [end - start for start, end in pairwise(padded)]
    if ends[0] or padded[0] or len(ends) != len(padded) or any(not 0 <= n <= m for n, m in zip(lengths, room)):
        raise ValueError(
            f"packed sequences: cu_seqlens_q {ends[:8]} and cu_seqlens_q_padded {padded[:8]} must start at 0, grow, and have one entry a "
            "sequence more; a sequence is no longer than its padded length"
        )
    documents = tuple(Document(*item) for item in zip(padded, lengths, room))
    params.__dict__["_documents"] = documents
    return documents
