"""Where another layout's ranks hold each parameter, and filling tensors from such parts."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.parts import load_from_parts
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, local_part
from megatron.training.checkpoint_names import LegacyFile, legacy_files, legacy_problem, rank_folder
from megatron.training.legacy_checkpoints import _is_copy, chained, joined_groups
from megatron.training.optimizer_buckets import registration_rank
from megatron.training.source_layout import KnownModel, KnownParam, Place, SourceLayout, blocks_of, place_of

FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def known(*keys: str, layers: int = 10) -> KnownModel:
    param = KnownParam(ParamSharding((4,)), True)
    return KnownModel(dict.fromkeys(keys, param), set(), dict.fromkeys(range(layers), FUSED))


@pytest.mark.parametrize(
    ("saved", "rank", "name", "place"),
    [
        ({}, (0, 0, 0), "decoder.layers.3.mlp.linear_fc2.weight", ("decoder.layers.mlp.linear_fc2.weight", 3, None)),
        ({}, (0, 0, 0), "decoder.layers.0.input_layernorm.bias", ("decoder.layers.self_attention.linear_qkv.layer_norm_bias", 0, None)),
        ({"pipeline_model_parallel_size": 2}, (1, 0, 0), "decoder.layers.1.mlp.linear_fc2.weight", ("", 5, None)),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            (1, 1, 0),
            "decoder.layers.1.mlp.linear_fc2.weight",
            ("", 7, None),
        ),
        (
            {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 3},
            (1, 0, 0),
            "decoder.layers.0.mlp.linear_fc2.weight",
            ("", 3, None),
        ),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2},
            (0, 0, 1),
            "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight",
            ("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, 3),
        ),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2},
            (0, 0, 1),
            "decoder.layers.2.mlp.experts.linear_fc1.weight0",
            ("decoder.layers.mlp.experts.experts.linear_fc1.weight", 2, 2),
        ),
        (
            {"num_experts": 4, "expert_model_parallel_size": 2},
            (0, 0, 1),
            "mtp.layers.1.transformer_layer.mlp.experts.linear_fc1.weight1",
            ("mtp.layers.1.transformer_layer.mlp.experts.experts.linear_fc1.weight", None, 3),
        ),
        (
            {},
            (0, 0, 0),
            "mtp.layers.0.mtp_model_layer.input_layernorm.bias",
            ("mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_bias", None, None),
        ),
        ({}, (0, 0, 0), "mtp.layers.0.eh_proj.weight", ("mtp.layers.0.eh_proj.weight", None, None)),
        ({}, (0, 0, 0), "output_layer.weight", ("embedding.word_embeddings.weight", None, None)),
        ({}, (0, 0, 0), "decoder.final_layernorm.weight", ("decoder.final_layernorm.weight", None, None)),
    ],
)
def test_a_ranks_name_has_one_place(saved: dict[str, Any], rank: tuple[int, int, int], name: str, place: tuple) -> None:
    keys = [
        "decoder.layers.mlp.linear_fc2.weight",
        "decoder.layers.self_attention.linear_qkv.layer_norm_bias",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
    ]
    layout = SourceLayout.of({"num_layers": 8, **saved})
    found = place_of(name, layout, *rank, known(*keys))
    assert (found.key, found.layer, found.expert) == (place[0] or keys[0], *place[1:])


def test_layers_that_a_stage_cannot_have_are_an_error() -> None:
    layout = SourceLayout.of({"num_layers": 4, "pipeline_model_parallel_size": 2})
    with pytest.raises(CheckpointError, match="holds 2 layers"):
        place_of("decoder.layers.2.mlp.linear_fc2.weight", layout, 1, 0, 0, known())
    with pytest.raises(CheckpointError, match="num_layers"):
        SourceLayout.of({})


@pytest.mark.parametrize(
    ("rank", "stages", "experts", "name"),
    [
        ((0, 0, 0), 1, 1, "mp_rank_00"),
        ((1, 2, 0), 4, 1, "mp_rank_01_002"),
        ((1, 0, 3), 1, 4, "mp_rank_01_003"),
        ((10, 2, 3), 4, 4, "mp_rank_10_002_003"),
    ],
)
def test_folders_are_megatron_lms(rank: tuple[int, int, int], stages: int, experts: int, name: str) -> None:
    assert rank_folder(rank, stages, experts) == name


@given(*(st.sampled_from([1, 2, 3, 4, 8]) for _ in range(4)))
def test_files_hold_every_part_once_or_are_refused(tensor: int, stages: int, expert: int, expert_tensor: int) -> None:
    """Each name stands once; a stage's dense parts and its parts of experts are all there; and every rank of a larger run has its file."""
    if legacy_problem(tensor, expert, expert_tensor):
        writers = [(rank % tensor, rank // expert_tensor % expert) for rank in range(expert_tensor * expert)]
        ranks = {(rank % tensor, rank // expert_tensor % expert) for rank in range(tensor * expert_tensor * expert)}
        assert len(set(writers)) < len(writers) or ranks != set(writers), "refused without need"
        with pytest.raises(ValueError, match="ranks"):
            legacy_files(tensor, stages, expert, expert_tensor)
        return
    found = legacy_files(tensor, stages, expert, expert_tensor)
    assert len({file.name for file in found}) == len(found)
    dense = [(file.stage, file.tensor) for file in found if file.first_of_dense]
    assert sorted(dense) == [(stage, part) for stage in range(stages) for part in range(tensor)]
    experts = sorted((file.stage, file.expert, file.expert_tensor) for file in found)
    assert experts == [(stage, one, part) for stage in range(stages) for one in range(expert) for part in range(expert_tensor)]
    if expert_tensor == tensor:
        assert {(file.tensor, file.expert_tensor) for file in found} == {(part, part) for part in range(tensor)}


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0, 1]),
    st.lists(st.integers(1, 2), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 2]),
)
def test_parts_of_any_layout_make_the_whole(layers: int, other: int, dim: int, segments: list[int], size: int, experts: int | None) -> None:
    runs = tuple(Segment(str(number), 4 * rows, "tp") for number, rows in enumerate(segments))
    shape = [other, other]
    shape[dim] = sum(run.size for run in runs)
    sharding = ParamSharding(tuple(shape), dim, runs)
    stacked = (layers, *((experts,) if experts else ()), *shape)
    whole = torch.arange(torch.Size(stacked).numel(), dtype=torch.float32).reshape(stacked)
    param = KnownParam(
        ParamSharding(tuple(shape), dim, runs, is_expert=bool(experts), experts=Experts(0, experts) if experts else None), True
    )
    parts: list = []
    for layer in range(layers):
        for expert in range(experts or 1):
            for rank in range(size):
                part = local_part(whole[layer, expert] if experts else whole[layer], sharding, rank, size)
                place = Place("key", layer, expert if experts else None)
                parts += [(block, part) for block in blocks_of(place, param, tuple(part.shape), rank, size)]
    wanted = ShardedTensor.from_rank_offsets("key", torch.zeros(stacked))
    assert torch.equal(load_from_parts({"a": wanted}, {"key": parts}, "here")["a"], whole)
    with pytest.raises(CheckpointError, match="here lacks what this run needs"):
        load_from_parts({"a": ShardedTensor.from_rank_offsets("key", torch.zeros(stacked))}, {"key": parts[1:]}, "here")


