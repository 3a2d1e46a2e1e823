"""tools/checkpoint/convert.py: every family to a checkpoint and back, the same logits and the same bits; what it refuses."""

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.core.export.conversion import HFModel
from megatron.core.export.hf_configs import ConversionError, flags_of_checkpoint
from megatron.core.export.weights import TorchDistWeights
from megatron.core.transformer.multi_token_prediction import mtp_reports
from tests.conftest import ROOT
from tests.distributed import run_on_ranks
from tests.unit_tests.export.hf_models import BASE, MODELS, VOCAB, build, logits, make, tokens
from tools.checkpoint.compare_logits import compare

MAIN = runpy.run_path(str(ROOT / "tools" / "checkpoint" / "convert.py"))["main"]


def convert(loader: str, saver: str, source: Path, target: Path, *words: str) -> int:
    sides = ["--model-type", "GPT", "--loader", loader, "--saver", saver, "--load-dir", str(source), "--save-dir", str(target)]
    return MAIN([*sides, *words])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_equal_to_the_bit(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])] == []


SLOW = ("deepseek_v2_groups", "deepseek_v3_dense", "deepseek_v3_experts")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS])
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Logits of the whole model within 1e-4 of transformers' (its weights are large: the logits are above 1), the same bits back, with the
    source's config.json and with one made from the arguments alone."""
    model = make(name, tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    ids = tokens()
    with torch.no_grad():
        expected = model(ids).logits
    ours = logits(tmp_path / "core" / "release", ids)
    assert expected.abs().max() > 1 and ours is not None
    assert (ours[..., :VOCAB] - expected).abs().max() < 1e-4
    assert not ours[..., VOCAB:].any() and ours.shape[-1] == 128, "rows of padding are zero"
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    said = capsys.readouterr().out
    assert "compared with transformers: logits differ by at most" in said
    assert_equal_to_the_bit(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))
    assert (tmp_path / "hf" / "config.json").read_text() == (tmp_path / "back" / "config.json").read_text().rstrip("\n") + "\n"
    assert convert("core", "hf", tmp_path / "core" / "release", tmp_path / "made") == 0  # its parent has hf/
    (tmp_path / "core" / "hf").rename(tmp_path / "elsewhere")
    assert convert("core", "hf", tmp_path / "core", tmp_path / "made_alone") == 0
    assert "config.json is made from its arguments" in capsys.readouterr().out
    assert_equal_to_the_bit(tensors(tmp_path / "hf"), tensors(tmp_path / "made_alone"))


