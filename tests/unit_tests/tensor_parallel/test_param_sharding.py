"""The sharding record: completeness, keys, parts, initial values."""

import math
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.init import init_method_normal
from megatron.core.tensor_parallel.param_sharding import (
    Experts,
    ParamSharding,
    Segment,
    build_param_table,
    count_parameters,
    declare,
    initialize_parameters,
    local_part,
    local_pieces,
    local_shape,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def model(tied=True, **extra):
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **extra)
    return GPTModel(config, get_gpt_layer_local_spec(), 64, 16, share_embeddings_and_output_weights=tied)


def test_parts_of_gate_and_up():
    sharding = ParamSharding((8, 2), 0, (Segment("gate", 4, "tp"), Segment("up", 4, "tp")))
    full = torch.arange(16).view(8, 2)
    assert local_shape(sharding, 2) == (4, 2) and sharding.is_split
    assert local_pieces(sharding, 1, 2) == [(2, 0, 2), (6, 2, 2)]
    assert local_part(full, sharding, 1, 2)[:, 0].tolist() == [4, 6, 12, 14]


def test_a_replicated_segment_beside_a_split_one():
    sharding = ParamSharding((6,), 0, (Segment("split", 4, "tp"), Segment("whole", 2, None)))
    assert local_part(torch.arange(6), sharding, 1, 2).tolist() == [2, 3, 4, 5]


def test_a_parameter_without_record_is_named():
    chunk = model()
    chunk.decoder.layers[1].extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"decoder\.layers\.1\.extra\.weight, decoder\.layers\.1\.extra\.bias"):
        build_param_table(chunk)


def test_names_and_keys():
    table = build_param_table(model(tied=False))
    assert list(table)[:2] == ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
    keys = {name.removeprefix("decoder.layers.1."): record.key for name, record in table.items() if record.layer == 1}
    assert keys == {
        "input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.bias": "decoder.layers.self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_proj.weight": "decoder.layers.self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias": "decoder.layers.self_attention.linear_proj.bias",
        "self_attention.linear_qkv.weight": "decoder.layers.self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias": "decoder.layers.self_attention.linear_qkv.bias",
        "pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "pre_mlp_layernorm.bias": "decoder.layers.mlp.linear_fc1.layer_norm_bias",
        "mlp.linear_fc1.weight": "decoder.layers.mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias": "decoder.layers.mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight": "decoder.layers.mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias": "decoder.layers.mlp.linear_fc2.bias",
    }
    assert table["output_layer.weight"].key == "output_layer.weight" and table["output_layer.weight"].layer is None
    assert all(record.stacked == (record.layer is not None) for record in table.values())
    assert "output_layer.weight" not in build_param_table(model())


def test_public_attributes_derive_from_the_record():
    params: dict[str, Any] = dict(model().named_parameters())
    fc1, fc2 = params["decoder.layers.0.mlp.linear_fc1.weight"], params["decoder.layers.0.mlp.linear_fc2.weight"]
    norm = params["decoder.final_layernorm.weight"]
    assert (fc1.tensor_model_parallel, fc1.partition_dim) == (True, 0) and (fc2.tensor_model_parallel, fc2.partition_dim) == (True, 1)
    assert (norm.tensor_model_parallel, norm.partition_dim, norm.sequence_parallel, norm.allreduce) == (False, -1, False, True)


