"""Norms that count every element of the model once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.optimizer.clip_grads import NormGroups, NormPlan, clip_coefficient, counted_parts
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, local_part
from tests.distributed import run_on_ranks


def record(shape, split_dim=None, segments=(), shared_with=None):
    return ParamSharding(
        shape, split_dim, tuple(Segment(f"s{i}", size, axis) for i, (size, axis) in enumerate(segments)), shared_with=shared_with
    )


def test_counted_parts():
    assert counted_parts(None, 2, 0) == [True] and counted_parts(None, 2, 1) == [False]
    replicated, split = record((4,)), record((8, 3), 0, [(8, "tp")])
    assert counted_parts(replicated, 2, 0) == [True] and counted_parts(replicated, 2, 1) == [False]
    assert counted_parts(split, 2, 0) == [True] and counted_parts(split, 2, 1) == [True]
    assert counted_parts(split, 2, 0, is_shared_copy=True) == [False]
    mixed = record((14, 3), 0, [(8, "tp"), (2, None), (4, "tp")])
    assert counted_parts(mixed, 2, 1) == [(0, 4, True), (4, 2, False), (6, 2, True)]
    assert counted_parts(mixed, 2, 0) == [(0, 4, True), (4, 2, True), (6, 2, True)]
    assert counted_parts(mixed, 1, 0) == [True]


def test_norm_equals_torch_in_float64():
    grads = [
        torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for shape in ((700, 300), (17,), (5, 5, 5))
    ]
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, 2.0)
    norm, nonfinite = NormPlan([(f"p{i}", p) for i, p in enumerate(params)]).norm(grads)
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)
    assert nonfinite.tolist() == [0, 0, 0]
    torch.testing.assert_close(grads[0] * clip_coefficient(norm, 2.0), params[0].grad, rtol=1e-12, atol=0)
    assert clip_coefficient(torch.tensor(0.5), 2.0).item() == 1.0


def test_fp32_norm_of_a_large_tensor_is_exact_enough():
    """torch's own fp32 norm of this tensor on a CPU is off by several 1e-4."""
    grad = torch.randn(6_000_000, generator=torch.Generator().manual_seed(0))
    norm, _ = NormPlan([("p", grad)]).norm([grad])
    assert norm.item() == pytest.approx(grad.double().norm().item(), rel=2e-6)


def test_nonfinite_and_zeros():
    tensors = [torch.ones(3), torch.tensor([1.0, float("nan")]), torch.zeros(70_000), torch.tensor([float("inf")])]
    plan = NormPlan([(f"p{i}", t) for i, t in enumerate(tensors)])
    norm, nonfinite = plan.norm(tensors)
    assert not norm.isfinite() and nonfinite.tolist() == [0, 1, 0, 1]
    assert plan.count_zeros(tensors).item() == 70_000


SHARDINGS = {
    "split": record((8, 6), 0, [(8, "tp")]),
    "columns": record((6, 8), 1, [(8, "tp")]),
    "replicated": record((10,)),
    "mixed": record((14, 3), 0, [(8, "tp"), (2, None), (4, "tp")]),
}


def _whole(name):
    seed = list(SHARDINGS).index(name)
    whole = torch.randn(SHARDINGS[name].global_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole.view(-1)[:3] = 0.0
    return whole


def _tp_norm(poison):
    world, rank = dist.group.WORLD, dist.get_rank()
    tensors = {name: local_part(_whole(name), sharding, rank, 2).contiguous() for name, sharding in SHARDINGS.items()}
    named = []
    for name, tensor in tensors.items():
        param: Any = torch.nn.Parameter(tensor.clone())
        param.sharding = SHARDINGS[name]
        named.append((name, param))
    if poison and rank == 1:
        tensors["replicated"][0] = float("nan")  # a copy that does not count must gate all ranks too
    plan = NormPlan(named, NormGroups(mp=world, tp=world))
    norm, nonfinite = plan.norm(list(tensors.values()))
    return norm.item(), nonfinite.tolist(), plan.count_zeros(list(tensors.values())).item()


def test_tensor_parallel_norm_counts_each_element_once():
    whole = torch.cat([_whole(name).reshape(-1) for name in SHARDINGS])
    for norm, nonfinite, zeros in run_on_ranks(2, _tp_norm, False):
        assert norm == pytest.approx(whole.norm().item(), rel=1e-14)
        assert (sum(nonfinite), zeros) == (0, int((whole == 0).sum()))


def test_a_nan_on_one_rank_gates_all():
    (norm0, bad0, _), (norm1, bad1, _) = run_on_ranks(2, _tp_norm, True)
    assert norm0 != norm0 and norm1 != norm1
    assert (bad0, bad1) == ([0, 0, 0, 0], [0, 0, 1, 0])


def _tied_over_stages():
    world = dist.group.WORLD
    name = "embedding.word_embeddings.weight" if dist.get_rank() == 0 else "output_layer.weight"
    param: Any = torch.nn.Parameter(torch.full((3, 3), 2.0))
    param.sharding = record((3, 3), 0, [(3, "tp")], shared_with="embedding.word_embeddings.weight")
    return NormPlan([(name, param)], NormGroups(mp=world), world).norm([param.detach()])[0].item()


def test_a_tied_parameter_on_two_stages_counts_once():
    """Tied embeddings on the first and last stage must not be counted twice in the norm."""
    assert run_on_ranks(2, _tied_over_stages) == [6.0, 6.0]


def _experts_on_one_stage():
    """Stage 1 alone has experts; ranks of a stage hold different ones. Squares: 4 + 9 dense, 16 and 25 of two ranks' experts."""
    rank, world = dist.get_rank(), dist.group.WORLD
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    pipeline = groups[2 + rank % 2]  # ranks 0 and 1 are the first stage
    named: list[Any] = [("dense", torch.nn.Parameter(torch.tensor([2.0 if rank < 2 else 3.0])))]
    named[0][1].sharding = record((1,))
    if rank >= 2:
        named.append(("expert", torch.nn.Parameter(torch.tensor([[4.0 if rank == 2 else 5.0]]))))
        named[1][1].sharding = ParamSharding((1,), is_expert=True, experts=Experts(rank - 2, 2, 1))
    plan = NormPlan(named, NormGroups(mp=pipeline), pipeline, experts=NormGroups(mp=world))
    return plan.norm([param.detach() for _, param in named])[0].item() ** 2


def test_a_stage_without_experts_takes_part_in_their_norm():
    assert run_on_ranks(4, _experts_on_one_stage) == pytest.approx([4 + 9 + 16 + 25] * 4)


def test_missing_record_means_replicated():
    assert counted_parts(getattr(SimpleNamespace(), "sharding", None), 4, 0) == [True]
