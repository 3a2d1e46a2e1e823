from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    E4M3 = 1
    HYBRID = 2


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling:
    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling:
    fp8_format: Format = Format.E4M3
