"""pretrain_gpt.py with faults on demand: --poison KIND at --poison-iteration, on --poison-rank only.

weight: a weight becomes NaN. loss, inf: the loss becomes NaN or infinite. gradient: the loss is right and its gradient NaN.
crash: an exception of ours, in the forward pass; data, backward, optimizer, save: the same there. sleep: it never goes on.
kill: the process ends as if the kernel had killed it. slow: every step takes 0.2 s.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt
from megatron.core.dist_checkpointing import saving
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.training import get_args, pretrain
from pretrain_gpt import model_provider, train_valid_test_datasets_provider

TASKS = Path("/proc/self/task")
POISONED_WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
KINDS = ("weight", "loss", "inf", "gradient", "crash", "data", "backward", "optimizer", "save", "sleep", "kill", "slow")


def fail(*unused: Any, **also_unused: Any) -> Any:
    raise RuntimeError("a fault of ours")


def poison_later(poison: str | None, data_iterator: Any) -> None:
    """Faults outside of the forward pass, in what this iteration does next."""
    if poison == "data":
        data_iterator.iterator = map(fail, range(9))
    if poison == "optimizer":
        MegatronOptimizer.step = fail
    if poison == "save":
        saving.write_shards = fail


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--poison", choices=KINDS)
    parser.add_argument("--poison-iteration", type=int, default=3)
    parser.add_argument("--poison-rank", type=int, default=0)
    return parser


class NaNGradient(torch.autograd.Function):
    """The identity, with a gradient of NaN."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * torch.nan


def forward_step(data_iterator: Iterator, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    args = get_args()
    args.forward_calls = getattr(args, "forward_calls", 0) + model.training
    iteration = args.iteration + (args.forward_calls - 1) // get_num_microbatches() + 1
    poison = args.poison if iteration == args.poison_iteration and args.rank == args.poison_rank and model.training else None
    if args.poison == "slow":
        time.sleep(0.2)
    if poison == "weight":
        dict(unwrap_model(model).named_parameters())[POISONED_WEIGHT].data[0, 0] = torch.nan
    if poison == "crash":
        fail()
    if poison == "sleep":
        time.sleep(1000)
    poison_later(poison, data_iterator)
    if poison == "kill":
        time.sleep(2)  # its last sign of life is of this iteration
        os.kill(os.getpid(), signal.SIGKILL)
    losses, loss_func = pretrain_gpt.forward_step(data_iterator, model)
    if poison in ("loss", "inf"):
        losses = losses * {"loss": torch.nan, "inf": torch.inf}[poison]
    if poison == "gradient":
        losses = NaNGradient.apply(losses)
    if poison == "backward":
        losses.register_hook(fail)
    return losses, loss_func


if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step, extra_args_provider=add_arguments
    )
    if TASKS.exists():  # threads that outlive training may abort the process when Python ends
        print("threads at the end:", *sorted((task / "comm").read_text().strip() for task in TASKS.iterdir()))
