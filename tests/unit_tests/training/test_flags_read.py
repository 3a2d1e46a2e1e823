"""No flag is accepted and then forgotten: each is read, refused beyond its default, or marked with the reason why it has no effect."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers import build_tokenizer
from megatron.training import flag_aliases
from megatron.training.argument_utils import all_fields, build_parser
from megatron.training.config.checks import name_of
from tests.unit_tests.training.lines import TINY, checked, without

ROOT = Path(__file__).parents[3]
PROGRAM = {
    path: path.read_text()
    for path in [*(ROOT / "megatron").rglob("*.py"), *ROOT.glob("pretrain_*.py")]
    # the rules about flags and the report of --check-config act on nothing
    if "training/config/" not in path.as_posix() and path.name not in ("check_config.py", "memory_estimate.py", "model_size.py")
}
# the core's checks of its configs are no use of them
CORE = {path: text for path, text in PROGRAM.items() if "megatron/core/" in path.as_posix() and path.name != "model_parallel_config.py"}
# dest -> by which way it acts that the searches below do not see
ELSEWHERE = {
    "add_position_embedding": "checks: it must not contradict --position-embedding-type, which is what counts",
    "num_layers_per_virtual_pipeline_stage": "checks_layout.virtual_stages",
    "num_virtual_stages_per_pipeline_rank": "checks_layout.virtual_stages",
    "yaml_cfg": "arguments.parse_args looks for it on the line",
    **{f"lr_{part}_{unit}": "checks.schedule_lengths" for part in ("decay", "warmup", "wsd_decay") for unit in ("iters", "samples")},
    "lr_warmup_fraction": "checks.schedule_lengths",
    **dict.fromkeys(("data_args_path", "per_split_data_args_path"), "config.data_lists fills --data-path and the like"),
}
MARKED = sorted(dest for dest, field in all_fields().items() if field.metadata["no_effect"])


def is_read(dest: str, configs: set[str]) -> bool:
    """Whether code reads `args.<dest>`, a table of meanings or the tokenizer takes it, or the core reads a config's field of that name."""
    reading = rf"\.{dest}\b(?!\s*=[^=])"
    return (
        any(re.search(rf"\bargs{reading}", text) for text in PROGRAM.values())
        or dest in flag_aliases.STANDS_FOR
        or dest in flag_aliases.ACTIVATIONS
        or dest in inspect.signature(build_tokenizer).parameters
        or (dest in configs and any(re.search(reading, text) for text in CORE.values()))
    )


def config_fields() -> set[str]:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    configs: tuple[Any, ...] = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig, GPTDatasetConfig)
    return {field.name for config in configs for field in dataclasses.fields(config)}


def test_every_flag_is_read_or_says_that_it_has_no_effect() -> None:
    configs = config_fields()
    forgotten = []
    for dest, field in all_fields().items():
        only_default = field.metadata["built"] == (field.default,)
        if not (field.metadata["no_effect"] or only_default or dest in ELSEWHERE or is_read(dest, configs)):
            forgotten.append(name_of(dest))
    assert not forgotten
    stale = [dest for dest in ELSEWHERE if dest not in all_fields() or is_read(dest, configs)]
    assert not stale


def test_help_says_why_a_flag_has_no_effect() -> None:
    help_of = {action.dest: action.help or "" for action in build_parser()._actions}
    for dest in MARKED:
        assert f"no effect: {all_fields()[dest].metadata['no_effect']}" in help_of[dest]


@pytest.mark.parametrize("dest", MARKED)
def test_a_flag_without_effect_is_noted_when_given(dest: str) -> None:
    action = next(action for action in build_parser()._actions if action.dest == dest)
    value = [] if action.nargs == 0 else ["7"]
    (note,) = checked([*TINY, name_of(dest), *value]).notes
    assert name_of(dest) in note and all_fields()[dest].metadata["no_effect"] in note


def test_flags_without_effect_share_one_line_and_defaults_have_none(tmp_path: Path) -> None:
    (note,) = checked([*TINY, "--use-mcore-models", "--no-masked-softmax-fusion", "--num-dataset-builder-threads", "1"]).notes
    assert "--use-mcore-models" in note and "--no-masked-softmax-fusion" in note and "threads" not in note
    path = tmp_path / "run.yaml"
    path.write_text("masked_softmax_fusion: true\nmanual_gc_eval: false\n")
    (note,) = checked([*TINY, "--yaml-cfg", str(path)]).notes
    assert "--no-manual-gc-eval" in note and "softmax" not in note


def test_notes_on_levels_and_saving() -> None:
    (note,) = checked([*TINY, "--timing-log-level", "2"]).notes
    assert "--timing-log-level 2" in note and not checked([*TINY, "--timing-log-level", "1"]).notes
    (note,) = checked([*TINY, "--save", "/tmp/none"]).notes
    assert "without --save-interval" in note
    assert not checked([*TINY, "--save", "/tmp/none", "--save-interval", "5"]).notes
    assert not checked([*without("--train-iters", "--lr"), "--skip-train", "--save", "/tmp/none"]).notes
