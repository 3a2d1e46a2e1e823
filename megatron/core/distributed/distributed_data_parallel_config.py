"""Settings of data-parallel gradient reduction."""

from dataclasses import dataclass

import torch

from megatron.core.utils import unbuilt_fields, unbuilt_problems

_USED = (
    "grad_reduce_in_fp32",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "check_for_nan_in_grad",
    "check_for_large_grads",
    "bucket_size",
    "num_buckets",
    "pad_buckets_for_high_nccl_busbw",
    "average_in_collective",
    "num_distributed_optimizer_instances",
    "reduce_scatter_with_fp32_accumulation",
)
# Read by nobody, and rightly: the same is computed whatever they are.
ANY_VALUE = (
    "fp8_param_gather",  # parameters are gathered in their own dtype, and each rank quantizes them
    "align_param_gather",  # every stage gathers as it needs to
    "gradient_reduce_div_fusion",  # a bucket is divided in one pass before its reduction, or by the collective
)


@dataclass
class DistributedDataParallelConfig:
    """How gradients are kept and reduced. Names are Megatron's.

    Raises ValueError listing every problem, among them each field that nothing implements yet and that is not at its default.
    """

    grad_reduce_in_fp32: bool = False
    """Keep and reduce gradients in fp32, whatever the parameters are."""
    overlap_grad_reduce: bool = False
    """Reduce a bucket as soon as the last micro batch's backward has filled it."""
    overlap_param_gather: bool = False
    """With use_distributed_optimizer and overlap_grad_reduce: a module's forward waits only for its own parameters."""
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    """Each data-parallel rank reduces and updates its part of every bucket; parameters are gathered after the update."""
    num_distributed_optimizer_instances: int = 1
    """With use_distributed_optimizer: data-parallel ranks form so many instances. State is spread over the ranks of each; gradients are
    reduced within an instance, then over the instances, so that less crosses slow links; parameters are gathered within it."""
    check_for_nan_in_grad: bool = False
    """Count non-finite local gradients before they are reduced, on the device, so that the rank can be named (nonfinite_report)."""
    check_for_large_grads: bool = False
    """With check_for_nan_in_grad: count gradients whose norm is above 1e10 too."""
    bucket_size: int | None = None
    """Elements in a bucket, at least; None means max(40 million, 1 million * data-parallel size)."""
    num_buckets: int | None = None
    """Buckets per buffer, instead of bucket_size."""
    pad_buckets_for_high_nccl_busbw: bool = False
    """Pad buckets to a multiple of 65536 elements too."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """With use_distributed_optimizer and 16-bit gradients: ranks exchange them as they are, and add them up in fp32."""
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    average_in_collective: bool = False
    """Let the collective average (NCCL) instead of scaling before a sum. Over a power of two of ranks it does anyway: the same bits."""
    fp8_param_gather: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    megatron_fsdp_version: int = 1
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def problems(self) -> list[str]:
        """What is wrong with these settings, one sentence each."""
        found = unbuilt_problems(self, UNBUILT)
        for name in ("bucket_size", "num_buckets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}: it must be at least 1, or None for the default")
        if self.bucket_size is not None and self.num_buckets is not None:
            found.append(f"bucket_size {self.bucket_size} and num_buckets {self.num_buckets} were both given: keep one of them")
        if self.num_distributed_optimizer_instances < 1:
            found.append(f"num_distributed_optimizer_instances {self.num_distributed_optimizer_instances} must be at least 1")
        if self.num_distributed_optimizer_instances > 1 and not self.use_distributed_optimizer:
            found.append(
                f"num_distributed_optimizer_instances {self.num_distributed_optimizer_instances} needs use_distributed_optimizer: turn "
                "that on, or leave it at 1"
            )
        if self.reduce_scatter_with_fp32_accumulation and not self.use_distributed_optimizer:
            found.append("reduce_scatter_with_fp32_accumulation needs use_distributed_optimizer: turn that on; all-reduces sum as they do")
        for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
            if self.overlap_param_gather and not getattr(self, name):
                found.append(f"overlap_param_gather needs {name}: turn that on, or overlap_param_gather off")
        return found

    def __post_init__(self) -> None:
        if found := self.problems():
            raise ValueError("\n".join(found))


UNBUILT = unbuilt_fields(DistributedDataParallelConfig, _USED + ANY_VALUE)
