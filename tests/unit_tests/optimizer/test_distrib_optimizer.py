"""The distributed optimizer is the plain one, spread over ranks: the same parameters, norms and counts after every step."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica, leaves
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import ParamAndGradBuffer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import NormPlan, _flat_cut
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_range_of, sharded_tensor_of
from tests.distributed import run_on_ranks
from tests.unit_tests.distributed.toy import Toy, batch

CONFIG = SimpleNamespace(calculate_per_token_loss=False)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NO_CLIP: dict[str, Any] = {"clip_grad": 1e9}  # the norm is summed in another order; where nothing is clipped it decides nothing
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
KINDS: dict[str, dict[str, Any]] = {"adamw": {}, "adam": {"decoupled_weight_decay": False}, "sgd": {"optimizer": "sgd"}}
# name -> (precision, optimizer settings, settings of the gradient buffers)
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"fp32 {kind}": ("fp32", {**NO_CLIP, **changes}, {}) for kind, changes in KINDS.items()},
    "fp64": ("fp64", NO_CLIP, {}),
    "bf16": ("bf16", NO_CLIP, {"grad_reduce_in_fp32": True}),
    "bf16 reduced in bf16": ("bf16", NO_CLIP, {}),
    "fp16": ("fp16", {**NO_CLIP, "initial_loss_scale": 2.0**12, "loss_scale_window": 3}, {"grad_reduce_in_fp32": True}),
    "one bucket": ("fp32", NO_CLIP, {"bucket_size": 10**6}),
    "no weight decay group for all": ("fp32", {**NO_CLIP, "decoupled_lr": 1e-3}, {}),
    **{f"overlap {p}": (p, NO_CLIP, {**OVERLAP, "grad_reduce_in_fp32": True}) for p in ("fp32", "bf16")},
}


def make(precision, settings, buffers, distributed, groups, model=None) -> tuple[Any, Any]:
    if not distributed:
        buffers = {name: value for name, value in buffers.items() if name != "overlap_param_gather"}
    ddp_config = DistributedDataParallelConfig(**{"bucket_size": 300, **buffers}, use_distributed_optimizer=distributed)
    ddp = DistributedDataParallel(CONFIG, ddp_config, (model or Toy(1)).to(DTYPES[precision]), pg_collection=groups)
    config = OptimizerConfig(
        lr=1e-2, weight_decay=0.1, bf16=precision == "bf16", fp16=precision == "fp16", log_num_zeros_in_grad=True,
        use_distributed_optimizer=distributed, **settings,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(config, [ddp], pg_collection=groups)


def step(ddp, optimizer, tokens, groups, micro_batches=2, poison=False) -> list[float]:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    losses = []
    parts = tokens.chunk(micro_batches)
    for index, part in enumerate(parts):
        loss = ddp(part).mean() / micro_batches
        losses.append(loss.item())
        with ddp.no_sync() if index + 1 < micro_batches else torch.enable_grad():
            optimizer.scale_loss(loss).backward()
        if poison:
            ddp.module.fc1.main_grad[3, 2] = float("nan")
    finalize_model_grads([ddp], pg_collection=groups)
    updated, norm, zeros = optimizer.step()
    return [*losses, updated.item(), norm.item(), zeros.item()]


def own_tokens(number):
    return batch(number, 48).chunk(dist.get_world_size())[dist.get_rank()]


def params(ddp) -> dict[str, torch.Tensor]:
    ddp.finish_param_sync()
    return {name: param.detach().clone() for name, param in ddp.module.named_parameters()}


def _against_plain(settings, steps=6):
    """name -> (rows of the plain optimizer, of the distributed one, largest relative difference of a parameter, parts kept)."""
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    found = {}
    for name, (precision, changes, buffers) in settings.items():
        both = [make(precision, changes, buffers, distributed, groups) for distributed in (False, True)]
        rows = [[step(ddp, optimizer, own_tokens(number), groups) for number in range(steps)] for ddp, optimizer in both]
        left, right = (params(ddp) for ddp, _ in both)
        assert isinstance(both[1][1], DistributedOptimizer)
        difference = max(((left[n] - right[n]).abs().max() / left[n].abs().max().clamp(min=1e-30)).item() for n in left)
        sizes = [sum(t.numel() for state in o.state.values() for t in state.values()) for _, o in both]
        found[name] = (*rows, difference, sizes)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_plain_optimizer_to_the_bit(ranks):
    results = run_on_ranks(ranks, _against_plain, SETTINGS)
    for name in SETTINGS:
        kept = 0
        for rank in results:
            plain, distributed, difference, sizes = rank[name]
            assert [row[:-2] for row in plain] == [row[:-2] for row in distributed], f"{name}: losses"
            assert [row[-1] for row in plain] == [row[-1] for row in distributed], f"{name}: zeros"
            assert [row[-2] for row in plain] == pytest.approx([row[-2] for row in distributed], rel=1e-6), f"{name}: norm"
            assert difference == 0, name
            assert all(row[2] for row in distributed)
            kept += sizes[1]
        assert kept == results[0][name][3][0], f"{name}: the ranks' parts make up the whole state"
    assert len({tuple(row[0] for row in results[0][name][1]) for name in ("fp32 adamw", "fp32 adam", "fp32 sgd")}) == 3


def _clipped_and_poisoned():
    """Clipping at 0.5 in float64; then a NaN on one rank in one step."""
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    both = [make("fp64", {"clip_grad": 0.5}, OVERLAP, distributed, groups) for distributed in (False, True)]
    rows, after, reports = [], [], []
    for ddp, optimizer in both:
        rows.append([step(ddp, optimizer, own_tokens(n), groups, poison=n == 3 and dist.get_rank() == 1) for n in range(6)])
        after.append(params(ddp))
        reports.append((optimizer.nonfinite_report(), optimizer.num_nan.item(), int(optimizer.param_groups[0]["step"])))
        reports.append(optimizer.get_params_norm().item())
    return rows, after, reports


def test_clipping_and_a_poisoned_step_in_float64():
    for rows, (left, right), reports in run_on_ranks(2, _clipped_and_poisoned):
        assert [row[2] for row in rows[1]] == [True, True, True, False, True, True]
        assert any(row[-2] > 0.5 for row in rows[0])
        for plain, distributed in zip(*rows, strict=True):
            assert distributed == pytest.approx(plain, rel=1e-12, nan_ok=True)
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, rtol=1e-9, atol=1e-12, msg=name)
        assert reports[0] == reports[2] == ([("fc1", 1)], 1, 5)
        assert reports[3] == pytest.approx(reports[1], rel=1e-12)


class Mixed(Toy):
    """One parameter stays in fp32, and so has a buffer of its own; one is not trained."""

    def __init__(self) -> None:
        super().__init__(3)
        self.fc1.requires_grad_(False)

    def to(self, dtype: torch.dtype) -> "Mixed":  # type: ignore[override]
        super().to(dtype)
        self.unused.data = self.unused.data.float()
        return self


# name -> (precision, optimizer settings); clipped, but for sgd, and with a NaN in one step
BY_BUCKETS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {"clip_grad": 0.5}),
    "adam, not adamw": ("bf16", {"clip_grad": 0.5, "decoupled_weight_decay": False}),
    "sgd": ("bf16", {**NO_CLIP, "optimizer": "sgd"}),
    "fp16, learning rates by group": (
        "fp16",
        {"clip_grad": 0.5, "initial_loss_scale": 2.0**12, "loss_scale_window": 2, "decoupled_lr": 1e-3},
    ),
    "fp64": ("fp64", {"clip_grad": 0.5}),
}


class Chunks:
    """Two chunks of a virtual pipeline, with one optimizer; of what it calls `calls` says in which order."""

    def __init__(self, precision: str, settings: dict[str, Any], overlap: bool, graphs: str = "none") -> None:
        self.groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
        buffers: dict[str, Any] = {"bucket_size": 100, "grad_reduce_in_fp32": precision == "bf16", "overlap_grad_reduce": True}
        ddp_config = DistributedDataParallelConfig(**buffers, overlap_param_gather=overlap, use_distributed_optimizer=True)
        models = [model.to(DTYPES[precision]) for model in (Toy(1), Mixed())]
        model_config = SimpleNamespace(calculate_per_token_loss=False, cuda_graph_impl=graphs)
        self.chunks: list[Any] = [DistributedDataParallel(model_config, ddp_config, model, pg_collection=self.groups) for model in models]
        config = OptimizerConfig(
            lr=1e-2, weight_decay=0.1, bf16=precision == "bf16", fp16=precision == "fp16", use_distributed_optimizer=True, **settings
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks, pg_collection=self.groups)
        self.calls: list[tuple[str, set[str]]] = []
        self._record()

    def _record(self) -> None:
        names = {id(entry.main_param): entry.name for entry in self.optimizer.params}
        inner: Any = self.optimizer.optimizer
        kept = inner._update

        def update(group: Any, params: Any, *more: Any) -> None:
            self.calls.append(("update", {names[id(param)] for param in params}))
            kept(group, params, *more)

        inner._update = update

    def step(self, number: int, poison: bool) -> list[float]:
        losses = []
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
            loss = chunk(own_tokens(number)).mean()
            self.optimizer.scale_loss(loss * float("nan") if poison else loss).backward()
            losses.append(loss.item())
        finalize_model_grads(self.chunks, pg_collection=self.groups)
        updated, norm, _ = self.optimizer.step()
        return [*losses, updated.item(), norm.item() if updated else 0.0]

    def everything(self) -> list[torch.Tensor]:
        weights = [value for chunk in self.chunks for value in params(chunk).values()]
        states = [tensor for entry in self.optimizer.params for tensor in self.optimizer.state[entry.main_param].values()]
        mains = [entry.main_param.detach().clone() for entry in self.optimizer.params]
        return [*weights, *mains, *states, *(group["step"] for group in self.optimizer.param_groups)]


def _by_buckets() -> dict[str, Any]:
    """name -> (rows of losses, everything that training has made of the run) without and with gathers in the background."""
    found: dict[str, Any] = {}
    for name, (precision, settings) in BY_BUCKETS.items():
        both = [Chunks(precision, settings, overlap) for overlap in (False, True)]
        rows = [[run.step(number, poison=number == 2 and dist.get_rank() == 1) for number in range(5)] for run in both]
        same = [torch.equal(left, right) for left, right in zip(*(run.everything() for run in both), strict=True)]
        found[name] = (rows, same, [int(group["step"]) for group in both[1].optimizer.param_groups])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_by_buckets_are_one_update_to_the_bit(ranks: int) -> None:
    for results in run_on_ranks(ranks, _by_buckets):
        for name, (rows, same, steps) in results.items():
            assert rows[0] == rows[1], name
            assert all(same), name
            assert [row[2] for row in rows[1]] == [True, True, False, True, True], name
            assert steps == [4] * len(steps), f"{name}: a step counts once, a skipped one does not"


def _calls_of_a_step(overlap: bool, graphs: str = "none") -> tuple[list[tuple[str, set[str]]], set[str], int]:
    """(updates and gathers in their order, with the names of their parameters; those of which this rank has a part; groups)."""
    gather = ParamAndGradBuffer.gather_bucket

    def recorded(buffer: ParamAndGradBuffer, index: int, async_op: bool) -> None:
        assert async_op == (overlap and graphs == "none")
        chunk = 0 if any(buffer is mine for mine in run.chunks[0].grad_buffers) else 1
        run.calls.append(("gather", {f"model{chunk}.{name}" for name in buffer.buckets[index].names}))
        gather(buffer, index, async_op)

    with mock.patch.object(ParamAndGradBuffer, "gather_bucket", recorded):
        run = Chunks("bf16", {**NO_CLIP, "decoupled_lr": 1e-3}, overlap, graphs)
        run.step(0, poison=False)
    own = {entry.name for entry in run.optimizer.params if entry.main_param.numel() > 0}
    return run.calls, own, len(run.optimizer.param_groups)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_gather_starts_between_its_update_and_the_next(ranks: int) -> None:
    gathers, most = [], 0
    for calls, own, _ in run_on_ranks(ranks, _calls_of_a_step, True):
        updated: set[str] = set()
        gathered: set[str] = set()
        before = 0
        for kind, names in calls:
            if kind == "update":
                assert not names & updated
                updated |= names
                before += 1
            else:
                gathered |= names
                assert updated == gathered & own, f"{names}: all that this bucket has, and nothing of later ones"
                most, before = max(most, before), 0
        assert updated == own
        gathers.append([names for kind, names in calls if kind == "gather"])
    assert most > 1, "some bucket has parameters of several groups"
    assert all(order == gathers[0] for order in gathers), "all ranks gather in one order"
    registered = [f"model{chunk}.{name}" for chunk in range(2) for name, _ in Toy(1).named_parameters()]
    first = [min(registered.index(name) for name in names) for names in gathers[0]]
    assert first == sorted(first) and len(first) > 6, "as the forward needs them, whichever buffer they are in"


@pytest.mark.parametrize(("ranks", "overlap", "graphs"), [(2, False, "none"), (2, True, "full_iteration"), (1, True, "none")])
def test_without_gathers_in_the_background_there_is_one_update(ranks: int, overlap: bool, graphs: str) -> None:
    for calls, own, groups in run_on_ranks(ranks, _calls_of_a_step, overlap, graphs):
        kinds = [kind for kind, _ in calls]
        num_updates = kinds.count("update")
        assert kinds == ["update"] * num_updates + ["gather"] * (len(kinds) - num_updates)
        # a call for each group, and one more for the fp32 parameter
        assert num_updates <= groups + 1
        assert set().union(*(names for kind, names in calls if kind == "update")) == own


class Shuffled(Toy):
    """The same model with its modules registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__(1)
        for name in ("fc2", "fc1", "norm_weight", "unused", "bias"):
            setattr(self, name, self._parameters.pop(name))


