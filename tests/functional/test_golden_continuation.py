"""Megatron-LM's own checkpoints of iteration 10, trained on to iteration 20: its losses, norms and rates."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing import load_common_state_dict
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


GPT = ("gpt_fp32", "pretrain_gpt", "")
LLAMA = ("llama_fp32", "pretrain_llama", "--group-query-attention --num-query-groups 2")
# layout -> flags, processes; the models of which it is part of the fast tests
LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one process": ("", 1, ("gpt_fp32", "llama_fp32")),
    "tp2": ("--tensor-model-parallel-size 2", 2, ()),
    "tp2 sp": ("--tensor-model-parallel-size 2 --sequence-parallel", 2, ("llama_fp32",)),
    "pp2": ("--pipeline-model-parallel-size 2", 2, ("gpt_fp32",)),
    "pp2 vpp2": ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2, ()),
    "dp2": ("", 2, ()),
    "dp2 sharded": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2, ()),
    "tp2 pp2": ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, ()),
}
CASES = [
    pytest.param(*model, *LAYOUTS[layout][:2], id=f"{model[0]} {layout}", marks=() if model[0] in LAYOUTS[layout][2] else pytest.mark.slow)
    for layout in LAYOUTS
    for model in (GPT, LLAMA)
]


@pytest.mark.parametrize(("name", "script", "flags", "layout", "processes"), CASES)
def test_continuation_matches_the_stored_run(
    golden: Path, tmp_path: Path, name: str, script: str, flags: str, layout: str, processes: int
) -> None:
    result, stored = continue_run(golden, tmp_path, name, script, f"{flags} {layout}", processes)
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


@pytest.mark.parametrize(("name", "script", "more"), [GPT, ("llama_te_bf16", LLAMA[1], f"{LLAMA[2]} --bf16 --use-distributed-optimizer")])
def test_what_is_saved_then_has_the_keys_that_megatron_lms_own_has(golden: Path, tmp_path: Path, name: str, script: str, more: str) -> None:
    """Its loader finds each of them; of the optimizer by buckets, which is saved by weights, those of the model."""
    result, _ = continue_run(golden, tmp_path, name, script, f"{more} --exit-interval 11 --save {tmp_path}/saved")
    assert result.code == 0, result.err
    (theirs,) = tmp_path.rglob("iter_0000010")
    index, own = (dcp.FileSystemReader(folder).read_metadata() for folder in (theirs, tmp_path / "saved" / "iter_0000011"))
    shapes, own_shapes = (
        {key: getattr(entry, "size", None) for key, entry in one.state_dict_metadata.items() if ".distributed." not in key}
        for one in (index, own)
    )
    states = {key for key in own_shapes if key.startswith("optimizer.state.")}
    if name == GPT[0]:
        assert states == {key for key in shapes if key.startswith("optimizer.state.")}
    else:
        assert len(states) == 3 * sum("/shard_" not in key for key in shapes)
        own_shapes = {key: size for key, size in own_shapes.items() if key not in states}
    assert own_shapes == {key: size for key, size in shapes.items() if not key.startswith("rerun_state_machine_state/")}
    common, own_common = (load_common_state_dict(folder) for folder in (theirs, tmp_path / "saved" / "iter_0000011"))
    assert own_common.keys() - {"data_order"} == common.keys() - {"rerun_state_machine"}
    assert own_common["opt_param_scheduler"].keys() == common["opt_param_scheduler"].keys()
    if name == GPT[0]:
        groups, own_groups = common["optimizer"]["param_groups"], own_common["optimizer"]["param_groups"]
        assert [group.keys() for group in own_groups] == [group.keys() for group in groups]
