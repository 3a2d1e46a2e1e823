"""The shape and arithmetic of a transformer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F

from megatron.core.broken_rule import BrokenRule, config_sentence
from megatron.core.context_parallel.combinations import context_parallel_problems
from megatron.core.fp8.settings import fp8_problems
from megatron.core.fusions.fused_layer_norm import NORMALIZATIONS
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.init import init_method_normal, scaled_init_method_normal
from megatron.core.transformer.attention_masks import window_problems
from megatron.core.transformer.cuda_graph_rules import cuda_graph_problems
from megatron.core.transformer.default_sizes import default_ffn_hidden_size, default_kv_channels
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.latent_attention_settings import latent_attention_problems
from megatron.core.transformer.moe.settings import moe_layer_pattern, moe_problems
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout, layout_problems
from megatron.core.transformer.recompute import DEFAULT_MODULES, recompute_problems
from megatron.core.transformer.transformer_engine_rules import transformer_engine_problems
from megatron.core.utils import unbuilt_fields, unbuilt_problems

# Of the fields that TransformerConfig itself declares.
_USED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "kv_channels",
    "hidden_dropout",
    "attention_dropout",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "rotary_interleaved",
    "apply_residual_connection_post_layernorm",
    "softmax_scale",
    "window_size",
    "window_attn_skip_freq",
    "cp_comm_type",
    "init_method",
    "output_layer_init_method",
    "init_method_std",
    "embedding_init_method",
    "embedding_init_method_std",
    "apply_query_key_layer_scaling",
    "attention_softmax_in_fp32",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
    "attention_backend",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "cuda_graph_impl",
    "cuda_graph_warmup_steps",
    "transformer_impl",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "calculate_per_token_loss",
    "logical_vocab_size",
    "softmax_vocab_size",
    "num_moe_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_grouped_gemm",
    "moe_router_topk",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_router_dtype",
    "moe_router_force_load_balancing",
    "moe_router_fusion",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "moe_token_dispatcher_type",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_shared_expert_overlap",
    "moe_permute_fusion",
    "moe_layer_recompute",
    "fp8",
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "tp_only_amax_red",
    "multi_latent_attention",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
)
# Read by no module of core, and rightly: whatever they are, the same is computed.
ANY_VALUE = (
    "masked_softmax_fusion",  # attention_backend chooses the kernel
    "persist_layer_norm",  # torch chooses the kernel
    "moe_per_layer_logging",  # the training loop's business
    "moe_enable_deepep",  # flex is DeepEP's with it and without
    "moe_flex_dispatcher_backend",
    "fp8_interval",  # scales are updated every step
)


@dataclass
class TransformerConfig(ModelParallelConfig):
    """Names and defaults are Megatron's. Sizes are those of the whole model, before any split.

    Raises ValueError with every problem at once, among them each field that nothing implements yet and that is not at its default.
    """

    # Shape. None: derived (ffn_hidden_size and kv_channels as default_sizes.py says, num_query_groups = heads).
    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None

    # Parts.
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    gated_linear_unit: bool = False
    activation_func: Callable = F.gelu
    normalization: str = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    qk_layernorm: bool = False
    rotary_interleaved: bool = False
    apply_residual_connection_post_layernorm: bool = False
    softmax_scale: float | None = None
    # Keys before and after a query that it sees beside its own, -1: all. skip_freq N: every Nth layer sees all; a list: 1 for a window.
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: int | list[int] | None = None

    # Initial weights. None: normal(0, init_method_std); output layers normal(0, init_method_std / sqrt(2 num_layers)).
    init_method: Callable | None = None
    output_layer_init_method: Callable | None = None
    init_method_std: float = 0.02
    embedding_init_method: Callable | None = None
    embedding_init_method_std: float | None = None

    # Arithmetic.
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    fp32_residual_connection: bool = False

    # Fast paths; each has a plain twin. With bias_activation_fusion GELU is its tanh approximation, as in Megatron.
    bias_activation_fusion: bool = False
    bias_dropout_fusion: bool = False
    masked_softmax_fusion: bool = False
    apply_rope_fusion: bool = False
    memory_efficient_layer_norm: bool = False
    persist_layer_norm: bool = False
    attention_backend: AttnBackend = AttnBackend.auto
    transformer_impl: str = "local"

    # Recompute, see recompute.py. recompute_modules None: core_attn, with selective granularity.
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    distribute_saved_activations: bool = False

    # Pipeline split. A layout (pipeline_parallel_layer_layout.py) says it whole; without one the layers are divided evenly.
    pipeline_model_parallel_layout: str | list[list[str]] | PipelineParallelLayerLayout | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    # How ranks that share a sequence attend (context_parallel/combinations.py): one kind, or one for each layer. None: p2p.
    cp_comm_type: str | list[str] | None = None

    # Loss. The two sizes are ours; None: the whole table. logical_vocab_size: rows beyond it are no tokens (they start at 0, do not count
    # as parameters). softmax_vocab_size: rows beyond it, padding for the tensor split alone, never enter the softmax.
    calculate_per_token_loss: bool = False
    logical_vocab_size: int | None = None
    softmax_vocab_size: int | None = None

    # Mixture of experts; what may be asked for stands in moe/settings.py. moe_ffn_hidden_size None: ffn_hidden_size.
    num_moe_experts: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_grouped_gemm: bool = False
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str | list[str] = "aux_loss"
    moe_aux_loss_coeff: float | list[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_dtype: str | None = None
    moe_router_force_load_balancing: bool = False
    moe_router_fusion: bool = False
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_token_dispatcher_type: str = "allgather"
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: str = "deepep"
    moe_permute_fusion: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_shared_expert_overlap: bool = False
    moe_layer_recompute: bool = False
    moe_per_layer_logging: bool = False

    # FP8 products in decoder layers, see fp8/. fp8: e4m3, or hybrid with e5m2 for gradients; margin: powers of two that delayed scales stay
    # below what the history allows; history_len in steps. tp_only_amax_red: delayed scales follow from this replica's data alone.
    fp8: str | None = None
    fp8_recipe: str = "delayed"
    fp8_margin: int = 0
    fp8_interval: int = 1
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: str = "most_recent"
    fp8_wgrad: bool = True
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    tp_only_amax_red: bool = False

    # Other kinds of models. multi_latent_attention needs an MLATransformerConfig.
    multi_latent_attention: bool = False
    # Layers that predict tokens further ahead (multi_token_prediction.py), and the weight of their losses' mean.
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    cuda_graph_impl: str = "none"
    cuda_graph_warmup_steps: int = 3
    cpu_offloading: bool = False

    def __post_init__(self) -> None:
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = default_ffn_hidden_size(self.hidden_size, gated=False)  # the command line alone narrows a gated MLP
        if self.kv_channels is None:
            self.kv_channels = default_kv_channels(self.hidden_size, self.num_attention_heads)
        if self.apply_query_key_layer_scaling:
            self.attention_softmax_in_fp32 = True
        if self.init_method is None:
            self.init_method = init_method_normal(self.init_method_std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(self.init_method_std, max(self.num_layers, 1))
        if self.embedding_init_method is None:
            std = self.embedding_init_method_std
            self.embedding_init_method = self.init_method if std is None else init_method_normal(std)
        super().__post_init__()
        if self.recompute_modules is None and self.recompute_granularity == "selective":
            self.recompute_modules = list(DEFAULT_MODULES)

    def recomputes(self, module: str) -> bool:
        """Whether the part `module` of every layer is to be run again in the backward pass (selective recompute)."""
        return module in (self.recompute_modules or ())

    def moe_layers(self) -> list[int]:
        """By layer of the whole model: 1 for a mixture of experts, 0 for a dense one."""
        return [0] * self.num_layers if self.num_moe_experts is None else moe_layer_pattern(self.moe_layer_freq, self.num_layers)

    def problems(self) -> list[str]:
        found = super().problems() + unbuilt_problems(self, UNBUILT)
        recompute = (self.recompute_granularity, self.recompute_method, self.recompute_num_layers, self.recompute_modules)
        found += [config_sentence(self, broken) for broken in recompute_problems(*recompute, self.num_layers)]
        sizes = ("num_layers", "hidden_size", "num_attention_heads")
        small = [f"{name} {getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        if small:
            return found + small
        found += self._layout_problems()
        heads, groups, tp = self.num_attention_heads, self.num_query_groups, self.tensor_model_parallel_size
        if self.kv_channels is None:
            found.append(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {heads}; give kv_channels, or a hidden size of "
                f"{-(-self.hidden_size // heads) * heads}"
            )
        if not groups or heads % groups:
            found.append(f"num_attention_heads {heads} is not divisible by num_query_groups {groups}; use a divisor of {heads}")
        elif groups % tp:
            found.append(f"num_query_groups {groups} is not divisible by tensor_model_parallel_size {tp}; each rank needs whole groups")
        if self.ffn_hidden_size and self.ffn_hidden_size % tp:
            found.append(f"ffn_hidden_size {self.ffn_hidden_size} is not divisible by tensor_model_parallel_size {tp}")
        found += [config_sentence(self, broken) for broken in self._broken_rules()]
        found += [
            f"{name} {getattr(self, name)} must be in [0, 1)"
            for name in ("hidden_dropout", "attention_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.normalization not in NORMALIZATIONS:
            found.append(f"normalization {self.normalization!r} must be {' or '.join(map(repr, NORMALIZATIONS))}")
        if self.apply_query_key_layer_scaling and self.softmax_scale == 0:
            found.append("softmax_scale must not be 0")
        if self.mtp_num_layers is not None and self.mtp_num_layers < 1:
            found.append(f"mtp_num_layers {self.mtp_num_layers} must be at least 1; leave it out for none")
        if self.mtp_num_layers and isinstance(self.window_attn_skip_freq, list):
            found.append("window_attn_skip_freq: a list says nothing of the layers of mtp_num_layers; give a number")
        if self.multi_latent_attention and not isinstance(self, MLATransformerConfig):
            found.append("multi_latent_attention needs MLATransformerConfig, which has its sizes; build that")
        return found

    def _layout_problems(self) -> list[str]:
        if self.pipeline_model_parallel_layout is None or self.pipeline_model_parallel_size < 1:
            return []
        others = ["num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"]
        others += ["account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"]
        found = [f"{name} excludes pipeline_model_parallel_layout, which says it; leave it out" for name in others if getattr(self, name)]
        chunks = self.virtual_pipeline_model_parallel_size or 1
        sizes = (self.pipeline_model_parallel_size, chunks, self.num_layers, self.mtp_num_layers)
        return found + layout_problems(self.pipeline_model_parallel_layout, *sizes)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Of those that the command line asks too; the sizes are at least 1."""
        yield from moe_problems(self, self.num_moe_experts)
        yield from context_parallel_problems(
            self.context_parallel_size,
            self.cp_comm_type,
            self.hierarchical_context_parallel_sizes,
            num_layers=self.num_layers,
            groups=self.num_query_groups,
            tp_size=self.tensor_model_parallel_size,
            attention_dropout=self.attention_dropout,
            window=self.window_size is not None,
            overlap=self.cp_comm_overlap,
        )
        yield from cuda_graph_problems(self, self.num_moe_experts)
        if self.transformer_impl == "transformer_engine":
            yield from transformer_engine_problems(self, self.num_moe_experts)
        yield from window_problems(self.window_size, self.window_attn_skip_freq, self.num_layers)
        yield from fp8_problems(self, self.num_layers, self.num_query_groups)


