"""Enumerations of the transformer."""

import enum

from megatron.core.enums import ModelType

__all__ = ["AttnBackend", "AttnMaskType", "AttnType", "LayerType", "ModelType"]


class LayerType(enum.Enum):
    """What a pipeline stage's layout can hold."""

    embedding = 1
    loss = 2
    encoder = 3
    decoder = 4
    mtp = 5


class AttnType(enum.Enum):
    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """Which keys a query may see. A mask tensor that is given holds in addition to `causal`."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnBackend(enum.Enum):
    """auto: the fastest of scaled_dot_product_attention; flash, fused (cuDNN): that one or an error; unfused and local: the plain twin."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5
