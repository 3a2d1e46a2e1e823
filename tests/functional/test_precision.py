"""Training in bf16 and fp16."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.functional.runner import checkpoint_tensors, on, train

LONG = "--train-iters 30 --lr 3e-3"


@pytest.mark.parametrize("flags", ["", "--bf16", "--fp16 --initial-loss-scale 65536", "--fp16 --loss-scale 1024"])
def test_it_learns(corpus: Path, flags: str) -> None:
    result = train(*on(corpus, LONG, flags))
    assert result.code == 0, result.err
    losses = result.losses()
    assert np.mean(losses[-5:]) < losses[0] - 0.8


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_half_precision_follows_fp32(corpus: Path, flags: str) -> None:
    half, full = train(*on(corpus, LONG, flags)), train(*on(corpus, LONG))
    assert half.losses() == pytest.approx(full.losses(), rel=0.02)


@pytest.mark.parametrize(("flags", "dtype"), [("--bf16", torch.bfloat16), ("--fp16 --initial-loss-scale 256", torch.float16)])
def test_main_weights_are_fp32(corpus: Path, tmp_path: Path, flags: str, dtype: torch.dtype) -> None:
    train(*on(corpus, flags), f"--save {tmp_path}")
    tensors = checkpoint_tensors(tmp_path, 4)
    mains = {key: value for key, value in tensors.items() if ".fp32_param." in key}
    weights = {key: value for key, value in tensors.items() if not key.startswith("optimizer.")}
    assert len(mains) == len(weights) > 10
    assert {value.dtype for value in mains.values()} == {torch.float32}
    assert {value.dtype for value in weights.values()} == {dtype}
    for key, value in mains.items():
        assert torch.equal(value.to(dtype), weights[key.partition(".fp32_param.")[2]])


def test_loss_scale_falls_on_overflow_and_grows_again(corpus: Path) -> None:
    """An overflow skips the step, halves the scale, and does not advance the learning rate; a clean window doubles the scale."""
    flags = f"--fp16 --initial-loss-scale {2**32} --loss-scale-window 6 --hysteresis 1 --lr-warmup-iters 5"
    result = train(*on(corpus, LONG, flags))
    assert result.code == 0, result.err
    scales, skipped = result.column("loss_scale"), result.column("skipped_iterations")
    assert skipped[0] == 1 and 0 < sum(skipped) < 25
    rates = [0.0, *result.column("lr")]
    clean = 0
    for before, after, was_skipped, old, new in zip([2.0**32, *scales], scales, skipped, rates, rates[1:], strict=False):
        clean = 0 if was_skipped else clean + 1
        if was_skipped:
            assert after == before / 2
            assert new == old
        else:
            assert after == (before * 2 if clean % 6 == 0 else before)
            assert new != old
    assert max(scales[i + 1] / scales[i] for i in range(29)) == 2, "the scale grew at least once"
    assert all(np.isfinite(result.losses()))
    assert sum(result.column("nan_iterations")) == 0


def test_a_finite_scale_does_not_change_the_update(corpus: Path) -> None:
    """The norm in the log and the update are those of the true gradient, whatever the scale."""
    first, second = (train(*on(corpus, f"--fp16 --loss-scale {scale}")) for scale in (256, 2048))
    assert first.column("grad_norm")[0] == pytest.approx(second.column("grad_norm")[0], rel=1e-3)
    assert first.losses() == pytest.approx(second.losses(), rel=1e-3)
