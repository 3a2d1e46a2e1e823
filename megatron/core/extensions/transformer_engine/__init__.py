"""Transformer Engine as a second backend, under Megatron's names: nothing but this folder imports it, and that when a layer is made.

    base        how its classes come in               linears    linears, norms, experts' linears
    precision   FP8 regions, recompute in FP8         attention  scaled dot products
    state       FP8 scales in checkpoints

What it cannot do here: transformer/transformer_engine_rules.py.
"""

from typing import Any

from megatron.core.extensions.transformer_engine.attention import TEDotProductAttention
from megatron.core.extensions.transformer_engine.base import HAVE_TE
from megatron.core.extensions.transformer_engine.linears import (
    TEColumnParallelLinear,
    TEGroupedLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine.precision import fp8_context, te_checkpoint
from megatron.core.tensor_parallel.duplicated_linear import DuplicatedLinear


class TESpecProvider:
    """Transformer Engine's answer to the backend protocol."""

    def linear(self) -> Any:
        return DuplicatedLinear  # of latent attention, which is refused

    def column_parallel_linear(self) -> Any:
        return TEColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        return TERowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
        return TENorm

    def column_parallel_layer_norm_linear(self) -> Any | None:
        return TELayerNormColumnParallelLinear

    def core_attention(self) -> Any:
        return TEDotProductAttention

    def grouped_linear(self) -> Any:
        return TEGroupedLinear

    def precision_context(self) -> Any:
        return fp8_context


__all__ = [
    "HAVE_TE",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TEGroupedLinear",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TERowParallelLinear",
    "TESpecProvider",
    "fp8_context",
    "te_checkpoint",
]
