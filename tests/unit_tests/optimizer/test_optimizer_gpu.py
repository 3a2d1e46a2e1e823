"""On a GPU: a whole step without one wait of the host for the device, and the same numbers as on the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.toy import Toy, batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def make(device: str, precision: str, **changes: Any) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "log_num_zeros_in_grad": True, "clip_grad": 0.5}
    settings.update(bf16=precision == "bf16", fp16=precision == "fp16", initial_loss_scale=2.0**10)
    model = Toy().to(device=device, dtype=DTYPES[precision])
    ddp = DistributedDataParallel(SimpleNamespace(), DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    return ddp, get_megatron_optimizer(OptimizerConfig(**{**settings, **changes}), [ddp])


def step(ddp: Any, optimizer: Any, number: int, poison: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    device = next(ddp.parameters()).device
    ddp.zero_grad_buffer()
    loss = ddp(batch(number).to(device)).sum()
    optimizer.scale_loss(loss).backward()
    tokens = torch.tensor(32, device=device)
    if poison:
        ddp.module.fc2.main_grad[1, 2] = float("nan")
    torch.cuda.set_sync_debug_mode("error" if device.type == "cuda" else "default")
    try:
        finalize_model_grads([ddp], tokens)
        success, norm, _ = optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return success, norm


@pytest.mark.parametrize("precision", list(DTYPES))
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_step_neither_waits_nor_differs_from_the_cpu(precision, kind):
    here, there = make("cuda", precision, optimizer=kind), make("cpu", precision, optimizer=kind)
    tolerance = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}[precision]
    for number in range(5):
        success, norm = step(*here, number)
        expected_success, expected_norm = step(*there, number)
        assert success.item() == expected_success.item()
        assert norm.item() == pytest.approx(expected_norm.item(), rel=tolerance)


@pytest.mark.parametrize("precision", list(DTYPES))
def test_a_nan_changes_nothing(precision):
    ddp, optimizer = make("cuda", precision)
    step(ddp, optimizer, 0)
    before = [p.detach().clone() for p in ddp.parameters()] + [t.clone() for s in optimizer.state.values() for t in s.values()]
    success, norm = step(ddp, optimizer, 1, poison=True)
    after = [p.detach() for p in ddp.parameters()] + [t for s in optimizer.state.values() for t in s.values()]
    assert not success.item() and norm.isnan().item()
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    assert optimizer.param_groups[0]["step"].item() == 1.0
    assert optimizer.nonfinite_report() == [("fc2", 1)]
