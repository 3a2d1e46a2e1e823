"""The model: size, layers' content, attention, positions, norms, recompute."""
# ruff: noqa: RUF009  (flag() makes a dataclass field)

from dataclasses import dataclass

from megatron.core.transformer.cuda_graph_rules import IMPLEMENTATIONS
from megatron.core.transformer.latent_attention_settings import ROPE_TYPES
from megatron.core.transformer.recompute import BUILT_MODULES, DEFAULT_MODULES, GRANULARITIES, METHODS
from megatron.training.config.converters import moe_freq_type, tuple_type
from megatron.training.config.fields import ARCHITECTURE, SETTING, flag


@dataclass
class ModelFlags:
    """Size and content of the layers."""

    num_layers: int | None = flag(None, "Transformer layers of the whole model.", minimum=1, checkpoint=ARCHITECTURE)
    hidden_size: int | None = flag(None, "Width of the residual stream.", minimum=1, checkpoint=ARCHITECTURE)
    ffn_hidden_size: int | None = flag(
        None,
        "Inner width of the MLP. Default: 4 times --hidden-size; with --swiglu 8/3 of it, rounded down to a multiple of 64.",
        minimum=1,
        checkpoint=ARCHITECTURE,
    )
    seq_length: int | None = flag(None, "Length of a training sample.", unit="tokens", minimum=1, checkpoint=SETTING)
    swiglu: bool = flag(False, "MLP with a gate and SiLU instead of GELU.", checkpoint=ARCHITECTURE)
    squared_relu: bool = flag(False, "relu(x)^2 instead of GELU.", checkpoint=ARCHITECTURE)
    quick_geglu: bool = flag(False, "MLP with a gate and x * sigmoid(1.702 x).", checkpoint=ARCHITECTURE)
    openai_gelu: bool = flag(False, "GELU by its tanh approximation.", checkpoint=ARCHITECTURE)
    add_bias_linear: bool = flag(True, "No biases in the linear layers.", names=("--disable-bias-linear",), checkpoint=ARCHITECTURE)
    untie_embeddings_and_output_weights: bool = flag(
        False, "The output head has a weight of its own instead of the embedding's.", checkpoint=ARCHITECTURE
    )
    hidden_dropout: float = flag(0.1, "Dropout of each block's output before the residual.", minimum=0.0, below=1.0, checkpoint=SETTING)
    init_method_std: float = flag(
        0.02, "Standard deviation of the initial weights; output layers of blocks have it divided by sqrt(2 num_layers).", minimum=0.0
    )
    embedding_init_method_std: float | None = flag(
        None, "Standard deviation of the initial embeddings. Default: --init-method-std.", minimum=0.0
    )
    perform_initialization: bool = flag(True, "Leave the weights as they are allocated.", names=("--no-initialization",))
    use_cpu_initialization: bool | None = flag(
        None, "Draw the initial weights on the CPU; another device draws other values from the same seed."
    )
    deprecated_use_mcore_models: bool = flag(
        False, "The models of megatron.core.", names=("--use-mcore-models",), no_effect="there are no others"
    )


@dataclass
class AttentionFlags:
    """Self attention."""

    num_attention_heads: int | None = flag(None, "Query heads.", minimum=1, checkpoint=ARCHITECTURE)
    kv_channels: int | None = flag(
        None, "Width of one head. Default: --hidden-size / --num-attention-heads.", minimum=1, checkpoint=ARCHITECTURE
    )
    group_query_attention: bool = flag(False, "Several query heads share a key and value head.", checkpoint=ARCHITECTURE)
    num_query_groups: int = flag(1, "Key and value heads, with --group-query-attention.", minimum=1, checkpoint=ARCHITECTURE)
    add_qkv_bias: bool = flag(False, "A bias in the QKV projection, also with --disable-bias-linear.", checkpoint=ARCHITECTURE)
    attention_dropout: float = flag(0.1, "Dropout of the attention probabilities.", minimum=0.0, below=1.0, checkpoint=SETTING)
    window_size: tuple[int, int] | None = flag(
        None,
        "Keys before and after a query that it sees beside its own, as (before,after); -1: all. A causal mask holds in addition.",
        type=tuple_type,
        checkpoint=ARCHITECTURE,
    )
    window_attn_skip_freq: int | list[int] | None = flag(
        None,
        "With --window-size: N, every Nth layer sees everything; or a list such as [1,1,1,0]*8, 1 for a layer with the window.",
        type=moe_freq_type,
        checkpoint=ARCHITECTURE,
    )
    apply_query_key_layer_scaling: bool = flag(
        False,
        "Scores are divided by the layer's number before, and multiplied by it inside, the softmax (for fp16); "
        "the softmax is then in fp32.",
        checkpoint=SETTING,
    )
    attention_softmax_in_fp32: bool = flag(False, "The softmax of the plain attention is in fp32.")
    masked_softmax_fusion: bool = flag(
        True,
        "Scale, mask and softmax of the plain attention apart.",
        names=("--no-masked-softmax-fusion",),
        no_effect="they always are apart",
    )
    attention_backend: str = flag(
        "auto",
        "Kernel of attention. `flash`, `fused`, `auto`: scaled_dot_product_attention or Transformer Engine's choice; `flash` and `auto` "
        "by FlashAttention-3 where flash_attn_interface can be imported on a Hopper GPU; `unfused`, `local`: plain torch.",
        choices=("flash", "fused", "unfused", "local", "auto"),
    )
    use_flash_attn: bool = flag(False, "The same as --attention-backend flash where that was not given.")


