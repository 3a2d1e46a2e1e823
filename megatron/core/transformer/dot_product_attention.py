"""softmax(q k^T scale) v: by torch's scaled_dot_product_attention, and by its plain twin."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core import device
from megatron.core.fusions.fused_softmax import causal_mask, scaled_masked_softmax
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide, get_pg_size

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
# In order of preference; on Hopper cuDNN's kernel takes about half of flash's time (forward and backward, GQA, causal).
GPU_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ONE_BACKEND = {AttnBackend.flash: SDPBackend.FLASH_ATTENTION, AttnBackend.fused: SDPBackend.CUDNN_ATTENTION}


def attention_plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor | None,
    *,
    scale: float,
    layer_coefficient: float = 1.0,
    in_fp32: bool = True,
    dropout: float = 0.0,
) -> torch.Tensor:
    """The plain twin. query [b, heads, s, d], key and value [b, groups, t, d], hidden [.., s, t] True where a key is not seen.

    layer_coefficient: scores are divided by it before, and multiplied inside, the softmax (apply_query_key_layer_scaling), so that
    fp16 scores do not overflow; the result is the same.
    """
    repeats = divide(query.shape[1], key.shape[1])
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query * (scale / layer_coefficient)) @ key.transpose(-1, -2)
    probabilities = scaled_masked_softmax(scores, hidden, layer_coefficient, in_fp32=in_fp32)
    return F.dropout(probabilities, p=dropout) @ value


class DotProductAttention(MegatronModule):
    """forward: query [s, b, heads, d], key and value [t, b, groups, d] -> [s, b, heads * d], all of this rank's heads.

    attention_mask: bool, True = hidden, [1 or b, 1, s, t]; it holds in addition to a causal mask type. None: nothing but the mask type.
    Raises ValueError for what no path here honours (packed sequences, context parallelism, a bias), never ignores it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        if config.context_parallel_size > 1 or get_pg_size(default_pg_collection(pg_collection).cp) > 1:
            raise ValueError("DotProductAttention: context parallelism is not built yet; use context_parallel_size 1")
        self.attn_mask_type = attn_mask_type
        assert config.kv_channels is not None
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale
        self.layer_coefficient = float(max(1, layer_number)) if config.apply_query_key_layer_scaling else 1.0
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.backend = config.attention_backend
        if self.backend is AttnBackend.fused and not device.has_accelerator():
            raise ValueError("attention_backend fused (cuDNN) needs an NVIDIA GPU; use auto, flash or unfused on a CPU")

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
        if packed_seq_params is not None or attention_bias is not None:
            raise ValueError("DotProductAttention: packed_seq_params and attention_bias are not built yet; leave them out and pass a mask")
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = mask_type in CAUSAL
        tokens, batch = query.shape[:2]
        hidden = attention_mask
        if causal and tokens == key.shape[0] and hidden is None:
            is_causal = tokens > 1
        else:
            is_causal = False
            if causal:
                triangle = causal_mask(tokens, key.shape[0], query.device)
                hidden = triangle if hidden is None else hidden | triangle
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d], a view
        dropout = self.dropout if self.training else 0.0
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            if self.backend in (AttnBackend.unfused, AttnBackend.local):
                if is_causal:
                    hidden = causal_mask(tokens, tokens, query.device)
                context = attention_plain(
                    query,
                    key,
                    value,
                    hidden,
                    scale=self.softmax_scale,
                    layer_coefficient=self.layer_coefficient,
                    in_fp32=self.config.attention_softmax_in_fp32,
                    dropout=dropout,
                )
            else:
                with self._kernels():
                    context = F.scaled_dot_product_attention(
                        query,
                        key,
                        value,
                        attn_mask=None if hidden is None else ~hidden,
                        dropout_p=dropout,
                        is_causal=is_causal,
                        scale=self.softmax_scale,
                        enable_gqa=query.shape[1] != key.shape[1],
                    )
        return context.permute(2, 0, 1, 3).reshape(tokens, batch, -1)

    def _kernels(self) -> AbstractContextManager:
        if self.backend is not AttnBackend.auto:
            return sdpa_kernel(ONE_BACKEND[self.backend])
        return sdpa_kernel(GPU_ORDER, set_priority=True) if device.has_accelerator() else nullcontext()
