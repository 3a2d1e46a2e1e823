"""Transformer Engine's linears and norms with our sharding records, initial values and main gradients.

They divide weights and tokens over the tensor-parallel ranks, and communicate, by themselves. Their backward adds the weight's gradient to
main_grad, which DistributedDataParallel has cleared (`adds_to_main_grad`), and gives autograd none.
"""

from typing import Any

import torch

from megatron.core.extensions.transformer_engine.base import TEModule, left_unset, refuse_unsupported, te_pytorch, where_parameters_live
from megatron.core.extensions.transformer_engine.precision import is_delayed, quantizes_now
from megatron.core.extensions.transformer_engine.state import of_each_expert, restore_scales, unpacked
from megatron.core.fusions.fused_layer_norm import is_rms
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import resolve_tp_group, share_of_sum
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.param_sharding import Experts, ParamSharding, Segment, declare, replicated
from megatron.core.transformer.moe.experts import local_experts
from megatron.core.transformer.moe.grouped_gemm import row_bias
from megatron.core.transformer.moe.token_dispatcher import TokenCounts
from megatron.core.utils import Group, divide, get_pg_rank, get_pg_size


def _common_arguments(config: Any) -> dict[str, Any]:
    refuse_unsupported(config)
    return {"init_method": left_unset, "params_dtype": config.params_dtype, "device": where_parameters_live(config)}


