"""Context parallelism through the whole trainer: the run of one process, evaluation and checkpoints too, and batches without squares."""

import resource
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.training.arguments import gpt_dataset_config_from_args, parse_args, validate_args
from tests.distributed import run_on_ranks
from tests.functional.forked import on_ranks
from tests.functional.runner import argv, on, train
from tests.functional.test_tensor_parallel import assert_same_training

CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
RESET = "--reset-attention-mask --reset-position-ids"
ROPE = "--position-embedding-type rope --swiglu --group-query-attention --num-query-groups 2"
UNEVEN = "--eod-mask-loss"  # ranks have other numbers of tokens that count
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PER_TOKEN = "--calculate-per-token-loss"

LAYOUTS = [
    (2, CP2, UNEVEN),
    pytest.param(2, f"{CP2} --cp-comm-type p2p a2a", f"{UNEVEN} {PER_TOKEN} {RESET} {ROPE}", marks=pytest.mark.slow),
    pytest.param(2, f"{CP2} --cp-comm-type all_gather {SHARDED}", f"{UNEVEN} {PER_TOKEN}", marks=pytest.mark.slow),
    pytest.param(2, f"{CP2} --cp-comm-type a2a", f"{UNEVEN} --window-size (9,0) --window-attn-skip-freq 2 {ROPE}", marks=pytest.mark.slow),
    pytest.param(4, f"{CP4} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", f"{RESET} {ROPE}", marks=pytest.mark.slow),
    pytest.param(4, f"{CP4} {SHARDED}", f"{UNEVEN} --window-size 9,0 --recompute-activations", marks=pytest.mark.slow),
    pytest.param(4, f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel", f"{UNEVEN} {ROPE}", marks=pytest.mark.slow),
    pytest.param(4, f"{CP2} --pipeline-model-parallel-size 2", f"{UNEVEN} {PER_TOKEN} {ROPE}", marks=pytest.mark.slow),
    pytest.param(4, f"{CP2} --use-tp-pp-dp-mapping {SHARDED}", f"{UNEVEN} {PER_TOKEN} {RESET}", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("processes", "layout", "flags"), LAYOUTS)
def test_a_run_equals_that_of_one_process(corpus: Path, processes: int, layout: str, flags: str) -> None:
    """A loss or gradient that scales with the number of ranks, or that averages ranks with other numbers of tokens, was reported."""
    more = "--eval-iters 1 --lr 1e-3 --min-lr 1e-4"  # at 1e-2 Adam makes differences of 1e-7 in a first gradient 2e-5 after four steps
    alone = train(*on(corpus, flags, more))
    result = on_ranks(processes, *on(corpus, flags, more, layout))
    assert_same_training(result, alone)
    assert len(alone.evaluations) == 2
    for row, expected in zip(result.evaluations, alone.evaluations, strict=True):
        assert row["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-6)


@pytest.mark.slow
def test_checkpoints_go_on_in_another_context_parallel_size(corpus: Path, tmp_path: Path) -> None:
    """Optimizer state lies over data- and context-parallel ranks; one process reads it and is read."""
    flags = f"{UNEVEN} --train-iters 6 --lr 1e-3 --min-lr 1e-4"
    straight = train(*on(corpus, flags))
    folder = f"--save {tmp_path} --load {tmp_path}"
    first = on_ranks(2, *on(corpus, flags, folder, f"{CP2} {SHARDED}"), "--exit-interval 2")
    second = train(*on(corpus, flags, folder), "--exit-interval 4")
    third = on_ranks(2, *on(corpus, flags, folder, f"{CP2} {SHARDED}"))
    for result, after in ((first, 0), (second, 2), (third, 4)):
        assert_same_training(result, straight, after)


class NullIds:
    vocab_size, eod, pad, unique_identifiers = 101, 100, 0, {"class": "NullIds"}


def fetch_long_batch(seq: int) -> tuple[int, int, int]:
    """One batch of `seq` tokens on a rank of two, in no more memory than 4 GiB: (its bytes, first and last token's positions)."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    line = argv(f"--mock-data --hidden-size 32 --num-layers 1 --seq-length {seq} --max-position-embeddings {seq} {CP2}")
    args = validate_args(parse_args(argv=line), {})
    config = gpt_dataset_config_from_args(args, NullIds())
    limit = 4 << 30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train_set, _, _ = BlendedMegatronDatasetBuilder(MockGPTDataset, [4, 0, 0], lambda: True, config).build()
    sample = torch.utils.data.default_collate([train_set[0]])
    tokens, labels, loss_mask, attention_mask, positions, _ = pretrain_gpt.get_batch(iter([sample]))
    assert attention_mask is None
    held = sum(tensor.numel() * tensor.element_size() for tensor in (tokens, labels, loss_mask, positions))
    return held, int(positions[0, 0]), int(positions[0, -1])


def test_a_long_sequence_makes_no_square_mask() -> None:
    """At 131072 tokens a mask [s, s] has 17 GB: runs died when they fetched a batch."""
    seq = 131072
    found = run_on_ranks(2, fetch_long_batch, seq)
    chunk = seq // 4
    assert found == [(28 * seq // 2, 0, seq - 1), (28 * seq // 2, chunk, 3 * chunk - 1)]
