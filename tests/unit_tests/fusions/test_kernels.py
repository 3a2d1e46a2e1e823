"""Triton kernels against their plain twins: in Triton's interpreter on the CPU, compiled on a GPU (`make test-gpu`)."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import device
from megatron.core.transformer.moe import permutation

pytest.importorskip("triton", reason="Triton is not installed")
from megatron.core.fusions import kernels
from megatron.core.fusions.kernels import permute as permute_kernels

pytestmark = [pytest.mark.gpu] if device.has_accelerator() else []
# relative, one rounding: the interpreter cuts where the device rounds
ONE_ROUNDING = {torch.float64: 0.0, torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
DTYPES = st.sampled_from(list(ONE_ROUNDING))


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device.current_device())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 70), st.integers(1, 5), st.integers(1, 4), DTYPES, st.booleans())
def test_rows_by_index(n: int, width: int, tokens: int, copies: int, dtype: torch.dtype, strided: bool) -> None:
    x = rand(n, 2 * width if strided else width).to(dtype)[:, :: 2 if strided else 1]
    index = torch.randint(0, n + 1, (tokens, copies), device=x.device)
    taken = permute_kernels.take_rows(x, index.flatten())
    assert torch.equal(taken, permutation.take_rows(x, index.flatten(), False))
    torch.testing.assert_close(
        permute_kernels.sum_rows(x, index), permutation.sum_rows(x, index, False), rtol=ONE_ROUNDING[dtype], atol=1e-7
    )


def test_wide_rows_take_several_programs() -> None:
    x = rand(3, permute_kernels.WIDEST + 5)
    index = torch.tensor([[2, 3], [0, 0]], device=x.device)
    assert torch.equal(permute_kernels.sum_rows(x, index), permutation.sum_rows(x, index, False))
    assert torch.equal(permute_kernels.take_rows(x, index[:, 0]), x[[2, 0]])


def test_a_permutation_with_kernels_is_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", not device.has_accelerator())
    calls = mock.Mock(side_effect=permute_kernels.sum_rows)
    monkeypatch.setattr(permute_kernels, "sum_rows", calls)
    routing_map = rand(6, 4) > -0.4
    rows, most = int(routing_map.sum()), int(routing_map.sum(dim=1).max())
    found = []
    for fused in (False, True):
        row_map = permutation.make_row_map(routing_map, rows, most, fused=fused)
        torch.manual_seed(0)
        x = rand(6, 8).requires_grad_()
        out = permutation.unpermute(permutation.permute(x, row_map) * 2, row_map)
        out.backward(rand(6, 8))
        found.append((out.detach(), x.grad))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right)
    assert calls.call_count == 2
