import random

import pytest
import torch

from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler


class PlainTwin:
    """The same rule in whole numbers on the host."""

    def __init__(self, scale, min_scale, interval, hysteresis):
        self.scale, self.min_scale, self.interval, self.full = scale, min_scale, interval, hysteresis
        self.good, self.left = 0, hysteresis

    def update(self, overflow):
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.good += 1
        if self.good == self.interval:
            self.good, self.left = 0, self.full
            self.scale *= 2


@pytest.mark.parametrize(("interval", "hysteresis", "overflow_rate"), [(3, 2, 0.3), (5, 1, 0.1), (2, 3, 0.6), (1, 2, 0.5)])
def test_dynamic_equals_its_twin(interval, hysteresis, overflow_rate):
    scaler = DynamicGradScaler(2.0**16, 1.0, growth_interval=interval, hysteresis=hysteresis, device=torch.device("cpu"))
    twin = PlainTwin(2.0**16, 1.0, interval, hysteresis)
    choices = random.Random(interval)
    seen = set()
    for _ in range(300):
        overflow = choices.random() < overflow_rate
        scaler.update(torch.tensor(overflow))
        twin.update(overflow)
        assert scaler.scale.item() == twin.scale
        assert (scaler.growth_tracker.item(), scaler.hysteresis_tracker.item()) == (twin.good, twin.left)
        seen.add(twin.scale)
    assert len(seen) > 3


def test_state_round_trip():
    scaler = DynamicGradScaler(2.0**10, 1.0, growth_interval=3, device=torch.device("cpu"))
    for overflow in (True, False, True, False):
        scaler.update(torch.tensor(overflow))
    other = DynamicGradScaler(2.0**4, 1.0, growth_interval=3, device=torch.device("cpu"))
    other.load_state_dict(scaler.state_dict())
    for overflow in (False, False, True, True, False):
        scaler.update(torch.tensor(overflow))
        other.update(torch.tensor(overflow))
    assert other.state_dict() == scaler.state_dict()
    assert other.scale.item() == 2.0**9  # 9 after the second overflow, 10 by growth, 9 again


def test_constant_stays_what_was_given():
    scaler = ConstantGradScaler(128.0, torch.device("cpu"))
    scaler.update(torch.tensor(True))
    scaler.load_state_dict({"scale": 4.0})
    assert scaler.scale.item() == 128.0
