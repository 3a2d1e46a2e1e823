"""The table: which ways to spread a model over processes train the same model as one process, on which models, within what.

A new layout is one line in LAYOUTS, a new model one entry of MODELS. `make test` runs the fast lines, `make test-layouts` all of them,
`make test-gpu` all that the machine has GPUs for.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Layout:
    """One way to train. Sizes are in ranks; what is left out is off."""

    name: str
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int | None = None  # chunks of a pipeline rank
    schedule: str = "1f1b"
    first_layers: int | None = None  # layers of the first and last pipeline rank, where the split is uneven
    last_layers: int | None = None
    layers: int = 0  # of the model; 0: one for each chunk, at least 2
    dp: int = 1
    cp: int = 1
    cp_comm_type: str | None = None
    hierarchical_cp: tuple[int, ...] = ()  # ranks of an all-to-all, ranks of a ring
    ep: int = 1  # divides the ranks that are there: it adds none
    etp: int | None = None
    distributed_optimizer: bool = False
    instances: int = 1  # of the distributed optimizer
    overlap: bool = False  # gradient reduction with the backward pass; with the distributed optimizer, gathering with the forward pass
    recompute: str | None = None  # a key of RECOMPUTE
    per_token: bool = False  # the loss is normalised by the step's valid tokens instead of micro batch by micro batch
    microbatches: int = 1  # of a data-parallel rank in one step
    config: dict[str, Any] = field(default_factory=dict, hash=False)  # more of TransformerConfig, that must change nothing
    models: tuple[str, ...] = ("gpt", "llama")
    fast: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_layers(self) -> int:
        return self.layers or max(2, self.pp * (self.vpp or 1))

    @property
    def global_microbatches(self) -> int:
        return self.dp * self.microbatches

    @property
    def plain(self) -> "Layout":
        """The same spread without what must not change a bit."""
        return replace(self, overlap=False, recompute=None)

    @property
    def alone(self) -> "Layout":
        """The same training in one process."""
        return Layout("one process", layers=self.num_layers, microbatches=self.global_microbatches, per_token=self.per_token)


RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
    "latent": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "layernorm"]},
    "latent and core": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "core_attn"]},
}

A2A: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
GROUPED: dict[str, Any] = A2A | {"moe_grouped_gemm": True}
EXPERTS = ("moe", "moe bias")  # models
LATENT = ("mla", "mla moe")
WIDE = ("gpt wide", "llama wide")  # heads, and their groups, for eight ranks
AHEAD = ("mtp", "mtp moe")

LAYOUTS = (
    # one axis
    Layout("dp2", dp=2, overlap=True, fast=True),
    Layout("dp2 accumulation", dp=2, microbatches=2, overlap=True),
    Layout("dp2 per-token", dp=2, microbatches=2, per_token=True),
    Layout("dp2 sharded", dp=2, distributed_optimizer=True),
    Layout("dp2 sharded overlap", dp=2, distributed_optimizer=True, overlap=True, microbatches=2, fast=True),
    Layout("dp4", dp=4),
    Layout("dp4 per-token", dp=4, per_token=True),
    Layout("dp4 sharded per-token", dp=4, distributed_optimizer=True, overlap=True, per_token=True),
    Layout("dp4 instances", dp=4, distributed_optimizer=True, instances=2, overlap=True, microbatches=2),
    Layout("tp2", tp=2, models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 accumulation", tp=2, microbatches=4),
    Layout("tp2 per-token", tp=2, microbatches=2, per_token=True),
    Layout("tp4", tp=4),
    Layout("tp2 sp", tp=2, sp=True, models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 sp accumulation", tp=2, sp=True, microbatches=4),
    Layout("tp4 sp", tp=4, sp=True, microbatches=2),
    Layout("tp2 sp overlap", tp=2, sp=True, config={"tp_comm_overlap": True}, fast=True),
    Layout("tp4 sp overlap", tp=4, sp=True, config={"tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": True}),
    Layout("pp2", pp=2, microbatches=4, models=("gpt", "llama", "norms"), fast=True),
    Layout("pp2 one micro batch", pp=2),
    Layout("pp2 per-token", pp=2, microbatches=4, per_token=True),
    Layout("pp2 uneven", pp=2, first_layers=3, layers=4, microbatches=4),
    Layout("pp2 zero-bubble", pp=2, schedule="zero-bubble", microbatches=4, fast=True),
    Layout("pp2 vpp2", pp=2, vpp=2, microbatches=2, fast=True),
    Layout("pp2 vpp2 more micro batches", pp=2, vpp=2, microbatches=8),
    Layout("pp2 vpp2 uneven", pp=2, vpp=2, last_layers=2, layers=6, microbatches=4),
    Layout("pp2 vpp2 larger groups", pp=2, vpp=2, microbatches=6, config={"microbatch_group_size_per_vp_stage": 4}),
    Layout("pp2 vpp2 waiting", pp=2, vpp=2, microbatches=4, config={"overlap_p2p_comm": False}),
    Layout("pp2 vpp4", pp=2, vpp=4, microbatches=4),
    Layout("pp4", pp=4, microbatches=4),
    Layout("pp4 fewer micro batches than stages", pp=4, microbatches=2, fast=True),
    Layout("pp4 one micro batch", pp=4),
    Layout("pp4 three micro batches", pp=4, microbatches=3),
    Layout("pp4 ends", pp=4, first_layers=1, last_layers=3, layers=8, microbatches=4),
    Layout("pp4 zero-bubble", pp=4, schedule="zero-bubble", microbatches=4),
    Layout("pp4 zero-bubble three micro batches", pp=4, schedule="zero-bubble", microbatches=3),
    Layout("pp2 letters", pp=2, layers=9, microbatches=2, config={"pipeline_model_parallel_layout": "Et*6|t*3L"}),
    Layout(  # a stage with the embedding alone, another with the loss alone
        "pp2 vpp2 letters", pp=2, vpp=2, layers=3, microbatches=4, config={"pipeline_model_parallel_layout": "E|t*2|t|L"}, fast=True
    ),
    Layout("pp4 vpp2", pp=4, vpp=2, microbatches=4),
    Layout("recompute block", recompute="block", microbatches=2),
    # mixtures
    Layout("tp2 recompute", tp=2, recompute="uniform", microbatches=2),
    Layout("tp2 sp recompute", tp=2, sp=True, recompute="selective", microbatches=2, fast=True),
    Layout("pp2 recompute", pp=2, recompute="block", layers=4, microbatches=4),
    Layout("pp2 vpp2 recompute", pp=2, vpp=2, recompute="uniform", microbatches=4),
    Layout("tp2 dp2", tp=2, dp=2, microbatches=2),
    Layout("tp2 dp2 overlap", tp=2, dp=2, microbatches=2, overlap=True),
    Layout("tp2 sp dp2", tp=2, sp=True, dp=2),
    Layout("tp2 sp dp2 per-token", tp=2, sp=True, dp=2, microbatches=2, per_token=True, overlap=True, fast=True),
    Layout(
        "tp2 sp dp2 sharded", tp=2, sp=True, dp=2, distributed_optimizer=True, overlap=True, models=("gpt", "llama", "norms"), fast=True
    ),
    Layout("tp2 pp2", tp=2, pp=2, microbatches=4),
    Layout("tp2 sp pp2", tp=2, sp=True, pp=2, microbatches=4, models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 sp pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, microbatches=4),
    Layout("tp2 pp2 zero-bubble", tp=2, pp=2, schedule="zero-bubble", microbatches=4),
    Layout("pp2 dp2", pp=2, dp=2, microbatches=4),
    Layout("pp2 dp2 per-token", pp=2, dp=2, microbatches=2, per_token=True),
    Layout("pp2 dp2 sharded", pp=2, dp=2, distributed_optimizer=True, overlap=True, microbatches=2, fast=True),
    Layout("pp2 vpp2 dp2 overlap", pp=2, vpp=2, dp=2, overlap=True, microbatches=4),
    Layout("pp2 dp2 overlap zero-bubble", pp=2, dp=2, overlap=True, schedule="zero-bubble", microbatches=4),
    Layout("tp4 dp2", tp=4, dp=2),
    Layout("tp2 sp dp4 accumulation", tp=2, sp=True, dp=4, microbatches=2),
    Layout("tp4 sp dp2 per-token", tp=4, sp=True, dp=2, per_token=True),
    Layout("tp2 sp pp2 dp2 sharded", tp=2, sp=True, pp=2, dp=2, distributed_optimizer=True, overlap=True, microbatches=2, fast=True),
    Layout("tp2 sp pp2 vpp2 dp2 recompute", tp=2, sp=True, pp=2, vpp=2, dp=2, overlap=True, recompute="uniform", microbatches=2),
    Layout("pp4 dp2 sharded per-token", pp=4, dp=2, distributed_optimizer=True, overlap=True, microbatches=4, per_token=True),
    # context parallelism
    Layout("cp2", cp=2, cp_comm_type="p2p", microbatches=2, models=("gpt", "llama", "window"), fast=True),
    Layout("cp2 per-token", cp=2, cp_comm_type="p2p", microbatches=2, per_token=True),
    Layout("cp2 all-gather", cp=2, cp_comm_type="all_gather", microbatches=2, models=("gpt", "llama", "window")),
    Layout("cp2 a2a", cp=2, cp_comm_type="a2a", microbatches=2, models=("llama", "window"), fast=True),
    Layout("cp4", cp=4, cp_comm_type="p2p"),
    Layout("cp4 hierarchical", cp=4, cp_comm_type="a2a+p2p", hierarchical_cp=(2, 2), fast=True),
    Layout("cp2 recompute", cp=2, cp_comm_type="p2p", recompute="uniform", microbatches=2),
    Layout("tp2 sp cp2", tp=2, sp=True, cp=2, cp_comm_type="p2p", models=("gpt", "llama", "norms"), fast=True),
    Layout("tp2 sp cp2 a2a", tp=2, sp=True, cp=2, cp_comm_type="a2a", per_token=True, microbatches=2),
    Layout("cp2 dp2 sharded", cp=2, dp=2, cp_comm_type="p2p", distributed_optimizer=True, overlap=True, per_token=True, microbatches=2),
    Layout("cp2 pp2", cp=2, pp=2, cp_comm_type="p2p", microbatches=4),
    Layout("tp2 sp cp2 pp2", tp=2, sp=True, cp=2, pp=2, cp_comm_type="p2p", microbatches=4),
    # experts
    Layout("dp2 experts", dp=2, models=EXPERTS),
    Layout("pp2 experts", pp=2, models=("moe", "moe pattern"), layers=4, microbatches=4),
    Layout("cp2 experts", cp=2, cp_comm_type="p2p", config=A2A, models=EXPERTS, microbatches=2, per_token=True),
    Layout("tp2 experts", tp=2, config=A2A, models=("moe",), microbatches=2),
    Layout("tp2 sp experts", tp=2, sp=True, config=A2A, models=EXPERTS, microbatches=2),
    Layout("ep2 allgather", dp=2, ep=2, models=EXPERTS, microbatches=2, fast=True),
    Layout("ep2", dp=2, ep=2, config=A2A, models=EXPERTS, microbatches=2, fast=True),
    Layout("ep2 grouped", dp=2, ep=2, config=GROUPED, models=("moe",), microbatches=2, fast=True),
    Layout(
        "ep2 sharded", dp=2, ep=2, config=GROUPED, models=EXPERTS, distributed_optimizer=True, overlap=True, per_token=True, microbatches=2
    ),
    Layout("ep2 recompute", dp=2, ep=2, config=GROUPED, models=EXPERTS, recompute="uniform", microbatches=2),
    Layout("ep4", dp=4, ep=4, config=A2A, models=EXPERTS, microbatches=2),
    Layout("ep2 dp4 instances", dp=4, ep=2, config=A2A, models=EXPERTS, distributed_optimizer=True, instances=2, overlap=True),
    Layout("tp2 sp ep2", tp=2, sp=True, dp=2, ep=2, config=A2A, models=("moe",), fast=True),
    Layout("tp2 sp ep2 etp1", tp=2, sp=True, dp=2, ep=2, etp=1, config=GROUPED, models=EXPERTS, microbatches=2),
    Layout("tp2 sp ep4 etp1", tp=2, sp=True, dp=2, ep=4, etp=1, config=GROUPED, models=EXPERTS),
    Layout("ep2 pp2", pp=2, dp=2, ep=2, config=A2A, models=EXPERTS, microbatches=4),
    Layout("cp2 ep2", cp=2, ep=2, cp_comm_type="p2p", config=GROUPED, models=EXPERTS, microbatches=2, fast=True),
    Layout("tp2 sp ep2 pp2 vpp2", tp=2, sp=True, pp=2, vpp=2, dp=2, ep=2, config=GROUPED, models=("moe",), microbatches=2),
    # latent attention
    Layout("tp2 latent", tp=2, models=("mla",)),
    Layout("tp2 sp latent", tp=2, sp=True, models=("mla",), fast=True),
    Layout("tp2 sp latent experts", tp=2, sp=True, config=A2A, models=LATENT, microbatches=2),
    Layout("pp2 latent", pp=2, models=("mla",), layers=4, microbatches=4),
    Layout("dp2 sharded latent", dp=2, distributed_optimizer=True, overlap=True, models=LATENT, microbatches=2),
    Layout("cp2 latent", cp=2, cp_comm_type="p2p", config=A2A, models=LATENT, per_token=True, microbatches=2),
    Layout("cp2 all-gather latent", cp=2, cp_comm_type="all_gather", models=("mla",)),
    Layout("cp2 a2a latent", cp=2, cp_comm_type="a2a", models=("mla",)),
    Layout("cp4 hierarchical latent", cp=4, cp_comm_type="a2a+p2p", hierarchical_cp=(2, 2), models=("mla",)),
    Layout("tp2 sp cp2 latent recompute", tp=2, sp=True, cp=2, cp_comm_type="p2p", recompute="latent", models=("mla",), fast=True),
    Layout("tp2 latent recompute", tp=2, recompute="latent and core", models=("mla",), microbatches=2),
    Layout("tp2 sp pp2 dp2 sharded latent", tp=2, sp=True, pp=2, dp=2, distributed_optimizer=True, overlap=True, models=("mla",)),
    Layout("tp2 sp ep2 latent", tp=2, sp=True, dp=2, ep=2, etp=1, config=GROUPED, models=("mla moe",), microbatches=2),
    Layout("pp2 zero-bubble latent", pp=2, schedule="zero-bubble", models=("mla",), microbatches=4),
    # multi-token prediction
    Layout("dp2 sharded ahead", dp=2, distributed_optimizer=True, overlap=True, models=AHEAD, microbatches=2),
    Layout("dp4 per-token ahead", dp=4, per_token=True, models=("mtp",)),
    Layout("tp2 ahead", tp=2, config=A2A, models=AHEAD, microbatches=2, per_token=True),
    Layout("tp2 sp ahead", tp=2, sp=True, config=A2A, models=AHEAD, microbatches=2),
    Layout("cp2 ahead", cp=2, cp_comm_type="p2p", config=A2A, models=AHEAD, microbatches=2),
    Layout("cp2 per-token ahead", cp=2, cp_comm_type="p2p", models=("mtp",), microbatches=2, per_token=True),
    Layout("pp2 ahead", pp=2, models=AHEAD, microbatches=2),
    Layout(
        "pp2 vpp2 letters ahead",
        pp=2,
        vpp=2,
        layers=3,
        microbatches=4,
        config={"pipeline_model_parallel_layout": "E|t*2|t|mmL"},
        models=("mtp",),
    ),
    Layout("pp2 zero-bubble ahead", pp=2, schedule="zero-bubble", models=("mtp",), microbatches=4),
    Layout("tp2 sp pp2 dp2 sharded ahead", tp=2, sp=True, pp=2, dp=2, config=A2A, distributed_optimizer=True, overlap=True, models=AHEAD),
    Layout("tp2 sp ahead recompute", tp=2, sp=True, recompute="uniform", models=("mtp",), fast=True),
    Layout("tp2 sp cp2 ep4 dp2 etp1", tp=2, sp=True, cp=2, dp=2, ep=4, etp=1, cp_comm_type="p2p", config=A2A, models=EXPERTS),
    # one axis over a host's eight GPUs, or two
    Layout("tp8 sp", tp=8, sp=True, models=WIDE),
    Layout("tp4 sp pp2", tp=4, sp=True, pp=2, microbatches=4),
    Layout("pp8", pp=8, microbatches=8),
    Layout("pp4 vpp2 dp2", pp=4, vpp=2, dp=2, microbatches=4),
    Layout("cp8", cp=8, cp_comm_type="p2p", models=WIDE),
    Layout("cp8 a2a", cp=8, cp_comm_type="a2a", models=WIDE),
    Layout("cp8 hierarchical", cp=8, cp_comm_type="a2a+p2p", hierarchical_cp=(4, 2), models=WIDE),
    Layout("dp8 sharded", dp=8, distributed_optimizer=True, overlap=True, microbatches=2),
    Layout("ep8", dp=8, ep=8, config=GROUPED, models=("moe wide",)),
    Layout("ep4 etp2", dp=8, ep=4, etp=2, config=A2A, models=("moe wide",)),
    Layout("tp2 sp ep4", tp=2, sp=True, dp=4, ep=4, config=GROUPED, models=("moe wide",)),
)

HIDDEN, HEADS, SEQ, MICRO_BATCH = 32, 4, 16, 2
TOKENS, DIVISIBLE_BY = 45, 8  # 48 rows of the vocabulary on one or two tensor-parallel ranks, 64 on four
STEPS = 10


@dataclass(frozen=True)
class Model:
    """A small model: TransformerConfig's fields, and GPTModel's arguments."""

    config: dict[str, Any]
    tied: bool
    position: str


LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "bias_activation_fusion": True,
    "add_bias_linear": False,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 80,
}
MOE: dict[str, Any] = LLAMA | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_load_balancing_type": "aux_loss",
}
# Queries with a latent and stretched frequencies; "mla moe" as DeepSeek-V2-Lite's: without both, one dense layer, then experts.
MLA: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "num_query_groups"} | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
MODELS = {
    "gpt": Model({}, tied=True, position="learned_absolute"),
    "llama": Model(LLAMA, tied=False, position="rope"),
    "gpt wide": Model({"num_attention_heads": 8}, tied=True, position="learned_absolute"),
    "llama wide": Model(LLAMA | {"num_attention_heads": 16, "num_query_groups": 8, "kv_channels": 4}, tied=False, position="rope"),
    # norms of queries and keys: replicated weights that see sharded heads
    "norms": Model({"qk_layernorm": True, "layernorm_zero_centered_gamma": True, "add_qkv_bias": True}, tied=True, position="rope"),
    "window": Model(LLAMA | {"window_size": (5, 0)}, tied=False, position="rope"),
    "moe": Model(MOE, tied=False, position="rope"),
    "moe wide": Model(MOE | {"num_moe_experts": 8}, tied=False, position="rope"),
    "moe pattern": Model(MOE | {"moe_layer_freq": [0, 1, 1, 0], "moe_z_loss_coeff": 1e-3}, tied=True, position="rope"),
    # as DeepSeek's: sigmoid gates with a bias that has no gradient, chosen groups, a shared expert, balance by sequence
    "moe bias": Model(
        MOE
        | {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_topk_scaling_factor": 1.5,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_shared_expert_intermediate_size": 32,
        },
        tied=False,
        position="rope",
    ),
    "mla": Model(MLA, tied=False, position="rope"),
    "mla moe": Model(
        {name: value for name, value in MOE.items() if name != "num_query_groups"}
        | MLA
        | {"q_lora_rank": None, "rope_type": "rope", "mscale_all_dim": 0.0, "moe_layer_freq": [0, 1]},
        tied=True,
        position="none",
    ),
    "mtp": Model(LLAMA | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}, tied=False, position="rope"),
    # as DeepSeek-V3: the layer that looks ahead has latents and experts
    "mtp moe": Model(
        {name: value for name, value in MOE.items() if name != "num_query_groups"} | MLA | {"mtp_num_layers": 1, "moe_layer_freq": [0, 1]},
        tied=True,
        position="rope",
    ),
}

# dtype -> kind of number -> largest difference, relative to the largest element of the tensor that one process computes.
Tolerances = dict[torch.dtype, dict[str, float]]
TOLERANCES: Tolerances = {
    torch.float64: {
        "forward": 1e-9,
        "gradient": 1e-9,
        "gradient norm": 1e-9,
        "first loss": 1e-9,
        "later loss": 1e-9,
        "trained weight": 1e-9,
    },
    # no weights: Adam makes steps of full size from gradients that are zero but for rounding (the bias of keys)
    torch.float32: {"forward": 1e-5, "gradient": 1e-5, "gradient norm": 1e-5, "first loss": 1e-5, "later loss": 1e-5},
}
# On GPUs kernels of other shapes add up in another order. Chosen, not fitted (docs/performance.md says which layouts passed): a gradient
# that is summed once too often, or not at all, is off by tens of percent.
GPU_TOLERANCES: Tolerances = {
    torch.float32: {"forward": 2e-5, "gradient": 5e-5, "gradient norm": 5e-5, "first loss": 1e-5, "later loss": 5e-5},
    torch.bfloat16: {"gradient norm": 5e-2, "first loss": 2e-3, "later loss": 2e-2},
}
