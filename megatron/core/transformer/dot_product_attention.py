"""softmax(q k^T scale) v: by FlashAttention-3 where it is there, by torch's scaled_dot_product_attention, and by their plain twin.

Over several ranks: core/context_parallel.
"""

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core import device
from megatron.core.context_parallel.attention import ContextParallelAttention, of_one_width
from megatron.core.context_parallel.block_plan import Mask, make_mask
from megatron.core.context_parallel.combinations import comm_type_of_layer, unsupported
from megatron.core.context_parallel.partial_attention import Geometry
from megatron.core.fusions.fused_softmax import causal_mask, scaled_masked_softmax
from megatron.core.packed_seq_params import Document, PackedSeqParams, packed_documents
from megatron.core.process_groups_config import ProcessGroupCollection, default_pg_collection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import flash_attention_3
from megatron.core.transformer.attention_masks import backend_problem, is_window_layer
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide, get_pg_size

logger = logging.getLogger(__name__)
CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
# In order of preference; on Hopper cuDNN's kernel takes about half of flash's time (forward and backward, GQA, causal).
GPU_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ONE_BACKEND = {AttnBackend.flash: SDPBackend.FLASH_ATTENTION, AttnBackend.fused: SDPBackend.CUDNN_ATTENTION}


@cache
def _say(kernel: str) -> None:
    """Once a process for each kernel."""
    logger.info("attention runs on %s", kernel)


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


def hidden_everywhere(documents: tuple[Document, ...], mask: Mask, where: torch.device) -> torch.Tensor:
    """bool [tokens, tokens], True where a query does not see a key: another sequence's, one that the mask hides, or padding.

    Under a causal mask padding is behind all that counts; it is not hidden, so that its own queries see something.
    """
    number = torch.cat([torch.full((document.padded,), n, device=where) for n, document in enumerate(documents)])
    place = torch.cat([torch.arange(document.padded, device=where) for document in documents])
    hidden = number[:, None] != number
    if mask.right is not None:
        hidden |= place > place[:, None] + mask.right
    if mask.left is not None:
        hidden |= place < place[:, None] - mask.left
    if mask.right != 0:
        hidden |= place >= torch.tensor([document.length for document in documents], device=where)[number]
    return hidden


def _unseen(query: torch.Tensor, value: torch.Tensor, queries: int) -> torch.Tensor:
    """The output [b, heads, queries, d of values] of queries that see nothing."""
    return query.new_zeros(*query.shape[:2], queries, value.shape[-1])


