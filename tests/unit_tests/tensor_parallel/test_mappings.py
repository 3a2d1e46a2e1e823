"""Conjugate pairs on two ranks: what comes out, and that the backward is the adjoint of the forward."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from tests.distributed import run_on_ranks

# name -> whether the input is the same on all ranks (else each rank holds a part, or a partial sum)
PAIRS = {
    "scatter_to_tensor_model_parallel_region": True,
    "scatter_to_sequence_parallel_region": True,
    "reduce_scatter_to_sequence_parallel_region": False,
    "gather_from_sequence_parallel_region": False,
    "all_gather_last_dim_from_tensor_parallel_region": False,
    "reduce_scatter_last_dim_to_tensor_parallel_region": False,
}


def _outputs():
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = dist.get_rank()
    whole = torch.arange(32.0).view(4, 2, 4)
    rows, columns = whole.chunk(2)[rank], whole.chunk(2, -1)[rank]
    partial = whole * (1 + rank)
    return {
        "copy": torch.equal(mappings.copy_to_tensor_model_parallel_region(whole), whole),
        "reduce": torch.equal(mappings.reduce_from_tensor_model_parallel_region(partial), 3 * whole),
        "scatter": torch.equal(mappings.scatter_to_tensor_model_parallel_region(whole), columns),
        "gather": torch.equal(mappings.gather_from_tensor_model_parallel_region(columns), whole),
        "scatter tokens": torch.equal(mappings.scatter_to_sequence_parallel_region(whole), rows),
        "gather tokens": torch.equal(mappings.gather_from_sequence_parallel_region(rows), whole),
        "reduce-scatter tokens": torch.equal(mappings.reduce_scatter_to_sequence_parallel_region(partial), 3 * rows),
        "gather columns": torch.equal(mappings.all_gather_last_dim_from_tensor_parallel_region(columns), whole),
        "reduce-scatter columns": torch.equal(mappings.reduce_scatter_last_dim_to_tensor_parallel_region(partial), 3 * columns),
    }


def test_outputs():
    for rank in run_on_ranks(2, _outputs):
        assert all(rank.values()), rank


def _adjoints():
    """<y, f(x)> summed over ranks equals <f^T(y), x> summed over ranks; an input that is the same everywhere counts once."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    out = {}
    for name, same_input in PAIRS.items():
        torch.manual_seed(0 if same_input else dist.get_rank())
        x = torch.randn(4, 2, 4, dtype=torch.float64, requires_grad=True)
        y = getattr(mappings, name)(x)
        torch.manual_seed(10 + dist.get_rank())
        weight = torch.randn_like(y)
        y.backward(weight)
        assert x.grad is not None
        forward, backward = (weight * y).sum().detach(), (x.grad * x).sum().detach()
        dist.all_reduce(forward)
        if not same_input:
            dist.all_reduce(backward)
        out[name] = (forward.item(), backward.item())
    return out


def test_backward_is_the_adjoint():
    for rank in run_on_ranks(2, _adjoints):
        for name, (forward, backward) in rank.items():
            assert abs(forward - backward) < 1e-9, name


def test_alone_nothing_happens():
    x = torch.randn(3, 2, requires_grad=True)
    for name in PAIRS:
        assert getattr(mappings, name)(x) is x