def test_the_arguments_in_a_checkpoint_are_the_model(tmp_path: Path) -> None:
    make("llama3", tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    assert (tmp_path / "core" / "latest_checkpointed_iteration.txt").read_text() == "release"
    args = dist_checkpointing.load_common_state_dict(tmp_path / "core" / "release")["args"]
    flags = flags_of_checkpoint(vars(args))
    found = {
        name: flags[name] for name in ("kv_channels", "num_query_groups", "use_rope_scaling", "rotary_base", "normalization", "swiglu")
    }
    assert found == {
        "kv_channels": 16,
        "num_query_groups": 2,
        "use_rope_scaling": True,
        "rotary_base": 500000,
        "normalization": "RMSNorm",
        "swiglu": True,
    }
    assert (args.vocab_size, args.padded_vocab_size, args.provenance["padded_vocab_size"]) == (VOCAB, 128, "derived")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3", {"tensor_model_parallel_size": 2}),
        ("llama3", {"pipeline_model_parallel_size": 2}),
        pytest.param("gpt2", {"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2", {"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"pipeline_model_parallel_size": 2, "moe_grouped_gemm": True}, marks=pytest.mark.slow),
        ("deepseek_v3", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
        pytest.param("deepseek_v3", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2", {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", {"pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_logits_in_other_layouts(name: str, layout: dict, tmp_path: Path) -> None:
    """With a vocabulary of 300 that is padded to 384 rows on one rank, to 512 on two."""
    settings = {"vocab_size": 300, ("n_layer" if name == "gpt2" else "num_hidden_layers"): 2}
    model = make(name, tmp_path / "hf", **settings)
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    ids = tokens(300)
    with torch.no_grad():
        expected = model(ids).logits
    results = [found for found in run_on_ranks(2, _logits, tmp_path / "core" / "release", ids, layout) if found is not None]
    assert len(results) == layout.get("tensor_model_parallel_size", 1)
    for found in results:
        assert (found[..., :300] - expected).abs().max() < 1e-4


def _logits(checkpoint: Path, ids: torch.Tensor, layout: dict) -> torch.Tensor | None:
    return logits(checkpoint, ids, **layout)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_latent_attention_is_computed_in_the_published_order(name: str, tmp_path: Path) -> None:
    """Norm of a latent, up-projection, rotation: layer by layer the hidden states of transformers' model, with and without a latent of
    queries (once the order was another, and imported models computed something else)."""
    make(name, tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    differences = compare(tmp_path / "hf", TorchDistWeights(tmp_path / "core" / "release"))
    assert [item.where for item in differences] == ["layer 0", "layer 1", "logits"]
    assert all(item.scale > 0.1 and item.relative < 1e-5 for item in differences)


def test_the_bias_that_chooses_experts_stays_in_fp32(tmp_path: Path) -> None:
    """A bf16 model's file has it in fp32 among weights in bf16: both ways it keeps its bits and does not widen the others."""
    make("deepseek_v3", tmp_path / "hf")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    whole = tensors(tmp_path / "hf")
    mixed = {name: tensor if name.endswith("correction_bias") else tensor.bfloat16() for name, tensor in whole.items()}
    assert not torch.equal(mixed[bias].bfloat16().float(), mixed[bias])
    save_file(mixed, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core") == 0
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "core" / "release")
    assert {tensor.dtype for key, tensor in stored.items() if not key.endswith("expert_bias")} == {torch.bfloat16}
    assert torch.equal(stored["decoder.layers.1.mlp.router.expert_bias"], mixed[bias])
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    assert_equal_to_the_bit(mixed, tensors(tmp_path / "back"))


def add_layer_ahead(model: Any, folder: Path) -> Any:
    """transformers' own layers for multi-token prediction, random, and their tensors in the folder as DeepSeek-V3's files have them."""
    from transformers.modeling_layers import MtpModel

    model.config.num_mtp_layers = 1
    ahead = MtpModel(model, 1).eval()
    layer, number = ahead.layers[0], model.config.num_hidden_layers
    found = tensors(folder)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        layer.mtp_block.mlp.gate.e_score_correction_bias.normal_(0.0, 0.2)
    for name, tensor in layer.state_dict().items():
        name = name.replace("post_norm", "shared_head.norm").removeprefix("mtp_block.")
        at = f"model.layers.{number}.{name}"
        if "mlp.experts.gate_up_proj" in name:
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2)):
                    found[f"model.layers.{number}.mlp.experts.{expert}.{part}.weight"] = half.clone()
        elif "mlp.experts.down_proj" in name:
            for expert, one in enumerate(tensor):
                found[f"model.layers.{number}.mlp.experts.{expert}.down_proj.weight"] = one.clone()
        else:
            found[at] = tensor.clone()
    found[f"model.layers.{number}.embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    found[f"model.layers.{number}.shared_head.head.weight"] = found["lm_head.weight"].clone()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    return layer


def test_layers_for_multi_token_prediction_come_along(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """DeepSeek-V3's files have one behind the last layer, which transformers' model leaves out: there, back to the bit, and its losses are
    those of transformers' class for it."""
    model = make("deepseek_v3", tmp_path / "hf", num_nextn_predict_layers=1)
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "without", "--no-verify") == 0
    plain = dist_checkpointing.load_plain_tensors(tmp_path / "without" / "release")
    assert not [key for key in plain if key.startswith("mtp.")], "a file without them makes a model without them"
    layer = add_layer_ahead(model, tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core") == 0, capsys.readouterr().err
    ids = tokens()
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[:, :-1]
        positions = torch.arange(ids.shape[1] - 1)[None].expand(2, -1)
        embedded = model.model.embed_tokens(ids[:, 1:])
        later = torch.full((ids.shape[1] - 1,) * 2, float("-inf")).triu(1)[None, None]
        angles = model.model.rotary_emb(embedded, positions)
        output = layer(embedded, hidden, position_embeddings=angles, attention_mask=later, position_ids=positions, cache=None)
        logits_ahead = model.lm_head(output)[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits_ahead.flatten(0, 1), ids[:, 2:].flatten())
        ours = build(tmp_path / "core" / "release").train()
        labels = torch.cat([ids[:, 1:], torch.zeros(2, 1, dtype=torch.int64)], dim=1)
        counts = torch.ones(labels.shape)
        counts[:, -1] = 0.0
        ours(ids, None, None, labels=labels, loss_mask=counts)
    (found,) = mtp_reports(ours).values()
    assert found[1] == 2 * (ids.shape[1] - 2)
    # rows of padding are in our softmax: logits of 28 zeros
    padded = torch.nn.functional.pad(logits_ahead, (0, 128 - VOCAB)).flatten(0, 1)
    assert found[0] / found[1] == pytest.approx(torch.nn.functional.cross_entropy(padded, ids[:, 2:].flatten()).item(), abs=1e-5)
    assert abs(found[0] / found[1] - expected) < 1 and expected > 1
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    assert_equal_to_the_bit(tensors(tmp_path / "hf"), tensors(tmp_path / "back"))
    (tmp_path / "core" / "hf").rename(tmp_path / "elsewhere")
    assert convert("core", "hf", tmp_path / "core", tmp_path / "made") == 0
    assert_equal_to_the_bit(tensors(tmp_path / "hf"), tensors(tmp_path / "made"))
    assert json.loads((tmp_path / "made" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    other = tensors(tmp_path / "hf")
    other["model.layers.3.embed_tokens.weight"] += 1
    save_file(other, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "third") == 1
    assert "model.layers.3.embed_tokens.weight is not model.embed_tokens.weight" in capsys.readouterr().err


def test_grouped_experts_read_what_sequential_ones_do(tmp_path: Path) -> None:
    make("mixtral", tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    one, other = (logits(tmp_path / "core" / "release", tokens(), **grouped) for grouped in ({}, {"moe_grouped_gemm": True}))
    assert one is not None and other is not None and torch.equal(one, other)


def test_a_tied_model_becomes_untied(tmp_path: Path) -> None:
    """CKPT-12: its file has no head: that of the checkpoint is a copy of the embedding, and the file made of it has one."""
    model = make("qwen2", tmp_path / "hf")
    assert "lm_head.weight" not in tensors(tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--untie-embeddings-and-output-weights") == 0
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "core" / "release")
    assert torch.equal(stored["output_layer.weight"], stored["embedding.word_embeddings.weight"])
    with torch.no_grad():
        expected = model(tokens()).logits
    ours = logits(tmp_path / "core" / "release", tokens())
    assert ours is not None and (ours[..., :VOCAB] - expected).abs().max() < 1e-4
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(tensors(tmp_path / "back")["lm_head.weight"], model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_exported_vocabulary_has_no_padding(name: str, kind: str, tmp_path: Path) -> None:
    """CKPT-11: 250 rows, untied and tied, padded to 256 in the checkpoint and again when it comes back."""
    make(name, tmp_path / "hf", vocab_size=250, num_hidden_layers=2)
    words = ["--target-tensor-parallel-size", "2"] if kind == "torch" else []
    assert convert("hf", kind, tmp_path / "hf", tmp_path / "ours", *words, "--no-verify") == 0
    assert convert(kind, "hf", tmp_path / "ours", tmp_path / "back") == 0
    found = tensors(tmp_path / "back")
    tables = ["model.embed_tokens.weight", *(["lm_head.weight"] if name == "llama2" else [])]
    assert {key for key, tensor in found.items() if len(tensor) in (250, 256)} == set(tables)
    assert all(len(found[key]) == 250 for key in tables)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 250
    assert convert("hf", "core", tmp_path / "back", tmp_path / "again", "--no-verify") == 0
    again = dist_checkpointing.load_plain_tensors(tmp_path / "again" / "release")
    assert len(again["embedding.word_embeddings.weight"]) == 256
    if kind == "core":
        assert_equal_to_the_bit(dist_checkpointing.load_plain_tensors(tmp_path / "ours" / "release"), again)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_vocabulary_that_is_no_multiple_of_the_ranks(size: int, tmp_path: Path) -> None:
    """CKPT-07: 300 tokens for 1, 2 and 4 tensor ranks: the logits are those of transformers within 1e-5."""
    from megatron.training.legacy_weights import LegacyWeights
    from tools.checkpoint.compare_logits import compare

    make("llama2", tmp_path / "hf", vocab_size=300, num_key_value_heads=4)
    words = ("--target-tensor-parallel-size", str(size), "--no-verify")
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", *words) == 0
    weights = LegacyWeights(tmp_path / "torch" / "release")
    assert weights.tensors["output_layer.weight"].global_shape == ({1: 384, 2: 512, 4: 512}[size], 32)
    assert all(difference.relative < 1e-5 for difference in compare(tmp_path / "hf", weights))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_no_tensor_may_be_missing(name: str, tmp_path: Path) -> None:
    """CKPT-12: a parameter without a tensor would stay at its random values. A tied head needs none, an untied one does."""
    make(name, tmp_path / "hf")
    whole = tensors(tmp_path / "hf")
    for key in whole:
        save_file({other: tensor for other, tensor in whole.items() if other != key}, tmp_path / "hf" / "model.safetensors")
        with pytest.raises(ConversionError, match=re.escape(key.removeprefix("transformer."))):
            HFModel(tmp_path / "hf")
    save_file(whole, tmp_path / "hf" / "model.safetensors")
    assert all(name in whole for piece in HFModel(tmp_path / "hf").pieces for name in piece.names)


def test_bf16_is_rounded_once(tmp_path: Path) -> None:
    make("llama2", tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--dtype", "bf16") == 0
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    rounded = {name: tensor.bfloat16() for name, tensor in tensors(tmp_path / "hf").items()}
    assert_equal_to_the_bit(rounded, tensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert("core", "hf", tmp_path / "core", tmp_path / "wide", "--dtype", "fp32") == 0
    assert_equal_to_the_bit({name: tensor.float() for name, tensor in rounded.items()}, tensors(tmp_path / "wide"))


def test_large_models_are_several_files(tmp_path: Path) -> None:
    """Read and written by an index; transformers reads them too (the comparison does)."""
    make("llama2", tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back", "--max-shard-size", "30000") == 0
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    whole = tensors(tmp_path / "hf")
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in whole.values())
    assert_equal_to_the_bit(whole, tensors(tmp_path / "back"))
    assert convert("hf", "core", tmp_path / "back", tmp_path / "again") == 0
    from transformers import AutoModelForCausalLM

    assert_equal_to_the_bit({**AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()}, whole)


def test_tokenizer_and_settings_come_along(tmp_path: Path) -> None:
    make("llama2", tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (tmp_path / "hf" / name).write_text(f"{{}} {name}")
    (tmp_path / "hf" / "notes.txt").write_text("stays behind")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    args = dist_checkpointing.load_common_state_dict(tmp_path / "core" / "release")["args"]
    assert (args.tokenizer_type, Path(args.tokenizer_model)) == ("HuggingFaceTokenizer", (tmp_path / "core" / "hf").resolve())
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back", "--no-verify") == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()} - {"notes.txt"}
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{} tokenizer.json"
    shutil.copytree(tmp_path / "core" / "release", tmp_path / "run" / "iter_0000003")  # of a training that went on from it
    assert convert("core", "hf", tmp_path / "run" / "iter_0000003", tmp_path / "trained", "--no-verify") == 0
    assert {path.name for path in (tmp_path / "trained").iterdir()} == names


# --- refused ---


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change) -> None:
    found = tensors(folder)
    change(found)
    save_file(found, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"
SPOILED = {
    "unknown family": (
        lambda folder: change_config(folder, model_type="bloom"),
        "model_type 'bloom' is not converted; there are gpt2, llama",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no readable config.json"),
    "junk config": (lambda folder: (folder / "config.json").write_text("[1, 2"), "no readable config.json"),
    "no size": (lambda folder: change_config(folder, hidden_size=None), "config.json lacks hidden_size"),
    "missing tensor": (lambda folder: change_tensors(folder, lambda found: found.pop(UP)), UP),
    "missing head": (lambda folder: change_tensors(folder, lambda found: found.pop("lm_head.weight")), "tie_word_embeddings"),
    "wrong shape": (lambda folder: change_tensors(folder, lambda found: found.update({UP: torch.zeros(47, 32)})), "[47, 32]"),
    "config of another shape": (lambda folder: change_config(folder, intermediate_size=64), "config.json says [64, 32]"),
    "unknown tensor": (lambda folder: change_tensors(folder, lambda found: found.update(extra=torch.zeros(1))), "extra"),
    "tied, with another head": (lambda folder: change_config(folder, tie_word_embeddings=True), "lm_head.weight is not the embedding"),
    "integers": (lambda folder: change_tensors(folder, lambda found: found.update({UP: torch.zeros(48, 32).char()})), "is of type I8"),
    "damaged file": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x10" * 40), "is damaged"),
    "pickled weights": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "save_pretrained()"),
    "quantized": (lambda folder: change_config(folder, quantization_config={"bits": 4}), "quantized"),
    "rope that we lack": (lambda folder: change_config(folder, rope_parameters={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_source_that_cannot_be_converted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One line that says what is wrong, and nothing is left."""
    spoil, message = SPOILED[kind]
    make("llama2", tmp_path / "hf", num_hidden_layers=2)
    spoil(tmp_path / "hf")
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make("llama2", tmp_path / "hf")
    for target in (tmp_path / "hf", tmp_path / "full"):
        target.mkdir(exist_ok=True)
        (target / "mine").write_text("precious")
        assert convert("hf", "core", tmp_path / "hf", target) == 1
        assert "is not empty" in capsys.readouterr().err and (target / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "empty", "--no-verify") == 0


def test_what_is_not_built_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for words in (
        ("--target-tensor-parallel-size", "2"),
        ("--target-pipeline-parallel-size", "1", "--saver", "hf", "--loader", "core"),
        ("--model-type", "mamba"),
        ("--saver", "hf"),
        ("--loader", "core"),
        ("--untie-embeddings-and-output-weights", "--loader", "torch"),
    ):
        assert MAIN(["--loader", "hf", "--saver", "core", "--load-dir", str(tmp_path), "--save-dir", str(tmp_path / "new"), *words]) == 1
        assert words[0] in capsys.readouterr().err


def test_a_mismatch_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The comparison judges the checkpoint by itself: one tensor with two rows exchanged is found and named by its layer."""
    from megatron.core.export import conversion

    make("llama2", tmp_path / "hf")
    original = conversion.HFModel.read

    def read(self, name):
        found = original(self, name)
        return found.flip(0) if name == UP and not reading_theirs else found

    from tools.checkpoint import compare_logits

    reading_theirs: list[bool] = []
    run = compare_logits.compare

    def compare(*arguments):
        reading_theirs.append(True)
        return run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion.HFModel, "read", read)
        patch.setitem(MAIN.__globals__, "compare", compare)
        assert convert("hf", "core", tmp_path / "hf", tmp_path / "core") == 1
    error = capsys.readouterr().err
    assert "layer 1" in error and "layer 0" not in error and "logits" in error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


SPOILED_CHECKPOINTS = {
    "no arguments": (lambda state: state.pop("args"), "without its arguments"),
    "another activation": (lambda state: setattr(state["args"], "swiglu", False), "would need swiglu"),
    "experts beside": (lambda state: setattr(state["args"], "moe_shared_expert_intermediate_size", 8), None),
    "more layers": (lambda state: setattr(state["args"], "num_layers", 4), "its arguments say [4, 32]"),
    "no vocabulary": (lambda state: setattr(state["args"], "vocab_size", None), "--true-vocab-size"),
    "missing tensor": (lambda state: state["model"].pop("decoder.final_layernorm.weight"), "decoder.final_layernorm.weight"),
    "unknown tensor": (lambda state: state["model"].update(extra=torch.zeros(3)), "extra"),
}


@pytest.mark.parametrize("kind", SPOILED_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_converted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spoil, message = SPOILED_CHECKPOINTS[kind]
    make("llama2", tmp_path / "source", num_hidden_layers=2)
    assert convert("hf", "core", tmp_path / "source", tmp_path / "core", "--no-verify") == 0
    state = dist_checkpointing.load_common_state_dict(tmp_path / "core" / "release")
    state["model"] = dist_checkpointing.load_plain_tensors(tmp_path / "core" / "release")
    state["args"] = plain_namespace(vars(state["args"]))  # stand-ins of classes cannot be pickled
    spoil(state)
    state["model"] = {key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in state["model"].items()}
    folder = tmp_path / "spoiled"
    folder.mkdir()
    dist_checkpointing.save(state, folder)
    assert convert("core", "hf", folder, tmp_path / "back", "--no-verify") == (0 if message is None else 1)
    if message is not None:
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error
        assert not list(tmp_path.glob("back*"))


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert convert("core", "hf", tmp_path, tmp_path / "new") == 1
    assert "no torch_dist checkpoint" in capsys.readouterr().err
    assert convert("core", "hf", tmp_path / "nowhere", tmp_path / "new") == 1
    assert "is no folder" in capsys.readouterr().err


def test_memory_is_that_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the source no two pieces are held at a time."""
    import weakref

    from megatron.core.export import conversion

    make("llama2", tmp_path / "hf", num_hidden_layers=6)
    held: list[weakref.ref] = []
    most = 0
    original = conversion.HFModel.read

    def read(self, name):
        nonlocal most
        most = max(most, sum(ref() is not None for ref in held))
        tensor = original(self, name)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(conversion.HFModel, "read", read)
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core", "--no-verify") == 0
    assert len(held) >= 6 * 9 and most <= 4, "queries, keys and values of one layer, and what was written last"


assert BASE["vocab_size"] == VOCAB
