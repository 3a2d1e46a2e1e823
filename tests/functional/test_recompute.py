"""Whole trainings with and without recompute are one training, dropout included."""

from pathlib import Path

import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import assert_equal_tensors, checkpoint_tensors, on, train

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


LATENT = "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8 --v-head-dim 16"


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        (FULL, ""),
        (FULL.replace("uniform", "block"), ""),
        ("--recompute-activations --recompute-modules mlp layernorm", ""),
        ("--recompute-activations --recompute-modules mla_up_proj layernorm", f"{LATENT} --qk-layernorm"),
    ],
)
def test_the_same_training(corpus: Path, tmp_path: Path, flags: str, model: str) -> None:
    plain = train(*on(corpus, DROPOUT, model), f"--save {tmp_path}/plain")
    recomputed = train(*on(corpus, DROPOUT, model, flags), f"--save {tmp_path}/recomputed")
    assert (plain.code, recomputed.code) == (0, 0), recomputed.err
    assert recomputed.losses() == plain.losses() and recomputed.column("grad_norm") == plain.column("grad_norm")
    assert_equal_tensors(checkpoint_tensors(tmp_path / "recomputed", 4), checkpoint_tensors(tmp_path / "plain", 4))


def test_with_overlapped_reduction(corpus: Path) -> None:
    """Gradients are ready in the backward of the second run."""
    flags = f"{DROPOUT} --overlap-grad-reduce --micro-batch-size 1"
    plain, recomputed = on_ranks(2, *on(corpus, flags)), on_ranks(2, *on(corpus, flags, FULL))
    assert recomputed.code == 0, recomputed.err
    assert recomputed.losses() == plain.losses()
