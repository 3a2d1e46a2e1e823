"""Enumerations that outsiders name: model kinds, recipes."""

import enum


class ModelType(enum.Enum):
    """What `pretrain` trains. `encoder_or_decoder` is every single-stack model."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    retro_encoder = 3
    retro_decoder = 4


class Fp8Recipe(enum.StrEnum):
    """How FP8 scales are found; values as on the command line."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"
