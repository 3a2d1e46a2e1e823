"""The optimizer against torch's plain ones, its gate against poisoned gradients, and its state against itself."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from tests.unit_tests.distributed.toy import Toy, batch

CONFIG = SimpleNamespace(calculate_per_token_loss=False)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def make(precision="fp32", reduce_in_fp32=True, seed=1, **changes) -> tuple[Any, Any]:
    settings: dict[str, Any] = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
    }
    config = OptimizerConfig(**{**settings, **changes})
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=reduce_in_fp32)
    ddp = DistributedDataParallel(CONFIG, ddp_config, Toy(seed).to(DTYPES[precision]))
    return ddp, get_megatron_optimizer(config, [ddp])


def backward(ddp, optimizer, step):
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    loss = ddp(batch(step)).mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads([ddp])
    return loss.detach()


def train(ddp, optimizer, steps) -> list[tuple[float, float, bool]]:
    out = []
    for step in steps:
        loss = backward(ddp, optimizer, step)
        success, norm, _ = optimizer.step()
        out.append((loss.item(), norm.item(), success.item()))
    return out


def plain_optimizer(kind, model, lr=1e-2):
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind](groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, foreach=False)


SETTINGS: dict[str, dict[str, Any]] = {"adamw": {}, "adam": {"decoupled_weight_decay": False}, "sgd": {"optimizer": "sgd"}}


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 2e-4)])
@pytest.mark.parametrize("kind", list(SETTINGS))
def test_equals_torch_over_20_steps(kind, precision, tolerance):
    """Clipped at 0.5, so that most steps are scaled; the unused parameter's gradient is zero."""
    ddp, optimizer = make(precision, clip_grad=0.5, **SETTINGS[kind])
    reference = Toy().to(DTYPES[precision])
    plain = plain_optimizer(kind, reference)
    clipped = 0
    for step in range(20):
        loss = backward(ddp, optimizer, step)
        success, norm, num_zeros = optimizer.step()
        plain.zero_grad(set_to_none=False)
        expected_loss = reference(batch(step)).mean()
        expected_loss.backward()
        for param in reference.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()
        clipped += bool(expected_norm > 0.5)
        assert success and num_zeros is None
        torch.testing.assert_close(norm, expected_norm.to(norm.dtype), rtol=tolerance, atol=0)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=tolerance, atol=0)
    assert clipped > 10
    for (name, mine), theirs in zip(ddp.module.named_parameters(), reference.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=name)


def test_bf16_equals_a_loop_over_fp32_copies():
    ddp, optimizer = make("bf16", clip_grad=0.0)
    assert isinstance(optimizer, Float16OptimizerWithFloat16Params)
    reference = Toy().bfloat16()
    copies = [p.detach().float().requires_grad_() for p in reference.parameters()]
    plain = plain_optimizer("adamw", SimpleNamespace(parameters=lambda: copies))
    for step in range(10):
        backward(ddp, optimizer, step)
        optimizer.step()
        for main, mine in zip(copies, ddp.module.parameters()):
            main.grad = mine.main_grad.clone()
        plain.step()
        for param, main in zip(reference.parameters(), copies):
            param.data.copy_(main.data)
    for mine, theirs in zip(ddp.module.parameters(), reference.parameters()):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
    assert (optimizer.params[0].main_param.bfloat16() == optimizer.params[0].model_param).all()


@pytest.mark.parametrize(("precision", "reduce_in_fp32"), [("bf16", True), ("bf16", False), ("fp16", True), ("fp16", False)])
def test_half_precision_trains(precision, reduce_in_fp32):
    ddp, optimizer = make(precision, reduce_in_fp32, initial_loss_scale=2.0**12)
    results = train(ddp, optimizer, [0] * 30)
    fp32 = train(*make("fp32"), [0] * 30)
    assert results[-1][0] < results[0][0] * 0.6
    assert results[0][1] == pytest.approx(fp32[0][1], rel=0.02)  # the norm does not show the loss scale
    assert results[-1][0] == pytest.approx(fp32[-1][0], rel=0.05)