@dataclass
class LatentAttentionFlags:
    """Multi-latent attention (DeepSeek-V2 and V3); all of it needs --multi-latent-attention."""

    multi_latent_attention: bool = flag(
        False,
        "Queries, keys and values are made of low-rank latents, and positions have channels of their own; with --qk-layernorm the latents "
        "are normalized.",
        checkpoint=ARCHITECTURE,
    )
    q_lora_rank: int | None = flag(
        None, "Width of the latent of queries. Default: none, they come from the hidden states.", minimum=1, checkpoint=ARCHITECTURE
    )
    kv_lora_rank: int = flag(32, "Width of the latent of keys and values.", minimum=1, checkpoint=ARCHITECTURE)
    qk_head_dim: int = flag(128, "Channels without positions of a head's queries and keys.", minimum=1, checkpoint=ARCHITECTURE)
    qk_pos_emb_head_dim: int = flag(
        64, "Channels with positions of a head's queries; the keys' are the same for all heads.", minimum=2, checkpoint=ARCHITECTURE
    )
    v_head_dim: int = flag(128, "Channels of a head's values.", minimum=1, checkpoint=ARCHITECTURE)
    rope_type: str | None = flag(
        None,
        "How they turn: yarn stretches slow frequencies by --rotary-scaling-factor, for longer sequences than the 4096 tokens of a first "
        "training. Default: yarn.",
        choices=ROPE_TYPES,
        checkpoint=ARCHITECTURE,
    )
    rotary_scaling_factor: float = flag(1.0, "How far.", minimum=1.0, checkpoint=ARCHITECTURE)
    mscale: float = flag(
        1.0,
        "With yarn what turns is multiplied by (0.1 mscale ln factor + 1) / (0.1 mscale_all_dim ln factor + 1), ...",
        minimum=0.0,
        checkpoint=ARCHITECTURE,
    )
    mscale_all_dim: float = flag(
        0.0, "... and the scores by the square of 0.1 mscale_all_dim ln factor + 1.", minimum=0.0, checkpoint=ARCHITECTURE
    )


@dataclass
class MultiTokenPredictionFlags:
    """Layers behind the last one that predict tokens further ahead (DeepSeek-V3); they are there for training alone."""

    mtp_num_layers: int | None = flag(None, "How many, and so how far ahead. Default: none.", minimum=1, checkpoint=ARCHITECTURE)
    mtp_loss_scaling_factor: float = flag(
        0.1, "Weight of the mean of their losses beside the model's own.", minimum=0.0, checkpoint=SETTING
    )


@dataclass
class PositionFlags:
    """Where a token stands."""

    max_position_embeddings: int | None = flag(
        None, "Longest sequence; rows of the table of learned positions.", unit="tokens", minimum=1, checkpoint=SETTING
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "Kind of position embedding.",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        built=("learned_absolute", "rope", "none"),
        checkpoint=ARCHITECTURE,
    )
    use_rotary_position_embeddings: bool = flag(False, "The same as --position-embedding-type rope.")
    add_position_embedding: bool = flag(
        True,
        "Deprecated: no learned table; allowed with --position-embedding-type rope or none.",
        names=("--no-position-embedding",),
    )
    rotary_base: int = flag(10000, "Base of the rotary frequencies.", minimum=1, checkpoint=ARCHITECTURE)
    rotary_percent: float = flag(1.0, "Share of a head's channels that rotates.", above=0.0, maximum=1.0, checkpoint=ARCHITECTURE)
    rotary_interleaved: bool = flag(False, "Pairs are neighbouring channels instead of the two halves.", checkpoint=ARCHITECTURE)
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "Positions are divided by it, to stretch a model to longer sequences.", minimum=1, checkpoint=ARCHITECTURE
    )
    use_rope_scaling: bool = flag(False, "Llama 3.1's stretching of the low rotary frequencies.", checkpoint=ARCHITECTURE)
    rope_scaling_factor: float = flag(8.0, "How far --use-rope-scaling stretches them.", minimum=1.0, checkpoint=ARCHITECTURE)
    apply_rope_fusion: bool = flag(True, "Rotary embedding by plain torch.", names=("--no-rope-fusion",))


