"""Named random states and the recompute that replays them (on the device of this machine)."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core import device
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def draw():
    return torch.rand(4, device=device.current_device())


def test_states_are_apart_and_repeat():
    model_parallel_cuda_manual_seed(11)
    tracker = get_cuda_rng_tracker()
    first = draw()
    with tracker.fork():
        inside = draw()
    second = draw()
    model_parallel_cuda_manual_seed(11)
    assert torch.equal(draw(), first) and torch.equal(draw(), second), "a fork must not move the default state"
    with tracker.fork():
        assert torch.equal(draw(), inside)
        assert not torch.equal(draw(), inside)


def test_rank_changes_the_model_parallel_state_alone():
    drawn = []
    for rank in (0, 1):
        model_parallel_cuda_manual_seed(11, tp_rank=rank)
        with get_cuda_rng_tracker().fork():
            inside = draw()
        drawn.append((draw(), inside))
    assert torch.equal(drawn[0][0], drawn[1][0]) and not torch.equal(drawn[0][1], drawn[1][1])


def test_an_exception_inside_a_fork_puts_the_default_state_back():
    model_parallel_cuda_manual_seed(11)
    expected = draw()
    model_parallel_cuda_manual_seed(11)
    with pytest.raises(KeyError), get_cuda_rng_tracker().fork():
        draw()
        raise KeyError
    assert torch.equal(draw(), expected)


def test_states_can_be_saved():
    model_parallel_cuda_manual_seed(11)
    tracker = get_cuda_rng_tracker()
    saved = tracker.get_states()
    with tracker.fork():
        inside = draw()
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(draw(), inside)


def test_messages():
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    with pytest.raises(ValueError, match="model_parallel_cuda_manual_seed"), tracker.fork():
        pass
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="must be new"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="te_rng_tracker"):
        model_parallel_cuda_manual_seed(1, te_rng_tracker=True)


def test_checkpoint_replays_dropout():
    model_parallel_cuda_manual_seed(3)
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def function(x, scale):
        hidden = F.dropout(x @ weight, 0.5)
        with get_cuda_rng_tracker().fork():
            return F.dropout(hidden, 0.5) * scale

    results = []
    for run in (lambda: function(x, 2.0), lambda: checkpoint(function, False, x, 2.0)):
        model_parallel_cuda_manual_seed(3)
        x.grad = weight.grad = None
        out = run()
        after = draw()
        (out * out).sum().backward()
        results.append((out.detach(), x.grad, weight.grad, after, draw()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="distribute_saved_activations"):
        checkpoint(function, True, x, 2.0)
