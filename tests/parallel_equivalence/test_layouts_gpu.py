"""The table on GPUs: NCCL, fp32 (no TF32) and bf16, as far as this machine's GPUs go. Run by `make test-gpu`."""

import pytest

from tests.gpus import needs_gpus
from tests.parallel_equivalence.comparison import assert_equals_one_process
from tests.parallel_equivalence.layouts import GPU_TOLERANCES, LAYOUTS, Layout


def cases() -> list:
    return [
        pytest.param(layout, id=layout.name, marks=needs_gpus(layout.world_size))
        for layout in sorted(LAYOUTS, key=lambda layout: layout.world_size)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", cases())
def test_layout_equals_one_gpu(layout: Layout) -> None:
    assert_equals_one_process(layout, GPU_TOLERANCES, backend="nccl")
