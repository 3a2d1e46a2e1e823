"""tools/checkpoint/convert.py from and to the legacy `torch` format: every family in any sizes, the same logits and the same bits."""

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import load_common_state_dict, load_plain_tensors
from megatron.core.dist_checkpointing.safe_pickle import load_torch, plain_namespace
from megatron.training.legacy_target import Sizes, padded_rows, size_problems
from tests.conftest import ROOT
from tests.unit_tests.export.hf_models import GPT2, MODELS, VOCAB, make

MAIN = runpy.run_path(str(ROOT / "tools" / "checkpoint" / "convert.py"))["main"]
MODEL = "model_optim_rng.pt"


def convert(loader: str, saver: str, source: Path, target: Path, *words: str) -> int:
    return MAIN(["--loader", loader, "--saver", saver, "--load-dir", str(source), "--save-dir", str(target), *words])


def sizes(tensor: int = 1, pipeline: int = 1, expert: int = 1) -> list[str]:
    named = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    return [word for name, size in named.items() for word in (f"--target-{name}-parallel-size", str(size))]


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].dtype != right[name].dtype or not torch.equal(left[name], right[name])] == []


def files(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.rglob(MODEL))


def model_of(folder: Path, name: str) -> dict[str, Any]:
    return load_torch(str(folder / name / MODEL))["model"]


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """At TP2 PP2, with experts EP2 too; the way back compares the logits with transformers, and the bits are those of the source."""
    moe = "num_experts_per_tok" in MODELS[name][1] and not name.endswith("_dense")
    layers = {"n_layer": 2} if name.startswith("gpt2") else {"num_hidden_layers": 2}
    if not name.startswith(("gpt2", "deepseek")):  # for two tensor ranks; latent attention has no groups
        layers["num_key_value_heads"] = 2
    make(name, tmp_path / "hf", **layers)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", *sizes(2, 2, 2 if moe else 1), "--no-verify") == 0
    ends = ["_000", "_001"] if moe else [""]
    assert files(tmp_path / "torch") == [f"mp_rank_{tensor:02d}_{stage:03d}{end}" for tensor in (0, 1) for stage in (0, 1) for end in ends]
    assert convert("torch", "hf", tmp_path / "torch", tmp_path / "back") == 0
    assert "compared with transformers" in capsys.readouterr().out
    assert_same_bits(load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))


def test_all_ways_between_the_formats(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """hf -> torch -> torch of other sizes -> core -> torch: each is read back, and the first and the last one are the same."""
    make("qwen3_moe_mixed", tmp_path / "hf", num_hidden_layers=4, vocab_size=300)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "one", *sizes(2, 2, 2)) == 0
    assert "compared with transformers" in capsys.readouterr().out
    assert convert("torch", "torch", tmp_path / "one", tmp_path / "two", *sizes(1, 4, 4)) == 0
    assert convert("torch", "core", tmp_path / "two", tmp_path / "core") == 0
    assert convert("core", "torch", tmp_path / "core", tmp_path / "three", *sizes(2, 2, 2)) == 0
    said = capsys.readouterr().out
    assert said.count("all bits are the source's") == 3 and said.count("optimizer state is not converted") == 3
    assert len(files(tmp_path / "one")) == 8 and len(files(tmp_path / "two")) == 16
    rows = {"one": 256, "two": 384, "three": 256}  # of one tensor rank: 300 tokens are padded to 512 for two, to 384 for one
    for name, count in rows.items():
        first = files(tmp_path / name)[0]
        assert len(model_of(tmp_path / name / "release", first)["embedding.word_embeddings.weight"]) == count
    for name in files(tmp_path / "one"):
        one, three = (model_of(tmp_path / which / "release", name) for which in ("one", "three"))
        assert list(one) == list(three)
        assert all(one[key] is three[key] is None or torch.equal(one[key], three[key]) for key in one), name
    assert (tmp_path / "three" / "hf" / "config.json").read_text() == (tmp_path / "hf" / "config.json").read_text()


