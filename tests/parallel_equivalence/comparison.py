"""What the ranks of a layout saw, held against what one process saw."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from megatron.core.tensor_parallel.param_sharding import local_part
from tests.distributed import ranks
from tests.parallel_equivalence.harness import Key, Trace, Traces, Weight, train_all, train_alone
from tests.parallel_equivalence.layouts import STEPS, Layout, Tolerances


def distance(value: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element that is expected; nan when one of them holds nan."""
    if value.shape != expected.shape:
        return float("inf")
    scale = expected.abs().max()
    return float((value - expected).abs().max() / (scale if scale > 0 else 1.0))


def part_of(whole: torch.Tensor, weight: Weight) -> torch.Tensor:
    """What the rank holds of a tensor of one process, whose vocabulary may have fewer rows of padding (which are zero)."""
    shape = list(weight.sharding.global_shape)
    if weight.sharding.logical_size is not None and shape[0] != whole.shape[0]:
        padded = whole.new_zeros(shape)
        rows = min(shape[0], whole.shape[0])
        padded[:rows] = whole[:rows]
        whole = padded
    return local_part(whole, weight.sharding, weight.rank, weight.size)


def measured(trace: Trace, reference: Trace) -> Iterator[tuple[str, str, float]]:
    """(kind of number, its name, relative difference between a rank and one process), in the order in which a training computes them."""
    for place, activation in trace.activations.items():
        yield "forward", str(place), distance(activation.value, reference.activations[place].value[activation.positions])
    for step, (loss, expected) in enumerate(zip(trace.losses, reference.losses)):
        yield "first loss" if step == 0 else "later loss", f"step {step + 1}", abs(loss - expected) / abs(expected)
    for kind, mine, theirs in (
        ("gradient", trace.gradients, reference.gradients),
        ("trained weight", trace.trained, reference.trained),
    ):
        for key, weight in mine.items():
            yield kind, str(key), distance(weight.value, part_of(theirs[key].value, weight))
    for step, (norm, expected) in enumerate(zip(trace.norms, reference.norms)):
        yield "gradient norm", f"step {step + 1}", abs(norm - expected) / expected


def differences(trace: Trace, reference: Trace, tolerances: dict[str, float]) -> list[str]:
    """What a rank has otherwise than one process, in words."""
    found = []
    for key, weight in trace.initial.items():
        if not torch.equal(weight.value, part_of(reference.initial[key].value, weight)):
            found.append(f"initial weight {key} has other bits")
    for kind, name, difference in measured(trace, reference):
        if kind in tolerances and not difference <= tolerances[kind]:
            found.append(f"{kind} of {name} is off by {difference:.1e}, allowed {tolerances[kind]:.0e}")
    return found


def coverage(traces: Sequence[Trace], reference: Trace, layout: Layout) -> list[str]:
    """What one process has and no rank, or too few: a comparison of nothing finds nothing."""
    found = []
    for name in ("initial", "gradients", "trained", "activations"):
        seen, expected = {key for trace in traces for key in getattr(trace, name)}, set(getattr(reference, name))
        if seen != expected or not expected:
            found.append(f"{name}: the ranks and one process differ in {sorted(seen ^ expected, key=str)}")
    outputs = layout.global_microbatches * (layout.num_layers + 3)  # of layers, embedding, final norm and loss
    if len(reference.activations) != outputs:
        found.append(f"activations: {len(reference.activations)} were kept instead of {outputs}")
    for place, activation in reference.activations.items():
        positions = [trace.activations[place].positions for trace in traces if place in trace.activations]
        if positions and set(torch.cat(positions).tolist()) != set(range(len(activation.value))):
            found.append(f"activation {place}: the ranks have not all positions of the sequence")
    with_loss = [trace for trace in traces if trace.losses]
    if len(with_loss) != len(traces) // layout.pp or any(len(trace.losses) != STEPS + 1 for trace in [*with_loss, reference]):
        found.append("losses of some steps are missing")
    if any(len(trace.norms) != STEPS for trace in [*traces, reference]):
        found.append("gradient norms of some steps are missing")
    return found


