"""Where the documents of a packed batch ([tokens, heads, dim], "thd") begin and end."""

from dataclasses import dataclass

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
