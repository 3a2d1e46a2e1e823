"""Flags about who writes and reads what of a checkpoint: the same training goes on, and the work is where the flags say."""

from pathlib import Path
from typing import Any

import pytest

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.saving import SaveStrategy
from tests.functional.forked import on_ranks
from tests.functional.runner import assert_equal_tensors, checkpoint_tensors, on, train


def sizes(folder: Path, iteration: int) -> list[int]:
    return [path.stat().st_size for path in sorted((folder / f"iter_{iteration:07d}").glob("*.distcp"))]


def test_ranks_share_in_saving_and_loading(corpus: Path, tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    flags = "--train-iters 6 --global-batch-size 4 --micro-batch-size 1 --ckpt-fully-parallel-load"
    one = on_ranks(2, *on(corpus, flags, f"--save {alone} --exit-interval 3 --no-ckpt-fully-parallel-save"))
    both = on_ranks(2, *on(corpus, flags, f"--save {shared} --exit-interval 3"))
    assert one.code == both.code == 0, one.err + both.err
    assert_equal_tensors(checkpoint_tensors(alone, 3), checkpoint_tensors(shared, 3))
    first, second = sizes(alone, 3)
    assert second < 0.05 * first, "the second rank has its random states alone, or nothing"
    assert 0.8 < sizes(shared, 3)[0] / sizes(shared, 3)[1] < 1.25 and abs(sum(sizes(shared, 3)) - first - second) < 0.05 * first
    rest = [on_ranks(2, *on(corpus, flags, f"--save {folder} --load {folder}")) for folder in (alone, shared)]
    straight = on_ranks(2, *on(corpus, flags))
    assert one.losses() + rest[0].losses() == both.losses() + rest[1].losses() == straight.losses()
    assert_equal_tensors(checkpoint_tensors(alone, 6), checkpoint_tensors(shared, 6))


@pytest.mark.parametrize("how", ["", "--async-save"])
def test_a_constant_structure_is_agreed_on_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    planned: list[int] = []
    plan = SaveStrategy._plan

    def counted(*args: Any) -> Any:
        planned.append(1)
        return plan(*args)

    monkeypatch.setattr(SaveStrategy, "_plan", counted)
    flags = f"--train-iters 4 --save-interval 1 {how}"
    for folder, more in (("kept", "--ckpt-assume-constant-structure"), ("anew", "")):
        planned.clear()
        result = train(*on(corpus, flags, f"--save {tmp_path / folder} {more}"))
        assert result.code == 0 and len(planned) == (1 if more else 4), result.err
    assert_equal_tensors(checkpoint_tensors(tmp_path / "kept", 4), checkpoint_tensors(tmp_path / "anew", 4))


def test_strictness_of_a_run(corpus: Path, tmp_path: Path) -> None:
    """A model with norms of its queries and keys starts from one without, where the flag lets it."""
    folder = tmp_path / "saved"
    assert train(*on(corpus, f"--train-iters 2 --save {folder}")).code == 0
    tensors = dist_checkpointing.load_tensors_metadata(folder / "iter_0000002")
    assert "decoder.layers.self_attention.q_layernorm.weight" not in tensors
    load = f"--train-iters 4 --load {folder} --finetune"
    flag, tensor = "--qk-layernorm is True here", "q_layernorm.weight"
    for strictness, fails, told in (
        ("assume_ok_unexpected", True, [flag]),
        ("raise_unexpected", True, [flag]),
        ("log_unexpected", False, [flag, tensor]),
        ("return_all", False, [flag, tensor]),
        ("ignore_all", False, [flag]),
    ):
        result = train(*on(corpus, load, f"--qk-layernorm --dist-ckpt-strictness {strictness}"))
        assert (result.code != 0) == fails, strictness
        assert [text for text in (flag, tensor) if text in result.err + result.out] == told, strictness
    result = train(*on(corpus, load, "--dist-ckpt-strictness raise_all"))
    assert result.code == 1 and "optimizer.state.exp_avg" in result.err, "a finetuning leaves the optimizer's state out"
