"""Settings of the optimizer."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.utils import unbuilt_fields, unbuilt_problems

_USED = (
    "fp8_recipe",  # which the model's configuration has too, and what reads it reads there
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "weight_decay",
    "apply_wd_to_qk_layernorm",
    "fp16",
    "bf16",
    "params_dtype",
    "optimizer",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "decoupled_weight_decay",
    "sgd_momentum",
    "clip_grad",
    "grad_norm_skip_threshold",
    "log_num_zeros_in_grad",
    "use_distributed_optimizer",
    "overlap_param_gather",
)
# Read by nobody, and rightly: the training loop times its phases itself.
ANY_VALUE = ("timers", "barrier_with_L1_time")
OPTIMIZERS = ("adam", "sgd")


@dataclass
class OptimizerConfig:
    """The optimizer, its precision, clipping and loss scaling. Names are Megatron's.

    Raises ValueError listing every problem, among them each field that nothing implements yet and that is not at its default.
    """

    lr: float | None = None
    min_lr: float | None = None
    decoupled_lr: float | None = None
    """Maximum learning rate of embedding and output layer, where it differs."""
    decoupled_min_lr: float | None = None
    weight_decay: float = 0.01
    apply_wd_to_qk_layernorm: bool = False
    fp8_recipe: str | None = None
    fp16: bool = False
    """fp16 model parameters: fp32 main parameters and dynamic loss scaling (constant with loss_scale)."""
    bf16: bool = False
    """bf16 model parameters: fp32 main parameters."""
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    params_dtype: torch.dtype = torch.float32
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    optimizer: str = "adam"
    loss_scale: float | None = None
    """A constant loss scale; None: dynamic with fp16, none otherwise."""
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    """Steps in a row without overflow after which the loss scale doubles."""
    hysteresis: int = 2
    """Overflows after which the loss scale halves."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-08
    decoupled_weight_decay: bool = True
    """AdamW; False adds the decay to the gradient."""
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_split_qkv: bool = True
    muon_nesterov: bool = False
    muon_scale_mode: str = "spectral"
    muon_fp32_matmul_prec: str = "medium"
    muon_coefficient_type: str = "quintic"
    muon_num_ns_steps: int = 5
    muon_tp_mode: str = "duplicated"
    muon_use_syrk: bool = False
    muon_extra_scale_factor: float = 1.0
    muon_scalar_optimizer: str = "adam"
    lion_beta1: float = 0.95
    lion_beta2: float = 0.98
    soap_shampoo_beta: float = 0.95
    soap_use_kl_shampoo: bool = True
    adaptive_muon_moment2_method: str = "adamuon"
    adaptive_muon_beta2: float = 0.95
    adaptive_muon_eps: float = 1e-08
    use_distributed_optimizer: bool = False
    """Each data-parallel rank keeps state for, and updates, its part of every gradient bucket."""
    use_layer_wise_distributed_optimizer: bool = False
    overlap_param_gather: bool = False
    """As DistributedDataParallelConfig, which decides, has it."""
    overlap_param_gather_with_optimizer_step: bool = False
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    grad_norm_skip_threshold: float = math.inf
    """A step whose gradient norm is above it is skipped."""
    log_num_zeros_in_grad: bool = False
    barrier_with_L1_time: bool = False
    timers: Any = None
    config_logger_dir: str = ""
    optimizer_cuda_graph: bool = False

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each."""
        found = unbuilt_problems(self, UNBUILT)
        if self.optimizer not in OPTIMIZERS:
            found.append(f"optimizer {self.optimizer!r} is not built yet; choose one of {', '.join(OPTIMIZERS)}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            found.append("overlap_param_gather needs use_distributed_optimizer: turn that on, or overlap_param_gather off")
        if self.fp16 and self.bf16:
            found.append("fp16 and bf16 were both given: keep one of them")
        if self.loss_scale is not None and not self.loss_scale > 0:
            found.append(f"loss scale {self.loss_scale} must be above 0, or None for a dynamic one")
        if not 0 < self.min_loss_scale <= self.initial_loss_scale:
            found.append(f"loss scales: 0 < minimum {self.min_loss_scale} <= initial {self.initial_loss_scale} must hold")
        if self.loss_scale_window < 1 or self.hysteresis < 1:
            found.append(f"loss scale window {self.loss_scale_window} and hysteresis {self.hysteresis} must be at least 1")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                found.append(f"{name} is {getattr(self, name)}: it must be at least 0 and below 1")
        for name in ("weight_decay", "clip_grad", "adam_eps"):
            if getattr(self, name) < 0:
                found.append(f"{name} is {getattr(self, name)}: it must be at least 0")
        return found

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ValueError("\n".join(found))


UNBUILT = unbuilt_fields(OptimizerConfig, _USED + ANY_VALUE)