class DotProductAttention(MegatronModule):
    """forward: query [s, b, heads, d], key and value [t, b, groups, d] -> [s, b, heads * d], all of this rank's heads.

    Values may have another width than queries and keys; the output has theirs.
    Packed sequences: [tokens, 1, heads, d], or [tokens, heads, d] -> [tokens, heads * d].
    attention_mask: bool, True = hidden, [1 or b, 1, s, t]; it holds in addition to a causal mask type and to the config's window. None:
    nothing but those. With context parallelism s are this rank's tokens, and the mask has the rows of them and the columns of all.
    Raises ValueError for what no path here honours, never ignores it.
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
        self.attn_mask_type = attn_mask_type
        assert config.kv_channels is not None
        scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale
        self.layer_coefficient = float(max(1, layer_number)) if config.apply_query_key_layer_scaling else 1.0
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.backend = config.attention_backend
        self.window = config.window_size if is_window_layer(config.window_size, config.window_attn_skip_freq, layer_number) else None
        if device.has_accelerator():
            windows = flash_attention_3.has_windows() and config.context_parallel_size == 1 and not self.dropout
            reason = backend_problem(self.backend.name, window=self.window is not None, attention_mask=False, windows=windows)
            if reason:
                raise ValueError(f"attention_backend {self.backend.name}: {reason}; use auto")
        elif self.backend is AttnBackend.fused:
            raise ValueError("attention_backend fused (cuDNN) needs an NVIDIA GPU; use auto, flash or unfused on a CPU")
        comm_type = cp_comm_type or comm_type_of_layer(config.cp_comm_type, layer_number)
        self.context_parallel = self._build_context_parallel(comm_type, pg_collection)

    def _build_context_parallel(self, comm_type: str, pg_collection: ProcessGroupCollection | None) -> ContextParallelAttention | None:
        """Attention over sequences that several ranks share; None where each rank has whole ones."""
        groups = default_pg_collection(pg_collection)
        size, told = get_pg_size(groups.cp), self.config.context_parallel_size
        if size != told:
            raise ValueError(f"the context-parallel group has {size} ranks but config.context_parallel_size is {told}")
        if size == 1:
            return None
        attention = ContextParallelAttention(comm_type, groups, self.softmax_scale, self.backend, self.config.cp_comm_overlap)
        if self.dropout and (reason := unsupported("attention dropout", comm_type)):
            raise ValueError(f"attention_dropout {self.dropout}: {reason}; or use attention_dropout 0")
        if self.window is not None and (reason := unsupported("a sliding window", comm_type)):
            raise ValueError(f"window_size {self.window}: {reason}; or leave window_size out")
        return attention

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
            raise ValueError("DotProductAttention: attention_bias is not built yet; leave it out and pass a mask")
        if query.dim() == 3:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
            return self.forward(query, key, value, attention_mask, attn_mask_type, None, packed_seq_params).squeeze(1)
        causal = (self.attn_mask_type if attn_mask_type is None else attn_mask_type) in CAUSAL
        documents = None
        if packed_seq_params is not None:
            documents = packed_documents(packed_seq_params)
            if query.shape[1] != 1 or attention_mask is not None:
                raise ValueError("packed_seq_params: a packed batch has batch size 1 and no attention_mask; leave the mask out")
        if attention_mask is not None and device.on_accelerator(query):
            reason = backend_problem(self.backend.name, window=False, attention_mask=True)
            if reason:
                raise ValueError(f"attention_backend {self.backend.name}: {reason}; use auto")

        def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return self._alone(query, key, value, mask, causal, documents)

        if self.context_parallel is None:
            context = alone(query, key, value, attention_mask)
        else:
            mask = make_mask(causal, self.window)
            context = self.context_parallel(query, key, value, mask, documents, attention_mask, alone)
        return context.flatten(2)

    def _alone(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        causal: bool,
        documents: tuple[Document, ...] | None,
    ) -> torch.Tensor:
        """Attention over whole sequences, -> [s, b, heads, d]."""
        tokens, keys = query.shape[0], key.shape[0]
        by_blocks = self.window is not None or documents is not None
        if by_blocks and tokens != keys:
            raise ValueError(f"{tokens} queries and {keys} keys: a sliding window or packed sequences need as many of both")
        if documents is not None and sum(document.padded for document in documents) != tokens:
            raise ValueError(f"packed sequences of {sum(document.padded for document in documents)} tokens, but there are {tokens}")
        dropout = self.dropout if self.training else 0.0
        mask = make_mask(causal, self.window)
        if self._by_flash_attention_3(query, key, value, attention_mask, mask, documents, dropout):
            return self._flash_attention_3(query, key, value, mask, documents)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d], a view
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            if self.backend in (AttnBackend.unfused, AttnBackend.local):
                own: torch.Tensor | None
                if by_blocks:
                    own = hidden_everywhere(documents or (Document(0, tokens, tokens),), mask, query.device)
                else:
                    own = causal_mask(tokens, keys, query.device) if causal and tokens > 1 else None
                hidden = own if attention_mask is None else attention_mask if own is None else attention_mask | own
                context = self._plain(query, key, value, hidden, dropout)
            elif by_blocks:
                geometry = Geometry(documents or (Document(0, tokens, tokens),), 0, 1, mask, attention_mask)
                context = self._by_blocks(query, key, value, geometry, dropout)
            else:
                context = self._kernel(query, key, value, attention_mask, causal and tokens > 1, dropout)
        return context.permute(2, 0, 1, 3)

    def _by_flash_attention_3(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        mask: Mask,
        documents: tuple[Document, ...] | None,
        dropout: float,
    ) -> bool:
        """Whether FlashAttention-3 does it. `auto` leaves it heads of two widths, which others take without filling up."""
        if self.backend not in (AttnBackend.auto, AttnBackend.flash):
            return False
        if self.backend is AttnBackend.auto and query.shape[-1] != value.shape[-1]:
            return False
        reason = flash_attention_3.problem(query, key, value, mask, documents, attention_mask=attention_mask is not None, dropout=dropout)
        if reason and self.window is not None and self.backend is AttnBackend.flash and device.on_accelerator(query):
            raise ValueError(f"attention_backend flash: a sliding window needs FlashAttention-3, but {reason}; use auto")
        return reason is None

    def _flash_attention_3(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, documents: tuple[Document, ...] | None
    ) -> torch.Tensor:
        _say("FlashAttention-3")
        width = value.shape[-1]
        query, key, value = of_one_width(query, key, value)
        return flash_attention_3.attend(query, key, value, mask, documents, self.softmax_scale)[..., :width]

    def _by_blocks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, geometry: Geometry, dropout: float) -> torch.Tensor:
        """Some queries at a time, each stretch with the keys that it sees: on one rank no stretch needs more than one block."""
        parts, done = [], 0
        for block in geometry.blocks(0):
            queries, keys = slice(*block.queries), slice(*block.keys)
            assert block.queries[0] >= done, "a stretch of queries in two blocks"
            if block.queries[0] > done:  # padding that sees nothing
                parts.append(_unseen(query, value, block.queries[0] - done))
            hidden = geometry.hidden(block, query.device)
            causal = block.kind == "causal"
            parts.append(self._kernel(query[:, :, queries], key[:, :, keys], value[:, :, keys], hidden, causal, dropout))
            done = block.queries[1]
        parts.append(_unseen(query, value, query.shape[2] - done))
        return torch.cat(parts, dim=2)

    def _plain(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        _say("torch's matrix products and softmax")
        return attention_plain(
            query,
            key,
            value,
            hidden,
            scale=self.softmax_scale,
            layer_coefficient=self.layer_coefficient,
            in_fp32=self.config.attention_softmax_in_fp32,
            dropout=dropout,
        )

    def _kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        hidden: torch.Tensor | None,
        causal: bool,
        dropout: float,
    ) -> torch.Tensor:
        """By scaled_dot_product_attention; `hidden` may be [queries, keys] or [1 or b, 1, queries, keys]."""
        tokens, keys = query.shape[2], key.shape[2]
        if causal and (hidden is not None or tokens != keys):
            triangle = causal_mask(tokens, keys, query.device)
            hidden, causal = triangle if hidden is None else hidden | triangle, False
        _say(f"torch's scaled_dot_product_attention ({self.backend.name})")
        width = value.shape[-1]
        if self.backend is AttnBackend.flash:  # has one width alone; of the others auto finds one that takes two
            query, key, value = of_one_width(query, key, value)
        with self._kernels():
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if hidden is None else ~hidden,
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return out[..., :width]

    def _kernels(self) -> AbstractContextManager:
        if self.backend is not AttnBackend.auto:
            return sdpa_kernel(ONE_BACKEND[self.backend])
        return sdpa_kernel(GPU_ORDER, set_priority=True) if device.has_accelerator() else nullcontext()
