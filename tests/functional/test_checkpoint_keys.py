"""What is in a checkpoint, read by torch.distributed.checkpoint alone: the keys, shapes and contents that docs/checkpoints.md lists."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.conftest import ROOT
from tests.functional.forked import on_ranks
from tests.functional.runner import on, train

LLAMA = "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
GQA = "--group-query-attention --num-query-groups 2"
MOE = (
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-shared-expert-intermediate-size 80 --moe-shared-expert-gate"
)
SIZES = {"L": 2, "h": 64, "V": 128, "P": 64, "c": 16, "a": 64, "q": 192, "f": 256, "F": 256, "E": 4, "m": 48, "M": 96, "s": 80, "S": 160}
# flags, sizes that differ
RUNS: dict[str, tuple[str, dict[str, int]]] = {
    "gpt": ("", {}),
    "llama": (f"{LLAMA} {GQA} --qk-layernorm --bf16 --ffn-hidden-size 96", {"q": 128, "f": 96, "F": 192}),
    "moe": (f"{MOE} --use-distributed-optimizer --bf16", {}),
    "moe with norms of two terms": (f"{MOE} --normalization LayerNorm --moe-grouped-gemm", {}),
    "moe in one layer": (f"{MOE} --moe-layer-freq ([0]*1+[1]*1) --optimizer sgd", {"f": 128, "F": 256}),
}


def read_plainly(folder: Path) -> dict[str, Any]:
    """Every entry of a torch_dist checkpoint, by torch's own code."""
    reader = dcp.FileSystemReader(folder)
    found: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        found[key] = None
        if isinstance(entry, TensorStorageMetadata):
            found[key] = torch.full(tuple(entry.size), float("nan"), dtype=entry.properties.dtype)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {key: value if torch.is_tensor(value) else value[0] for key, value in found.items()}


def tables() -> dict[str, dict[str, str]]:
    """Of the document: a table's first heading -> {key: the other cell}."""
    found: dict[str, dict[str, str]] = {}
    text = (ROOT / "docs" / "checkpoints.md").read_text().partition("\n## Keys\n")[2]
    for row in re.findall(r"^\| (.+) \|$", text, re.M):
        first, rest = row.split(" | ", 1)
        if "`" not in first:
            rows = found.setdefault(first, {})
        rows.update(dict.fromkeys(re.findall("`([^`]+)`", first), rest))
    return found


