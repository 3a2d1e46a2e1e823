"""Which regions were entered, and whether linears quantize: a stack of (enabled, recipe)."""

from typing import Any


class FP8GlobalStateManager:
    regions: list[tuple[bool, Any]] = []
    entered: list[tuple[bool, Any]] = []

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.regions) and cls.regions[-1][0]


class autocast:
    def __init__(self, enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None) -> None:
        self.region = (enabled, recipe)

    def __enter__(self) -> None:
        FP8GlobalStateManager.regions.append(self.region)
        FP8GlobalStateManager.entered.append(self.region)

    def __exit__(self, *_: Any) -> None:
        FP8GlobalStateManager.regions.pop()
