"""The optimizer that a training loop sees: main parameters, loss scale, clipping, skipped steps. `step` never waits for the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.fp8.model import Fp8Steps
from megatron.core.optimizer.clip_grads import NormGroups, NormPlan, clip_coefficient
from megatron.core.optimizer.fused_optimizers import FusedOptimizer, Part
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

# What a checkpoint's group must share with ours to be the same group, with the value that an older one means by leaving it out
_GROUP_IDENTITY = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}


def group_identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes parameter groups of two runs, or of two pipeline stages, the same group."""
    return tuple(group.get(key, default) for key, default in _GROUP_IDENTITY.items())


@dataclass
class OptimizedParam:
    """A model parameter and the tensor that is updated for it: itself, or its fp32 copy when it is fp16 or bf16."""

    name: str
    model_param: nn.Parameter
    main_param: torch.Tensor

    @property
    def has_copy(self) -> bool:
        return self.main_param is not self.model_tensor

    @property
    def model_tensor(self) -> torch.Tensor:
        """What of the model's parameter `main_param` stands for: all of it."""
        return self.model_param


class MegatronOptimizer:
    """Mixed precision, clipping and gating around a fused optimizer.

    Args:
        optimizer: over the main parameters, group by group.
        params: in the order of the optimizer's groups.
        model_chunks: whose parameters they are, for checkpoints.
        grad_scaler: None without loss scaling.
        pg_collection: `mp`, `tp`, `pp` are used, and of experts `tp_ep_pp`, `expt_tp`.

    A step with a gradient that is not finite changes nothing (parameters, moments, step count), decided on the device. Counters there:
    `num_skipped` (overflows under loss scaling, and norms above grad_norm_skip_threshold) and `num_nan` (non-finite without it).
    """

    def __init__(
        self,
        optimizer: FusedOptimizer,
        config: OptimizerConfig,
        init_state_fn: Callable[[Any], None] = lambda x: None,
        *,
        params: Sequence[OptimizedParam],
        model_chunks: Sequence[nn.Module] = (),
        grad_scaler: MegatronGradScaler | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection()
        self.optimizer = optimizer
        self.config = config
        self.params = list(params)
        self.model_chunks = list(model_chunks)
        self.grad_scaler = grad_scaler
        self.device = self.params[0].main_param.device
        self.norm_plan = self._make_norm_plan(groups)
        self.num_skipped = torch.zeros((), dtype=torch.int32, device=self.device)
        self.num_nan = torch.zeros((), dtype=torch.int32, device=self.device)
        self._nonfinite_counts = torch.zeros(len(self.params), dtype=torch.int32, device=self.device)
        self._nonfinite_reported = [0] * len(self.params)
        self._one = torch.ones((), dtype=torch.float32, device=self.device)
        self.fp8 = Fp8Steps.of(self.model_chunks, groups)
        init_state_fn(optimizer)

    def _make_norm_plan(self, groups: ProcessGroupCollection) -> NormPlan:
        named = [(entry.name, entry.model_param) for entry in self.params]
        experts = NormGroups(groups.tp_ep_pp, groups.expt_tp)
        return NormPlan(named, NormGroups(groups.mp, groups.tp), groups.pp, experts=experts)

    # --- a step ---

    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Update the model from its main gradients, which are divided by loss scale and clipping in place.

        Returns (0-d bool: the update was made; 0-d gradient norm before clipping, without the loss scale: nan or inf when a gradient
        was; 0-d number of zero gradients, with log_num_zeros_in_grad).
        """
        grads = self.prepare_grads()
        norm, nonfinite = self.norm_plan.norm(grads)
        num_zeros = self.norm_plan.count_zeros(grads) if self.config.log_num_zeros_in_grad else None
        loss_scale = self.get_loss_scale()
        norm = norm / loss_scale
        bad = ~norm.isfinite()
        skip = bad | (norm > self.config.grad_norm_skip_threshold)
        self._nonfinite_counts += nonfinite
        self.step_with_ready_grads(grads, self._grad_scale(norm, loss_scale), skip)
        if self.fp8 is not None:
            self.fp8.end_step()
        if self.grad_scaler is None:
            self.num_nan += bad
            self.num_skipped += skip & ~bad
        else:
            self.num_skipped += skip
            self.grad_scaler.update(bad)
        return ~skip, norm if grads[0].dtype == torch.float64 else norm.float(), num_zeros

    def prepare_grads(self) -> list[torch.Tensor]:
        """The gradients in the main parameters' dtypes and order: main_grad, or `grad` where a model was not wrapped."""
        grads = []
        for entry in self.params:
            param = entry.model_param
            assert getattr(param, "main_grad_filled", True), f"main_grad of {entry.name} is not complete: call finish_grad_sync before step"
            grad = getattr(param, "main_grad", param.grad)
            grads.append(torch.zeros_like(entry.main_param) if grad is None else grad.to(entry.main_param.dtype))
        return grads

    def _grad_scale(self, norm: torch.Tensor, loss_scale: torch.Tensor) -> torch.Tensor | None:
        """What gradients are divided by: loss scale / clip coefficient, in one pass with the update."""
        if self.config.clip_grad > 0.0:
            return loss_scale / clip_coefficient(norm, self.config.clip_grad)
        return loss_scale if self.grad_scaler is not None else None

    def step_with_ready_grads(self, grads: Sequence[torch.Tensor], grad_scale: torch.Tensor | None, skip: torch.Tensor) -> None:
        """Update main parameters (unless the 0-d bool `skip`), then the model's."""
        self._update(grads, grad_scale, skip)

    def _update(
        self, grads: Sequence[torch.Tensor], grad_scale: torch.Tensor | None, skip: torch.Tensor, parts: Sequence[Part] | None = None
    ) -> None:
        """parts: see FusedOptimizer.step."""
        targets = [entry.model_tensor if entry.has_copy else None for entry in self.params]
        self.optimizer.step(grads, grad_scale, skip.float(), targets, parts)

    @torch.no_grad()
    def _copy_main_to_model(self) -> None:
        """Round fp32 main parameters to the model's dtype."""
        copies = [entry for entry in self.params if entry.has_copy]
        if copies:
            torch._foreach_copy_([entry.model_tensor for entry in copies], [entry.main_param for entry in copies])

    @torch.no_grad()
    def reload_model_params(self, state_dict: Any = None) -> None:
        """Take the main parameters from the model's, after those were loaded without an optimizer's state."""
        for entry in self.params:
            if entry.has_copy:
                entry.main_param.copy_(entry.model_tensor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop `grad` of every parameter. Main gradients belong to DistributedDataParallel.zero_grad_buffer."""
        for entry in self.params:
            if set_to_none or entry.model_param.grad is None:
                entry.model_param.grad = None
            else:
                entry.model_param.grad.zero_()

    # --- what a loop asks for ---

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with `lr`, `weight_decay`, `wd_mult`, `lr_mult`, `is_decoupled_lr`, `step` (0-d tensor), `params` (main)."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return self.optimizer.state

    def get_parameters(self) -> list[nn.Parameter]:
        return [entry.model_param for entry in self.params]

    def get_loss_scale(self) -> torch.Tensor:
        """0-d fp32 tensor on the device; 1 without loss scaling."""
        return self._one if self.grad_scaler is None else self.grad_scaler.scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` to call backward on."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    def get_grad_norm(self) -> torch.Tensor:
        """Norm of the present main gradients (0-d fp64), loss scale removed. A collective."""
        return self.norm_plan.norm(self.prepare_grads())[0] / self.get_loss_scale()

    def count_zeros(self) -> torch.Tensor:
        """Elements of the present main gradients that are 0 (0-d int64). A collective."""
        return self.norm_plan.count_zeros(self.prepare_grads())

    def get_params_norm(self) -> torch.Tensor:
        """2-norm of the main parameters over the whole model (0-d fp64). A collective."""
        return self.norm_plan.norm([entry.main_param.detach() for entry in self.params])[0]

    def nonfinite_report(self) -> list[tuple[str, int]]:
        """(parameter, steps): gradients that were not finite since the last call, fp16 overflows too. Waits for the device.

        Only parameters of this rank; after the data-parallel reduction, so all data-parallel ranks report the same.
        """
        counts = self._nonfinite_counts.tolist()
        before, self._nonfinite_reported = self._nonfinite_reported, counts
        return [(entry.name, now - then) for entry, now, then in zip(self.params, counts, before) if now > then]

    # --- checkpoints ---

    state_kind = "plain"  # what `model_sharded_state` gives

    def shard_range(self, param: nn.Parameter) -> tuple[int, int] | None:
        """[start, end) of the flattened parameter that the state's tensors are for; None: all of it, in the parameter's shape."""
        return None

    def shard_replica(self, param: nn.Parameter) -> int:
        """Which this is of the ranks that keep the same elements of `shard_range`; the first one's are stored."""
        return 0

    def model_sharded_state(self, kind: str = "plain") -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
        """(record of the parameter table, {state name: tensor of the parameter's local shape, `fp32_param` where there is a copy}).

        The tensors are the optimizer's own, to be written, or read into. After reading fp32_param the model's parameters follow with
        the next step, or from the checkpoint itself. Raises ValueError for a kind other than "plain".
        """
        if kind != "plain":
            raise ValueError(f"optimizer state of kind {kind!r} is not built yet; use 'plain'")
        from megatron.core.tensor_parallel.param_sharding import build_param_table

        by_param = {id(entry.model_param): entry for entry in self.params}
        for chunk in self.model_chunks:
            for record in build_param_table(unwrap_model(chunk)).values():
                entry = by_param.get(id(record.param))
                if entry is not None:
                    tensors = dict(self.optimizer.state[entry.main_param])
                    yield record, tensors | ({"fp32_param": entry.main_param} if entry.has_copy else {})

    def _export_groups(self) -> list[dict[str, Any]]:
        """Groups in plain values, parameters numbered through all groups. Waits for the device."""
        groups = []
        first = 0
        for group in self.param_groups:
            numbers = list(range(first, first + len(group["params"])))
            groups.append({**group, "step": int(group["step"].item()), "params": numbers})
            first += len(numbers)
        return groups

    def _import_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the step counts. Learning rate and weight decay are the scheduler's to restore, betas and eps the configuration's."""
        saved = {group_identity(group): group for group in groups}
        for group in self.param_groups:
            identity = group_identity(group)
            # Experts step with the others: a checkpoint whose experts were in the dense group says the same.
            found = saved.get(identity) or saved.get(group_identity({**group, "is_expert_parallel": False}))
            if found is None:
                raise ValueError(
                    f"the checkpoint's optimizer has no parameter group with ({', '.join(_GROUP_IDENTITY)}) = {identity}; "
                    f"it has {list(saved)}. Give the settings that made it, or load without the optimizer (--no-load-optim)"
                )
            group["step"].fill_(float(found.get("step", 0)))

    def common_state_dict(self) -> dict[str, Any]:
        """What is not a tensor per parameter: groups with the step count, and the loss scale. Plain values."""
        state: dict[str, Any] = {"param_groups": self._export_groups()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_common_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of common_state_dict. Raises ValueError for groups that do not match."""
        self._import_groups(state_dict.get("optimizer", state_dict)["param_groups"])
        if self.grad_scaler is not None and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def state_dict(self) -> dict[str, Any]:
        """Everything, for one file: state by parameter number, groups; with copies, `fp32_from_fp16_params` by group."""
        inner = {
            "state": {number: dict(self.optimizer.state[entry.main_param]) for number, entry in enumerate(self.params)},
            "param_groups": self._export_groups(),
        }
        state: dict[str, Any] = inner
        if any(entry.has_copy for entry in self.params):
            state = {"optimizer": inner, "fp32_from_fp16_params": self._copies_by_group()}
        if self.grad_scaler is not None:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def _copies_by_group(self) -> list[list[torch.Tensor]]:
        copied = {id(entry.main_param) for entry in self.params if entry.has_copy}
        return [[param for param in group["params"] if id(param) in copied] for group in self.param_groups]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read what state_dict wrote, into the tensors that are there. Raises ValueError where it does not fit."""
        self.load_common_state_dict(state_dict)
        saved = state_dict.get("optimizer", state_dict)["state"]
        if len(saved) != len(self.params):
            raise ValueError(f"the checkpoint's optimizer has state for {len(saved)} parameters, the model has {len(self.params)}")
        for number, entry in enumerate(self.params):
            for name, tensor in self.optimizer.state[entry.main_param].items():
                _copy_checked(tensor, saved[number].get(name), f"{name} of {entry.name}")
        if any(entry.has_copy for entry in self.params):
            if "fp32_from_fp16_params" not in state_dict:
                self.reload_model_params()
                return
            for mine, theirs in zip(self._copies_by_group(), state_dict["fp32_from_fp16_params"], strict=True):
                for tensor, value in zip(mine, theirs, strict=True):
                    _copy_checked(tensor, value, "an fp32 main parameter")
            self._copy_main_to_model()


def _copy_checked(target: torch.Tensor, value: torch.Tensor | None, what: str) -> None:
    if value is None or value.shape != target.shape:
        found = "nothing" if value is None else f"shape {tuple(value.shape)}"
        raise ValueError(f"the checkpoint has {found} for {what}, which needs shape {tuple(target.shape)}")
    target.copy_(value)


class FP32Optimizer(MegatronOptimizer):
    """Parameters in fp32 (or fp64), updated themselves."""


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    """Parameters in fp16 or bf16 with fp32 main copies; fp32 ones among them are updated themselves."""