def unmarked_differences(traces: Sequence[Trace]) -> list[str]:
    """Parameters that are not marked as split and yet not equal, to the bit, on all ranks that hold them."""
    first: dict[tuple[Key, int | None], torch.Tensor] = {}
    found = []
    for trace in traces:
        for key, weight in trace.trained.items():
            place = (key, weight.rank if weight.sharding.is_split else None)
            if not torch.equal(first.setdefault(place, weight.value), weight.value):
                found.append(f"{key} is marked as {'one part' if weight.sharding.is_split else 'replicated'} and differs between ranks")
    return found


def bit_differences(left: Traces, right: Traces) -> list[str]:
    """What two runs of a rank in the same layout have not equal to the bit."""
    found = []
    for case, trace in left.items():
        other = right[case]
        if (trace.losses, trace.norms) != (other.losses, other.norms) or not trace.norms:
            found.append(f"{case}: losses or gradient norms")
        for name in ("initial", "activations", "gradients", "trained"):
            mine, theirs = getattr(trace, name), getattr(other, name)
            differing = [key for key in mine if key not in theirs or not torch.equal(mine[key].value, theirs[key].value)]
            if mine.keys() != theirs.keys() or differing:
                found.append(f"{case}: {name} of {differing[:3]}")
    return found


@cache
def reference(layout: Layout, model: str, dtype: torch.dtype, backend: str) -> Trace:
    """What one process sees (`layout` is one process already: layouts of one global batch share it)."""
    (trace,) = ranks(backend).run(1, train_alone, layout, model, dtype, name=f"one process, {model} {dtype}")
    return trace


def report(layout: Layout, results: Sequence[Traces], tolerances: Tolerances, backend: str = "gloo") -> list[str]:
    """All that is wrong with what the ranks of a layout saw, each with the model, the dtype and the rank."""
    found = []
    for model, dtype in results[0]:
        expected = reference(layout.alone, model, dtype, backend)
        traces = [rank[model, dtype] for rank in results]
        found += [f"{model} {dtype}: {text}" for text in coverage(traces, expected, layout)]
        for rank, trace in enumerate(traces):
            found += [f"{model} {dtype} rank {rank}: {text}" for text in differences(trace, expected, tolerances[dtype])]
        found += [f"{model} {dtype}: {text}" for text in unmarked_differences(traces)]
    return found


def largest(layout: Layout, results: Sequence[Traces], backend: str = "gloo") -> dict[torch.dtype, dict[str, float]]:
    """Of each dtype and kind of number the largest difference between any rank and one process; nan where one of them is."""
    found: dict[torch.dtype, dict[str, list[float]]] = {}
    for rank in results:
        for (model, dtype), trace in rank.items():
            for kind, _, difference in measured(trace, reference(layout.alone, model, dtype, backend)):
                found.setdefault(dtype, {}).setdefault(kind, []).append(difference)
    return {
        dtype: {kind: max(values, key=lambda value: (math.isnan(value), value)) for kind, values in kinds.items()}
        for dtype, kinds in found.items()
    }


def trained(
    layout: Layout, dtypes: Sequence[torch.dtype], fault: object = None, backend: str = "gloo", timeout: float = 240
) -> list[Traces]:
    """What each rank of the layout saw."""
    return ranks(backend).run(layout.world_size, train_all, layout, tuple(dtypes), fault, name=layout.name, timeout=timeout)


def assert_equals_one_process(layout: Layout, tolerances: Tolerances, backend: str = "gloo") -> None:
    found = report(layout, trained(layout, list(tolerances), backend=backend), tolerances, backend)
    assert not found, f"{layout.name}: {len(found)} differences, the first of them:\n" + "\n".join(found[:20])
