"""The protocol through which layer specs get their classes, and the local backend: torch alone, on every device."""

from typing import Any, Protocol

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.tensor_parallel.duplicated_linear import DuplicatedLinear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import GroupedLinear


class BackendSpecProvider(Protocol):
    """Each method returns a class (or spec) that takes the arguments of our own class of that kind."""

    def linear(self) -> Any:
        """A linear that is not split: every tensor-parallel rank holds the whole weight."""

    def column_parallel_linear(self) -> Any: ...

    def row_parallel_linear(self) -> Any: ...

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
        """`rms_norm`: the kind is known to be RMSNorm. A class that asks its config for the kind may ignore it."""

    def column_parallel_layer_norm_linear(self) -> Any | None:
        """Norm and linear in one; None where the backend composes them."""

    def core_attention(self) -> Any: ...

    def grouped_linear(self) -> Any:
        """A linear of several experts at once, see transformer/moe/experts.py."""

    def precision_context(self) -> Any | None:
        """(config, layer number or None for all layers of a chunk, pg_collection) -> a context manager in which layers compute in the
        precision that the config asks for; None where layers see to that by themselves."""


class LocalSpecProvider:
    """torch's own kernels."""

    def linear(self) -> Any:
        return DuplicatedLinear

    def column_parallel_linear(self) -> Any:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        return RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
        return FusedLayerNorm

    def column_parallel_layer_norm_linear(self) -> Any | None:
        return None

    def core_attention(self) -> Any:
        return DotProductAttention

    def grouped_linear(self) -> Any:
        return GroupedLinear

    def precision_context(self) -> Any | None:
        return None
