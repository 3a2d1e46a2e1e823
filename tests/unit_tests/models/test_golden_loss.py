"""With the weights that Megatron-LM trained for 10 iterations, its validation loss comes out."""

import json
import tarfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.param_sharding import build_param_table
from megatron.core.transformer.transformer_config import TransformerConfig

SEQ, SAMPLES = 128, 16  # the evaluation at iteration 10: 2 batches of 8
LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
}


def build(name):
    shape: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 176, "num_attention_heads": 4}
    config = TransformerConfig(**shape, hidden_dropout=0.0, attention_dropout=0.0, **(LLAMA if name == "llama_fp32" else {}))
    if name == "llama_fp32":
        return GPTModel(config, get_gpt_layer_local_spec(), 1024, SEQ, position_embedding_type="rope")
    return GPTModel(config, get_gpt_layer_local_spec(), 1024, SEQ, share_embeddings_and_output_weights=True)


def load(model, folder):
    """Read every parameter by its checkpoint key; the stored model must have no other."""
    reader = dcp.FileSystemReader(folder)
    stored = {key: entry for key, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "size")}
    weights = {key: torch.empty(entry.size) for key, entry in stored.items() if not key.startswith("optimizer")}
    table = build_param_table(model)
    assert {record.key for record in table.values()} == set(weights)
    dcp.load(weights, storage_reader=reader, no_dist=True)
    with torch.no_grad():
        for record in table.values():
            record.param.copy_(weights[record.key][record.layer] if record.stacked else weights[record.key])


@pytest.mark.parametrize("name", ["gpt_fp32", "llama_fp32"])
def test_validation_loss_of_iteration_10(name, golden, tmp_path):
    with tarfile.open(golden / "checkpoints" / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    model = build(name)
    load(model, tmp_path / name / "iter_0000010")
    with np.load(golden / "samples.npz") as samples:
        tokens, labels, positions, mask = (
            torch.from_numpy(samples[f"blend.valid.{kind}"][:SAMPLES]) for kind in ("tokens", "labels", "position_ids", "loss_mask")
        )
    with torch.no_grad():
        loss = model(tokens.long(), positions.long(), None, labels=labels.long())
    mean = ((loss * mask).sum() / mask.sum()).item()
    expected = next(
        row["lm_loss"] for row in json.loads((golden / "losses.json").read_text())[name]["validation"] if row["iteration"] == 10
    )
    assert mean == pytest.approx(expected, abs=5e-6)
