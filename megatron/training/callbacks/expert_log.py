"""Balance losses and the load of each expert, for the log: collected on the device, read with the log line."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core import device
from megatron.core.transformer.moe.router import RouterStep, routers_of
from megatron.training.callbacks.base import Callback
from megatron.training.train_step import StepRecord, TrainingRun
from megatron.training.training_log import StepNumbers


@dataclass
class ExpertLog(Callback):
    """Keeps each step's numbers of all routers; `read_into` adds them to the steps of a log interval. Comes before the log's callback.

    moe_layers: their numbers in the whole model, from 1. names: of the balance losses, as logged. same_tokens: ranks with copies of the
    same tokens (tensor-parallel ones without sequence parallelism). replicas: micro batches at a time, the data-parallel size.
    """

    moe_layers: list[int]
    num_experts: int
    names: list[str]
    same_tokens: int
    replicas: int
    per_layer: bool

    def __post_init__(self) -> None:
        self.steps: list[list[tuple[int, RouterStep]]] = []

    def on_step_end(self, run: TrainingRun, record: StepRecord) -> None:
        self.steps.append([(router.layer_number or 0, router.last_step) for router in routers_of(run.model)])

    def read_into(self, steps: list[StepNumbers]) -> None:
        """Of each step the mean of each loss over MoE layers, wherever in a pipeline they are, and the experts' tokens. A collective."""
        kept, self.steps = self.steps, []
        assert len(kept) == len(steps), "the expert log and the interval log saw different steps"
        if not kept:
            return
        numbers = self._collected(kept).tolist()  # [step][MoE layer][losses by name, then tokens by expert]
        for step, layers in zip(steps, numbers):
            for column, name in enumerate(self.names):
                by_layer = [row[column] / self.replicas for row in layers]
                step.losses[name] = sum(by_layer) / len(by_layer)
                if self.per_layer:
                    step.details.update({f"moe/{name}_layer_{n}": value for n, value in zip(self.moe_layers, by_layer)})
            step.expert_load = {n: row[len(self.names) :] for n, row in zip(self.moe_layers, layers)}

    def _collected(self, kept: list[list[tuple[int, RouterStep]]]) -> torch.Tensor:
        """[steps, MoE layers, losses + experts], summed over all ranks, copies of tokens counted once."""
        example = next((s.tokens_per_expert for step in kept for _, s in step if s.tokens_per_expert is not None), None)
        where = torch.device("cpu") if example is None else example.device
        if example is None and dist.is_initialized() and dist.get_world_size() > 1:
            where = device.current_device()
        width = len(self.names) + self.num_experts
        table = torch.zeros(len(kept), len(self.moe_layers), width, dtype=torch.float64, device=where)
        for index, step in enumerate(kept):
            for layer, seen in step:
                if seen.tokens_per_expert is None:
                    continue
                row = table[index, self.moe_layers.index(layer)]
                for column, name in enumerate(self.names):
                    row[column] = seen.losses[name].double() / seen.microbatches
                row[len(self.names) :] = seen.tokens_per_expert
        table /= self.same_tokens
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(table)
        return table


def max_over_mean(tokens: list[float]) -> float:
    """How far the busiest expert is above the even share: 1 is balanced."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else 1.0
