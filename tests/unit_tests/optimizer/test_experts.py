"""Experts train as in one process wherever they are: gradients, norm, counts, parameters; so do several optimizer instances."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_sharding import build_param_table, local_part
from megatron.core.utils import get_pg_rank, get_pg_size
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.expert_toy import ExpertToy, batch, start_groups

STEPS = 4
SPREAD = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True}
# name -> (experts of a rank in one parameter, settings of the gradient buffers)
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain, sequential": (False, {}),
    "plain, overlapped": (False, OVERLAP),
    "distributed, sequential": (False, SPREAD),
    "distributed, grouped, overlapped": (True, {**SPREAD, **OVERLAP, "overlap_param_gather": True}),
}
LAYOUTS: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"ep": 1}, {"ep": 2}, {"etp": 2}, {"tp": 2, "etp": 2}, {"tp": 2, "etp": 1, "ep": 2}),
    4: ({"ep": 2}, {"ep": 4}, {"etp": 2, "ep": 2}, {"tp": 2, "etp": 1, "ep": 2},
        {"tp": 2, "etp": 2, "ep": 2}, {"tp": 2, "etp": 1, "ep": 4}),
}  # fmt: skip
INSTANCES = ({"instances": 2}, {"instances": 4}, {"ep": 2, "instances": 2}, {"tp": 2, "etp": 1, "instances": 2})


def make(grouped: bool, groups: ProcessGroupCollection, **changes: Any) -> tuple[Any, Any]:
    ddp_config = DistributedDataParallelConfig(**{"bucket_size": 150, **changes})
    model = ExpertToy(grouped, groups)
    ddp = DistributedDataParallel(SimpleNamespace(calculate_per_token_loss=False), ddp_config, model, pg_collection=groups)
    ddp.broadcast_params()
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, clip_grad=0.2, log_num_zeros_in_grad=True,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(config, [ddp], pg_collection=groups)


def accumulate(ddp: Any, groups: ProcessGroupCollection, step: int, micro_batches: int = 2) -> None:
    """A step's forward and backward: the batch is divided over dp, then in micro batches, then over tp."""
    ddp.zero_grad_buffer()
    mine = [part.chunk(get_pg_size(groups.dp))[get_pg_rank(groups.dp)].chunk(micro_batches) for part in batch(step)]
    for number, micro in enumerate(zip(*mine, strict=True)):
        tokens, chosen = (part.chunk(get_pg_size(groups.tp))[get_pg_rank(groups.tp)] for part in micro)
        loss = ddp(tokens, chosen).sum() / len(micro[0]) / micro_batches
        with ddp.no_sync() if number + 1 < micro_batches else torch.enable_grad():
            loss.backward()


def identity(record: Any) -> tuple[Any, ...]:
    """What a parameter is of the whole model, and which part."""
    return record.family, record.layer, record.sharding, record.param.tp_coordinates


def train(grouped: bool, groups: ProcessGroupCollection, steps: int = STEPS, **changes: Any) -> tuple[list, list[dict], dict]:
    """(norm, zeros) of each step, gradients of each step unless they are spread, parameters; tensors by `identity`."""
    ddp, optimizer = make(grouped, groups, **changes)
    records = build_param_table(ddp).values()
    rows, gradients = [], []
    for step in range(steps):
        accumulate(ddp, groups, step)
        finalize_model_grads([ddp], pg_collection=groups)
        if not ddp.ddp_config.use_distributed_optimizer:
            gradients.append({identity(record): record.param.main_grad.clone() for record in records})  # type: ignore[attr-defined]
        updated, norm, zeros = optimizer.step()
        assert updated
        rows.append((norm.item(), int(zeros)))
    ddp.finish_param_sync()
    return rows, gradients, {identity(record): record.param.detach().clone() for record in records}


def train_all(layouts: tuple[dict[str, int], ...], kinds: dict[str, tuple[bool, dict[str, Any]]]) -> dict[tuple[int, str], Any]:
    found = {}
    for number, layout in enumerate(layouts):
        groups = start_groups(**layout)
        for kind, (grouped, changes) in kinds.items():
            settings = {**changes, "num_distributed_optimizer_instances": layout.get("instances", 1)}
            found[number, kind] = train(grouped, groups, **settings)
    return found


@pytest.fixture(scope="module")
def alone() -> Any:
    """One process without buffers: plain autograd's gradients, and the plain optimizer."""
    return train(True, ProcessGroupCollection())


def same(found: dict, expected: dict, what: str) -> None:
    whole = {(family, layer): value for (family, layer, *_), value in expected.items()}
    for (family, layer, sharding, coordinates), value in found.items():
        part = local_part(whole[family, layer], sharding, *coordinates)
        torch.testing.assert_close(value, part, rtol=1e-9, atol=1e-13, msg=f"{what}: {family} of layer {layer}")


