"""Checkpoint form of a model: keys, global shapes and offsets; pieces of two ranks put together give the whole."""

import torch

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, leaves
from megatron.core.transformer.module import MegatronModule
from tests.distributed import run_on_ranks
from tests.unit_tests.models.test_gpt_model import model


def test_stacked_layers_and_keys():
    chunk = model("gpt", "learned_absolute", tied=True)
    state = chunk.sharded_state_dict()
    assert set(state) == set(dict(chunk.named_parameters()))
    norm = state["decoder.layers.1.input_layernorm.weight"]
    assert norm.key == "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert (norm.global_shape, norm.global_offset, norm.local_shape) == ((2, 32), (1, 0), (32,))
    assert chunk.sharded_state_dict("model.")["model.decoder.final_layernorm.bias"].key == "model.decoder.final_layernorm.bias"


def test_an_override_wins():
    class Custom(MegatronModule):
        def __init__(self, old):
            super().__init__(old.config)
            self.old = old

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            return {f"{prefix}mine": ShardedTensor.from_rank_offsets("mine", torch.zeros(2))}

    chunk = model()
    chunk.decoder.layers[0].mlp = Custom(chunk.decoder.layers[0].mlp)
    state = chunk.sharded_state_dict()
    assert state["decoder.layers.0.mlp.mine"].key == "mine" and not [name for name in state if name.startswith("decoder.layers.0.mlp.old")]
    assert "decoder.layers.1.mlp.linear_fc1.weight" in state


def _pieces(variant):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    state = model(variant, tensor_model_parallel_size=2).sharded_state_dict()
    built = {name: value.build() if isinstance(value, ShardedTensorFactory) else value for name, value in state.items()}
    merged = {
        name: torch.equal(value.merge_fn({key: piece.data for key, piece in built[name].items()}), value.data)
        for name, value in state.items()
        if isinstance(value, ShardedTensorFactory)
    }
    return [(piece.key, piece.global_shape, piece.global_offset, piece.data, piece.replica_id) for piece in leaves(built)], merged


def test_two_ranks_make_the_whole():
    """Gate and up are each split, and stored gate rows first."""
    whole: dict[str, torch.Tensor] = {}
    for piece in model("llama").sharded_state_dict().values():
        stack = whole.setdefault(piece.key, torch.full(piece.global_shape, torch.nan, dtype=torch.float64))
        stack[tuple(slice(at, at + size) for at, size in zip(piece.global_offset, piece.chunk_shape))] = piece.data
    built = {key: torch.full_like(value, torch.nan) for key, value in whole.items()}
    for pieces, merged in run_on_ranks(2, _pieces, "llama"):
        assert merged and all(merged.values())
        for key, shape, offset, data, replica in pieces:
            assert tuple(built[key].shape) == shape
            if any(replica):
                continue
            chunk = data.view((1,) * (len(shape) - data.dim()) + tuple(data.shape))
            region = built[key][tuple(slice(at, at + size) for at, size in zip(offset, chunk.shape))]
            assert region.isnan().all(), f"two ranks write {key} at {offset}"
            region.copy_(chunk)
    for key, value in whole.items():
        assert torch.equal(built[key], value), key