def _shuffled(steps):
    groups = ProcessGroupCollection(dp_cp=dist.group.WORLD)
    found = []
    overlaps: list[dict[str, Any]] = [{}, {"overlap_grad_reduce": True}, OVERLAP]
    for model in (lambda: Toy(1), Shuffled):
        for buffers in overlaps:
            ddp, optimizer = make("fp32", NO_CLIP, {"bucket_size": 100, **buffers}, True, groups, model=model())
            found.append([step(ddp, optimizer, own_tokens(n), groups)[:2] for n in range(steps)])
    ddp, optimizer = make("fp32", NO_CLIP, {"bucket_size": 100, **OVERLAP}, True, groups)
    found.append([])
    for number in range(steps):
        for param in ddp.parameters():  # between steps, while parameters may still be gathered
            param.main_grad.fill_(float("nan"))
        found[-1].append(step(ddp, optimizer, own_tokens(number), groups)[:2])
    return found


def test_overlap_sees_no_stale_weights_in_any_order_of_registration():
    """Nor does a gather touch gradients, or need them: the last run has them poisoned between steps."""
    for rank in run_on_ranks(2, _shuffled, 20):
        assert all(losses == rank[0] for losses in rank)
        assert rank[0][-1] != rank[0][0]


def gpt(tied, dtype=torch.float64, **layout) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype,
        gradient_accumulation_fusion=True, **layout,
    )  # fmt: skip
    return GPTModel(config, get_gpt_layer_local_spec(), 48, 12, share_embeddings_and_output_weights=tied, position_embedding_type="rope")