@dataclass
class MLATransformerConfig(TransformerConfig):
    """A TransformerConfig with multi-latent attention (DeepSeek-V2): queries, keys and values are made of low-rank latents.

    A head's queries and keys have qk_head_dim channels without and qk_pos_emb_head_dim with positions, its values v_head_dim. With
    qk_layernorm the latents are normalized. kv_channels is not read.
    """

    multi_latent_attention: bool = True
    q_lora_rank: int | None = 512  # None: queries come from the hidden states at once
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    normalization: str = "RMSNorm"

    # Positions. yarn: see yarn_rotary_pos_embedding.py; what follows rotary_percent is read by it alone.
    rope_type: str = "yarn"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    rotary_scaling_factor: float = 40
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    cache_mla_latents: bool = False
    mla_down_proj_fusion: bool = False

    def __post_init__(self) -> None:
        if self.kv_channels is None:
            self.kv_channels = default_kv_channels(self.hidden_size, self.num_attention_heads) or self.qk_head_dim
        super().__post_init__()

    def problems(self) -> list[str]:
        found = super().problems() + unbuilt_problems(self, MLA_UNBUILT)
        if not self.multi_latent_attention:
            return [*found, "MLATransformerConfig is for multi_latent_attention; build a TransformerConfig for a model without"]
        return found + [config_sentence(self, broken) for broken in latent_attention_problems(self, self.num_query_groups)]


UNBUILT = unbuilt_fields(TransformerConfig, _USED + ANY_VALUE)
MLA_UNBUILT = {"cache_mla_latents": False, "mla_down_proj_fusion": False}
