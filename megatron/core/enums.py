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


# Orders of a pipeline's micro batches, see pipeline_parallel/schedule_plan.py. A tuple, not an enumeration: configs hold the name.
PIPELINE_SCHEDULES = ("1f1b", "zero-bubble")
