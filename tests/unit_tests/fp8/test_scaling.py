"""Scales: the rule, and what delayed scaling makes of the steps before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.fp8.formats import E4M3, E5M2, LARGEST, amax_of, round_to, scale_for
from megatron.core.fp8.scaling import GRADIENT, INPUT, WEIGHT, DelayedScaling, joined
from megatron.core.fp8.settings import Fp8Settings

CPU = torch.device("cpu")


@given(st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from([E4M3, E5M2]))
def test_the_largest_power_of_two_that_fits(amax: float, dtype: torch.dtype) -> None:
    scale = float(scale_for(torch.tensor(amax), LARGEST[dtype]))
    assert torch.tensor(scale).frexp().mantissa == 0.5, "a power of two"
    assert scale * amax <= LARGEST[dtype] < 2 * scale * amax


def test_scales_at_the_ends() -> None:
    scales = scale_for(torch.tensor([0.0, 1e-38, torch.inf]), 448.0)
    assert scales.isfinite().all() and scales[0] == scales[1] > 0 and scales[2] == 0
    assert scales[:2].reciprocal().square().isfinite().all()


@given(st.integers(-20, 20))
def test_how_a_tensor_is_cut_moves_no_digit(shift: int) -> None:
    """The same numbers under any scale that is a power of two, but for what underflows."""
    x = torch.randn(512) * 8
    x = torch.where(x.abs() < 1.0, 1.0, x)
    assert torch.equal(round_to(x, torch.tensor(1.0), E4M3).float(), round_to(x * 2.0**shift, torch.tensor(2.0**-shift), E4M3).float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_too_large_is_cut_and_what_is_not_finite_stays_visible(dtype: torch.dtype) -> None:
    found = round_to(torch.tensor([1e6, -1e6, torch.inf, torch.nan, 1.0]), torch.tensor(1.0), dtype).float()
    assert found[:2].tolist() == [LARGEST[dtype], -LARGEST[dtype]] and found[2:4].isnan().all() and found[4] == 1
    assert amax_of(torch.tensor([1.0, torch.nan])).isinf() and amax_of(torch.empty(0, 4)) == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_an_infinity_does_not_count_as_the_largest_number(bad: float) -> None:
    x = torch.tensor([[1.0, bad], [2.0, 3.0]])
    assert amax_of(x).isinf() and amax_of(x, dim=1).tolist() == [torch.inf, 3.0]
    scaling = state(history_len=4, algo="max")
    scaling.first_scale(INPUT, amax_of(x))
    assert scales_after(scaling, [float(amax_of(x)), 7.0]) == [1.0, 64.0], "it is not in the history either"


def state(**settings: object) -> DelayedScaling:
    made: dict = {"recipe": "delayed", "hybrid": True, **settings}
    return DelayedScaling(Fp8Settings(**made), 1, CPU)


def scales_after(scaling: DelayedScaling, amaxes: list[float]) -> list[float]:
    """Of the input, after each step that saw one of `amaxes`."""
    found = []
    for amax in amaxes:
        scaling.amax.fill_(amax)
        scaling.update()
        assert not scaling.amax.any() and torch.equal(scaling.inverse, scaling.scale.reciprocal())
        found.append(float(scaling.scale[INPUT]))
    return found


def test_a_first_step_that_was_not_finite_is_forgotten() -> None:
    scaling = state()
    for tensor in (INPUT, WEIGHT, GRADIENT):
        scaling.first_scale(tensor, torch.tensor(torch.inf))
    assert not scaling.scale.any()
    assert scales_after(scaling, [torch.inf, 7.0]) == [1.0, 64.0]


def test_what_a_checkpoint_never_saw_is_not_known() -> None:
    saved, loaded = state(), state()
    saved.amax[INPUT] = 7.0
    saved.update()
    loaded.load(saved.state())
    assert loaded.is_known == [tensor == INPUT for tensor in range(3)] and loaded.scale[INPUT] == 64


def test_the_newest_amax_or_the_largest_of_the_history() -> None:
    """448 / 7 = 64: the scale that amax 7 gives."""
    seen = [7.0, 28.0, 7.0, 3.5, 3.5, 3.5]
    assert scales_after(state(), seen) == [64, 16, 64, 128, 128, 128]
    assert scales_after(state(history_len=3), seen) == [64, 16, 64, 128, 128, 128], "a history that the newest is taken from"
    assert scales_after(state(history_len=3, algo="max"), seen) == [64, 16, 16, 16, 64, 128]
    assert scales_after(state(algo="max"), seen) == scales_after(state(), seen), "a history of one"


def test_margin_and_the_range_of_gradients() -> None:
    plain, wide = state(), state(margin=2)
    assert scales_after(wide, [7.0]) == [16]
    scales_after(plain, [7.0])
    assert float(plain.scale[GRADIENT]) == 8192 and float(plain.scale[WEIGHT]) == 64, "57344 / 7"
    e4m3 = state(hybrid=False)
    scales_after(e4m3, [7.0])
    assert float(e4m3.scale[GRADIENT]) == 64


def test_a_step_without_values_or_with_bad_ones_keeps_the_scale() -> None:
    assert scales_after(state(), [7.0, 0.0, torch.inf, 14.0]) == [64, 64, 64, 32]
    assert scales_after(state(history_len=2, algo="max"), [7.0, torch.inf, 3.5]) == [64, 64, 128]


def test_joined_states_share_memory_and_keep_their_values() -> None:
    states = [state(history_len=2) for _ in range(3)]
    for index, one in enumerate(states):
        scales_after(one, [7.0 * 2**index])
    states[1].is_known[INPUT] = True
    whole, parts = joined(states)
    assert whole.scale[INPUT::3].tolist() == [64, 32, 16]
    assert [part.is_known[INPUT] for part in parts] == [False, True, False]
    parts[2].amax[WEIGHT] = 3.5
    whole.update()
    assert float(parts[2].scale[WEIGHT]) == 128 and float(parts[2].scale[INPUT]) == 16
    assert parts[2].history[:, WEIGHT].tolist() == [3.5, 28.0]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_saved_state_goes_on_in_a_history_of_another_length(length: int) -> None:
    saved = state(history_len=3, algo="max")
    scales_after(saved, [7.0, 28.0, 3.5])
    loaded = state(history_len=length, algo="max")
    loaded.load(saved.state())
    assert torch.equal(loaded.scale, saved.scale) and torch.equal(loaded.inverse, saved.inverse) and all(loaded.is_known)
    assert loaded.history[:, INPUT].tolist() == [3.5, 28.0, 7.0, 0.0, 0.0][:length]


FORMATS = [({"hybrid": True}, {"hybrid": False}), ({"hybrid": False}, {"hybrid": True}), ({}, {"margin": 3})]


@pytest.mark.parametrize(("before", "after"), FORMATS)
def test_a_saved_state_goes_on_in_another_format(before: dict, after: dict) -> None:
    """Once the stored scales were taken: those of e5m2 are 128 times what e4m3 holds."""
    first, second, fresh = state(**before), state(**after), state(**after)
    for one in (first, fresh):
        one.amax.copy_(torch.tensor([1.0, 2.0, 4.0]))
        one.update()
    second.load(first.state())
    assert torch.equal(second.scale, fresh.scale) and torch.equal(second.inverse, fresh.inverse)
