"""The loss of a micro batch that ranks share: a sum over all tokens over their number, whatever their masks."""

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.context_parallel import split_for_context_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, loss_and_tokens
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from pretrain_gpt import loss_func
from tests.distributed import run_on_ranks

SEQ, MICROBATCHES = 8, 3


def masks(kind):
    """[micro batches, 1, SEQ]. A rank without tokens: the second of two, and in the last micro batch both."""
    mask = torch.ones(MICROBATCHES, 1, SEQ)
    if kind == "uneven":
        mask[0, 0, :5], mask[1, 0, 2:4] = 0.0, 0.0
    elif kind == "a rank without tokens":
        mask[:2, 0, 2:6], mask[2] = 0.0, 0.0
    return mask


class Model(torch.nn.Module):
    """Loss of a token: w times its input."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.tensor([2.0, -1.0]))

    def forward(self, inputs):
        return inputs @ self.weight


def step(cp, per_token, kind, forward_only=False):
    """(gradient, summed reports) of a step on this rank."""
    groups = ProcessGroupCollection.use_mpu_process_groups() if cp > 1 else ProcessGroupCollection()
    rank = parallel_state.get_context_parallel_rank() if cp > 1 else 0
    sizes: Any = {"num_layers": 1, "hidden_size": 2, "num_attention_heads": 1, "attention_dropout": 0.0}
    config = TransformerConfig(**sizes, context_parallel_size=cp, calculate_per_token_loss=per_token)
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    model: Any = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(config), pg_collection=groups)
    inputs = torch.randn(MICROBATCHES, 1, SEQ, 2, generator=torch.Generator().manual_seed(3))
    batches = [split_for_context_parallel(t, 2, rank, cp) for t in (inputs, masks(kind))]

    def forward_step(iterator, model):
        values, mask = next(iterator)
        return model(values), partial(loss_func, mask)

    model.zero_grad_buffer()
    reports = get_forward_backward_func(1)(
        forward_step_func=forward_step,
        data_iterator=iter(zip(*batches)),
        model=model,
        num_microbatches=MICROBATCHES,
        forward_only=forward_only,
        pg_collection=groups,
    )
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    return (None if forward_only else model.module.weight.main_grad.clone()), total


def all_steps(cp):
    if cp > 1:
        parallel_state.initialize_model_parallel(context_parallel_size=cp)
    kinds = ("even", "uneven", "a rank without tokens")
    found: dict[Any, Any] = {(per_token, kind): step(cp, per_token, kind) for per_token in (False, True) for kind in kinds}
    found["evaluation"] = step(cp, False, "uneven", forward_only=True)
    return found


def test_gradients_and_reports_equal_those_of_one_rank():
    """Gradients grew with the number of ranks; a rank whose tokens are all masked made the loss NaN."""
    expected = all_steps(1)
    ranks = run_on_ranks(2, all_steps, 2)
    for key, (gradient, report) in expected.items():
        for found in ranks:
            if gradient is not None:
                assert gradient.abs().min() > 0 and gradient.isfinite().all()
                torch.testing.assert_close(found[key][0], gradient, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(sum(found[key][1] for found in ranks), report, rtol=1e-6, atol=1e-6)


def test_a_mean_over_some_tokens_is_refused():
    group = mock.Mock(**{"size.return_value": 2})
    with mock.patch("torch.distributed.is_initialized", return_value=True):
        with pytest.raises(ValueError, match=r"must return \(loss sum, number of tokens, report\)"):
            loss_and_tokens((torch.tensor(1.0), {}), 1, False, group)
    assert loss_and_tokens((torch.tensor(1.0), {}), 2, False)[0] == 0.5
