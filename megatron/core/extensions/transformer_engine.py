"""Transformer Engine's layers under Megatron's names. They import everywhere and are refused by name when made.

The backend itself is not built yet: the local backend (`--transformer-impl local`) runs every model.
"""

from typing import Any

import torch

from megatron.core.optional_imports import available

HAVE_TE = available("transformer_engine")


class _NotYet(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(transformer_engine_problem(type(self).__name__))


class TENorm(_NotYet):
    pass


class TELinear(_NotYet):
    pass


class TEColumnParallelLinear(_NotYet):
    pass


class TERowParallelLinear(_NotYet):
    pass


class TELayerNormColumnParallelLinear(_NotYet):
    pass


class TEDotProductAttention(_NotYet):
    pass


class TEGroupedLinear(_NotYet):
    pass


def transformer_engine_problem(what: str) -> str:
    """Why `what` cannot be built."""
    return f"{what}: the Transformer Engine backend is not built yet; use the local backend (--transformer-impl local)"


class TESpecProvider:
    """Transformer Engine's answer to the backend protocol."""

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