def snapshot(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    return state, [p.detach().clone() for p in optimizer.get_parameters()]


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("precision", "kind"), [("fp32", "adamw"), ("fp32", "sgd"), ("bf16", "adamw"), ("fp64", "adamw")])
def test_a_nonfinite_gradient_changes_nothing_in_that_step(precision, kind, bad):
    """Parameters, moments and step counts stand still, and training goes on as if the step had not been."""
    ddp, optimizer = make(precision, **SETTINGS[kind])
    clean_ddp, clean = make(precision, **SETTINGS[kind])
    train(ddp, optimizer, range(3))
    train(clean_ddp, clean, range(3))
    before = snapshot(optimizer)
    backward(ddp, optimizer, 3)
    ddp.module.fc2.main_grad[1, 2] = bad
    success, norm, _ = optimizer.step()
    assert not success and not norm.isfinite()
    assert_same(snapshot(optimizer), before)
    assert (optimizer.num_nan.item(), optimizer.num_skipped.item()) == (1, 0)
    assert optimizer.nonfinite_report() == [("fc2", 1)]
    assert optimizer.nonfinite_report() == []
    assert train(ddp, optimizer, range(3, 6)) == train(clean_ddp, clean, range(3, 6))
    assert_same(snapshot(optimizer), snapshot(clean))


def test_a_poisoned_weight_never_spreads():
    """Training must not go on with NaN unnoticed: every later step is skipped and counted; other weights keep their values."""
    ddp, optimizer = make()
    train(ddp, optimizer, range(2))
    with torch.no_grad():
        ddp.module.fc1[0, 0] = float("nan")
    before = [p.detach().clone() for p in ddp.parameters()]
    losses = train(ddp, optimizer, range(2, 5))
    assert all(loss != loss for loss, _, _ in losses) and optimizer.num_nan.item() == 3
    assert all(torch.equal(p.nan_to_num(), was.nan_to_num()) for p, was in zip(ddp.parameters(), before))


def test_fp16_overflow_halves_the_scale_until_steps_succeed():
    ddp, optimizer = make("fp16", initial_loss_scale=2.0**26, hysteresis=1)
    results = train(ddp, optimizer, range(20))
    skipped = [success for _, _, success in results].count(False)
    assert 0 < skipped < 19
    assert optimizer.num_skipped.item() == skipped and optimizer.num_nan.item() == 0
    assert optimizer.get_loss_scale().item() == 2.0 ** (26 - skipped)
    assert optimizer.param_groups[0]["step"].item() == 20 - skipped


def test_constant_loss_scale_is_neutral():
    scaled = train(*make("fp32", loss_scale=1024.0), range(3))
    plain = train(*make("fp32"), range(3))
    for left, right in zip(scaled, plain):
        assert left == pytest.approx(right, rel=1e-5)


def test_grad_norm_skip_threshold():
    ddp, optimizer = make(grad_norm_skip_threshold=1e-3)
    before = snapshot(optimizer)
    assert train(ddp, optimizer, range(2))[0][2] is False
    assert_same(snapshot(optimizer), before)
    assert (optimizer.num_skipped.item(), optimizer.num_nan.item()) == (2, 0)
    assert optimizer.nonfinite_report() == []


def test_num_zeros_and_params_norm():
    ddp, optimizer = make(log_num_zeros_in_grad=True)
    backward(ddp, optimizer, 0)
    expected = sum(int((p.main_grad == 0).sum()) for p in ddp.parameters())
    torch.testing.assert_close(
        optimizer.get_params_norm(), torch.cat([p.detach().double().reshape(-1) for p in ddp.parameters()]).norm(), rtol=1e-6, atol=0
    )
    assert optimizer.step()[2].item() == expected >= 21


def test_incomplete_gradients_are_refused():
    ddp, optimizer = make()
    ddp.zero_grad_buffer()
    ddp(batch(0)).mean().backward()
    with pytest.raises(AssertionError, match="main_grad of unused"):
        optimizer.step()


