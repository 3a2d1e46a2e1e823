"""The parts of a mixture of experts, by backend."""

from megatron.core.extensions.transformer_engine import TESpecProvider
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, GroupedMLPSubmodules, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec


def get_moe_module_spec_for_backend(backend: BackendSpecProvider, moe_grouped_gemm: bool | None = False) -> ModuleSpec:
    """A MoELayer whose experts are one grouped parameter a linear, or one MLP each; shared experts are built where the config has any."""
    mlp = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    if moe_grouped_gemm:
        linear = backend.grouped_linear()
        experts = ModuleSpec(module=GroupedMLP, submodules=GroupedMLPSubmodules(linear, linear))
    else:
        experts = ModuleSpec(module=SequentialMLP, submodules=mlp)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=TopKRouter))


def get_moe_module_spec(use_te: bool | None = False, num_experts: int | None = None, moe_grouped_gemm: bool | None = False) -> ModuleSpec:
    """The same of the local backend, or of Transformer Engine's."""
    if num_experts is None:
        raise ValueError("get_moe_module_spec: num_experts is None; give the number of experts, such as 8")
    return get_moe_module_spec_for_backend(TESpecProvider() if use_te else LocalSpecProvider(), moe_grouped_gemm)