def test_what_a_file_holds(tmp_path: Path) -> None:
    """The arguments say for which layout it is; a tied embedding stands in the first and the last stage; torch reads it by mapping."""
    make("gpt2", tmp_path / "hf", n_layer=2)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", *sizes(2, 2), "--no-verify") == 0
    assert (tmp_path / "torch" / "latest_checkpointed_iteration.txt").read_text() == "release"
    folder = tmp_path / "torch" / "release"
    assert (folder / "checksums.json").is_file()
    first, last = (load_torch(str(folder / name / MODEL), mmap=True) for name in ("mp_rank_01_000", "mp_rank_01_001"))
    args = first["args"]
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.padded_vocab_size, args.world_size) == (2, 2, 256, 4)
    assert (first["checkpoint_version"], first["iteration"], "optimizer" in first) == (3.0, 0, False)
    embedding = first["model"]["embedding.word_embeddings.weight"]
    assert embedding.shape == (128, 32) and torch.equal(embedding, last["model"]["output_layer.weight"])
    assert not any(name.startswith("embedding") for name in last["model"])
    numbers = {name.split(".")[2] for stage in (first, last) for name in stage["model"] if name.startswith("decoder.layers.")}
    assert numbers == {"0"}, "layers are counted within a stage"


def test_the_type_is_asked_for(tmp_path: Path) -> None:
    make("llama2", tmp_path / "hf")
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", "--dtype", "bf16", *sizes(2)) == 0
    assert convert("torch", "core", tmp_path / "torch", tmp_path / "core", "--dtype", "fp32") == 0
    wide = load_plain_tensors(tmp_path / "core" / "release")
    source = load_file(tmp_path / "hf" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(wide["decoder.final_layernorm.weight"], source.bfloat16().float())


def test_megatron_lms_own_checkpoints(golden: Path, tmp_path: Path) -> None:
    """Its `torch` checkpoint becomes its `torch_dist` one of the same run, to the bit; that becomes the file of the first again, names in
    order, whatever sizes it went through."""
    import tarfile

    for name in ("llama_legacy", "llama_fp32"):
        with tarfile.open(golden / "checkpoints" / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    legacy, dist = tmp_path / "llama_legacy", tmp_path / "llama_fp32"
    assert convert("torch", "core", legacy, tmp_path / "core") == 0
    assert (tmp_path / "core" / "latest_checkpointed_iteration.txt").read_text() == "10"
    theirs = load_plain_tensors(dist / "iter_0000010")
    found = load_plain_tensors(tmp_path / "core" / "iter_0000010")
    assert_same_bits(found, {key: theirs[key] for key in found})
    common = load_common_state_dict(tmp_path / "core" / "iter_0000010")
    assert common["iteration"] == 10 and common["args"].consumed_train_samples == 80 and "opt_param_scheduler" in common
    assert convert("core", "torch", dist, tmp_path / "split", "--true-vocab-size", "1000", *sizes(2, 4)) == 0
    assert convert("torch", "torch", tmp_path / "split", tmp_path / "again", "--true-vocab-size", "1000") == 0
    one, other = (model_of(folder / "iter_0000010", "mp_rank_00") for folder in (legacy, tmp_path / "again"))
    assert list(one) == list(other)
    assert all(one[name] is other[name] is None or torch.equal(one[name], other[name]) for name in one)


def test_names_of_transformer_engine_are_read_too(tmp_path: Path) -> None:
    """There a norm is a part of the linear behind it, and extra states are bytes."""
    make("mixtral", tmp_path / "hf")
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "local", *sizes(2), "--no-verify") == 0
    shutil.copytree(tmp_path / "local", tmp_path / "fused")
    for path in (tmp_path / "fused").rglob(MODEL):
        file = load_torch(str(path))
        file["args"] = plain_namespace(vars(file["args"]) | {"transformer_impl": "transformer_engine"})
        names = {name: name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_") for name in file["model"]}
        assert any(name != new for name, new in names.items())
        extra = torch.zeros(9, dtype=torch.uint8)
        file["model"] = {names[name]: extra if name.endswith("_extra_state") else value for name, value in file["model"].items()}
        write_as_another_program(file, path)
    for name in ("local", "fused"):
        assert convert("torch", "core", tmp_path / name, tmp_path / f"{name}.core") == 0
    assert_same_bits(*(load_plain_tensors(tmp_path / f"{name}.core" / "release") for name in ("local", "fused")))


# --- refused ---

FLAGS = {
    "num_attention_heads": 12,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "num_layers": 6,
    "num_experts": 8,
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": None,
}


@pytest.mark.parametrize(
    ("wanted", "changes", "named"),
    [
        (Sizes(4, 3, 8), {}, []),
        (Sizes(3, 1, 1), {}, ["num_query_groups 4", "moe_ffn_hidden_size 20"]),
        (Sizes(8, 4, 3), {}, ["num_attention_heads 12", "num_query_groups 4", "moe_ffn_hidden_size 20", "num_layers 6", "num_experts 8"]),
        (Sizes(5, 1, 1), {"num_experts": None}, ["num_attention_heads 12", "num_query_groups 4", "ffn_hidden_size 48"]),
        (Sizes(1, 1, 2), {"num_experts": None}, ["has no experts"]),
        (Sizes(0, -1, 0), {}, ["tensor-parallel-size 0", "pipeline-parallel-size -1", "expert-parallel-size 0"]),
        (Sizes(2, 1, 1), {"moe_shared_expert_intermediate_size": 7}, ["moe_shared_expert_intermediate_size 7"]),
    ],
)
def test_sizes_that_do_not_fit_are_all_named(wanted: Sizes, changes: dict[str, Any], named: list[str]) -> None:
    problems = size_problems(wanted, FLAGS | changes)
    assert len(problems) == len(named)
    assert all(any(name in problem for problem in problems) for name in named), problems


def test_nothing_is_written_for_wrong_sizes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make("llama2", tmp_path / "hf")
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "new", *sizes(3, 2, 2)) == 1
    error = capsys.readouterr().err
    for words in ("num_attention_heads 4", "num_query_groups 2", "num_layers 3 is no multiple of it (works: 1, 3)", "has no experts"):
        assert words in error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "new", *sizes(2)) == 1
    assert "--target-tensor-parallel-size" in (error := capsys.readouterr().err) and "legacy format alone" in error