def test_initial_values():
    """normal(0.02), output layers by sqrt(2 L), norms 1, biases 0; the same for the same seed and for another dtype."""
    table = build_param_table(model(init_method_std=0.02))
    std = {name: record.param.std().item() for name, record in table.items()}
    assert std["embedding.word_embeddings.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["decoder.layers.0.mlp.linear_fc1.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["decoder.layers.0.mlp.linear_fc2.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert std["decoder.layers.0.self_attention.linear_proj.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.1)
    assert (table["decoder.layers.0.input_layernorm.weight"].param == 1).all() and std["decoder.layers.0.mlp.linear_fc1.bias"] == 0
    layers = [table[f"decoder.layers.{index}.mlp.linear_fc1.weight"].param for index in range(2)]
    assert not torch.equal(*layers)
    again, half = build_param_table(model()), build_param_table(model(params_dtype=torch.bfloat16))
    for name, record in table.items():
        assert torch.equal(record.param, again[name].param), name
        assert torch.equal(record.param.bfloat16(), half[name].param), name


def test_seed_and_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    chunk = model()
    assert torch.equal(torch.rand(3), expected), "building a model must not move the default random state"
    before = chunk.embedding.word_embeddings.weight.clone()
    initialize_parameters(chunk, 4321)
    assert not torch.equal(chunk.embedding.word_embeddings.weight, before)


def test_padding_rows_are_zero_and_do_not_move_the_others():
    plain, padded = (
        model(),
        GPTModel(
            TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, logical_vocab_size=64),
            get_gpt_layer_local_spec(),
            80,
            16,
        ),
    )
    weight = padded.embedding.word_embeddings.weight
    assert torch.equal(weight[:64], plain.embedding.word_embeddings.weight) and (weight[64:] == 0).all()
    assert count_parameters(padded) == count_parameters(model(tied=False))
    assert count_parameters(plain) == sum(param.numel() for param in plain.parameters())


def expert_part(first, count, tp_rank=0, tp_size=1):
    """A layer's weight of experts [first, first + count), or of one (count None): two rows of a split gate and two of up each."""
    sharding = ParamSharding(
        (4, 3), 0, (Segment("gate", 2, "tp"), Segment("up", 2, "tp")), is_expert=True, experts=Experts(first, 4, count)
    )
    part = torch.nn.Module()
    part.mlp = torch.nn.Module()
    part.mlp.experts = holder = torch.nn.Module()
    if count is None:
        holder.local_experts = torch.nn.ModuleList([torch.nn.Module()])
        holder = holder.local_experts[0]
    holder.linear_fc1 = torch.nn.Module()
    weight = torch.nn.Parameter(torch.empty(local_shape(sharding, tp_size)))
    holder.linear_fc1.weight = weight
    declare(weight, sharding, init_method_normal(1.0), tp_rank=tp_rank, tp_size=tp_size)
    return part, weight


def test_experts_start_equal_wherever_they_are():
    """One by one or several in a parameter, all on one rank or spread, whole or split over the experts' tensor axis."""
    whole, all_weights = expert_part(0, 4)
    initialize_parameters(whole, 3)
    assert len({tuple(expert.flatten().tolist()) for expert in all_weights}) == 4
    for first, count, tp_rank, tp_size in ((2, 2, 0, 1), (3, None, 0, 1), (0, None, 1, 2), (1, 3, 1, 2), (0, 4, 0, 2)):
        part, weight = expert_part(first, count, tp_rank, tp_size)
        initialize_parameters(part, 3)
        assert torch.equal(weight, local_part(all_weights.detach(), weight.sharding, tp_rank, tp_size)), (first, count, tp_rank)
    assert local_shape(expert_part(1, 3)[1].sharding, 2) == (3, 2, 3) and local_shape(expert_part(3, None)[1].sharding, 1) == (4, 3)


def test_experts_made_outside_of_a_model_differ_by_their_index():
    parts = []
    for first in (0, 2):
        torch.manual_seed(5)
        parts.append(expert_part(first, 2)[1])
        after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.cat(parts), expert_part(0, 4)[1]) and torch.equal(after, torch.rand(1)), "ranks stay in step"


def test_experts_have_one_key_and_count_once():
    for count in (None, 2):
        part, weight = expert_part(2, count)
        (record,) = build_param_table(part).values()
        assert record.key == "mlp.experts.experts.linear_fc1.weight"
        assert (record.whole_shape, record.place, record.prepended) == ((4, 4, 3), (2,), int(count is None))
        assert count_parameters(part) == 4 * 12 and not weight.allreduce and not weight.sequence_parallel
    shared: Any = torch.nn.Module()
    shared.shared_experts = torch.nn.Linear(2, 2, bias=False)
    declare(shared.shared_experts.weight, ParamSharding((2, 2)), init_method_normal(1.0))
    (record,) = build_param_table(shared).values()
    assert record.key == "shared_experts.weight" and shared.shared_experts.weight.allreduce
