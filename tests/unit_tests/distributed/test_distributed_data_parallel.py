"""Gradients through the buffers equal plain autograd's, for any number of data-parallel ranks, overlapped or not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.toy import Toy, batch

CONFIG = SimpleNamespace(calculate_per_token_loss=False)


def plain_gradients(dtype=torch.float64, step=0):
    model = Toy().to(dtype)
    model(batch(step)).mean().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def accumulate(ddp, tokens, micro_batches):
    """A step's forward and backward as the training loop does it."""
    ddp.zero_grad_buffer()
    parts = tokens.chunk(micro_batches)
    with ddp.no_sync():
        for part in parts[:-1]:
            (ddp(part).mean() / micro_batches).backward()
    (ddp(parts[-1]).mean() / micro_batches).backward()


def wrap(model, config=CONFIG, pg_collection=None, **changes) -> Any:
    return DistributedDataParallel(config, DistributedDataParallelConfig(**changes), model, pg_collection=pg_collection)


def main_grads(ddp):
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_accumulation_equals_one_batch(micro_batches):
    """Over two steps: the second must not see anything of the first."""
    ddp = wrap(Toy().double())
    for step in range(2):
        accumulate(ddp, batch(step), micro_batches)
        finalize_model_grads([ddp])
        for name, expected in plain_gradients(step=step).items():
            torch.testing.assert_close(main_grads(ddp)[name], expected, rtol=1e-12, atol=1e-14, msg=name)
    assert all(p.grad is None for p in ddp.parameters())


def test_main_grads_are_views_of_one_buffer_in_the_layout():
    ddp = wrap(Toy().bfloat16(), grad_reduce_in_fp32=True)
    (buffer,) = ddp.grad_buffers
    assert [slot.name for slot in buffer.layout.params] == [name for name, _ in reversed(list(ddp.module.named_parameters()))]
    for name, param in ddp.module.named_parameters():
        assert param.main_grad.dtype == torch.float32 and param.main_grad.shape == param.shape, name
        assert param.main_grad.untyped_storage().data_ptr() == buffer.grad_data.untyped_storage().data_ptr()
    assert wrap(Toy().bfloat16()).grad_buffers[0].grad_data.dtype == torch.bfloat16


def test_state_dict_has_no_prefix():
    ddp = wrap(Toy(seed=1))
    assert list(ddp.state_dict()) == list(Toy().state_dict())
    before = {id(p) for p in ddp.parameters()}
    ddp.load_state_dict(Toy(seed=2).state_dict())
    assert {id(p) for p in ddp.parameters()} == before
    assert torch.equal(ddp.module.fc1, Toy(seed=2).fc1)


def test_per_token_scaling():
    """Losses are sums; gradients are divided by the tokens that counted."""
    ddp = wrap(Toy().double(), SimpleNamespace(calculate_per_token_loss=True))
    ddp.zero_grad_buffer()
    ddp(batch(0)).sum().backward()
    finalize_model_grads([ddp], num_tokens=torch.tensor(32))
    for name, expected in plain_gradients().items():
        torch.testing.assert_close(main_grads(ddp)[name], expected, rtol=1e-12, atol=1e-14, msg=name)
    ddp.zero_grad_buffer()
    (ddp(batch(0)).sum() * 0).backward()
    finalize_model_grads([ddp], num_tokens=torch.tensor(0))
    assert not any(grad.any() for grad in main_grads(ddp).values())


def _grads_of_rank(changes, per_token, micro_batches, steps, dtype):
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    model = Toy(seed=1 + dist.get_rank()).to(dtype)  # ranks start apart: broadcast_params must unite them
    ddp = wrap(model, SimpleNamespace(calculate_per_token_loss=per_token), groups, **changes)
    ddp.broadcast_params()
    per_step = []
    for step in range(steps):
        tokens = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        if per_token:
            ddp.zero_grad_buffer()
            # uneven: rank 0 counts 3 tokens fewer
            loss = ddp(tokens)[3 if dist.get_rank() == 0 else 0 :]
            loss.sum().backward()
            finalize_model_grads([ddp], torch.tensor(loss.numel()), groups)
        else:
            accumulate(ddp, tokens, micro_batches)
            finalize_model_grads([ddp], pg_collection=groups)
        per_step.append(main_grads(ddp))
    return per_step, len(ddp.bucket_groups)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_gradients_of_one(ranks):
    results = run_on_ranks(ranks, _grads_of_rank, {"bucket_size": 300}, False, 2, 2, torch.float64)
    for per_step, num_buckets in results:
        assert num_buckets >= 3
        for step, grads in enumerate(per_step):
            for name, expected in plain_gradients(step=step).items():
                torch.testing.assert_close(grads[name], expected, rtol=1e-11, atol=1e-14, msg=name)


