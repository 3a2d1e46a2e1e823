"""Mixture of experts: which layers, the router, balance losses, dispatch, shared experts."""
# ruff: noqa: RUF009  (flag() makes a dataclass field)

from dataclasses import dataclass

from megatron.core.transformer.moe.settings import (
    BALANCING_TYPES,
    DISPATCHER_TYPES,
    DROP_POLICIES,
    SCORE_FUNCTIONS,
)
from megatron.training.config.converters import moe_freq_type
from megatron.training.config.fields import ARCHITECTURE, flag


@dataclass
class MoEFlags:
    """Mixture of experts; all of it needs --num-experts."""

    num_experts: int | None = flag(None, "Experts of a layer. Default: none, all layers are dense.", minimum=1, checkpoint=ARCHITECTURE)
    moe_layer_freq: int | list[int] = flag(
        1,
        'Every Nth layer is a mixture of experts, the first included; or a list of 0 (dense) and 1 by layer, such as "([0]*1+[1]*23)".',
        type=moe_freq_type,
        checkpoint=ARCHITECTURE,
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "Inner width of one expert. Default: --ffn-hidden-size.", minimum=1, checkpoint=ARCHITECTURE
    )
    moe_grouped_gemm: bool = flag(False, "The experts of a rank by one grouped matrix product instead of one after the other.")
    moe_router_topk: int = flag(2, "Experts of each token.", minimum=1, checkpoint=ARCHITECTURE)
    moe_router_score_function: str = flag("softmax", "Function of the gate.", choices=SCORE_FUNCTIONS, checkpoint=ARCHITECTURE)
    moe_router_pre_softmax: bool = flag(
        False, "Softmax over all experts before the choice, instead of over the chosen ones.", checkpoint=ARCHITECTURE
    )
    moe_router_topk_scaling_factor: float | None = flag(None, "The weights are multiplied by it.", checkpoint=ARCHITECTURE)
    moe_router_num_groups: int | None = flag(
        None, "Groups of consecutive experts, for --moe-router-group-topk.", minimum=1, checkpoint=ARCHITECTURE
    )
    moe_router_group_topk: int | None = flag(None, "A token's experts are in that many groups alone.", minimum=1, checkpoint=ARCHITECTURE)
    moe_router_enable_expert_bias: bool = flag(
        False,
        "A bias by expert that chooses but does not weigh, moved each step towards balance.",
        checkpoint=ARCHITECTURE,
    )
    moe_router_bias_update_rate: float = flag(0.001, "How far it moves a step.", minimum=0.0)
    moe_router_dtype: str | None = flag(None, "Precision of the gate's product. Default: that of its input.", choices=("fp32", "fp64"))
    moe_router_force_load_balancing: bool = flag(False, "Experts in turn, whatever the gate says: to measure speed, not to train.")
    moe_router_fusion: bool = flag(
        False,
        "The gate's scores, choice and weights by one Triton kernel each way (on GPUs); of equal logits the first expert. For softmax and "
        "sigmoid without groups of experts and expert bias; all else goes as without it.",
    )
    moe_input_jitter_eps: float | None = flag(None, "The gate's input times uniform(1 - eps, 1 + eps) in training.", minimum=0.0, below=1.0)
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "How load is balanced: a loss over the micro batch, over each sequence, or over the global batch so far (several combine, each "
        "with its own --moe-aux-loss-coeff); sinkhorn's choice; or not.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
        built=BALANCING_TYPES,
        nargs="+",
    )
    moe_aux_loss_coeff: float = flag(0.0, "Coefficient of the balance loss; one for each type.", nargs="+")
    moe_z_loss_coeff: float | None = flag(None, "Coefficient of the gate's z-loss (ST-MoE); 1e-3 is usual.", minimum=0.0)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "An expert takes at most this times its even share of a micro batch; the rest is dropped. Default: nothing is.",
        above=0.0,
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "Experts' inputs all have their capacity's size.")
    moe_token_drop_policy: str = flag("probs", "What stays: the largest weights, or the first tokens.", choices=DROP_POLICIES)
    moe_token_dispatcher_type: str = flag(
        "allgather", "How tokens reach the ranks of their experts; flex: by the package DeepEP.", choices=DISPATCHER_TYPES
    )
    moe_enable_deepep: bool = flag(False, "Says that --moe-token-dispatcher-type flex is DeepEP's, as it is without too.")
    moe_flex_dispatcher_backend: str = flag(
        "deepep", "Backend of the flex dispatcher.", choices=("deepep", "hybridep", "ncclep"), built=("deepep",)
    )
    moe_permute_fusion: bool = flag(False, "One Triton kernel copies tokens to their experts' rows, one sums them (on GPUs).")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Inner width of the shared experts, all together. Default: there are none.", minimum=1, checkpoint=ARCHITECTURE
    )
    moe_shared_expert_gate: bool = flag(False, "A gate on the shared experts' output.", checkpoint=ARCHITECTURE)
    moe_shared_expert_overlap: bool = flag(False, "Shared experts compute while the all-to-all is under way.")
    moe_layer_recompute: bool = flag(False, "The backward pass makes a MoE layer's activations again.")
    moe_per_layer_logging: bool = flag(False, "Balance losses of each layer in the logs too.")
