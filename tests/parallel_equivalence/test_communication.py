"""How much a layer communicates: counted, and held against the formula.

With x = sequence x micro batch x hidden elements, a layer of two blocks (attention, MLP) moves in one forward and backward pass:
tensor parallelism all-reduces x once a block forward and once backward; sequence parallelism gathers x before a block and
reduce-scatters it after, does the opposite on the way back, and gathers the input of the block's first linear again for its weight's
gradient. A pipeline stage sends x (sequence parallelism: its rank's part of it) on after each of its chunks, and the gradient of x back,
once a micro batch. A step moves the gradient buffer once over the data-parallel ranks; with the distributed optimizer half of that work,
and the parameters as the other half. With experts spread over ranks each token's row goes to each of its experts with its weight, comes
back without, and their gradients go the opposite way. (Context parallelism: tests/unit_tests/context_parallel/.)
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.param_sharding import build_param_table
from tests.distributed import ranks
from tests.parallel_equivalence import harness
from tests.parallel_equivalence.layouts import HIDDEN, MICRO_BATCH, MODELS, SEQ, Layout

X = SEQ * MICRO_BATCH * HIDDEN
TOKENS = SEQ * MICRO_BATCH
DATA = Layout("dp2", dp=2)
SHARDED = Layout("dp2 sharded", dp=2, distributed_optimizer=True)
SPLIT = (
    Layout("tp2", tp=2),
    Layout("tp2 sp", tp=2, sp=True),
    Layout("tp2 sp overlap", tp=2, sp=True, config={"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True}),
)
# name -> position of the whole tensor
LARGE_SIDE = {
    "all_reduce": 0,
    "all_gather_into_tensor": 0,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "broadcast": 0,
}
PIPELINES = (
    Layout("pp2", pp=2, microbatches=3),
    Layout("pp2 vpp2", pp=2, vpp=2, microbatches=4),
    Layout("pp2 zero-bubble", pp=2, schedule="zero-bubble", microbatches=4),
    Layout("tp2 sp pp2", tp=2, sp=True, pp=2, microbatches=2),
    Layout("pp4", pp=4, microbatches=4),
)


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Elements that each kind of collective moves meanwhile: those of the whole tensor, once a call."""
    counts: Counter = Counter()

    def counting(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += args[LARGE_SIDE[name]].numel()
            return original(*args, **kwargs)

        return call

    def batch(operations: list[dist.P2POp], original: Callable = dist.batch_isend_irecv) -> Any:
        for operation in operations:
            counts["isend" if operation.op is dist.isend else "irecv"] += operation.tensor.numel()
        return original(operations)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch))
        for name in LARGE_SIDE:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield counts


def one_pass(layout: Layout, model: str, num_layers: int) -> dict[str, int]:
    """What forward and backward of one micro batch move."""
    harness.start_groups(layout)
    chunks, _ = harness.build(replace(layout, layers=num_layers), model, torch.float32)
    data = harness.micro_batch(0)
    with counted() as counts:
        losses = chunks[0](data["tokens"], torch.arange(SEQ).expand(MICRO_BATCH, -1), None, labels=data["labels"])
        losses.sum().backward()
    return dict(counts)


def passes() -> dict[tuple[str, str, int], dict[str, int]]:
    return {(layout.name, model, n): one_pass(layout, model, n) for layout in SPLIT for model in ("gpt", "llama") for n in (1, 2, 3)}


def outside_of_layers(layout: Layout, model: str) -> dict[str, int]:
    """Embedding, output layer and loss: the maximum of a token's logits, and three sums."""
    loss = TOKENS + 3 * TOKENS
    if not layout.sp:
        return {"all_reduce": 2 * X + loss}  # the embedding's sum, and the gradient of the output layer's input
    # the output layer's input is gathered twice, its gradient scattered; the embedding's gradient is gathered
    scattered = MODELS[model].position != "learned_absolute"  # else the positions are added to the whole sum, which is then cut
    return {
        "all_reduce": loss + (0 if scattered else X),
        "all_gather_into_tensor": 3 * X,
        "reduce_scatter_tensor": X + (X if scattered else 0),
    }


def of_a_layer(layout: Layout) -> dict[str, int]:
    if not layout.sp:
        return {"all_reduce": 2 * X + 2 * X}
    return {"all_gather_into_tensor": 2 * X + 2 * X + 2 * X, "reduce_scatter_tensor": 2 * X + 2 * X}


