"""The parts of a GPT layer, by backend."""

from typing import Any

from megatron.core.extensions.transformer_engine import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_layer_norm import is_rms
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.process_groups_config import default_pg_collection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, layers_of_stage
from megatron.core.utils import get_pg_rank

# Checkpoints are written under the names of Transformer Engine, whose linears contain the norm before them.
FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Latent attention's input norm is before several linears and fused with none; its latents' norms are.
FUSED_LATENT_NORM_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": FUSED_NORM_KEYS["pre_mlp_layernorm."],
}


def layer_spec(
    backend: BackendSpecProvider,
    *,
    qk_layernorm: bool = False,
    normalization: str | None = None,
    moe: ModuleSpec | None = None,
    multi_latent_attention: bool = False,
) -> ModuleSpec:
    """A pre-norm layer of self-attention and MLP (or `moe`) from a backend's parts. `normalization` is held against the config's when it is
    built. The norms before a MoE and before latent attention are modules of their own in every backend, and have keys of their own."""
    norm_linear = backend.column_parallel_layer_norm_linear()
    norm = _norm(backend, normalization) if norm_linear is None else IdentityOp
    column = backend.column_parallel_linear() if norm_linear is None else norm_linear
    attention = _latent_attention if multi_latent_attention else _attention
    keys = FUSED_LATENT_NORM_KEYS if multi_latent_attention else FUSED_NORM_KEYS
    if moe is not None:
        keys = {name: key for name, key in keys.items() if name != "pre_mlp_layernorm."}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=_norm(backend, normalization) if multi_latent_attention else norm,
            self_attention=attention(backend, column, _norm(backend, normalization, for_qk=True) if qk_layernorm else None),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if moe is None else _norm(backend, normalization),
            mlp=moe or ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=backend.row_parallel_linear())),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,  # also where norms are fused: files in the legacy format name them apart
            precision_context=backend.precision_context(),
        ),
    )


def _attention(backend: BackendSpecProvider, column: Any, head_norm: Any) -> ModuleSpec:
    """`column`: a column-parallel linear, with the norm before it where the backend joins the two."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention(backend: BackendSpecProvider, column: Any, latent_norm: Any) -> ModuleSpec:
    """`column` takes normalized latents where the backend joins it with its norm; without norms of latents it is a linear alone."""
    joined = column is not backend.column_parallel_linear() and latent_norm is not None
    up_projection = column if joined else backend.column_parallel_linear()
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=up_projection,
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=up_projection,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=None if joined else latent_norm,
            kv_layernorm=None if joined else latent_norm,
        ),
    )


def _norm(backend: BackendSpecProvider, normalization: str | None, for_qk: bool = False) -> Any:
    if normalization is None:
        return backend.layer_norm(for_qk=for_qk)
    norm = backend.layer_norm(rms_norm=is_rms(normalization), for_qk=for_qk)
    return ModuleSpec(module=norm, params={"normalization": normalization})


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(f"GPT layer spec: {name} = {value!r} is not built yet; leave it out")


def get_gpt_layer_local_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
) -> ModuleSpec:
    """A layer of the local backend, a mixture of experts where num_experts is given. qk_layernorm: norms of query and key heads, or of the
    latents of multi_latent_attention.

    `fp8` changes nothing: the config says it. `normalization` None: as the config says; another kind is refused when it is built.
    Raises ValueError for an unknown normalization and for what is not built yet.
    """
    _refuse(qk_l2_norm=qk_l2_norm)
    return _layer_spec(LocalSpecProvider(), num_experts, moe_grouped_gemm, qk_layernorm, normalization, multi_latent_attention)


def _layer_spec(
    backend: BackendSpecProvider,
    num_experts: int | None,
    moe_grouped_gemm: bool | None,
    qk_layernorm: bool | None,
    normalization: str | None = None,
    multi_latent_attention: bool | None = False,
) -> ModuleSpec:
    moe = None if num_experts is None else get_moe_module_spec_for_backend(backend, moe_grouped_gemm)
    common: dict[str, Any] = {"qk_layernorm": bool(qk_layernorm), "multi_latent_attention": bool(multi_latent_attention)}
    return layer_spec(backend, normalization=normalization, moe=moe, **common)


def get_gpt_layer_with_transformer_engine_spec(
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    qk_layernorm: bool | None = False,
    multi_latent_attention: bool | None = False,
    fp8: str | None = None,
    qk_l2_norm: bool | None = False,
) -> ModuleSpec:
    """The same of the Transformer Engine backend, which must be installed when the layer is made. `fp8` is the config's business.

    Raises ValueError for what is not built yet.
    """
    _refuse(multi_latent_attention=multi_latent_attention, qk_l2_norm=qk_l2_norm)
    return _layer_spec(TESpecProvider(), num_experts, moe_grouped_gemm, qk_layernorm)


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool | None = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The specs of the layers of this stage (its chunk `vp_stage`), dense or MoE as config.moe_layer_freq says, and the final norm."""
    _refuse(qk_l2_norm=qk_l2_norm)
    backend: BackendSpecProvider = TESpecProvider() if use_transformer_engine else LocalSpecProvider()
    common = (config.qk_layernorm, normalization, config.multi_latent_attention)
    dense = _layer_spec(backend, None, False, *common)
    moe = _layer_spec(backend, config.num_moe_experts, config.moe_grouped_gemm, *common)
    stage = get_pg_rank(default_pg_collection(None).pp) if pp_rank is None else pp_rank
    pattern = config.moe_layers()
    layers = layers_of_stage(config, stage, vp_stage)
    return TransformerBlockSubmodules([moe if pattern[layer] else dense for layer in layers], backend.layer_norm())


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specs of config.mtp_num_layers layers that predict tokens further ahead; None where the model has none of them. For the last
    stage; others build nothing of it.

    Each has a layer as the model's last one is; `spec`, a block's or a layer's, gives it where it has layers.
    """
    if not config.mtp_num_layers:
        return None
    if use_transformer_engine:
        raise ValueError("multi-token prediction is not built for Transformer Engine's layers yet: use --transformer-impl local")
    if isinstance(spec, ModuleSpec):
        layer = spec
    elif spec.layer_specs:
        layer = spec.layer_specs[-1]
    else:  # a stage with the loss alone
        experts = config.num_moe_experts if config.moe_layers()[-1] else None
        layer = get_gpt_layer_local_spec(experts, config.moe_grouped_gemm, config.qk_layernorm, config.multi_latent_attention)
    backend = LocalSpecProvider()
    norm = backend.layer_norm()
    submodules = MultiTokenPredictionLayerSubmodules(norm, norm, backend.column_parallel_linear(), layer, norm)
    depth = ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)
    return MultiTokenPredictionBlockSubmodules([depth] * config.mtp_num_layers)
