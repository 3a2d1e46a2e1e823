"""The flags, as dataclasses without torch: one class per subject, one field per flag.

`SECTIONS` is their order in `--help`. To add a flag: one field here and one line in the frozen list of the tests.
"""

from megatron.training.config.data import DataFlags, TokenizerFlags
from megatron.training.config.fp8 import Fp8Flags
from megatron.training.config.model import (
    AttentionFlags,
    GraphFlags,
    KernelFlags,
    LatentAttentionFlags,
    ModelFlags,
    NormFlags,
    PositionFlags,
    RecomputeFlags,
)
from megatron.training.config.moe import MoEFlags
from megatron.training.config.optimization import LearningRateFlags, OptimizerFlags, PrecisionFlags
from megatron.training.config.output import CheckpointFlags, LoggingFlags, ProfilingFlags
from megatron.training.config.training import BatchFlags, DistributedFlags, EvaluationFlags, ParallelismFlags, TrainingFlags

SECTIONS: tuple[type, ...] = (
    ModelFlags,
    AttentionFlags,
    LatentAttentionFlags,
    PositionFlags,
    NormFlags,
    KernelFlags,
    GraphFlags,
    RecomputeFlags,
    MoEFlags,
    ParallelismFlags,
    BatchFlags,
    TrainingFlags,
    EvaluationFlags,
    OptimizerFlags,
    LearningRateFlags,
    PrecisionFlags,
    Fp8Flags,
    DataFlags,
    TokenizerFlags,
    CheckpointFlags,
    LoggingFlags,
    ProfilingFlags,
    DistributedFlags,
)

__all__ = ["SECTIONS"] + [section.__name__ for section in SECTIONS]
