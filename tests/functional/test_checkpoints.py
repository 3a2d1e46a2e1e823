"""What is on disk after a run, whatever happened during it, and what a later run makes of it."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, saving
from megatron.core.dist_checkpointing.safe_pickle import plain_namespace
from megatron.training import resume_checks
from tests.functional.forked import on_ranks
from tests.functional.runner import (
    Processes,
    assert_equal_tensors,
    checkpoint_tensors,
    checkpoints,
    on,
    tracker,
    train,
    write_corpus,
)


def weights(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    return {key: value for key, value in checkpoint_tensors(folder, iteration).items() if not key.startswith("optimizer.")}


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of iterations 2 and 4 of a finished run."""
    folder = tmp_path_factory.mktemp("saved")
    assert train(*on(corpus), f"--save {folder} --save-interval 2").code == 0
    return folder


def test_the_folder_has_the_layout_of_torch_dist(saved: Path) -> None:
    assert checkpoints(saved) == ["iter_0000002", "iter_0000004"] and tracker(saved) == "4"
    assert {path.name for path in saved.iterdir()} == {
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
        "training_curves.png",
    }
    last = saved / "iter_0000004"
    assert json.loads((last / "metadata.json").read_text()) == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    assert {path.name for path in last.iterdir()} == {".metadata", "metadata.json", "checksums.json", "__0_0.distcp"}
    common = dist_checkpointing.load_common_state_dict(last)
    assert {"args", "checkpoint_version", "iteration", "optimizer", "opt_param_scheduler", "content_metadata"} <= common.keys()
    assert common["iteration"] == 4 and common["args"].consumed_train_samples == 16
    assert common["args"].transformer_impl == "local"
    tensors = checkpoint_tensors(saved, 4)
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 192, 64)
    assert tensors["optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"].shape == (128, 64)


# --- a save that fails ---


def test_killed_while_saving(corpus: Path, tmp_path: Path) -> None:
    """The process dies half-way through its second checkpoint: the first one is the last, is whole, and the next run cleans up."""
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal\n"
        "import tests.functional.poisoned_gpt as gpt\n"
        "from megatron.core import dist_checkpointing\n"
        "save = dist_checkpointing.save\n"
        "def half(contents, folder, **more):\n"
        "    save(contents, folder, **more)\n"
        "    if '0000004' in str(folder):\n"
        "        os.remove(folder / 'metadata.json')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist_checkpointing.save = half\n"
        "from megatron.core.enums import ModelType\n"
        "gpt.pretrain(gpt.train_valid_test_datasets_provider, gpt.model_provider, ModelType.encoder_or_decoder, gpt.forward_step,\n"
        "             extra_args_provider=gpt.add_arguments)\n"
    )
    folder = tmp_path / "saved"
    with Processes() as started:
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        try:
            child = started.alone(*on(corpus), f"--train-iters 6 --save {folder} --save-interval 2", script=str(script))
        finally:
            del os.environ["PYTHONPATH"]
        assert child.wait(60) == -signal.SIGKILL
    assert checkpoints(folder) == ["iter_0000002"] and tracker(folder) == "2"
    resumed = train(*on(corpus), f"--train-iters 6 --save {folder} --load {folder} --save-interval 2")
    straight = train(*on(corpus), "--train-iters 6")
    assert resumed.code == 0 and resumed.losses() == straight.losses()[2:]
    assert sorted(path.name for path in folder.glob("iter_*")) == ["iter_0000002", "iter_0000004", "iter_0000006"]


