"""Pipeline layouts as text: what they mean, what is refused, and a model that is split by one."""

from typing import Any

import pytest

from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
    layout_problems,
    parse_pipeline_layout,
    pipeline_layout,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import layers_of_stage


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Et|tt|tL", ["Et", "tt", "tL"]),
        ("Et*3|(tt|)*4L", ["Ettt", "tt", "tt", "tt", "tt", "L"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("E|(t|tt|)*2L", ["E", "t", "tt", "t", "tt", "L"]),
        ("E, ((t*2|)*2 t|)*2 L", ["Ett", "tt", "t", "tt", "tt", "t", "L"]),
        ("E(t)*10L", ["E" + "t" * 10 + "L"]),
    ],
)
def test_parsing(text, stages):
    assert parse_pipeline_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|xL", "at character 4 'x' means nothing; letters are E, t"),
        ("E(t|L", "at character 2 a parenthesis is not closed"),
        ("Et)L", "at character 3 a parenthesis was not opened"),
        ("*3tL", r"at character 1 \* stands between what is repeated and a number"),
        ("Et*L", r"at character 3 \* stands between"),
        ("Et*0L", r"at character 3 \* stands between"),
        ("Et*2*2L", r"at character 5 \* stands between"),
    ],
)
def test_what_cannot_be_read_is_shown(text, message):
    with pytest.raises(ValueError, match=message):
        parse_pipeline_layout(text)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("Ett|m|L", 3, "m, multi-token prediction, must stand in the last stage"),
        ("Ett|mtL", 2, "m, multi-token prediction, must stand in the last stage, before L"),
        ("Et||tL", 3, "stage 1 of 0 .. 2 is empty"),
        ("Et|tL|", 3, "stage 2 of 0 .. 2 is empty"),
        ("Et|t|tL", 2, "has 3 stages: it must be a multiple of the 2 pipeline ranks, 2 for example"),
        ("tt|tL", 2, "the embedding, E, must stand once, in the first stage"),
        ("Et|EtL", 2, "the embedding, E, must stand once"),
        ("tt|EtL", 2, "the embedding, E, must stand once, in the first stage"),
        ("Et|tt", 2, "the loss, L, must stand once, in the last stage"),
        ("tE|tL", 2, "E must come before and L after every layer"),
        ("Et|Lt", 2, "E must come before and L after every layer"),
        ([["embedding", "head"]], 1, "'head' must be one of embedding, decoder, mtp, loss"),
    ],
)
def test_refusals(text, ranks, message):
    with pytest.raises(ValueError, match=message):
        PipelineParallelLayerLayout(text, ranks)


def test_chunks_go_round_the_ranks():
    layout = pipeline_layout("E|t|tt|(t|)*2tL", 3)
    assert layout.virtual_pipeline_model_parallel_size == 2 and layout.num_layers == 6
    assert [[list(layout.layers(rank, chunk)) for chunk in range(2)] for rank in range(3)] == [[[], [3]], [[0], [4]], [[1, 2], [5]]]
    listed = PipelineParallelLayerLayout([["embedding", "decoder"], ["decoder", "loss"]], 2)
    assert listed.text == "Et|tL"


def test_a_layout_must_fit_the_model():
    assert layout_problems("Et|tL", 2, 1, 2) == []
    assert layout_problems("Et|tL", 2, None, 3) == ["pipeline layout 'Et|tL' has 2 decoder layers, t: the model has 3"]
    assert "so 1 chunks on each of 2 pipeline ranks, not 2" in layout_problems("Et|tL", 2, 2, 2)[0]
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "pipeline_model_parallel_size": 2}
    config = TransformerConfig(**shape, pipeline_model_parallel_layout="Ettt|tL")
    assert [len(layers_of_stage(config, rank)) for rank in range(2)] == [3, 1]
    with pytest.raises(ValueError, match="has 3 decoder layers"):
        TransformerConfig(**shape, pipeline_model_parallel_layout="Ett|tL")
    with pytest.raises(ValueError, match="num_layers_in_first_pipeline_stage excludes pipeline_model_parallel_layout"):
        TransformerConfig(**shape, pipeline_model_parallel_layout="Ettt|tL", num_layers_in_first_pipeline_stage=3)
    with pytest.raises(ValueError, match="so 2 chunks on each of 2 pipeline ranks, not 1"):
        TransformerConfig(**shape, pipeline_model_parallel_layout="Et|t|t|tL")
