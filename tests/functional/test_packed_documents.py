"""Documents of one sample that do not see each other: by packed sequences, without a mask [s, s]."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import pretrain_gpt
from megatron.core.datasets import gpt_dataset
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config import checks_layout
from tests.functional.runner import TINY, on, torchrun, train, write_corpus

EOD = 100
RESET = "--reset-attention-mask --reset-position-ids --eod-mask-loss"


def short_documents(folder: Path) -> Path:
    return write_corpus(folder / "short", documents=200)


@pytest.mark.parametrize("position", ["learned_absolute", "rope"])
@pytest.mark.parametrize("micro", [1, 2])
def test_packed_sequences_equal_the_square_mask(tmp_path: Path, position: str, micro: int) -> None:
    corpus = short_documents(tmp_path)
    flags = f"{RESET} --position-embedding-type {position} --micro-batch-size {micro} --seq-length 256 --max-position-embeddings 256"
    with mock.patch.object(gpt_dataset, "square_mask", side_effect=AssertionError("no square mask is made")):
        packed = train(*on(corpus, flags))
    assert packed.code == 0, packed.err
    with (
        mock.patch.object(checks_layout, "packs_documents", return_value=False),
        mock.patch.object(pretrain_gpt, "packs_documents", return_value=False),
    ):
        square = train(*on(corpus, flags))
    assert packed.losses() == pytest.approx(square.losses(), rel=1e-5) and packed.losses()[0] == pytest.approx(square.losses()[0], rel=1e-6)
    assert packed.column("grad_norm") == pytest.approx(square.column("grad_norm"), rel=1e-4)
    assert packed.losses() != train(*on(corpus, flags.replace("--reset-attention-mask", ""))).losses(), "the documents did not matter"


def test_backends_whose_kernels_take_no_mask_have_packed_documents(tmp_path: Path) -> None:
    corpus = short_documents(tmp_path)
    flash, unfused = (train(*on(corpus, RESET, f"--attention-backend {backend}")) for backend in ("flash", "unfused"))
    assert flash.code == unfused.code == 0, flash.err + unfused.err
    assert flash.losses() == pytest.approx(unfused.losses(), rel=1e-5)


def batch_of(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    starts = torch.stack([torch.from_numpy(gpt_dataset.document_starts(row.numpy(), EOD)) for row in tokens])
    positions = torch.arange(tokens.shape[1]) - starts
    return {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(tokens.shape), "position_ids": positions}


def test_a_changed_document_changes_no_other_ones_loss() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(), 128, 24, pg_collection=ProcessGroupCollection())
    tokens = torch.randint(0, EOD, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[0, 9] = tokens[1, 4] = tokens[1, 15] = EOD
    changed = tokens.clone()
    changed[1, 5:9] = (tokens[1, 5:9] + 1) % EOD  # of the second row's second document, places 5 to 15
    losses = []
    for each in (tokens, changed):
        ids, labels, mask, square, positions, packed = pretrain_gpt.get_batch(iter([batch_of(each)]), EOD)
        assert square is None and ids.shape == labels.shape == mask.shape == positions.shape == (1, 48)
        losses.append(model(ids, positions, square, labels=labels, packed_seq_params=packed).view(2, 24))
    differ = losses[0] != losses[1]
    assert differ[1, 4:16].sum() >= 11 and not differ[0].any() and not differ[1, :4].any() and not differ[1, 16:].any()


def test_rows_that_are_not_marked_stay_rows() -> None:
    batch = batch_of(torch.zeros(2, 8, dtype=torch.long))
    tokens, *_, packed = pretrain_gpt.get_batch(iter([batch]))
    assert packed is None and tokens.shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2", "--context-parallel-size 2", ""]
)
def test_documents_are_the_same_on_two_ranks(tmp_path: Path, layout: str) -> None:
    """With context parallelism by the square mask, else by packed sequences; the last are two data-parallel ranks."""
    corpus = short_documents(tmp_path)
    flags = f"{RESET} --position-embedding-type rope --micro-batch-size 1 --recompute-granularity full --recompute-method uniform"
    flags += " --recompute-num-layers 1 --calculate-per-token-loss"
    alone, spread = train(*on(corpus, flags)), torchrun(2, *on(corpus, flags, layout))
    assert alone.code == spread.code == 0, alone.err + spread.err
    assert spread.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert spread.column("grad_norm") == pytest.approx(alone.column("grad_norm"), rel=1e-4)


def test_where_documents_cannot_be_packed_the_mask_remains(tmp_path: Path) -> None:
    """Experts' balance losses of one sequence count on rows."""
    with mock.patch.object(gpt_dataset, "square_mask", side_effect=gpt_dataset.square_mask) as made:
        result = train(*on(short_documents(tmp_path), RESET, "--num-experts 2 --train-iters 1"), base=TINY)
    assert result.code == 0 and made.called, result.err