class Full:
    """File-system calls that find the disk full."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["shards", "index", "tracker"])
def test_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Exit code 1, one line, and the old checkpoint is still the one that is named and loads."""
    assert train(*on(corpus), f"--train-iters 2 --lr-decay-iters 4 --save {tmp_path}").code == 0
    before = checkpoint_tensors(tmp_path, 2)
    if where == "shards":
        monkeypatch.setattr(saving.ChecksummedFile, "write", Full(0))
    elif where == "index":
        monkeypatch.setattr(dcp.FileSystemWriter, "finish", Full(0))
    else:
        monkeypatch.setattr(os, "replace", Full(0))
    result = train(*on(corpus), f"--train-iters 4 --lr-decay-iters 4 --save {tmp_path} --load {tmp_path}")
    monkeypatch.undo()
    assert result.code == 1 and "Traceback" not in result.err
    (line,) = result.errors
    assert "phase saving a checkpoint, iteration 4" in line and "No space left on device" in line
    assert tracker(tmp_path) == "2"
    assert_equal_tensors(before, checkpoint_tensors(tmp_path, 2))
    resumed = train(*on(corpus), f"--train-iters 4 --lr-decay-iters 4 --save {tmp_path} --load {tmp_path}")
    assert resumed.code == 0 and resumed.column("iteration") == [3, 4] and tracker(tmp_path) == "4"
    assert not list(tmp_path.glob("*.unfinished")) + list(tmp_path.glob("*.replaced"))


def test_the_same_iteration_can_be_saved_again(corpus: Path, tmp_path: Path) -> None:
    first = train(*on(corpus), f"--save {tmp_path}")
    again = train(*on(corpus), f"--save {tmp_path} --seed 8")
    assert first.code == again.code == 0 and first.losses() != again.losses()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004"]
    third = train(*on(corpus), f"--save {tmp_path}/other --seed 8")
    assert third.code == 0
    assert_equal_tensors(checkpoint_tensors(tmp_path, 4), checkpoint_tensors(tmp_path / "other", 4))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--train-iters 5 --save-interval 2", [2, 4, 5]),
        ("--train-iters 3", [3]),
        ("--train-iters 9 --save-interval 2 --exit-interval 3", [2, 3]),
        ("--train-iters 3 --save-interval 2 --exit-duration-in-mins 0", [2, 3]),
        # the scale overflows in every step: the last iteration is one without an update
        ("--train-iters 3 --save-interval 3 --fp16 --initial-loss-scale 1e38 --loss-scale-window 1000", [3]),
    ],
)
def test_the_last_iteration_is_saved_whatever_it_was(corpus: Path, tmp_path: Path, flags: str, expected: list[int]) -> None:
    result = train(*on(corpus, flags), f"--save {tmp_path}")
    assert result.code == 0, result.err
    assert checkpoints(tmp_path) == [f"iter_{iteration:07d}" for iteration in expected] and tracker(tmp_path) == str(expected[-1])
    common = dist_checkpointing.load_common_state_dict(tmp_path / checkpoints(tmp_path)[-1])
    assert common["iteration"] == expected[-1] and common["args"].consumed_train_samples == 4 * expected[-1]
    if "--fp16" in flags:
        assert result.column("skipped_iterations") == [1, 1, 1] and common["optimizer"]["optimizer"]["param_groups"][0]["step"] == 0


def test_a_finished_run_that_is_started_again_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    """As an elastic launcher does it after the end."""
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 2 --keep-last 1"
    assert train(*on(corpus, flags)).code == 0

    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [tmp_path, *tmp_path.rglob("*")]}

    before = state()
    again = train(*on(corpus, flags))
    assert again.code == 0 and again.steps == [] and "training already complete: iteration 4 of 4" in again.out
    assert state() == before


# --- a load that cannot be done ---


@pytest.mark.parametrize(("written", "other"), [("torch", "torch_dist"), ("torch_dist", "torch")])
def test_the_format_is_found_out_and_a_wrong_one_is_one_message(corpus: Path, tmp_path: Path, written: str, other: str) -> None:
    whole = train(*on(corpus), f"--save {tmp_path} --save-interval 2 --ckpt-format {written}")
    load = f"--load {tmp_path} --ckpt-step 2"
    assert train(*on(corpus), load).losses() == whole.losses()[2:]
    assert train(*on(corpus), f"{load} --ckpt-format {other} --auto-detect-ckpt-format").losses() == whole.losses()[2:]
    text = only_error(train(*on(corpus), f"{load} --ckpt-format {other}"))
    assert f"is in the format {written} and --ckpt-format {other} was given" in text