def test_a_part_of_another_model_is_an_error() -> None:
    param = KnownParam(ParamSharding((8, 4), 0, (Segment("rows", 8, "tp"),)), False)
    with pytest.raises(CheckpointError, match=r"\(4, 3\) in the checkpoint's files and would be \(4, 4\)"):
        blocks_of(Place("key"), param, (4, 3), 0, 2)


def test_a_layers_parts_are_registered_in_megatron_lms_order() -> None:
    attention = [
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
    ]
    latent = [
        "input_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_q_down_proj.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attention.linear_q_up_proj.weight",
        "self_attention.linear_kv_down_proj.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        "self_attention.linear_kv_up_proj.weight",
    ]
    dense = ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.bias", "mlp.linear_fc2.weight"]
    experts = ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1.weight"]
    for order in (attention + dense, latent + experts):
        assert all(registration_rank(one, True) < registration_rank(next_one, True) for one, next_one in pairwise(order))
    alone = [attention[2], attention[3], attention[0], attention[1], *attention[4:], *dense]
    assert all(registration_rank(one, False) < registration_rank(next_one, False) for one, next_one in pairwise(alone))
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        registration_rank("mixer.in_proj.weight", True)


def test_chained_optimizers_groups_are_joined() -> None:
    dense, experts = {"wd_mult": 1.0}, {"wd_mult": 1.0, "is_expert_parallel": True}
    numbered = {1: {"param_groups": [experts]}, 0: {"optimizer": {"param_groups": [dense]}, "grad_scaler": "kept"}}
    for optimizer in (numbered, [numbered[0], numbered[1]]):
        assert joined_groups(chained(optimizer)) == {"param_groups": [dense, experts], "grad_scaler": "kept"}
    assert joined_groups(chained(numbered[1])) == {"param_groups": [experts]}


def test_a_later_stages_embedding_is_a_copy() -> None:
    """That of a tied head, and that with which multi-token prediction embeds tokens in the last stage."""
    split, key = ParamSharding((8, 4), 0, (Segment("vocabulary", 8, "tp"),)), "embedding.word_embeddings.weight"
    second, later = LegacyFile(1, 0, 0, 1, True, "mp_rank_01_000"), LegacyFile(0, 1, 0, 0, True, "mp_rank_00_001")
    assert not _is_copy(second, split, key, key)
    assert _is_copy(later, split, key, key)
    assert _is_copy(later, split, "output_layer.weight", key)
    assert not _is_copy(later, split, "output_layer.weight", "output_layer.weight")
