"""Forward and backward over micro batches: normalisation of the loss, gradient accumulation, what is reported."""

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.schedules import loss_and_tokens


class Linear(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = ModelParallelConfig()
        for name, value in config.items():
            setattr(self.config, name, value)
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight


def run(data, masks=None, forward_only=False, **config):
    model = Linear(**config)
    masks = masks or [torch.ones(len(x), dtype=torch.float64) for x in data]
    pairs = iter(zip(data, masks, strict=True))

    def forward_step(iterator, model):
        x, mask = next(iterator)

        def loss_func(output):
            total = (output * output * mask).sum()
            return total, mask.sum(), {"loss": torch.stack([total.detach(), mask.sum()])}

        return model(x), loss_func

    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=pairs,
        model=[model],
        num_microbatches=len(data),
        forward_only=forward_only,
    )
    return model.weight.grad, reports


def test_microbatches_equal_one_batch():
    x = torch.randn(8, 2, dtype=torch.float64)
    whole, _ = run([x])
    parts, reports = run(list(x.chunk(4)))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    assert len(reports) == 4


def test_a_microbatch_without_valid_tokens_contributes_nothing():
    x = torch.randn(4, 2, dtype=torch.float64)
    masks = [torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]
    gradient, _ = run(list(x.chunk(2)), masks)
    alone, _ = run([x[:2]])
    assert torch.isfinite(gradient).all()
    torch.testing.assert_close(gradient, alone / 2, rtol=1e-12, atol=0)


def test_per_token_loss_sums_and_hands_over_the_tokens():
    x = torch.randn(6, 2, dtype=torch.float64)
    masks = [torch.tensor([1.0, 0, 0]).double(), torch.ones(3).double()]
    handed = []
    gradient, _ = run(
        list(x.chunk(2)), masks, calculate_per_token_loss=True, finalize_model_grads_func=lambda chunks, tokens: handed.append(tokens)
    )
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ((x @ weight) ** 2 * torch.cat(masks)).sum().backward()
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-12, atol=0)
    assert handed == [4]


def test_forward_only_leaves_no_gradient():
    gradient, reports = run([torch.randn(2, 2, dtype=torch.float64)] * 2, forward_only=True)
    assert gradient is None and len(reports) == 2


def test_a_mean_loss_is_divided_by_the_microbatches():
    loss, tokens, report = loss_and_tokens((torch.tensor(6.0), {"a": 1}), 3, per_token=False)
    assert loss == 2.0 and tokens is None and report == {"a": 1}


def test_chunks_without_a_pipeline_are_refused():
    with pytest.raises(ValueError, match="virtual pipeline size 2 needs more than 1 pipeline stage"):
        get_forward_backward_func(vp_size=2)
    with pytest.raises(ValueError, match="there is one model chunk, not 2"):
        get_forward_backward_func()(forward_step_func=None, data_iterator=None, model=[Linear(), Linear()], num_microbatches=1)