def test_volume_of_tensor_and_sequence_parallelism() -> None:
    layouts = {layout.name: layout for layout in SPLIT}
    for rank in ranks().run(2, passes):
        for (name, model, num_layers), counts in rank.items():
            fixed, layer = Counter(outside_of_layers(layouts[name], model)), Counter(of_a_layer(layouts[name]))
            expected = {kind: fixed[kind] + num_layers * layer[kind] for kind in fixed | layer}
            assert counts == expected, f"{name}, {model}, {num_layers} layers"


EXPERTS = Layout("ep2", dp=2, ep=2, config={"moe_token_dispatcher_type": "alltoall"})


def expert_passes() -> dict[int, int]:
    return {n: one_pass(EXPERTS, "moe", n)["all_to_all_single"] for n in (1, 2)}


def test_volume_of_experts() -> None:
    """Over all ranks, since how the tokens divide over experts is the router's choice."""
    topk = MODELS["moe"].config["moe_router_topk"]
    of_a_layer = EXPERTS.ep * TOKENS * topk * (2 * (HIDDEN + 1) + 2 * HIDDEN)
    every_rank = ranks().run(EXPERTS.world_size, expert_passes)
    for num_layers in (1, 2):
        assert sum(rank[num_layers] for rank in every_rank) == num_layers * of_a_layer


def one_step(layout: Layout) -> tuple[dict[str, int], int, int]:
    """(what finishing the gradients of a step and the optimizer move, elements of the buffers, elements of partial gradients)."""
    harness.start_groups(layout)
    chunks, optimizer = harness.build(layout, "gpt", torch.float32)
    for number in range(2):
        with chunks[0].no_sync():
            data = harness.micro_batch(number)
            chunks[0](data["tokens"], torch.arange(SEQ).expand(MICRO_BATCH, -1), None, labels=data["labels"]).sum().backward()
    with counted() as counts:
        harness.finalize_model_grads(chunks)
        optimizer.step()
    records = build_param_table(chunks[0]).values()
    partial = sum(record.param.numel() for record in records if "tp" in record.sharding.grad_partial)
    return dict(counts), sum(buffer.grad_data.numel() for buffer in chunks[0].grad_buffers), partial


def steps() -> list[tuple[dict[str, int], int, int]]:
    return [one_step(layout) for layout in (DATA, SHARDED, *SPLIT)]


def test_volume_of_a_step() -> None:
    """The gradient buffer once over data-parallel ranks, however many micro batches; replicated weights that saw a part of the tokens
    once over tensor-parallel ranks; one number for the gradient norm."""
    for rank in ranks().run(2, steps):
        for layout, (counts, buffer, partial) in zip((DATA, SHARDED, *SPLIT), rank, strict=True):
            expected = {"all_reduce": buffer if layout.dp > 1 else partial + 1}
            if layout.distributed_optimizer:
                expected = {"reduce_scatter_tensor": buffer, "all_gather_into_tensor": buffer, "all_reduce": 1}
            assert counts == expected, layout.name
            assert bool(partial) == layout.sp


def pipeline_step(layout: Layout) -> dict[str, int]:
    """Elements that this stage sends and receives in forward and backward of a step."""
    harness.start_groups(layout)
    chunks, _ = harness.build(layout, "llama", torch.float32)
    recorder = harness.Recorder(layout, chunks, harness.Trace())
    with counted() as counts:
        get_forward_backward_func()(
            forward_step_func=recorder.forward_step,
            data_iterator=harness.batches_of_step(layout, 0),
            model=chunks,
            num_microbatches=layout.microbatches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
    return {kind: counts[kind] for kind in ("isend", "irecv")}


@pytest.mark.parametrize("layout", PIPELINES, ids=lambda layout: layout.name)
def test_volume_of_a_pipeline(layout: Layout) -> None:
    """Of the pipeline's slots (chunks in the model's order, which go round the stages) all but the last send x on, all but the first a
    gradient back, once a micro batch."""
    x = X // layout.tp if layout.sp else X
    slots = layout.pp * (layout.vpp or 1)
    for rank, counts in enumerate(ranks().run(layout.world_size, pipeline_step, layout)):
        stage = rank // layout.tp
        mine = range(stage, slots, layout.pp)
        forward, backward = sum(slot < slots - 1 for slot in mine), sum(slot > 0 for slot in mine)
        sent = layout.microbatches * x * (forward + backward)
        assert counts == {"isend": sent, "irecv": sent}, f"stage {stage}"