class TELinear(TEModule):
    """A linear whose weight is split by parallel_mode "column" (outputs), "row" (inputs), or not (None, "duplicated").

    forward: as ColumnParallelLinear and RowParallelLinear of tensor_parallel/layers.py, whose arguments mean the same here. An expert's
    (`is_expert`) communicates nothing: its dispatcher does.
    """

    te_class = "Linear"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str | None,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: Group = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        segments: tuple[tuple[str, int], ...] | None = None,
        experts: Experts | None = None,
        **norm: Any,
    ) -> None:
        if skip_weight_param_allocation or symmetric_ar_type is not None:
            raise ValueError(f"{type(self).__name__}: skip_weight_param_allocation and symmetric_ar_type are not built yet; leave them out")
        mode = None if parallel_mode == "duplicated" else parallel_mode
        group = resolve_tp_group(tp_group, pg_collection, is_expert) if mode else None
        rank, size = get_pg_rank(group), get_pg_size(group)
        alone = size == 1 or is_expert
        split_here = (size if mode == "row" else 1, size if mode == "column" else 1) if is_expert else (1, 1)
        super().__init__(
            divide(input_size, split_here[0]),
            divide(output_size, split_here[1]),
            sequence_parallel=config.sequence_parallel and not alone,
            tp_group=None if alone else group,
            tp_size=1 if alone else size,
            bias=bias,
            return_bias=bias and (skip_bias_add or (is_expert and mode == "row")),
            parallel_mode=None if is_expert else mode,
            **_common_arguments(config),
            **norm,
        )
        self.config, self.skip_bias_add, self.split_over = config, skip_bias_add, group
        self.bias_is_shared = is_expert and mode == "row"  # by the ranks whose outputs are summed
        rows = tuple(Segment(segment, length, "tp") for segment, length in segments or (("rows0", output_size),))
        if mode == "row":
            rows = (Segment("columns0", input_size, "tp"),)
        expert: dict[str, Any] = {"is_expert": is_expert, "experts": experts}
        place: dict[str, Any] = {"tp_rank": rank, "tp_size": size}
        split = {"column": {"split_dim": 0, "segments": rows}, "row": {"split_dim": 1, "segments": rows}, None: {}}[mode]
        declare(self.weight, ParamSharding((output_size, input_size), **split, **expert), init_method, **place)  # type: ignore[arg-type]
        _written_by_the_linear(self.weight, config)
        if bias:
            split = split if mode == "column" else {}
            partial = ("tp",) if mode == "row" and config.sequence_parallel and not alone else ()
            sharding = ParamSharding((output_size,), grad_partial=partial, **split, **expert)  # type: ignore[arg-type]
            declare(self.bias, sharding, torch.nn.init.zeros_, **place)  # type: ignore[arg-type]

    def forward(self, input_: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.fuse_wgrad_accumulation = self.config.gradient_accumulation_fusion and hasattr(self.weight, "main_grad")
        output = super().forward(input_, is_first_microbatch=is_first_microbatch)
        if not self.return_bias:
            return output, None
        output, bias = output
        if self.bias_is_shared:
            bias = share_of_sum(bias, get_pg_size(self.split_over))
        return (output, bias) if self.skip_bias_add else (output + bias, None)

    @property
    def keeps_scales(self) -> bool:
        return is_delayed(self.config)

    def restore_states(self, states: list[Any]) -> bool:
        """See restore_scales."""
        return restore_scales(self, states)

    def set_extra_state(self, state: Any) -> None:
        restore_scales(self, [state])


def _written_by_the_linear(weight: Any, config: Any) -> None:
    """Tell DistributedDataParallel who writes this gradient."""
    weight.adds_to_main_grad = config.gradient_accumulation_fusion


class TEColumnParallelLinear(TELinear):
    """y = x A^T + b with the outputs split over the ranks, see ColumnParallelLinear."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        stride: int = 1,
        segments: tuple[tuple[str, int], ...] | None = None,
        **others: Any,
    ) -> None:
        segments = segments or tuple((f"rows{index}", divide(output_size, stride)) for index in range(stride))
        super().__init__(
            input_size,
            output_size,
            parallel_mode="column",
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            segments=segments,
            **others,
        )
        if gather_output and self.sequence_parallel:
            raise ValueError(f"{type(self).__name__}: gather_output cannot be used with sequence_parallel; turn one off")
        self.gather_output = gather_output

    def forward(self, input_: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, is_first_microbatch)
        return (gather_from_tensor_model_parallel_region(output, group=self.split_over) if self.gather_output else output), bias


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    """The norm that the config asks for, and a TEColumnParallelLinear on its output. The norm's parameters are `layer_norm_weight` and
    `layer_norm_bias`; under sequence parallelism each rank normalizes its own tokens, before they are gathered."""

    te_class = "LayerNormLinear"

    def __init__(self, input_size: int, output_size: int, *, config: Any, is_expert: bool = False, **others: Any) -> None:
        if is_expert:
            raise ValueError("TELayerNormColumnParallelLinear: an expert's linear has no norm; use TEColumnParallelLinear")
        super().__init__(
            input_size,
            output_size,
            config=config,
            eps=config.layernorm_epsilon,
            normalization="RMSNorm" if is_rms(config.normalization) else "LayerNorm",
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            **others,
        )
        _declare_norm(config, self.layer_norm_weight, None if is_rms(config.normalization) else self.layer_norm_bias)


def _declare_norm(config: Any, weight: Any, bias: Any) -> None:
    sharding = replicated(weight, grad_partial=("tp",) if config.sequence_parallel else ())
    declare(weight, sharding, torch.nn.init.zeros_ if config.layernorm_zero_centered_gamma else torch.nn.init.ones_)
    if bias is not None:
        declare(bias, sharding, torch.nn.init.zeros_)


class TERowParallelLinear(TELinear):
    """y = x A^T + b with the inputs split over the ranks, see RowParallelLinear; x comes split."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        **others: Any,
    ) -> None:
        if not input_is_parallel:
            raise ValueError(f"{type(self).__name__}: input_is_parallel False is not built; scatter the input first")
        super().__init__(
            input_size,
            output_size,
            parallel_mode="row",
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            **others,
        )


