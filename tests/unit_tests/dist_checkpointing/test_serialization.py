"""Sharded state dicts on disk: any layout reads any other, nothing is lost in silence, nothing that a checkpoint names is run."""

import argparse
import io
import json
import os
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import CheckpointError, LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.safe_pickle import StandIn, load_pickle, load_torch
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping, replace_prefix_for_sharding
from tests.distributed import run_on_ranks


def rows(key, whole, index, count, **kwargs):
    """Block `index` of `count` along dim 0."""
    return ShardedTensor.from_rank_offsets(key, whole.chunk(count)[index].clone(), (0, index, count), **kwargs)


@settings(max_examples=15, deadline=None)
@given(
    written=st.sampled_from([1, 2, 3, 4, 6, 12]),
    read=st.sampled_from([1, 2, 3, 4, 6, 12]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_split_reads_any_other(tmp_path_factory, written, read, dtype):
    folder = tmp_path_factory.mktemp("checkpoint")
    whole = torch.randn(12, 5).to(dtype)
    dist_checkpointing.save({str(i): rows("w", whole, i, written) for i in range(written)}, folder)
    wanted = {str(i): rows("w", torch.zeros(12, 5, dtype=dtype), i, read) for i in range(read)}
    loaded = dist_checkpointing.load(wanted, folder)
    assert torch.equal(torch.cat([loaded[str(i)] for i in range(read)]), whole)


def test_stacked_layers_objects_and_the_common_state(tmp_path):
    layers = {
        f"layer{i}": ShardedTensor.from_rank_offsets("w", torch.full((2, 3), float(i)), (0, i, 4), prepend_axis_num=1) for i in range(4)
    }
    local = LocalNonpersistentObject("stays")
    state = {"model": layers, "rng": ShardedObject("rng_state", [1, 2], (1, 1), (0, 0)), "iteration": 7, "local": local}
    dist_checkpointing.save({**state, "args": argparse.Namespace(num_layers=4), "empty": {}, "list": [1, {"a": 2}]}, tmp_path)
    assert json.loads((tmp_path / "metadata.json").read_text()) == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    whole = dist_checkpointing.load_plain_tensors(tmp_path)
    assert whole["w"].shape == (4, 2, 3) and torch.equal(whole["w"][3], torch.full((2, 3), 3.0))
    common = dist_checkpointing.load_common_state_dict(tmp_path)
    assert common == {"iteration": 7, "args": argparse.Namespace(num_layers=4), "empty": {}, "list": [1, {"a": 2}]}
    loaded = dist_checkpointing.load({"rng": ShardedObject("rng_state", None, (1, 1), (0, 0)), "local": local}, tmp_path)
    assert loaded["rng"] == [1, 2] and loaded["local"] == "stays" and loaded["iteration"] == 7


def test_factories_store_pieces_and_merge_them(tmp_path):
    def build(key, tensor, replica_id, flattened_range):
        gate, up = tensor.chunk(2)
        return [ShardedTensor.from_rank_offsets(key, gate, (0, 0, 2)), ShardedTensor.from_rank_offsets(key, up, (0, 1, 2))]

    weight = torch.randn(6, 2)
    dist_checkpointing.save({"fc1": ShardedTensorFactory("fc1", weight, build, torch.cat)}, tmp_path)
    loaded = dist_checkpointing.load({"fc1": ShardedTensorFactory("fc1", torch.zeros(6, 2), build, torch.cat)}, tmp_path)
    assert torch.equal(loaded["fc1"], weight)


def test_all_that_is_missing_is_listed(tmp_path):
    dist_checkpointing.save({"a": rows("a", torch.ones(4), 0, 1)}, tmp_path)
    wanted = {name: rows(name, torch.zeros(4), 0, 1) for name in ("a", "b", "c")}
    with pytest.raises(CheckpointError, match="lacks") as caught:
        dist_checkpointing.load(wanted, tmp_path)
    assert "b" in str(caught.value).split() and "c" in str(caught.value).split()
    loaded = dist_checkpointing.load(wanted, tmp_path, strict="log_unexpected")
    assert torch.equal(loaded["a"], torch.ones(4)) and torch.equal(loaded["b"], torch.zeros(4))


def test_another_shape_is_refused_with_both(tmp_path):
    dist_checkpointing.save({"a": rows("a", torch.ones(4, 2), 0, 1)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"a is \(4, 2\) there and \(4, 3\) in this model"):
        dist_checkpointing.load({"a": rows("a", torch.ones(4, 3), 0, 1)}, tmp_path)


@pytest.mark.parametrize("size", [3, 6])
def test_a_padded_vocabulary_of_another_size(tmp_path, size):
    whole = torch.randn(4, 2)
    dist_checkpointing.save({"a": rows("a", whole, 0, 1)}, tmp_path)
    loaded = dist_checkpointing.load({"a": rows("a", torch.zeros(size, 2), 0, 1, allow_shape_mismatch=True)}, tmp_path)["a"]
    assert torch.equal(loaded[:4], whole[:size]) and not loaded[4:].any()


def test_shards_with_a_gap_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"do not make up whole tensors:\n  w: 1 shards hold 2 of 4 elements"):
        dist_checkpointing.save({"w": rows("w", torch.ones(4), 0, 2)}, tmp_path)
    assert not (tmp_path / "metadata.json").exists()


@pytest.mark.parametrize("broken", ["no folder", "empty", "cut off", "other backend"])
def test_what_is_no_checkpoint_is_named(tmp_path, broken):
    folder = tmp_path / "iter_0000001"
    if broken != "no folder":
        folder.mkdir()
    if broken == "cut off":
        (folder / "metadata.json").write_text('{"sharded_ba')
    if broken == "other backend":
        (folder / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(CheckpointError, match="iter_0000001"):
        dist_checkpointing.load_plain_tensors(folder)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("bomb-went-off",)


def test_reading_runs_nothing_that_the_file_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save([Bomb(), {"w": torch.ones(2)}], buffer)
    inert, tensors = load_torch(buffer.getvalue())
    assert isinstance(inert, StandIn) and torch.equal(tensors["w"], torch.ones(2))
    assert isinstance(load_pickle(io.BytesIO(pickle.dumps(Bomb()))), StandIn)
    assert not (tmp_path / "bomb-went-off").exists()


def test_stored_checkpoint_of_megatron_lm(golden, tmp_path):
    import tarfile

    with tarfile.open(golden / "checkpoints" / "gpt_fp32.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "gpt_fp32" / "iter_0000010"
    tensors = dist_checkpointing.load_tensors_metadata(folder)
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].global_shape == (4, 192, 64)
    common = dist_checkpointing.load_common_state_dict(folder)
    assert common["iteration"] == 10 and common["args"].num_layers == 4 and common["optimizer"]["param_groups"][0]["step"] == 10


def save_half(folder):
    rank = torch.distributed.get_rank()
    state = {"w": rows("w", torch.arange(8.0), rank, 2), "copy": rows("copy", torch.ones(3), 0, 1, replica_id=rank), "iteration": 3}
    dist_checkpointing.save(state, folder)
    return dist_checkpointing.load({"w": rows("w", torch.zeros(8), 1 - rank, 2)}, folder)["w"]


def test_two_ranks_write_one_checkpoint(tmp_path):
    swapped = run_on_ranks(2, save_half, str(tmp_path))
    assert torch.equal(swapped[1], torch.arange(4.0)) and torch.equal(swapped[0], torch.arange(4.0, 8.0))
    assert torch.equal(dist_checkpointing.load_plain_tensors(tmp_path)["w"], torch.arange(8.0))


def test_prefixes():
    state = {"a": rows("model.a", torch.ones(1), 0, 1), "o": ShardedObject("model.o", 1, (1,), (0,))}
    replace_prefix_for_sharding(state, "model.", "new.")
    assert state["a"].key == "new.a" and state["o"].key == "new.o"
    with pytest.raises(ValueError, match=r"new\.a does not start with model\."):
        replace_prefix_for_sharding(state, "model.", "x.")
    apply_prefix_mapping(state, {"new.": "n.", "new.a": "special"})
    assert state["a"].key == "special" and state["o"].key == "n.o"


@pytest.mark.parametrize("offsets", [((0, 2, 2),), ((0, -1, 2),)])
def test_a_block_outside_of_its_grid(offsets):
    with pytest.raises(ValueError, match="does not exist"):
        ShardedTensor.from_rank_offsets("w", torch.ones(2), *offsets)