@pytest.fixture(scope="module")
def written(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Name of a run -> what its checkpoint holds."""
    found = {}
    for name, (flags, _) in RUNS.items():
        folder = tmp_path_factory.mktemp("keys")
        result = train(*on(corpus, flags), f"--exit-interval 1 --save {folder}")
        assert result.code == 0, result.err
        found[name] = read_plainly(folder / "iter_0000001")
    folder = tmp_path_factory.mktemp("keys")
    layout = "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    result = on_ranks(2, *on(corpus, MOE, layout, f"--exit-interval 1 --save {folder}"))
    assert result.code == 0, result.err
    found["moe on two ranks"] = read_plainly(folder / "iter_0000001")
    return found


def pattern_of(key: str) -> re.Pattern:
    """Of a listed object's key: <linear>, <norm>, <expert linear> are modules, other names in angle brackets numbers."""
    experts = r".*\.experts\.experts\.linear_\w+"
    modules = {"<linear>": rf"(?!{experts}).*\.linear_\w+", "<expert linear>": experts, "<norm>": r".*layernorm"}
    parts = re.split("(<[^>]+>)", key)
    return re.compile("".join(modules.get(part, r"\d+") if part.startswith("<") else re.escape(part) for part in parts))


def test_the_document_lists_what_is_written(written: dict[str, dict[str, Any]]) -> None:
    listed = tables()
    assert list(listed) == ["weights", "optimizer", "objects", "common state"]
    seen: set[str] = set()
    for name, entries in written.items():
        sizes = SIZES | (RUNS[name][1] if name in RUNS else {"V": 256})  # padded for two tensor ranks
        for key, value in entries.items():
            if "/shard_" not in key:
                prefix, weight = re.fullmatch(r"(optimizer\.state\.\w+\.)?(.+)", key).groups()  # type: ignore[union-attr]
                family, numbers = re.subn(r"layers\.\d+\.", "layers.", weight)
                assert family in listed["weights"], f"{name} has {key}"
                shape = [word for word in listed["weights"][family].split() if not (numbers and word == "L")]
                assert list(value.shape) == [sizes.get(word) or int(word) for word in shape], f"{name}: {key}"
                assert value.isfinite().all()
                seen.add(family)
                if prefix:
                    assert f"{prefix}<weight>" in listed["optimizer"] and value.dtype == torch.float32, f"{name} has {key}"
                    seen.add(f"{prefix}<weight>")
        for key in (key for key in entries if "/shard_" in key):
            matching = [one for one in listed["objects"] if pattern_of(one).fullmatch(key)]
            assert matching, f"{name} has {key}"
            seen.update(matching)
        common = entries["common_state/shard_0_1"]
        assert common.keys() == listed["common state"].keys()
        seen.update(common)
    assert seen == {key for table in listed.values() for key in table}, "listed and not written"


def test_an_extra_state_for_each_layer_and_expert(written: dict[str, dict[str, Any]]) -> None:
    """Megatron-LM's loader asks for each of them, and takes none that has something in it."""
    entries = written["moe on two ranks"]
    states = {key: value for key, value in entries.items() if "._extra_state/" in key}
    experts = [key for key in states if ".experts.experts." in key]
    assert len(experts) == 2 * 2 * 4 and "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_1.3_2.4" in experts
    assert all(value is None or (value.dtype == torch.uint8 and value.numel() == 0) for value in states.values())
    assert states["decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2"] is None
    assert states["decoder.final_layernorm._extra_state/shard_0_1"].numel() == 0
    assert not any("output_layer" in key or "router" in key for key in states)


def test_the_common_state(written: dict[str, dict[str, Any]]) -> None:
    group_keys = {"lr", "weight_decay", "step", "betas", "eps", "bias_correction", "wd_mult", "lr_mult", "is_decoupled_lr"}
    group_keys |= {"is_expert_parallel", "default_config", "max_lr", "min_lr"}
    plain = written["gpt"]["common_state/shard_0_1"]
    assert [group.keys() for group in plain["optimizer"]["param_groups"]] == [group_keys] * 2, "numbers of parameters are the loader's own"
    assert plain["iteration"] == 1 and plain["args"].consumed_train_samples == 4 and plain["opt_param_scheduler"]["num_steps"] == 4
    assert plain["args"].tokenizer_record["type"] == "NullTokenizer"
    copies = written["llama"]["common_state/shard_0_1"]["optimizer"]
    assert list(copies) == ["optimizer"] and len(copies["optimizer"]["param_groups"]) == 2
    sharded = written["moe"]["common_state/shard_0_1"]
    assert sharded["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
    assert sharded["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    chain = written["moe on two ranks"]["common_state/shard_0_1"]["optimizer"]
    assert [[group["is_expert_parallel"] for group in chain[number]["param_groups"]] for number in (0, 1)] == [[False, False], [True]]
    (states,) = [value for key, value in written["gpt"].items() if key.startswith("rng_state/")]
    assert states[0].keys() == {"random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states"}


def test_values_are_those_of_the_other_format(corpus: Path, tmp_path: Path) -> None:
    """The same training saved as `torch` files, which plain torch.load reads, one tensor for each layer."""
    for form in ("torch", "torch_dist"):
        assert train(*on(corpus, RUNS["llama"][0]), f"--exit-interval 1 --ckpt-format {form} --save {tmp_path}/{form}").code == 0
    (path,) = (tmp_path / "torch").rglob("model_optim_rng.pt")
    model = torch.load(path, weights_only=False)["model"]
    entries = read_plainly(tmp_path / "torch_dist" / "iter_0000001")
    fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    compared = set()
    for name, tensor in model.items():
        if name.endswith("_extra_state"):
            continue
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        key = re.sub(r"layers\.\d+\.", "layers.", name)
        for own, stored in fused.items():
            key = key.replace(own, stored)
        assert torch.equal(entries[key][int(layer[1])] if layer else entries[key], tensor), name
        compared.add(key)
    assert compared == {key for key in entries if "/shard_" not in key and not key.startswith("optimizer.")}