class TENorm(TEModule):
    """LayerNorm or RMSNorm, as the config says: [.., hidden_size] -> same. See FusedLayerNorm."""

    @classmethod
    def _te_class_for(cls, config: Any, *args: Any, **kwargs: Any) -> str:
        return "RMSNorm" if is_rms(config.normalization) else "LayerNorm"

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, normalization: str | None = None) -> None:
        if normalization is not None and is_rms(normalization) != is_rms(config.normalization):
            raise ValueError(f"normalization {normalization!r} contradicts config.normalization {config.normalization!r}; leave it out")
        super().__init__(
            hidden_size,
            eps=eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
            device=where_parameters_live(config),
        )
        self.config = config
        _declare_norm(config, self.weight, None if is_rms(config.normalization) else self.bias)


class TEGroupedLinear(TEModule):
    """y = x A_e^T (+ b_e) for rows of several experts in one call, with a parameter `weight<e>` (and `bias<e>`) for each local expert.
    Arguments and forward are those of GroupedLinear in transformer/moe/experts.py; it waits for the counts of rows on the host."""

    te_class = "GroupedLinear"
    num_gemms: int

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        split: str,
        pg_collection: ProcessGroupCollection,
        segments: tuple[tuple[str, int], ...] | None = None,
    ) -> None:
        held, column = local_experts(config, pg_collection), split == "column"
        assert held.count == num_local_experts
        rank, etp = get_pg_rank(pg_collection.expt_tp), get_pg_size(pg_collection.expt_tp)
        super().__init__(
            num_local_experts,
            divide(input_size, 1 if column else etp),
            divide(output_size, etp if column else 1),
            bias=bias,
            return_bias=bias and not column,
            **_common_arguments(config),
        )
        self.config, self.column, self.etp = config, column, etp
        if getattr(config, "fp8", None):  # the kernels take multiples of 16 or 32 rows
            te = te_pytorch(type(self).__name__)
            self.pad, self.unpad = te.Fp8Padding(num_local_experts), te.Fp8Unpadding(num_local_experts)
        rows = tuple(Segment(name, size, "tp") for name, size in segments or ((split, output_size if column else input_size),))
        for index, expert in enumerate(held.held):
            one: dict[str, Any] = {"is_expert": True, "experts": Experts(expert, held.total)}
            weight = getattr(self, f"weight{index}")
            sharding = ParamSharding((output_size, input_size), 0 if column else 1, rows, **one)
            declare(weight, sharding, init_method, tp_rank=rank, tp_size=etp)
            _written_by_the_linear(weight, config)
            if bias:
                sharding = ParamSharding((output_size,), **({"split_dim": 0, "segments": rows} if column else {}), **one)  # type: ignore[arg-type]
                declare(getattr(self, f"bias{index}"), sharding, torch.nn.init.zeros_, tp_rank=rank, tp_size=etp)

    def forward(self, rows: torch.Tensor, counts: TokenCounts, bias_scale: torch.Tensor | None = None) -> torch.Tensor:
        self.fuse_wgrad_accumulation = self.config.gradient_accumulation_fusion and hasattr(self.weight0, "main_grad")
        sizes = counts.tolist()
        quantizes = bool(getattr(self.config, "fp8", None)) and quantizes_now()
        padded, padded_sizes = self.pad(rows, sizes) if quantizes else (rows, sizes)
        output = super().forward(padded, padded_sizes)
        output, biases = output if self.return_bias else (output, None)
        if quantizes:
            output = self.unpad(output, sizes)
        if biases is None:
            return output
        added = row_bias(share_of_sum(torch.stack(list(biases)), self.etp), counts, rows.shape[0])
        return output + (added if bias_scale is None else (added * bias_scale.unsqueeze(-1)).to(output.dtype))

    def get_expert_states(self) -> list[torch.Tensor]:
        """`get_extra_state`, of each local expert."""
        return of_each_expert(self.get_extra_state(), self.num_gemms)

    @property
    def keeps_scales(self) -> bool:
        return is_delayed(self.config)

    def restore_states(self, states: list[Any]) -> bool:
        """Of each local expert; see restore_scales."""
        return restore_scales(self, states)

    def set_extra_state(self, state: Any) -> None:
        if unpacked(state):
            restore_scales(self, of_each_expert(state, self.num_gemms))
