"""The loss against torch's, whole and split over ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device, parallel_state
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.distributed import run_on_ranks


def data(dtype=torch.float64, vocab=40):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(6, 3, vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 30, (6, 3), generator=generator)
    scale = torch.rand(6, 3, generator=generator, dtype=torch.float64)
    return logits.to(dtype), target, scale


def run(logits, target, scale, **options):
    leaf = logits.clone().requires_grad_()
    # through an operation, so that overwriting the logits is seen by nobody
    loss = vocab_parallel_cross_entropy(leaf * 1, target, **options)
    (loss * scale).sum().backward()
    return loss.detach(), leaf.grad


def reference(logits, target, scale, smoothing=0.0):
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing).view(target.shape)
    (loss * scale).sum().backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_equals_torch(monkeypatch, consume, smoothing, block):
    monkeypatch.setitem(device.BLOCK_ELEMENTS, "cpu", block)
    logits, target, scale = data()
    got = run(logits, target, scale, label_smoothing=smoothing, consume_logits=consume)
    torch.testing.assert_close(got, reference(logits, target, scale, smoothing), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_logits_give_an_fp32_loss(dtype):
    logits, target, scale = data(dtype)
    loss, grad = run(logits, target, scale, consume_logits=True)
    expected_loss, expected_grad = reference(logits.double(), target, scale)
    assert loss.dtype is torch.float32 and grad.dtype is dtype
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=8e-3, atol=8e-3)


def test_padding_never_enters_the_softmax():
    logits, target, scale = data()
    loss, grad = run(logits, target, scale, num_valid=30)
    expected_loss, expected_grad = reference(logits[..., :30], target, scale)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad[..., :30], expected_grad)
    assert grad[..., 30:].abs().max() == 0


def test_targets_outside_of_the_vocabulary():
    logits, target, scale = data()
    target[0, 0], target[1, 1] = -100, 40
    loss, grad = run(logits, target, scale)
    assert loss[0, 0] == 0 and grad[0, 0].abs().max() == 0
    assert loss[1, 1].isnan() and loss.isnan().sum() == 1


def test_consumed_logits_cannot_be_used_twice():
    logits, target, _ = data()
    loss = vocab_parallel_cross_entropy(logits.requires_grad_() * 1, target, consume_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_smoothing_out_of_range_is_refused():
    with pytest.raises(ValueError, match="label_smoothing"):
        run(*data(), label_smoothing=1.0)


# num_valid 18: the second rank holds nothing but padding
OPTIONS: list[dict[str, Any]] = [{}, {"label_smoothing": 0.1}, {"num_valid": 30}, {"num_valid": 18}]


def _split():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = parallel_state.get_tensor_model_parallel_rank()
    out = []
    for options in OPTIONS:
        logits, target, scale = data()
        target = target.clamp(max=options.get("num_valid", 40) - 1)
        out.append(run(logits.chunk(2, dim=-1)[rank].contiguous(), target, scale, **options))
    return out


def test_split_over_two_ranks():
    first, second = run_on_ranks(2, _split)
    for index, options in enumerate(OPTIONS):
        logits, target, scale = data()
        loss, grad = run(logits, target.clamp(max=options.get("num_valid", 40) - 1), scale, **options)
        assert torch.equal(first[index][0], second[index][0])
        torch.testing.assert_close(first[index][0], loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat((first[index][1], second[index][1]), -1), grad, rtol=1e-12, atol=1e-12)