def _gpt_losses(tied, tp, buffers, steps=4):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = []
    for distributed in (False, True):
        model = gpt(tied, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
        ddp_config = DistributedDataParallelConfig(
            bucket_size=3000, use_distributed_optimizer=distributed, **(buffers if distributed else {})
        )
        ddp: Any = DistributedDataParallel(model.config, ddp_config, model, pg_collection=groups)
        config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
        rows = []
        for number in range(steps):
            ids = torch.randint(0, 48, (4, 13), generator=torch.Generator().manual_seed(number))
            dp = parallel_state.get_data_parallel_world_size()
            ids = ids.chunk(dp)[parallel_state.get_data_parallel_rank()]
            ddp.zero_grad_buffer()
            loss = ddp(ids[:, :-1], torch.arange(12).expand(len(ids), -1), None, labels=ids[:, 1:]).mean()
            loss.backward()
            finalize_model_grads([ddp], pg_collection=groups)
            rows.append([loss.item(), optimizer.step()[1].item()])
        found.append((rows, params(ddp)))
    return found


@pytest.mark.parametrize(("ranks", "tp", "tied"), [(2, 1, True), (4, 2, True), (2, 2, False)])
def test_a_gpt_with_tied_weights_and_tensor_parallelism(ranks, tp, tied):
    for (plain, left), (distributed, right) in run_on_ranks(ranks, _gpt_losses, tied, tp, OVERLAP):
        for a, b in zip(plain, distributed, strict=True):
            assert b == pytest.approx(a, rel=1e-9)
        for name, value in left.items():
            torch.testing.assert_close(right[name], value, rtol=1e-9, atol=1e-11, msg=name)


def _stored_state():
    """(key, offsets, sizes, data) of the pieces of the state that this rank writes: of the plain optimizer and of the distributed one."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    found = []
    for distributed in (False, True):
        model = gpt(True, tensor_model_parallel_size=2, gated_linear_unit=True, activation_func=torch.nn.functional.silu)
        ddp_config = DistributedDataParallelConfig(bucket_size=3000, use_distributed_optimizer=distributed)
        ddp: Any = DistributedDataParallel(model.config, ddp_config, model, pg_collection=groups)
        config = OptimizerConfig(lr=1e-2, use_distributed_optimizer=distributed)
        optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
        ids = torch.randint(0, 48, (2, 13), generator=torch.Generator().manual_seed(parallel_state.get_data_parallel_rank()))
        ddp.zero_grad_buffer()
        ddp(ids[:, :-1], torch.arange(12).expand(2, -1), None, labels=ids[:, 1:]).mean().backward()
        finalize_model_grads([ddp], pg_collection=groups)
        optimizer.step()
        pieces: list[Any] = []
        for record, tensors in optimizer.model_sharded_state(optimizer.state_kind):
            place = optimizer.shard_range(record.param)
            if place is not None:
                pieces += sharded_range_of(record, tensors["exp_avg"], place[0])
            else:
                whole = sharded_tensor_of(record, tensors["exp_avg"])
                pieces += leaves(whole.build() if isinstance(whole, ShardedTensorFactory) else whole)
        written = [piece for piece in pieces if is_main_replica(piece.replica_id)]
        found.append([(p.key, p.global_shape, p.global_offset, p.chunk_shape, p.data.clone()) for p in written])
    return found


def test_stored_state_is_the_plain_optimizers_under_tensor_parallelism():
    """TP 2 x DP 2: the ranks' pieces tile each tensor, gate and up included, with the numbers of the plain optimizer."""
    ranks = run_on_ranks(4, _stored_state)
    wholes: list[dict[str, torch.Tensor]] = []
    for kind in range(2):
        whole: dict[str, torch.Tensor] = {}
        for key, shape, offsets, sizes, data in (piece for rank in ranks for piece in rank[kind]):
            target = whole.setdefault(key, torch.full(shape, float("nan"), dtype=torch.float64))
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            assert target[place].isnan().all(), f"{key} is written twice"
            target[place] = data
        assert not any(tensor.isnan().any() for tensor in whole.values())
        wholes.append(whole)
    assert wholes[0].keys() == wholes[1].keys()
    for key, value in wholes[0].items():
        torch.testing.assert_close(wholes[1][key], value, rtol=1e-9, atol=1e-15, msg=key)


def test_parameters_are_views_of_one_buffer_and_stay_the_same_objects():
    model = Toy(1).bfloat16()
    before = {name: (id(param), param.detach().clone()) for name, param in model.named_parameters()}
    ddp, optimizer = make("bf16", {}, {}, True, ProcessGroupCollection(), model=model)
    (buffer,) = ddp.grad_buffers
    for name, param in model.named_parameters():
        assert id(param) == before[name][0] and torch.equal(param, before[name][1])
        assert param.untyped_storage().data_ptr() == buffer.param_data.untyped_storage().data_ptr()
    assert all(entry.main_param.dtype == torch.float32 and entry.main_param.dim() == 1 for entry in optimizer.params)


def test_cuts_of_parts():
    """Rows 4 to 8 of a [10, 3] matrix, as they appear in runs of its elements."""
    shape, rows = torch.Size((10, 3)), (0, 4, 4)
    cuts = [_flat_cut(shape, rows, start, end) for start, end in ((0, 0), (0, 12), (0, 13), (12, 20), (20, 30), (24, 30), (0, 30))]
    assert cuts == [(0, 12, 0), (0, 12, 0), (0, 12, 1), (0, 0, 8), (0, 0, 4), (0, 0, 0), (0, 12, 12)]
    assert _flat_cut(shape, None, 3, 5) is None
    with pytest.raises(ValueError, match="along dim 1 is not built yet"):
        _flat_cut(shape, (1, 0, 2), 0, 30)


def test_norms_of_parts_add_up():
    param, other = torch.nn.Parameter(torch.randn(10, 3, dtype=torch.float64)), torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    named = [("param", param), ("other", other)]
    squares, zeros = 0.0, 0
    for cut, more in (((0, 0), (0, 0)), ((0, 7), (2, 5)), ((7, 8), (0, 0)), ((8, 30), (0, 2))):
        parts = [param.detach().view(-1)[slice(*cut)], other.detach()[slice(*more)]]
        plan = NormPlan(named, ranges=[cut, more])
        norm, bad = plan.norm(parts)
        squares += norm.item() ** 2
        zeros += int(plan.count_zeros([torch.zeros_like(part) for part in parts]))
        assert bad.tolist() == [0, 0]
    assert zeros == 35
    assert squares == pytest.approx(NormPlan(named).norm([param.detach(), other.detach()])[0].item() ** 2, rel=1e-12)


def test_refusals():
    groups = ProcessGroupCollection()
    ddp = DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), Toy(1))
    with pytest.raises(ValueError, match=r"DistributedDataParallelConfig\(use_distributed_optimizer=True\)"):
        get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), [ddp])
    ddp, optimizer = make("fp32", {}, {}, True, groups)
    with pytest.raises(ValueError, match=r"set OptimizerConfig\.use_distributed_optimizer too"):
        get_megatron_optimizer(OptimizerConfig(lr=1e-2), [ddp])
    with pytest.raises(ValueError, match="overlap_param_gather needs overlap_grad_reduce"):
        DistributedDataParallelConfig(overlap_param_gather=True, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="overlap_param_gather needs use_distributed_optimizer"):
        DistributedDataParallelConfig(overlap_param_gather=True, overlap_grad_reduce=True)
    with pytest.raises(ValueError, match="one file"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="dp_reshardable"):
        list(optimizer.model_sharded_state("dp_reshardable"))