def test_overlap_is_bit_equal():
    plain = run_on_ranks(2, _grads_of_rank, {"bucket_size": 300}, False, 2, 3, torch.float32)
    overlapped = run_on_ranks(2, _grads_of_rank, {"bucket_size": 300, "overlap_grad_reduce": True}, False, 2, 3, torch.float32)
    for (steps, _), (overlapped_steps, _) in zip(plain, overlapped):
        for grads, overlapped_grads in zip(steps, overlapped_steps):
            for name, grad in grads.items():
                assert torch.equal(grad, overlapped_grads[name]), name


def test_per_token_over_ranks_counts_global_tokens():
    model = Toy().double()
    (model(batch(0))[3:].sum() / 29).backward()
    for per_step, _ in run_on_ranks(2, _grads_of_rank, {}, True, 1, 1, torch.float64):
        for name, param in model.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(per_step[0][name], expected, rtol=1e-11, atol=1e-14, msg=name)


def _overlap_starts_during_backward():
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    ddp = wrap(Toy(), CONFIG, groups, bucket_size=300, overlap_grad_reduce=True)
    dispatched = []
    for step in range(2):
        accumulate(ddp, batch(step), 2)
        dispatched.append([bucket.dispatched for bucket in ddp.bucket_groups])
        ddp.finish_grad_sync()
    ddp.finish_grad_sync()  # does nothing
    # a part that took no part in the first step writes late
    ddp.zero_grad_buffer()
    error = ""
    try:
        ddp(batch(0)).mean().backward()
        (ddp.module.fc2.sum() * 1.0).backward()
    except RuntimeError as raised:
        error = str(raised)
    return dispatched, [bucket.names for bucket in ddp.bucket_groups], error


def test_overlap_starts_during_backward():
    for dispatched, names, error in run_on_ranks(2, _overlap_starts_during_backward):
        assert not any(dispatched[0])  # the first step learns
        assert all(dispatched[1]), names  # the last parameter of the first bucket comes last here
        assert "--overlap-grad-reduce" in error


def _local_nonfinite():
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    ddp = wrap(Toy(), CONFIG, groups, check_for_nan_in_grad=True)
    for step in range(3):
        accumulate(ddp, batch(step), 1)
        if dist.get_rank() == 1 and step > 0:
            ddp.module.fc1.main_grad[0, 0] = float("nan")
        ddp.finish_grad_sync()
    everywhere = bool(ddp.module.fc1.main_grad[0, 0].isnan())
    return ddp.nonfinite_report(), ddp.nonfinite_report(), everywhere


def test_the_rank_with_the_nan_knows():
    reports = run_on_ranks(2, _local_nonfinite)
    assert [report for report, _, _ in reports] == [[], [("fc1", 2)]]
    assert [again for _, again, _ in reports] == [[], []]
    assert all(everywhere for _, _, everywhere in reports)


def _partial_sum():
    groups = ProcessGroupCollection(tp=dist.group.WORLD)
    model: Any = Toy()
    model.norm_weight.sharding = SimpleNamespace(grad_partial=("tp",), is_expert=False, shared_with=None)
    ddp = wrap(model, CONFIG, groups)
    accumulate(ddp, batch(dist.get_rank()), 1)
    local = main_grads(ddp)
    finalize_model_grads([ddp], pg_collection=groups)
    return local, main_grads(ddp)


def test_partial_gradients_are_summed_over_their_axis():
    (local0, final0), (local1, final1) = run_on_ranks(2, _partial_sum)
    assert torch.equal(final0["norm_weight"], local0["norm_weight"] + local1["norm_weight"])
    assert torch.equal(final0["norm_weight"], final1["norm_weight"])
    assert torch.equal(final0["fc1"], local0["fc1"]) and not torch.equal(final0["fc1"], final1["fc1"])


def test_unbuilt_settings_are_refused_by_name():
    with pytest.raises(ValueError, match="keep_fp8_transpose_cache = True is not built yet"):
        DistributedDataParallelConfig(keep_fp8_transpose_cache=True)
    with pytest.raises(ValueError, match="keep one"):
        DistributedDataParallelConfig(bucket_size=5, num_buckets=2)
    assert DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=()).problems() == []