@pytest.mark.parametrize(
    ("tensor", "stored", "target", "vocab", "rows"),
    [
        (1, 384, 2, None, 512),  # 257 .. 384 tokens are 512 rows
        (1, 384, 4, None, 512),
        (2, 512, 1, None, None),  # 384 or 512
        (2, 512, 1, 300, 384),
        (2, 512, 4, None, 512),
        (2, 768, 4, 600, 1024),
        (4, 512, 4, None, 512),
    ],
)
def test_padding_follows_the_target(tensor: int, stored: int, target: int, vocab: int | None, rows: int | None) -> None:
    saved = {"tensor_model_parallel_size": tensor, "make_vocab_size_divisible_by": 128}
    assert padded_rows(saved, Sizes(tensor=target), stored, vocab) == rows


def test_an_unknown_vocabulary_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its padding would be cut off in the wrong place; rows of padding that a training changed go, those of tokens stay."""
    make("llama2", tmp_path / "hf", vocab_size=100)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", *sizes(2), "--no-verify") == 0
    for name in ("mp_rank_00", "mp_rank_01"):
        path = tmp_path / "torch" / "release" / name / MODEL
        file = load_torch(str(path))
        file["args"] = plain_namespace(vars(file["args"]) | {"vocab_size": None})
        if name == "mp_rank_01":
            file["model"]["embedding.word_embeddings.weight"].fill_(7.0)  # rows 128 .. 255
        write_as_another_program(file, path)
    assert convert("torch", "torch", tmp_path / "torch", tmp_path / "new") == 1
    assert "--true-vocab-size" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert convert("torch", "torch", tmp_path / "torch", tmp_path / "new", "--true-vocab-size", "100") == 0
    found = model_of(tmp_path / "new" / "release", "mp_rank_00")["embedding.word_embeddings.weight"]
    assert torch.equal(found[:100], load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]) and len(found) == 128
    assert convert("torch", "torch", tmp_path / "torch", tmp_path / "more", "--true-vocab-size", "300") == 1
    assert "has 256 rows, fewer than the vocabulary of 300" in capsys.readouterr().err


def write_as_another_program(file: dict, path: Path) -> None:
    """Such a checkpoint has no checksums."""
    torch.save(file, path)
    (path.parents[1] / "checksums.json").unlink(missing_ok=True)


def spoil_file(folder: Path, change) -> None:
    path = folder / "mp_rank_00_001" / MODEL
    file = load_torch(str(path))
    file["args"] = plain_namespace(vars(file["args"]))
    change(file)
    write_as_another_program(file, path)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SPOILED = {
    "a file that is missing": (lambda folder: shutil.rmtree(folder / "mp_rank_01_000"), "mp_rank_01_000"),
    "a damaged file": (lambda folder: (folder / "mp_rank_00_001" / MODEL).write_bytes(b"PK" * 99), "model_optim_rng.pt is damaged"),
    "a tensor too few": (lambda folder: spoil_file(folder, lambda file: file["model"].pop(QKV)), "linear_qkv.weight"),
    "a tensor too many": (lambda folder: spoil_file(folder, lambda file: file["model"].update(extra=torch.zeros(3))), "extra"),
    "another shape": (lambda folder: spoil_file(folder, lambda file: file["model"].update({QKV: torch.zeros(5, 32)})), "(5, 32)"),
    "another type": (lambda folder: spoil_file(folder, lambda file: file["model"].update({QKV: torch.zeros(32, 32).half()})), "several"),
    "no such checkpoint": (lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text("7"), "iter_0000007"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_a_checkpoint_that_cannot_be_converted(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    spoil, message = SPOILED[kind]
    make("llama2", tmp_path / "hf", num_hidden_layers=2)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", *sizes(2, 2), "--no-verify") == 0
    spoil(tmp_path / "torch" / "release")
    for saver in ("core", "hf"):
        assert convert("torch", saver, tmp_path / "torch", tmp_path / "new", "--no-verify") == 1
        assert message in capsys.readouterr().err
        assert not list(tmp_path.glob("new*"))


def test_the_format_must_be_the_one_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make("llama2", tmp_path / "hf", num_hidden_layers=2)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", "--no-verify") == 0
    assert convert("core", "hf", tmp_path / "torch", tmp_path / "new") == 1
    assert "is in the format torch: give --loader torch" in capsys.readouterr().err


def test_an_older_order_of_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    make("llama2", tmp_path / "hf", num_hidden_layers=2)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "torch", "--no-verify") == 0
    path = tmp_path / "torch" / "release" / "mp_rank_00" / MODEL
    file = load_torch(str(path))
    write_as_another_program(file | {"args": plain_namespace(vars(file["args"])), "checkpoint_version": 2.0}, path)
    assert convert("torch", "core", tmp_path / "torch", tmp_path / "new") == 1
    assert "checkpoint_version 2.0" in capsys.readouterr().err


@pytest.mark.parametrize("saver", ["core", "torch"])
def test_what_was_written_is_read_back(saver: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number that changes on its way to the disk is found, its tensor named, and nothing is left."""
    from megatron.core.dist_checkpointing.planners import ShardedSavePlanner
    from megatron.core.export.torch_file import TorchFile

    make("gpt2", tmp_path / "hf", n_layer=2)
    assert convert("hf", "torch", tmp_path / "hf", tmp_path / "source", "--no-verify") == 0
    write, resolve = TorchFile.write, ShardedSavePlanner.resolve_data

    def other_bit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[3] = torch.nextafter(tensor.view(-1)[3], torch.tensor(9.0))
        return tensor

    def write_file(self, name, tensor):
        write(self, name, other_bit(tensor) if name == "decoder.layers.1.mlp.linear_fc2.bias" else tensor)

    def resolve_item(self, item):
        found = resolve(self, item)
        return (
            other_bit(found)
            if torch.is_tensor(found) and item.index.fqn.endswith("linear_fc2.bias") and item.index.offset[0] == 1
            else found
        )

    monkeypatch.setattr(TorchFile, "write", write_file)
    monkeypatch.setattr(ShardedSavePlanner, "resolve_data", resolve_item)
    assert convert("torch", saver, tmp_path / "source", tmp_path / "new") == 1
    error = capsys.readouterr().err
    assert "what was written is not what was read" in error and error.strip().endswith(": decoder.layers.mlp.linear_fc2.bias")
    assert not list(tmp_path.glob("new*"))


assert GPT2["vocab_size"] == VOCAB
