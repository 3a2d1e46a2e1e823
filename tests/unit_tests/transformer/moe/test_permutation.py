"""Rows by expert and back, against loops; properties for any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.moe.permutation import (
    make_row_map,
    permute,
    permute_plain,
    reorder,
    take_probs,
    transposed_chunks,
    unpermute,
    unpermute_plain,
)


def random_map(tokens: int, experts: int, most: int, seed: int) -> torch.Tensor:
    """[T, E] with up to `most` experts a token."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(dim=1)
    return order < torch.randint(0, most + 1, (tokens, 1), generator=generator)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6), st.booleans())
def test_permutation_and_its_gradients_are_those_of_a_loop(tokens: int, experts: int, most: int, seed: int, padded: bool) -> None:
    most = min(most, experts)
    routing_map = random_map(tokens, experts, most, seed)
    counts = routing_map.sum(dim=0)
    x = torch.randn(tokens, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(tokens, experts, dtype=torch.float64, requires_grad=True)
    capacity = int(counts.max()) + 1 if padded else None
    rows = experts * capacity if capacity is not None else int(counts.sum())
    row_map = make_row_map(routing_map, rows, most, capacity=capacity)
    place = torch.cat([torch.arange(int(n)) + e * (capacity or 0) for e, n in enumerate(counts)]) if padded else torch.arange(rows)
    found = permute(x, row_map)
    assert found.shape == (rows, 3) and int((found != 0).any(dim=1).sum()) == len(place)
    torch.testing.assert_close(found[place], permute_plain(x, routing_map))
    weights = take_probs(probs, row_map)
    torch.testing.assert_close(weights[place], probs.t()[routing_map.t()])
    out = unpermute(found * weights.unsqueeze(1), row_map)
    plain = unpermute_plain(permute_plain(x, routing_map) * probs.t()[routing_map.t()].unsqueeze(1), routing_map)
    torch.testing.assert_close(out, plain)
    grad = torch.randn_like(out)
    for left, right in zip(torch.autograd.grad(out, (x, probs), grad), torch.autograd.grad(plain, (x, probs), grad)):
        torch.testing.assert_close(left, right)


def test_full_maps_are_the_special_case_that_they_claim_to_be() -> None:
    routing_map = torch.zeros(5, 4, dtype=torch.bool).scatter(1, torch.tensor([[0, 1], [1, 2], [3, 1], [0, 2], [2, 3]]), True)
    quick, careful = (make_row_map(routing_map, 10, 2, full=full) for full in (True, False))
    for name in ("token_of_row", "pair_of_row", "rows_of_token"):
        assert torch.equal(getattr(quick, name), getattr(careful, name)), name


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4))
def test_chunks_change_places(sizes: list[list[int]]) -> None:
    table = torch.tensor(sizes)
    rows = int(table.sum())
    source = torch.cat([torch.full((n,), a * 10 + b) for a, row in enumerate(sizes) for b, n in enumerate(row)])
    expected = torch.cat([torch.full((sizes[a][b],), a * 10 + b) for b in range(3) for a in range(len(sizes))])
    order, inverse = transposed_chunks(table, rows)
    x = source.double().unsqueeze(1).requires_grad_()
    moved = reorder(x, order, inverse)
    assert moved.flatten().tolist() == expected.tolist()
    assert reorder(moved, inverse, order).flatten().tolist() == source.tolist()
    if rows:
        (grad,) = torch.autograd.grad((moved * moved.detach()).sum(), x)
        torch.testing.assert_close(grad, x.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tokens_rows_are_summed_in_fp32(dtype: torch.dtype) -> None:
    routing_map = torch.ones(1, 4, dtype=torch.bool)
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=dtype)
    assert unpermute(rows, make_row_map(routing_map, 4, 4, full=True)).item() == (260.0 if dtype is torch.bfloat16 else 259.0)