def test_a_model_that_is_not_wrapped():
    model = Toy()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95), [model])
    ddp, wrapped = make()
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).mean().backward()
        optimizer.step()
    train(ddp, wrapped, range(3))
    for mine, theirs in zip(model.parameters(), ddp.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_param_groups():
    _, optimizer = make(decoupled_lr=5e-3, decoupled_min_lr=5e-4, min_lr=1e-3)
    assert isinstance(optimizer, FP32Optimizer)
    described = [
        (group["wd_mult"], group["is_decoupled_lr"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in optimizer.param_groups
    ]
    assert described == [(1.0, False, 1e-2, 0.1, 3), (1.0, True, 5e-3, 0.1, 1), (0.0, False, 1e-2, 0.0, 2)]
    assert (optimizer.param_groups[1]["max_lr"], optimizer.param_groups[1]["min_lr"]) == (5e-3, 5e-4)
    assert [entry.name for entry in optimizer.params][:3] == ["fc1", "fc2", "unused"]


def test_qk_layernorm_decays_only_when_asked():
    from megatron.core.optimizer import has_weight_decay

    vector, matrix = torch.zeros(3), torch.zeros(3, 3)
    name = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert not has_weight_decay(name, vector) and has_weight_decay(name, vector, apply_wd_to_qk_layernorm=True)
    assert not has_weight_decay("decoder.final_layernorm.weight", vector, apply_wd_to_qk_layernorm=True)
    assert has_weight_decay("x.weight", matrix) and not has_weight_decay("experts.bias", matrix)


def test_a_tied_parameter_is_taken_once():
    model: Any = Toy()
    model.output_layer = torch.nn.Module()
    model.output_layer.weight = model.embedding.word_embeddings.weight
    ddp = DistributedDataParallel(CONFIG, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95), [ddp])
    assert len(optimizer.params) == 6
    assert train(ddp, optimizer, range(3)) == train(*make(), range(3))


@pytest.mark.parametrize(
    ("precision", "kind"), [("fp32", "adamw"), ("fp32", "adam"), ("fp32", "sgd"), ("bf16", "adamw"), ("bf16", "sgd"), ("fp16", "adamw")]
)
@pytest.mark.parametrize("in_parts", [False, True])
def test_resume_is_bit_equal(precision, kind, in_parts, tmp_path):
    changes = {**SETTINGS[kind], "initial_loss_scale": 2.0**26, "hysteresis": 1, "loss_scale_window": 3}
    ddp, optimizer = make(precision, **changes)
    train(ddp, optimizer, range(15))
    tensors = [dict(optimizer.state[entry.main_param], main=entry.main_param.detach()) for entry in optimizer.params]
    torch.save((ddp.state_dict(), optimizer.state_dict(), optimizer.common_state_dict(), tensors), tmp_path / "state.pt")
    expected = train(ddp, optimizer, range(15, 25))
    model_state, state, common, tensors = torch.load(tmp_path / "state.pt", weights_only=True)
    ddp2, resumed = make(precision, seed=2, **changes)
    ddp2.load_state_dict(model_state)
    if in_parts:  # as a distributed checkpoint does: common values, then tensors read in place
        resumed.load_common_state_dict(common)
        with torch.no_grad():
            for entry, saved in zip(resumed.params, tensors):
                entry.main_param.copy_(saved.pop("main"))
                for name, tensor in resumed.state[entry.main_param].items():
                    tensor.copy_(saved[name])
    else:
        resumed.load_state_dict(state)
    assert train(ddp2, resumed, range(15, 25)) == expected
    assert_same(snapshot(resumed), snapshot(optimizer))


def test_state_dict_form():
    ddp, optimizer = make()
    train(ddp, optimizer, range(2))
    state = optimizer.state_dict()
    assert [(group["step"], group["params"]) for group in state["param_groups"]] == [(2, [0, 1, 2, 3]), (2, [4, 5])]
    assert set(state["state"][0]) == {"exp_avg", "exp_avg_sq"}
    _, half = make("fp16")
    assert set(half.state_dict()) == {"optimizer", "fp32_from_fp16_params", "grad_scaler"}


def test_load_refuses_what_does_not_fit():
    _, optimizer = make()
    _, decoupled = make(decoupled_lr=1e-3)
    with pytest.raises(ValueError, match="no parameter group with"):
        decoupled.load_common_state_dict(optimizer.common_state_dict())
    state = optimizer.state_dict()
    state["state"][0] = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    with pytest.raises(ValueError, match="exp_avg of fc1, which needs shape"):
        make()[1].load_state_dict(state)


def test_reload_model_params():
    ddp, optimizer = make("bf16")
    ddp.load_state_dict(Toy(seed=5).bfloat16().state_dict())
    optimizer.reload_model_params()
    assert all(torch.equal(entry.main_param, entry.model_param.float()) for entry in optimizer.params)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon"}, "'muon' is not built yet"),
        ({"fp16": True, "bf16": True}, "keep one"),
        ({"use_layer_wise_distributed_optimizer": True}, "use_layer_wise_distributed_optimizer"),
        ({"clip_grad": -1.0}, "clip_grad is -1.0"),
        ({"loss_scale": 0.0}, "loss scale 0.0"),
    ],
)
def test_refused_settings(changes, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(lr=1e-3, **changes)


def test_refused_models():
    with pytest.raises(ValueError, match=r"OptimizerConfig\.lr is None"):
        get_megatron_optimizer(OptimizerConfig(), [Toy()])
    with pytest.raises(ValueError, match="fp16 needs loss scaling"):
        get_megatron_optimizer(OptimizerConfig(lr=1e-3), [Toy().half()])
    with pytest.raises(ValueError, match="no trainable"):
        get_megatron_optimizer(OptimizerConfig(lr=1e-3), [Toy().requires_grad_(False)])
