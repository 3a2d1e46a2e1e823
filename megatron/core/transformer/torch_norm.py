"""The norm of the local backend."""

from typing import Any

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm


class WrappedTorchNorm(FusedLayerNorm):
    """LayerNorm or RMSNorm, as config.normalization says."""

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        super().__init__(config, hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization)
