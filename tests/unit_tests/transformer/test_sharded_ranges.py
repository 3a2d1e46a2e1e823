"""Runs of a flattened parameter as boxes of the whole tensor."""

import itertools

import torch

from megatron.core.tensor_parallel.param_sharding import ParamRecord, ParamSharding, Segment
from megatron.core.transformer.utils import boxes_of_range, sharded_range_of


def test_boxes_make_up_the_range():
    for shape in ((7,), (3, 4), (2, 3, 4), (5, 1)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
            boxes = boxes_of_range(shape, start, end)
            assert len(boxes) <= 2 * len(shape) - 1
            found = []
            for offsets, sizes, first in boxes:
                box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
                assert box.flatten()[0] == first and box.shape == sizes
                found.append(box.flatten())
            assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *found]), torch.arange(start, end))


def test_ranges_of_a_layer_fill_its_place():
    """Two ranks' runs of a gate-and-up weight of layer 1 of 3, without a tensor-parallel split."""
    weight = torch.nn.Parameter(torch.randn(8, 3))
    sharding = ParamSharding((8, 3), 0, (Segment("gate", 4, "tp"), Segment("up", 4, "tp")))
    record = ParamRecord("w", weight, sharding, 1, "layers.w", True, 3)
    whole = torch.zeros(3, 8, 3)
    for start, end in ((0, 13), (13, 24)):
        flat = weight.detach().reshape(-1)[start:end].clone()
        for part in sharded_range_of(record, flat, start, "optimizer.state.exp_avg."):
            assert part.key == "optimizer.state.exp_avg.layers.w" and part.global_shape == (3, 8, 3) and part.prepend_axis_num == 1
            place = tuple(slice(at, at + size) for at, size in zip(part.global_offset, part.chunk_shape, strict=True))
            assert part.data is not None and not whole[place].any()
            whole[place] = part.data
            assert part.data.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr(), "a load must fill the optimizer's own"
    assert torch.equal(whole[1], weight) and not whole[[0, 2]].any()
