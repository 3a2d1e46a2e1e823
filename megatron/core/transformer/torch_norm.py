"""Megatron's name and place of the local backend's norm."""

from megatron.core.fusions.fused_layer_norm import FusedLayerNorm as WrappedTorchNorm

__all__ = ["WrappedTorchNorm"]