def test_an_optimizers_state_that_is_empty_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Saved at iteration 20 by two ranks' distributed optimizer it is not; a checkpoint that has lost it does not begin anew unasked."""
    flags = "--train-iters 22 --use-distributed-optimizer"
    assert on_ranks(2, *on(corpus, flags, f"--save {tmp_path}/saved --save-interval 20 --exit-interval 20")).code == 0
    tensors = checkpoint_tensors(tmp_path / "saved", 20)
    names = [key for key in tensors if not key.startswith("optimizer.")]
    for state in ("exp_avg", "exp_avg_sq"):
        assert all(tensors[f"optimizer.state.{state}.{name}"].abs().sum() > 0 for name in names)
    source = tmp_path / "saved" / "iter_0000020"
    common = dist_checkpointing.load_common_state_dict(source)
    common["args"] = plain_namespace(vars(common["args"]))
    rng = dist_checkpointing.load({"rng_state": dist_checkpointing.stored_objects(source, "rng_state")}, source)["rng_state"]
    objects = [ShardedObject("rng_state", rng[0], (1, 1), (0, 0))]
    for lost, message in (("optimizer.", "state in it is empty"), ("optimizer.state.exp_avg_sq.output", "optimizer.state.exp_avg_sq.")):
        left = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items() if not key.startswith(lost)}
        if lost != "optimizer.":
            left.pop("optimizer.state.exp_avg_sq.decoder.final_layernorm.weight")
        folder = tmp_path / "lost" / "iter_0000020"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder)
        folder.mkdir()
        dist_checkpointing.save({**common, "rng": objects, **left}, folder)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("20")
        text = only_error(train(*on(corpus, flags, f"--load {tmp_path}/lost")))
        assert message in text and "--no-load-optim" in text
        assert train(*on(corpus, flags, f"--load {tmp_path}/lost --no-load-optim")).column("iteration") == [21, 22]


def only_error(result: Any) -> str:
    """The one line that a run time error is."""
    assert result.code == 1 and result.steps == []
    assert "Traceback" not in result.err
    (line,) = result.errors
    return result.err[result.err.index(line) :]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--hidden-size 32", ("decoder.final_layernorm.weight is (64,) there and (32,) in this model",)),
        ("--num-layers 3", ("decoder.layers.mlp.linear_fc1.weight is (2, 256, 64) there and (3, 256, 64) in this model",)),
        ("--untie-embeddings-and-output-weights", ("lacks what this run needs", "output_layer.weight")),
    ],
)
def test_another_shape_is_one_error_that_lists_keys(
    corpus: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: tuple[str, ...]
) -> None:
    """Also of a checkpoint whose arguments do not say what it holds."""
    monkeypatch.setattr(resume_checks, "model_differences", lambda saved, args: [])
    text = only_error(train(*on(corpus, flags), f"--load {saved}"))
    assert str(saved / "iter_0000004") in text
    for part in expected:
        assert part in text


