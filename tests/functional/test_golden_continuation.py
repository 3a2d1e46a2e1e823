"""Megatron-LM's own checkpoints of iteration 10, trained on to iteration 20: its losses, norms and rates."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.functional.forked import on_ranks
from tests.functional.runner import train

RECIPE = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 5 "
    "--lr-decay-iters 20 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --attention-dropout 0 --hidden-dropout 0 --seed 1234 "
    "--split 95,5,0 --eval-interval 10 --eval-iters 2 --log-interval 1 --no-create-attention-mask-in-dataloader --transformer-impl local "
    "--tokenizer-type SentencePieceTokenizer --num-workers 0"
)
LOGGED_DIGIT = 0.6e-6  # losses are stored with six decimals


def data_flags(golden: Path, folder: Path) -> tuple[str, str]:
    """The stored runs' corpora and tokenizer, their index cached in `folder`."""
    tokens = golden / "tokens"
    data = f"--data-path 0.7 {tokens}/kjv_text_document 0.3 {tokens}/fortunes_text_document --tokenizer-model {tokens}/sp1000.model"
    return data, f"--data-cache-path {folder}/cache"


def continue_run(golden: Path, folder: Path, name: str, script: str, more: str, processes: int = 1) -> tuple[Any, dict[str, Any]]:
    """(our result, what Megatron-LM logged) of the stored run `name` from iteration 10 on, here or in processes of its own."""
    with tarfile.open(golden / "checkpoints" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (tracker,) = folder.rglob("latest_checkpointed_iteration.txt")
    flags = (*data_flags(golden, folder), f"--load {tracker.parent}", more)
    if processes == 1:
        result = train(*flags, script=script, base=RECIPE)
    else:
        result = on_ranks(processes, *flags, script=f"{script}.py", base=RECIPE)
    return result, json.loads((golden / "losses.json").read_text())[name]


@pytest.mark.parametrize(
    ("name", "script", "more", "processes"),
    [
        ("gpt_fp32", "pretrain_gpt", "", 1),
        ("llama_fp32", "pretrain_llama", "--group-query-attention --num-query-groups 2", 1),
        pytest.param("gpt_fp32", "pretrain_gpt", "--tensor-model-parallel-size 2", 2, marks=pytest.mark.slow),
        (
            "llama_fp32",
            "pretrain_llama",
            "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 2 --sequence-parallel",
            2,
        ),
    ],
)
def test_continuation_matches_the_stored_run(golden: Path, tmp_path: Path, name: str, script: str, more: str, processes: int) -> None:
    result, stored = continue_run(golden, tmp_path, name, script, more, processes)
    assert result.code == 0, result.err
    expected = stored["train"][10:]
    assert result.column("iteration") == [row["iteration"] for row in expected] == list(range(11, 21))
    assert result.losses() == pytest.approx([row["lm_loss"] for row in expected], abs=2e-6 + LOGGED_DIGIT, rel=0)
    assert result.column("grad_norm") == pytest.approx([row["grad_norm"] for row in expected], abs=1.1e-3, rel=0)
    # rates are stored as fp32 numbers with seven significant digits
    assert [float(f"{np.float32(lr):.6E}") for lr in result.column("lr")] == pytest.approx([row["lr"] for row in expected], rel=1e-9)
    assert [row["iteration"] for row in result.evaluations] == [20, 20]
    held_out = [row["lm_loss"] for row in stored["validation"][1:]]
    assert [row["lm_loss"] for row in result.evaluations] == pytest.approx(held_out, abs=2e-6 + LOGGED_DIGIT, rel=0)
    assert result.column("consumed_samples")[-1] == 160