def compare(found: dict[tuple[int, str], Any], layouts: tuple[dict[str, int], ...], alone: Any) -> None:
    for (number, kind), (rows, gradients, params) in found.items():
        what = f"{layouts[number]}, {kind}"
        for (norm, zeros), (expected_norm, expected_zeros) in zip(rows, alone[0], strict=True):
            assert norm == pytest.approx(expected_norm, rel=1e-9), what
            assert zeros == expected_zeros, what
        for step, (mine, theirs) in enumerate(zip(gradients, alone[1])):
            same(mine, theirs, f"{what}: gradients of step {step}")
        same(params, alone[2], f"{what}: parameters")


def test_reference_is_plain_autograd(alone: Any) -> None:
    model = ExpertToy(True, ProcessGroupCollection())
    tokens, chosen = batch(0)
    model(tokens, chosen).mean().backward()
    gradients: dict[Any, Any] = {key[:2]: value for key, value in alone[1][0].items()}
    idle = 0
    for record in build_param_table(model).values():
        assert record.param.grad is not None
        torch.testing.assert_close(gradients[record.family, record.layer], record.param.grad, rtol=1e-9, atol=1e-13)
        if record.sharding.experts is not None:
            idle += int((record.param.grad.flatten(1).abs().sum(1) == 0).sum())
    assert idle and any(norm > 0.2 for norm, _ in alone[0]), "some experts have no tokens, and some steps are clipped"


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_experts_train_as_in_one_process(ranks: int, alone: Any) -> None:
    results = run_on_ranks(ranks, train_all, LAYOUTS[ranks], KINDS)
    for found in results:
        compare(found, LAYOUTS[ranks], alone)
    for rank, found in enumerate(results):  # one norm, everywhere
        assert [row for row, _, _ in found.values()] == [row for row, _, _ in results[0].values()], rank


def test_several_optimizer_instances_train_as_one(alone: Any) -> None:
    kinds = {kind: setting for kind, setting in KINDS.items() if kind.startswith("distributed")}
    for found in run_on_ranks(4, train_all, INSTANCES, kinds):
        compare(found, INSTANCES, alone)


def _overlap_bits(layouts: tuple[dict[str, int], ...]) -> list[bool]:
    found = []
    for layout in layouts:
        groups = start_groups(**layout)
        instances = {"num_distributed_optimizer_instances": layout.get("instances", 1)}
        bases: tuple[dict[str, Any], ...] = ({}, SPREAD) if "instances" not in layout else ({**SPREAD, **instances},)
        for base in bases:
            for size in (150, 10**6):  # in one large bucket experts without tokens share it with others
                ways = [{}, OVERLAP, {**OVERLAP, "overlap_param_gather": True}][: 3 if base else 2]
                runs = [train(False, groups, **base, **more, bucket_size=size)[2] for more in ways]
                found += [torch.equal(runs[0][key], run[key]) for run in runs[1:] for key in run]
    return found


def test_overlap_changes_no_bit_though_ranks_have_experts_without_tokens() -> None:
    """Some ranks wait in vain for an expert's gradient, others do not: they reduce in one order all the same.

    Parameters are then updated bucket by bucket; experts that no other rank has (the last layout) after all that is gathered.
    """
    for found in run_on_ranks(4, _overlap_bits, ({"ep": 1}, {"ep": 2}, {"ep": 2, "instances": 2})):
        assert found and all(found)


def _poisoned(layout: dict[str, int], rank: int, name: str) -> list[Any]:
    groups = start_groups(**layout)
    found = []
    for changes in ({}, SPREAD):
        ddp, optimizer = make(True, groups, check_for_nan_in_grad=True, **changes)
        accumulate(ddp, groups, 1)
        if dist.get_rank() == rank:
            dict(ddp.module.named_parameters())[name].main_grad.view(-1)[0] = float("nan")
        finalize_model_grads([ddp], pg_collection=groups)
        before = [param.detach().clone() for param in ddp.parameters()]
        updated, norm, _ = optimizer.step()
        ddp.finish_param_sync()
        unchanged = all(torch.equal(old, new) for old, new in zip(before, ddp.parameters(), strict=True))
        found.append((bool(updated), norm.isfinite().item(), unchanged, ddp.nonfinite_report(), optimizer.nonfinite_report()))
    return found


@pytest.mark.parametrize("layout", [{"ep": 2}, {"ep": 4}])
def test_one_experts_nan_holds_back_all_ranks_and_is_named_where_it_is(layout: dict[str, int]) -> None:
    name = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    for rank, results in enumerate(run_on_ranks(4, _poisoned, layout, 2, name)):
        for updated, finite, unchanged, local, reduced in results:
            assert (updated, finite, unchanged) == (False, False, True)
            assert local == ([(name, 1)] if rank == 2 and layout["ep"] == 2 else [])  # alone: the optimizer's report says it
            assert reduced == ([(name, 1)] if rank % layout["ep"] == 2 % layout["ep"] else []), (
                "other ranks' experts of the same name are not it"
            )