def test_a_damaged_checkpoint_is_named(corpus: Path, tmp_path: Path) -> None:
    train(*on(corpus), f"--save {tmp_path} --save-interval 2")
    flags = f"--load {tmp_path} --train-iters 6 --lr-decay-iters 4"
    data = next((tmp_path / "iter_0000004").glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    for damaged in (whole[: len(whole) // 2], whole[:-200] + bytes(100) + whole[-100:]):  # of another size, of other contents
        data.write_bytes(damaged)
        text = only_error(train(*on(corpus, flags)))
        assert f"{data} is damaged" in text and "--ckpt-step 2 loads another one" in text
        assert train(*on(corpus, flags, "--ckpt-step 2")).column("iteration") == [3, 4, 5, 6]
    data.write_bytes(whole)
    (tmp_path / "iter_0000004" / "metadata.json").unlink()
    assert "metadata.json" in only_error(train(*on(corpus, flags)))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("77")
    text = only_error(train(*on(corpus, flags)))
    assert "iter_0000077" in text and "iter_0000002, iter_0000004" in text
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "'soon'" in only_error(train(*on(corpus, flags)))


def test_retention_in_a_run(corpus: Path, tmp_path: Path) -> None:
    """The last two, multiples of 3, one that was marked in between; a checkpoint loaded from elsewhere is not touched."""
    assert train(*on(corpus), f"--train-iters 8 --exit-interval 1 --save {tmp_path}/first").code == 0
    flags = f"--train-iters 8 --save-interval 1 --save {tmp_path}/second --keep-last 2 --save-retain-interval 3"
    assert train(*on(corpus, flags), f"--load {tmp_path}/first --exit-interval 4").code == 0
    assert checkpoints(tmp_path / "second") == ["iter_0000003", "iter_0000004"]
    (tmp_path / "second" / "iter_0000004" / "keep").touch()
    assert train(*on(corpus, flags), f"--load {tmp_path}/second").code == 0
    assert checkpoints(tmp_path / "second") == ["iter_0000003", "iter_0000004", "iter_0000006", "iter_0000007", "iter_0000008"]
    assert checkpoints(tmp_path / "first") == ["iter_0000001"] and tracker(tmp_path / "second") == "8"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--save-retain-interval 3 --save-interval 2 --save x", "--save-retain-interval 3: must be a multiple of --save-interval 2"),
        ("--save-retain-interval 3 --save x", "needs --save-interval"),
        ("--keep-last 3", "needs --save"),
        ("--keep-last 0 --save x", "--keep-last 0"),
    ],
)
def test_retention_that_makes_no_sense(corpus: Path, flags: str, expected: str) -> None:
    result = train(*on(corpus, flags))
    assert result.code == 2 and expected in result.err


def test_a_missing_checkpoint(corpus: Path, tmp_path: Path) -> None:
    fresh = train(*on(corpus), f"--load {tmp_path}")
    assert fresh.code == 0 and fresh.column("iteration") == [1, 2, 3, 4]
    assert f"WARNING: no checkpoint in {tmp_path}" in fresh.out
    refused = train(*on(corpus), f"--load {tmp_path} --exit-on-missing-checkpoint")
    assert refused.code == 2 and f"--load {tmp_path}: holds no checkpoint" in refused.err


# --- what is taken from a checkpoint ---


def test_ckpt_step_chooses_the_iteration(corpus: Path, saved: Path) -> None:
    straight = train(*on(corpus))
    result = train(*on(corpus), f"--load {saved} --ckpt-step 2")
    assert result.column("iteration") == [3, 4] and result.losses() == straight.losses()[2:]
    refused = train(*on(corpus), f"--load {saved} --ckpt-step 3")
    assert refused.code == 2 and "which has 2, 4 (works: --ckpt-step 4)" in refused.err, "before a model is built"


def test_finetune_takes_the_weights_alone(corpus: Path, saved: Path, tmp_path: Path) -> None:
    """It starts at iteration 1, sample 0, the beginning of warm-up, with a fresh optimizer."""
    flags = f"--finetune --load {saved} --lr-warmup-iters 2 --weight-decay 0.3"
    result = train(*on(corpus, flags), f"--save {tmp_path}")
    assert result.code == 0, result.err
    assert result.column("iteration") == [1, 2, 3, 4] and result.column("consumed_samples")[0] == 4
    assert result.column("lr")[:2] == [5e-3, 1e-2], "the first step runs at 0"
    frozen = train(*on(corpus, flags), f"--train-iters 1 --lr-warmup-iters 0 --lr 0 --min-lr 0 --save {tmp_path}/frozen")
    assert frozen.code == 0, frozen.err
    assert_equal_tensors(weights(tmp_path / "frozen", 1), weights(saved, 4))
    assert dist_checkpointing.load_common_state_dict(tmp_path / "iter_0000004")["iteration"] == 4


def test_no_load_optim_keeps_position_and_schedule(corpus: Path, tmp_path: Path) -> None:
    """The schedule goes on from the checkpoint's position, once; only the moments are fresh."""
    train(*on(corpus), f"--train-iters 8 --exit-interval 4 --save {tmp_path}")
    whole = train(*on(corpus), f"--train-iters 8 --load {tmp_path}")
    fresh = train(*on(corpus), f"--train-iters 8 --load {tmp_path} --no-load-optim")
    assert fresh.code == 0, fresh.err
    assert fresh.column("iteration") == whole.column("iteration") == [5, 6, 7, 8]
    assert fresh.column("lr") == whole.column("lr")
    assert fresh.losses()[0] == whole.losses()[0] and fresh.losses()[2] != whole.losses()[2]
    assert "restored: weights, random states, schedule, position" in fresh.out and "reset: optimizer (--no-load-optim)" in fresh.out


def test_a_checkpoint_at_the_end_of_its_schedule(corpus: Path, tmp_path: Path) -> None:
    """--finetune begins a schedule of its own; --no-load-optim stays where the old one ended and is not moved on again."""
    train(*on(corpus), f"--train-iters 4 --save {tmp_path}")
    again = train(*on(corpus), f"--train-iters 4 --finetune --load {tmp_path}")
    assert again.column("lr") == train(*on(corpus), "--train-iters 4").column("lr")
    longer = train(*on(corpus), f"--train-iters 6 --lr-decay-iters 4 --no-load-optim --load {tmp_path}")
    assert longer.code == 0, longer.err
    assert longer.column("iteration") == [5, 6] and longer.column("lr") == [1e-3, 1e-3]


def test_no_save_optim_and_no_save_rng(corpus: Path, tmp_path: Path) -> None:
    whole = train(*on(corpus), f"--train-iters 8 --exit-interval 4 --save {tmp_path} --no-save-optim --no-save-rng")
    assert whole.code == 0 and not any(key.startswith("optimizer.") for key in checkpoint_tensors(tmp_path, 4))
    refused = only_error(train(*on(corpus), f"--train-iters 8 --load {tmp_path}"))
    assert "without an optimizer: give --no-load-optim" in refused and "without random states (rng_state): give --no-load-rng" in refused
    assert "rng_state" in only_error(train(*on(corpus), f"--train-iters 8 --load {tmp_path} --no-load-optim"))
    taken = train(*on(corpus), f"--train-iters 8 --load {tmp_path} --no-load-optim --no-load-rng")
    assert taken.code == 0 and taken.column("iteration") == [5, 6, 7, 8]
    assert taken.column("lr") == train(*on(corpus), "--train-iters 8").column("lr")[4:], "the schedule is at the position all the same"


# --- a schedule that changes ---


def test_a_longer_training_names_the_choices(corpus: Path, saved: Path) -> None:
    text = only_error(train(*on(corpus), f"--train-iters 8 --load {saved}"))
    for choice in ("--use-checkpoint-opt-param-scheduler", "--override-opt-param-scheduler", "--lr-decay-iters"):
        assert choice in text


def test_a_longer_training_by_each_of_the_choices(corpus: Path, saved: Path) -> None:
    straight = train(*on(corpus), "--train-iters 8")
    override = train(*on(corpus), f"--train-iters 8 --load {saved} --override-opt_param-scheduler")
    assert override.column("iteration") == [5, 6, 7, 8] and override.column("lr") == straight.column("lr")[4:]
    for flags in ("--use-checkpoint-opt_param-scheduler", "--lr-decay-iters 4"):
        kept = train(*on(corpus), f"--train-iters 8 --load {saved} {flags}")
        assert kept.code == 0, kept.err
        assert kept.column("iteration") == [5, 6, 7, 8] and kept.column("lr") == [1e-3] * 4


@pytest.mark.parametrize(("flag", "decay"), [("--use-checkpoint-opt_param-scheduler", 0.1), ("--override-opt_param-scheduler", 0.3)])
def test_weight_decay_of_the_first_step_after_a_resume(
    corpus: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, flag: str, decay: float
) -> None:
    from megatron.training import training

    seen: list[set[float]] = []
    original = training.train_step

    def step(run: Any, batches: Any) -> Any:
        seen.append({group["weight_decay"] for group in run.optimizer.param_groups if group["wd_mult"] > 0})
        return original(run, batches)

    monkeypatch.setattr(training, "train_step", step)
    result = train(*on(corpus), f"--train-iters 6 --lr-decay-iters 6 --load {saved} --weight-decay 0.3 {flag}")
    assert result.code == 0, result.err
    assert seen == [{decay}] * 2


@pytest.mark.slow
def test_a_vocabulary_padded_for_four_ranks_and_back(corpus: Path, tmp_path: Path) -> None:
    """250 ids: 256 rows on one rank, 512 on four. Rows of ids keep their bits."""
    prefix = write_corpus(tmp_path / "text", vocab=249)
    frozen = "--vocab-size 249 --lr 0 --min-lr 0 --weight-decay 0 --override-opt_param-scheduler"
    first = train(*on(prefix, f"--vocab-size 249 --exit-interval 1 --save {tmp_path}/one"))
    second = on_ranks(
        4, *on(prefix, frozen, f"--tensor-model-parallel-size 4 --exit-interval 2 --load {tmp_path}/one --save {tmp_path}/four")
    )
    third = train(*on(prefix, frozen, f"--exit-interval 3 --load {tmp_path}/four --save {tmp_path}/back"))
    assert [result.code for result in (first, second, third)] == [0] * 3, second.err
    key = "embedding.word_embeddings.weight"
    rows = [checkpoint_tensors(tmp_path / name, iteration)[key] for iteration, name in enumerate(("one", "four", "back"), 1)]
    assert [len(one) for one in rows] == [256, 512, 256]
    assert torch.equal(rows[0][:250], rows[1][:250]) and torch.equal(rows[0][:250], rows[2][:250])


# --- flags from the checkpoint ---


def test_use_checkpoint_args(corpus: Path, saved: Path, tmp_path: Path) -> None:
    """The model comes from the checkpoint, an explicit flag wins and is logged, a contradiction is refused with both values."""
    base = (
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr-decay-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine "
        "--weight-decay 0.1 --eval-iters 0 --log-interval 1 --num-workers 0 --seed 7 --split 80,10,10 --transformer-impl local "
        "--no-create-attention-mask-in-dataloader --use-checkpoint-args"
    )
    taken = train(*on(corpus), f"--load {saved}", base=base)
    assert taken.code == 0, taken.err
    assert taken.losses() == train(*on(corpus), f"--load {saved} --train-iters 6 --lr-decay-iters 4").losses()
    assert "from the checkpoint: " in taken.err and "hidden_size=64" in taken.err
    refused = train(*on(corpus), f"--load {saved} --hidden-size 128", base=base)
    assert refused.code == 2 and "--hidden-size 128: the checkpoint's model has 64" in refused.err
    other = train(*on(write_corpus(tmp_path / "other", seed=5)), f"--load {saved} --seed 8 --hidden-dropout 0.1", base=base)
    assert other.code == 0 and other.column("iteration") == [5, 6]
    assert "--hidden-dropout 0.1 overrides the checkpoint's 0.0" in other.err


def test_use_checkpoint_args_without_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    result = train(*on(corpus), f"--load {tmp_path} --use-checkpoint-args")
    assert result.code in (1, 2) and "iter_0000005" in result.err and "Traceback" not in result.err
