"""How much a layer communicates: counted, and held against the formula.

With x = sequence x micro batch x hidden elements, a layer of two blocks (attention, MLP) moves in one forward and backward pass:
tensor parallelism all-reduces x once a block forward and once backward; sequence parallelism gathers x before a block and
reduce-scatters it after, does the opposite on the way back, and gathers the input of the block's first linear again for its weight's
gradient.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.core.tensor_parallel.param_sharding import build_param_table
from tests.distributed import run_on_ranks
from tests.parallel_equivalence import harness
from tests.parallel_equivalence.layouts import HIDDEN, MICRO_BATCH, MODELS, SEQ, Layout

X = SEQ * MICRO_BATCH * HIDDEN
TOKENS = SEQ * MICRO_BATCH
DATA = Layout("dp2", dp=2)
SPLIT = (Layout("tp2", tp=2), Layout("tp2 sp", tp=2, sp=True))
LARGE_SIDE = {"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "broadcast": 0}  # position of the whole tensor


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Elements that each kind of collective moves meanwhile: those of the whole tensor, once a call."""
    counts: Counter = Counter()

    def counting(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += args[LARGE_SIDE[name]].numel()
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in LARGE_SIDE:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield counts


def one_pass(layout: Layout, model: str, num_layers: int) -> dict[str, int]:
    """What forward and backward of one micro batch move."""
    harness.start_groups(layout)
    with mock.patch.object(harness, "NUM_LAYERS", num_layers):
        chunks, _ = harness.build(layout, model, torch.float32)
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
    for rank in run_on_ranks(2, passes):
        for (name, model, num_layers), counts in rank.items():
            fixed, layer = Counter(outside_of_layers(layouts[name], model)), Counter(of_a_layer(layouts[name]))
            expected = {kind: fixed[kind] + num_layers * layer[kind] for kind in fixed | layer}
            assert counts == expected, f"{name}, {model}, {num_layers} layers"


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
    return [one_step(layout) for layout in (DATA, *SPLIT)]


def test_volume_of_a_step() -> None:
    """The gradient buffer once over data-parallel ranks, however many micro batches; replicated weights that saw a part of the tokens
    once over tensor-parallel ranks; one number for the gradient norm."""
    for rank in run_on_ranks(2, steps):
        for layout, (counts, buffer, partial) in zip((DATA, *SPLIT), rank, strict=True):
            assert counts == {"all_reduce": buffer if layout.dp > 1 else partial + 1}, layout.name
            assert bool(partial) == layout.sp
