"""What other projects ask of shards: places in grids, stretches of an axis, names on disk, contents of a checkpoint without data."""

from pathlib import Path

import pytest
import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, ShardedTensorFactory


def layer(index: int, rank: int) -> ShardedTensor:
    """Half of the rows of one of three stacked layers."""
    data = torch.arange(8.0).view(2, 4) + 100 * index + 10 * rank
    return ShardedTensor.from_rank_offsets("w", data, (0, index, 3), (1, rank, 2), prepend_axis_num=1)


def test_the_place_in_the_grid() -> None:
    shard = layer(2, 1)
    assert shard.global_shape == (3, 4, 4) and shard.global_offset == (2, 2, 0)
    assert shard.has_regular_grid() and shard.local_chunk_offset_in_global() == (2, 1, 0)
    free = ShardedTensor("w", torch.ones(2), torch.float32, (2,), (5,), (3,), None)
    assert not free.has_regular_grid()
    with pytest.raises(ValueError, match="no part of a regular grid"):
        free.local_chunk_offset_in_global()


@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 2), (0, 0, 1), (1, 1, 2), (1, 0, 2), (2, 3, 1), (2, 0, 4)])
def test_narrow_is_that_of_the_whole(tmp_path: Path, dim: int, start: int, length: int) -> None:
    shards = [layer(index, rank) for index in range(3) for rank in range(2)]
    whole = torch.stack([torch.cat([shards[2 * index + rank].data for rank in range(2)]) for index in range(3)])  # type: ignore[misc]
    pieces = [piece for shard in shards for piece in shard.narrow(dim, start, length)]
    dist_checkpointing.save({str(number): piece for number, piece in enumerate(pieces)}, tmp_path)
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"], whole.narrow(dim, start, length))
    assert all(shard.data is not None and shard.data.shape == (2, 4) for shard in shards), "the shards themselves stay"


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (2, 3), (3, -1)])
def test_a_stretch_outside_of_the_axis(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="is not within axis 1"):
        layer(0, 0).narrow(1, start, length)


def test_flattened_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="flattened_range"):
        ShardedTensor.from_rank_offsets("w", torch.ones(4), flattened_range=slice(0, 2))  # type: ignore[arg-type]


def test_objects_by_their_names() -> None:
    item = ShardedObject("a/b", 1, (2, 3), (1, 2))
    assert item.unique_key == "a/b/shard_1.2_2.3"
    found = ShardedObject.empty_from_unique_key(item.unique_key, replica_id=4)
    assert found == ShardedObject("a/b", None, (2, 3), (1, 2), 4)
    with pytest.raises(ValueError, match="is no object's name"):
        ShardedObject.empty_from_unique_key("a/b")
    with pytest.raises(ValueError, match=r"the grid of \(2,\) objects has none at \(2,\)"):
        ShardedObject("a", 1, (2,), (2,))


def test_factories_without_data() -> None:
    factory = ShardedTensorFactory("w", torch.ones(2), lambda *_: {}, lambda parts: parts)
    factory.validate_metadata_integrity()
    assert factory.without_data().data is None and factory.data is not None


def test_what_a_checkpoint_holds_without_data(tmp_path: Path) -> None:
    objects = {str(place): ShardedObject("o", place, (2,), (place,)) for place in range(2)}
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3, 2).bfloat16()), "o": objects, "step": 3}
    dist_checkpointing.save(state, tmp_path, content_metadata={"kind": "plain"})
    found = dist_checkpointing.load_sharded_metadata(tmp_path)
    assert found.keys() == {"w", "o/shard_0_2", "o/shard_1_2"}
    weight, second = found["w"], found["o/shard_1_2"]
    assert isinstance(weight, ShardedTensor) and (weight.global_shape, weight.dtype, weight.data) == ((3, 2), torch.bfloat16, None)
    assert isinstance(second, ShardedObject) and (second.key, second.global_offset, second.data) == ("o", (1,), None)
    assert dist_checkpointing.load_content_metadata(tmp_path) == {"kind": "plain"}


def test_saving_beside_training_is_another_function(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="begin_save"):
        dist_checkpointing.save({}, tmp_path, async_sharded_save=True)
