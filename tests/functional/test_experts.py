"""Trainings of tiny mixture-of-experts models: resume, sequential and grouped experts, the presets, what the logs say."""

from pathlib import Path

import pytest

from tests.functional.runner import assert_equal_tensors, checkpoint_tensors, on, train

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --no-bias-swiglu-fusion --swiglu"
BIASED = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
SHORT = "--train-iters 2 --lr-decay-iters 4"
KEY = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
BIAS = "decoder.layers.mlp.router.expert_bias"
MIXTRAL = (
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-permute-fusion --swiglu --disable-bias-linear --normalization RMSNorm "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 96 --use-distributed-optimizer --bf16"
)
DEEPSEEK = (
    "--num-layers 3 --num-experts 16 --moe-layer-freq ([0]*1+[1]*2) --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4 --moe-token-dispatcher-type alltoall --moe-router-pre-softmax "
    "--moe-grouped-gemm --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 --moe-router-num-groups 4 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-shared-expert-overlap --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope --qk-layernorm"
)


def test_sequential_and_grouped_experts_train_alike_and_resume_each_others_checkpoints(corpus: Path, tmp_path: Path) -> None:
    sequential = train(*on(corpus, BIASED, f"--save {tmp_path / 's'} --save-interval 2"))
    grouped = train(*on(corpus, BIASED, f"--moe-grouped-gemm --save {tmp_path / 'g'} --save-interval 2"))
    assert grouped.losses() == pytest.approx(sequential.losses(), rel=1e-5)
    tensors = checkpoint_tensors(tmp_path / "s", 4)
    assert tensors[KEY].shape == (2, 4, 96, 64) and tensors[BIAS].shape == (2, 4) and tensors[BIAS].abs().sum() > 0
    (tmp_path / "s" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(*on(corpus, BIASED, f"--moe-grouped-gemm --load {tmp_path / 's'} --save {tmp_path / 'r'} --save-interval 4"))
    assert resumed.losses() == pytest.approx(sequential.losses()[2:], rel=1e-5)
    resumed = train(*on(corpus, BIASED, f"--load {tmp_path / 's'} --save {tmp_path / 'r'} --save-interval 4"))
    assert resumed.losses() == sequential.losses()[2:]
    assert_equal_tensors(checkpoint_tensors(tmp_path / "r", 4), tensors)


def test_balance_losses_and_loads_are_logged(corpus: Path) -> None:
    result = train(*on(corpus, EXPERTS, "--moe-per-layer-logging --train-iters 2 --log-interval 2"))
    (row,) = result.steps
    assert 1.0 <= row["load_balancing_loss"] < 1.5 and row["z_loss"] > 0
    by_layer = [row[f"moe/load_balancing_loss_layer_{layer}"] for layer in (1, 2)]
    assert row["load_balancing_loss"] == pytest.approx(sum(by_layer) / 2)
    assert {layer: sum(tokens) for layer, tokens in row["tokens_per_expert"].items()} == {"1": 2 * 4 * 64 * 2, "2": 2 * 4 * 64 * 2}
    assert all(1.0 <= value <= 4.0 for value in row["expert_load_max_over_mean"].values())
    assert "load_balancing_loss: 1." in result.out and "layer_1" not in result.out


def test_the_logged_balance_loss_is_the_mean_over_the_moe_layers_alone(corpus: Path) -> None:
    result = train(*on(corpus, EXPERTS, "--num-layers 4 --moe-layer-freq ([0]*3+[1]*1) --train-iters 1 --lr-decay-iters 4"))
    assert 1.0 <= result.steps[0]["load_balancing_loss"] < 1.5 and list(result.steps[0]["tokens_per_expert"]) == ["4"]


@pytest.mark.parametrize("preset", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_presets_train(corpus: Path, tmp_path: Path, preset: str) -> None:
    result = train(*on(corpus, preset, f"--train-iters 2 --lr-decay-iters 4 --save {tmp_path}"))
    assert result.code == 0, result.err
    assert len(result.losses()) == 2
    if preset is DEEPSEEK:
        names = checkpoint_tensors(tmp_path, 2).keys()
        assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"} <= names
        assert {"decoder.layers.1.pre_mlp_layernorm.weight", "decoder.layers.1.mlp.router.expert_bias"} <= names


def test_recompute_is_neutral_to_the_bit_with_experts(corpus: Path, tmp_path: Path) -> None:
    flags = f"{BIASED} --moe-shared-expert-intermediate-size 16 --hidden-dropout 0.1 --moe-input-jitter-eps 0.01 {SHORT}"
    plain = train(*on(corpus, flags, f"--save {tmp_path / 'plain'}"))
    for name, recompute in {
        "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "parts": "--recompute-granularity selective --recompute-modules moe_act shared_experts layernorm",
        "moe": "--moe-layer-recompute",
    }.items():
        again = train(*on(corpus, flags, recompute, f"--save {tmp_path / name}"))
        assert again.column("load_balancing_loss") == plain.column("load_balancing_loss")
        assert_equal_tensors(checkpoint_tensors(tmp_path / name, 2), checkpoint_tensors(tmp_path / "plain", 2))
