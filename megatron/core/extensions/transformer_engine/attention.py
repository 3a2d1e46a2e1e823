"""Attention by Transformer Engine's kernels: cuDNN's, flash-attn's where that is installed, or plain ones."""

import os
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.context_parallel.combinations import comm_type_of_layer
from megatron.core.extensions.transformer_engine.base import TEModule, refuse_unsupported
from megatron.core.fusions.fused_softmax import causal_mask
from megatron.core.packed_seq_params import PackedSeqParams, packed_documents
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.attention_masks import is_window_layer
from megatron.core.transformer.dot_product_attention import CAUSAL
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.utils import get_pg_size

# What attention_backend sets of the environment, from which Transformer Engine chooses its kernel at the first forward.
_CHOICE = {AttnBackend.flash: "FLASH", AttnBackend.fused: "FUSED", AttnBackend.unfused: "UNFUSED"}


def choose_kernel(backend: AttnBackend) -> None:
    """Leave Transformer Engine the kernel of this kind alone; `auto` leaves it the choice. Raises ValueError for `local`."""
    if backend is AttnBackend.auto:
        return
    if backend not in _CHOICE:
        raise ValueError(f"attention_backend {backend.name}: transformer_impl transformer_engine has auto, flash, fused and unfused")
    for kind in _CHOICE.values():
        os.environ[f"NVTE_{kind}_ATTN"] = str(int(kind == _CHOICE[backend]))


class TEDotProductAttention(TEModule):
    """Arguments and forward are those of DotProductAttention in transformer/dot_product_attention.py.

    Raises ValueError for what no path here honours: a mask or packed sequences over context-parallel ranks, an attention bias.
    """

    te_class = "DotProductAttention"

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if num_splits is not None:
            raise ValueError("TEDotProductAttention: num_splits is not built yet; leave it out")
        refuse_unsupported(config)
        choose_kernel(config.attention_backend)
        groups = default_pg_collection(pg_collection)
        window = config.window_size if is_window_layer(config.window_size, config.window_attn_skip_freq, layer_number) else None
        causal = attn_mask_type in CAUSAL
        if window is not None and not causal and min(window) < 0:
            raise ValueError(f"window_size {window}: without a causal mask transformer_engine needs two numbers from 0 on; give (128, 128)")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        channels = config.kv_channels if k_channels is None else k_channels
        super().__init__(
            config.num_attention_heads,
            channels if v_channels is None or v_channels == channels else (channels, v_channels),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=dropout,
            attn_mask_type="causal" if causal else "no_mask",
            window_size=window if window is None or not causal else (window[0], 0),
            tp_size=get_pg_size(groups.tp),
            tp_group=groups.tp if get_pg_size(groups.tp) > 1 else None,
            # heads are split over the tensor-parallel ranks, also under sequence parallelism: each draws masks of its own
            get_rng_state_tracker=get_cuda_rng_tracker if dropout else None,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=config.softmax_scale if softmax_scale is None else softmax_scale,
            **_context_parallel(config, groups, cp_comm_type or comm_type_of_layer(config.cp_comm_type, layer_number)),
        )
        self.config, self.is_causal, self.context_size = config, causal, get_pg_size(groups.cp)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if attention_bias is not None:
            raise ValueError("TEDotProductAttention: attention_bias is not built yet; leave it out and pass a mask")
        causal = self.is_causal if attn_mask_type is None else attn_mask_type in CAUSAL
        if self.context_size > 1 and (attention_mask is not None or packed_seq_params is not None):
            what = "an attention mask" if packed_seq_params is None else "packed sequences"
            raise ValueError(f"{what}: transformer_engine has none over several context-parallel ranks here; transformer_impl local has")
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if packed_seq_params is not None:
            if attention_mask is not None:
                raise ValueError("packed_seq_params: a packed batch has no attention_mask; leave the mask out")
            return self._packed(query, key, value, causal, packed_seq_params)
        if attention_mask is None:
            return super().forward(query, key, value, attn_mask_type="causal" if causal else "no_mask")
        if self.config.window_size is not None:
            raise ValueError("window_size: transformer_engine has no attention mask beside a window here; transformer_impl local has")
        hidden = attention_mask | causal_mask(query.shape[0], key.shape[0], query.device) if causal else attention_mask
        return super().forward(query, key, value, attention_mask=hidden, attn_mask_type="arbitrary", window_size=(-1, -1))

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, packed: PackedSeqParams) -> torch.Tensor:
        """Sequences behind each other: [tokens, 1, heads, d], or [tokens, heads, d] -> [tokens, heads * d]."""
        rows = query.dim() == 4
        if rows:
            if query.shape[1] != 1:
                raise ValueError(f"packed_seq_params: a packed batch has batch size 1, not {query.shape[1]}")
            query, key, value = (tensor.squeeze(1) for tensor in (query, key, value))
        longest = max(document.padded for document in packed_documents(packed))
        counts = packed.cu_seqlens_q
        padding = {} if packed.cu_seqlens_q_padded is None else {"cu_seqlens_q_padded": packed.cu_seqlens_q_padded}
        if padding:
            padding["cu_seqlens_kv_padded"] = padding["cu_seqlens_q_padded"]
        output = super().forward(
            query,
            key,
            value,
            qkv_format="thd",
            cu_seqlens_q=counts,
            cu_seqlens_kv=counts,
            max_seqlen_q=packed.max_seqlen_q or longest,
            max_seqlen_kv=packed.max_seqlen_kv or longest,
            attn_mask_type="padding_causal" if causal else "padding",
            **padding,
        )
        return output.unsqueeze(1) if rows else output


def _context_parallel(config: Any, groups: ProcessGroupCollection, comm_type: str) -> dict[str, Any]:
    """Arguments for a sequence that several ranks share, in the halves that get_batch_on_this_cp_rank gives them."""
    size, told = get_pg_size(groups.cp), config.context_parallel_size
    if size != told:
        raise ValueError(f"the context-parallel group has {size} ranks but config.context_parallel_size is {told}")
    if size == 1:
        return {}
    group: Any = list(groups.hcp or ()) if comm_type == "a2a+p2p" else groups.cp
    return {
        "cp_group": group,
        "cp_global_ranks": dist.get_process_group_ranks(groups.cp),  # type: ignore[arg-type]
        "cp_stream": device.side_stream(),
        "cp_comm_type": comm_type,
    }
