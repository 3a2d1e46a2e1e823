"""How a model is spread over ranks and in which precision: the settings that layers, schedules and gradients share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.enums import PIPELINE_SCHEDULES
from megatron.core.utils import unbuilt_fields, unbuilt_problems

_USED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "perform_initialization",
    "use_cpu_initialization",
    "init_seed",
    "fp16",
    "bf16",
    "params_dtype",
    "pipeline_dtype",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "gradient_accumulation_fusion",
    "pipeline_schedule",
    "tp_comm_overlap",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
    "cp_comm_overlap",
    "overlap_p2p_comm",
    "microbatch_group_size_per_vp_stage",
)
# Read by no module of core, and rightly: whatever they are, the same is computed.
ANY_VALUE = (
    "hierarchical_context_parallel_sizes",  # parallel_state makes groups of these sizes; TransformerConfig says what is wrong with them
    "deterministic_mode",  # device.set_deterministic, which the program calls, tells torch
    "batch_p2p_comm",  # transfers between the same computations always go as one batch
    "batch_p2p_sync",  # nothing waits for the device
    "overlap_p2p_comm_warmup_flush",  # warm-up and flush are overlapped as all the rest is
    "deallocate_pipeline_outputs",  # what was received by the next stage is let go of in any case
    "cross_entropy_loss_fusion",  # there is one cross-entropy, and it is fused
    "timers",  # the training loop times its phases itself
    "barrier_with_L1_time",
)


@dataclass
class ModelParallelConfig:
    """Names and defaults are Megatron's.

    Raises ValueError with every problem that `problems` finds, among them each field that nothing implements yet and that is not at its
    default.
    """

    # Sizes of the axes, in ranks.
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: list[int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None

    # Initial weights. init_seed is ours: values depend on it, the checkpoint key and the layer, never on the layout.
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    init_seed: int = 1234

    # Precision.
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    pipeline_dtype: torch.dtype | None = None
    deterministic_mode: bool = False

    # Set by the training loop, called by schedules.
    timers: Any = None
    finalize_model_grads_func: Callable | None = None
    grad_scale_func: Callable | None = None
    no_sync_func: Callable | list[Callable] | None = None
    grad_sync_func: Callable | list[Callable] | None = None
    param_sync_func: Callable | list[Callable] | None = None

    # Linears write their weight gradient straight into the gradient buffer (tensor_parallel/weight_grad.py).
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False

    # Communication of sequence parallelism behind the matrix products (tensor_parallel/comm_overlap.py): gathering for column-parallel
    # linears and back through row-parallel ones, scattering after row-parallel ones, scattering of column-parallel ones' gradients.
    tp_comm_overlap: bool = False
    tp_comm_overlap_ag: bool = True
    tp_comm_overlap_rs: bool = True
    tp_comm_overlap_rs_dgrad: bool = False
    cp_comm_overlap: bool = False  # ours: the ring's transfers by copy engines (context_parallel/ring_exchange.py)
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"

    # Pipeline communication.
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = False  # stages compute meanwhile, in every schedule; False: each batch is waited for at once
    overlap_p2p_comm_warmup_flush: bool = False
    batch_p2p_comm: bool = True
    batch_p2p_sync: bool = True
    deallocate_pipeline_outputs: bool = False
    microbatch_group_size_per_vp_stage: int | None = None  # micro batches that pass a chunk before the next does. None: the stages
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    barrier_with_L1_time: bool = True
    pipeline_schedule: str = "1f1b"  # ours; one of enums.PIPELINE_SCHEDULES. 1f1b is interleaved where stages have several chunks

    def __post_init__(self) -> None:
        if self.fp16 and self.params_dtype is torch.float32:
            self.params_dtype = torch.float16
        if self.bf16 and self.params_dtype is torch.float32:
            self.params_dtype = torch.bfloat16
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        problems = self.problems()
        if problems:
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each: what was given, the rule, a value that works."""
        found = [
            f"{name} {getattr(self, name)} must be at least 1"
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
            )
            if getattr(self, name) < 1
        ]
        if self.fp16 and self.bf16:
            found.append("fp16 and bf16 are both on; choose one")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            found.append("sequence_parallel needs tensor_model_parallel_size > 1, which is 1; turn it off or split over 2 ranks")
        if self.tp_comm_overlap and not self.sequence_parallel:
            found.append("tp_comm_overlap needs sequence_parallel: it hides the gathering and scattering of tokens; turn it on too")
        if self.tp_comm_overlap_rs_dgrad and not self.tp_comm_overlap:
            found.append("tp_comm_overlap_rs_dgrad needs tp_comm_overlap; turn it on too")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            found.append("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size > 1, which is 1; leave it unset")
        group, stages = self.microbatch_group_size_per_vp_stage, self.pipeline_model_parallel_size
        if group is not None and (self.virtual_pipeline_model_parallel_size or 1) == 1:
            found.append(f"microbatch_group_size_per_vp_stage {group} needs virtual_pipeline_model_parallel_size > 1; leave it unset")
        elif group is not None and group < stages:
            found.append(f"microbatch_group_size_per_vp_stage {group} must be at least pipeline_model_parallel_size {stages}")
        if self.pipeline_schedule not in PIPELINE_SCHEDULES:
            found.append(f"pipeline_schedule {self.pipeline_schedule!r} must be one of {', '.join(PIPELINE_SCHEDULES)}")
        if self.pipeline_schedule == "zero-bubble" and (self.virtual_pipeline_model_parallel_size or 1) > 1:
            found.append("pipeline_schedule 'zero-bubble' has one chunk a stage; leave virtual_pipeline_model_parallel_size unset")
        if self.pipeline_schedule == "zero-bubble" and not self.gradient_accumulation_fusion:
            found.append("pipeline_schedule 'zero-bubble' needs gradient_accumulation_fusion: only those weight gradients can be put off")
        return found + unbuilt_problems(self, UNBUILT)


UNBUILT = unbuilt_fields(ModelParallelConfig, _USED + ANY_VALUE)
