"""What --check-config says of memory: each axis divides what it divides."""

import argparse

import pytest

from megatron.training.memory_estimate import activation_bytes, state_bytes
from megatron.training.model_size import embedding_parameters, layer_parameters
from tests.unit_tests.training.lines import TINY, checked

LAYERS = 8


@pytest.fixture
def estimate(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def of(flags: str, world: int = 1) -> argparse.Namespace:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        line = f"--num-layers {LAYERS} --padded-vocab-size 256 --global-batch-size 16 --bf16 --attention-dropout 0 {flags}"
        return checked([*TINY, *line.split()])

    return of


def test_tensor_parallelism_divides_heads_and_with_sequence_parallelism_all(estimate) -> None:  # type: ignore[no-untyped-def]
    lines = ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel")
    whole, split, tokens_split = (activation_bytes(estimate(line, 2)) for line in lines)
    assert whole / 2 == tokens_split < split < whole


def test_context_parallelism_divides_tokens(estimate) -> None:  # type: ignore[no-untyped-def]
    assert activation_bytes(estimate("--context-parallel-size 2", 2)) == activation_bytes(estimate("")) / 2


@pytest.mark.parametrize(
    ("flags", "world", "share"),  # of the optimizer's 12 bytes a parameter, the part that a rank holds
    [
        ("", 1, 1),
        ("", 4, 1),
        ("--use-distributed-optimizer", 4, 1 / 4),
        ("--use-distributed-optimizer --context-parallel-size 2", 4, 1 / 4),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", 4, 1 / 2),
    ],
)
def test_the_distributed_optimizer_divides_its_state(estimate, flags: str, world: int, share: float) -> None:  # type: ignore[no-untyped-def]
    args = estimate(flags, world)
    parameters = LAYERS * layer_parameters(args) + (embedding_parameters(args) or 0)
    assert state_bytes(args) == pytest.approx(parameters * (2 + 4 + 12 * share), rel=1e-6)


def test_a_pipeline_divides_layers_and_ends_hold_one_of_two_tables(estimate) -> None:  # type: ignore[no-untyped-def]
    untied = "--untie-embeddings-and-output-weights --position-embedding-type none"
    args = estimate(f"{untied} --pipeline-model-parallel-size 4", 4)
    parameters = LAYERS // 4 * layer_parameters(args) + (embedding_parameters(args) or 0) // 2
    assert state_bytes(args) == parameters * (2 + 4 + 12)


def test_experts_are_divided_by_their_own_ranks(estimate) -> None:  # type: ignore[no-untyped-def]
    experts = "--num-experts 4 --use-distributed-optimizer"
    alone, two = state_bytes(estimate(experts, 2)), state_bytes(estimate(f"{experts} --expert-model-parallel-size 2", 2))
    dense = state_bytes(estimate("--use-distributed-optimizer", 2))
    assert dense < two < alone


def test_fp8_keeps_weights_both_ways(estimate) -> None:  # type: ignore[no-untyped-def]
    args = estimate("--fp8-format hybrid")
    assert state_bytes(args) - state_bytes(estimate("")) == 2 * LAYERS * layer_parameters(args)


def test_recomputed_layers_keep_their_inputs(estimate) -> None:  # type: ignore[no-untyped-def]
    full = "--recompute-granularity full --recompute-num-layers"
    none, uniform, block = (
        activation_bytes(estimate(flags)) for flags in ("", f"{full} 2 --recompute-method uniform", f"{full} 2 --recompute-method block")
    )
    args = estimate("")
    one_input = 2 * args.micro_batch_size * args.seq_length * args.hidden_size
    layer = (none - activation_bytes(estimate(f"{full} {LAYERS} --recompute-method block")) + LAYERS * one_input) / (LAYERS - 1)
    assert none - uniform == (LAYERS - 2) * layer - LAYERS // 2 * one_input
    assert none - block == layer - 2 * one_input
