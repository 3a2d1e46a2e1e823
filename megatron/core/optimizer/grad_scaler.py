"""Loss scaling for fp16, wholly on the device: the host never reads whether a step overflowed."""

from typing import Any

import torch

from megatron.core.device import current_device


class MegatronGradScaler:
    """A loss scale that never changes; `scale` is a 0-d fp32 tensor on the device."""

    def __init__(self, initial_scale: float, device: torch.device | None = None) -> None:
        self.device = current_device() if device is None else device
        self.scale = torch.tensor(float(initial_scale), dtype=torch.float32, device=self.device)

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.reciprocal()

    def update(self, found_inf: torch.Tensor) -> None:
        """After each step; `found_inf` is a 0-d tensor, true or not 0 when gradients overflowed."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Waits for the device."""
        return {"scale": self.scale.item()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale.fill_(float(state_dict["scale"]))


class ConstantGradScaler(MegatronGradScaler):
    """A constant loss scale is what the configuration says: a checkpoint does not change it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DynamicGradScaler(MegatronGradScaler):
    """Halves after `hysteresis` overflows, doubles after `growth_interval` steps in a row without one.

    An overflow restarts the count of good steps; hysteresis is restored when the scale grows. So once it is used up, each further
    overflow halves the scale.
    """

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(initial_scale, device)
        self.min_scale = min_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=self.device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=self.device)

    def update(self, found_inf: torch.Tensor) -> None:
        bad = found_inf.bool()
        good_steps = torch.where(bad, 0, self.growth_tracker + 1)
        hysteresis_left = self.hysteresis_tracker - bad.to(torch.int32)
        shrink = bad & (hysteresis_left <= 0)
        grow = good_steps >= self.growth_interval
        smaller = (self.scale * self.backoff_factor).clamp(min=self.min_scale)
        self.scale.copy_(torch.where(shrink, smaller, torch.where(grow, self.scale * self.growth_factor, self.scale)))
        self.growth_tracker.copy_(torch.where(grow, 0, good_steps))
        self.hysteresis_tracker.copy_(torch.where(grow, self.hysteresis, hysteresis_left))

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale.item(),
            "growth_tracker": self.growth_tracker.item(),
            "hysteresis_tracker": self.hysteresis_tracker.item(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.growth_tracker.fill_(int(state_dict["growth_tracker"]))
        self.hysteresis_tracker.fill_(int(state_dict["hysteresis_tracker"]))