@dataclass
class NormFlags:
    """Normalization."""

    normalization: str = flag("LayerNorm", "Kind of norm.", choices=("LayerNorm", "RMSNorm"), checkpoint=ARCHITECTURE)
    layernorm_epsilon: float = flag(
        1e-05, "Added to the variance before the root.", names=("--norm-epsilon",), above=0.0, checkpoint=ARCHITECTURE
    )
    layernorm_zero_centered_gamma: bool = flag(
        False, "The norm's weight is stored minus 1.", names=("--apply-layernorm-1p",), checkpoint=ARCHITECTURE
    )
    qk_layernorm: bool = flag(False, "Norms of query and key heads before the scores.", checkpoint=ARCHITECTURE)
    no_persist_layer_norm: bool = flag(False, "Not the persistent norm kernel.", no_effect="there is one norm kernel")


@dataclass
class KernelFlags:
    """Which of equivalent implementations computes; results agree to rounding, but for GELU's."""

    transformer_impl: str = flag(
        "transformer_engine",
        "Backend of the layers. Without Transformer Engine, a GPU or this flag `local` is used, and said so.",
        choices=("local", "transformer_engine", "inference_optimized"),
        built=("local", "transformer_engine"),
    )
    bias_gelu_fusion: bool = flag(True, "GELU is the exact one, not its tanh approximation.", names=("--no-bias-gelu-fusion",))
    bias_swiglu_fusion: bool = flag(True, "Bias and SwiGLU apart.", names=("--no-bias-swiglu-fusion",))
    bias_dropout_fusion: bool = flag(True, "Bias, dropout, residual and norm apart.", names=("--no-bias-dropout-fusion",))
    cross_entropy_loss_fusion: bool = flag(
        False, "Cross entropy by one kernel.", no_effect="one implementation, which takes the loss a block at a time"
    )
    cross_entropy_fusion_impl: str = flag("native", "Whose cross entropy.", choices=("native", "te"), built=("native",))
    gradient_accumulation_fusion: bool = flag(
        True,
        "Weight gradients are computed first and added after, not by one matrix product.",
        names=("--no-gradient-accumulation-fusion",),
    )


@dataclass
class GraphFlags:
    """CUDA graphs: kernels that are recorded once and launched together, for models whose kernels are too short for the host."""

    cuda_graph_impl: str = flag(
        "none",
        "`local`: forward and backward of every layer, and of those with experts what comes before them; `full_iteration`: all forwards "
        "and backwards of a step.",
        choices=("none", "local", "transformer_engine", "full_iteration"),
        built=IMPLEMENTATIONS,
    )
    cuda_graph_warmup_steps: int = flag(3, "What runs as usual before it is recorded: micro batches of a layer, or steps.", minimum=1)
    enable_cuda_graph: bool = flag(False, "The same as --cuda-graph-impl local.")
    te_rng_tracker: bool = flag(
        False, "Random states that CUDA graphs can record.", no_effect="they are used wherever there are graphs, and draw the same numbers"
    )


@dataclass
class RecomputeFlags:
    """Activations that the backward pass makes again instead of keeping them; what is trained is the same to the bit."""

    recompute_granularity: str | None = flag(
        None,
        "`full`: whole layers, as --recompute-method says; `selective`: the parts that --recompute-modules names.",
        choices=GRANULARITIES,
    )
    recompute_method: str | None = flag(
        None,
        "With full: `uniform` drops what is inside each run of --recompute-num-layers layers, `block` that of the first "
        "--recompute-num-layers layers of a stage alone.",
        choices=METHODS,
    )
    recompute_num_layers: int | None = flag(None, "Layers of a run (uniform), or that recompute (block).", minimum=1)
    recompute_modules: list[str] | None = flag(
        None, f"With selective: any of {', '.join(BUILT_MODULES)}. Default: {' '.join(DEFAULT_MODULES)}.", nargs="+"
    )
    recompute_activations: bool = flag(False, "The same as --recompute-granularity selective.")
