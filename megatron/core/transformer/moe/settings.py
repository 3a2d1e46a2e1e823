"""What may be asked for of mixture of experts, for the command line and for configs made in Python. No torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import optional_imports
from megatron.core.broken_rule import BrokenRule

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
BALANCE_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
BALANCING_TYPES = (*BALANCE_LOSSES, "sinkhorn", "none")
DISPATCHER_TYPES = ("allgather", "alltoall", "flex")
DROP_POLICIES = ("probs", "position")


def layer_freq_problem(freq: int | Sequence[int], num_layers: int | None) -> str | None:
    """What is wrong with moe_layer_freq; None for num_layers: that it is not known yet."""
    if freq < 1 if isinstance(freq, int) else not set(freq) <= {0, 1}:
        return "must be a number of at least 1, or a 0 or a 1 for each layer"
    if not isinstance(freq, int) and not any(freq):
        return "makes no layer a mixture of experts"
    if not isinstance(freq, int) and num_layers and len(freq) != num_layers:
        return f"lists {len(freq)} layers, but the model has {num_layers}"
    return None


def moe_layer_pattern(freq: int | Sequence[int], num_layers: int) -> list[int]:
    """1 for each layer of the whole model that is MoE, 0 for each that is not. Raises ValueError for what is no pattern of them."""
    if problem := layer_freq_problem(freq, num_layers):
        raise ValueError(f"moe_layer_freq {freq} {problem}")
    return [int(layer % freq == 0) for layer in range(num_layers)] if isinstance(freq, int) else list(freq)


def balance_coefficients(types: str | Sequence[str], coefficients: float | Sequence[float]) -> dict[str, float]:
    """Balance loss -> its coefficient, for those that are not 0; of several types each has its own."""
    names = [types] if isinstance(types, str) else list(types)
    numbers = list(coefficients) if isinstance(coefficients, list | tuple) else [coefficients]
    return {name: float(number) for name, number in zip(names, numbers) if name in BALANCE_LOSSES and number}  # type: ignore[arg-type]


def balances_by(types: str | Sequence[str], kind: str) -> bool:
    return kind == types if isinstance(types, str) else kind in types


def moe_problems(settings: Any, num_experts: int | None) -> Iterator[BrokenRule]:
    """Everything that is wrong with the moe_* fields of `settings` (flags or a config), with what the layout makes of them.

    `settings` must hold them under TransformerConfig's names.
    """
    ep = settings.expert_model_parallel_size
    if num_experts is None:
        if ep > 1:
            yield BrokenRule("expert_model_parallel_size", "needs a model with experts", 1)
        return
    if num_experts < 1:
        yield BrokenRule("num_moe_experts", "must be at least 1", 8)
        return
    if ep > 0 and num_experts % ep:
        yield BrokenRule("num_moe_experts", f"must be a multiple of expert_model_parallel_size {ep}", -(-num_experts // ep) * ep)
    if problem := layer_freq_problem(settings.moe_layer_freq, settings.num_layers):
        yield BrokenRule("moe_layer_freq", problem, f"([0]*1+[1]*{(settings.num_layers or 2) - 1})")
    yield from _router_problems(settings, num_experts)
    yield from _balance_problems(settings)
    yield from _dispatch_problems(settings)
    yield from _layout_problems(settings)


def _router_problems(settings: Any, num_experts: int) -> Iterator[BrokenRule]:
    topk, score = settings.moe_router_topk, settings.moe_router_score_function
    groups, group_topk = settings.moe_router_num_groups, settings.moe_router_group_topk
    sinkhorn = balances_by(settings.moe_router_load_balancing_type, "sinkhorn")
    if not 1 <= topk <= num_experts:
        yield BrokenRule("moe_router_topk", f"must be between 1 and the {num_experts} experts", min(2, num_experts))
    if score not in SCORE_FUNCTIONS:
        yield BrokenRule("moe_router_score_function", f"must be one of {', '.join(SCORE_FUNCTIONS)}", "softmax")
    elif topk == 1 and score == "softmax" and not settings.moe_router_pre_softmax and not sinkhorn:
        rule = "with softmax after the choice the one weight is always 1 and the router learns nothing; give moe_router_pre_softmax"
        yield BrokenRule("moe_router_topk", rule, "2, or moe_router_pre_softmax")
    if settings.moe_router_dtype not in (None, "fp32", "fp64"):
        yield BrokenRule("moe_router_dtype", "must be fp32 or fp64", "fp32")
    if settings.moe_router_enable_expert_bias and (score == "softmax" or sinkhorn):
        yield BrokenRule("moe_router_enable_expert_bias", "needs moe_router_score_function sigmoid or sqrtsoftplus, without sinkhorn")
    if (groups is None) != (group_topk is None):
        yield BrokenRule("moe_router_num_groups", "and moe_router_group_topk are given together")
    elif groups is not None and group_topk is not None:
        if groups < 1 or num_experts % groups:
            yield BrokenRule("moe_router_num_groups", f"must divide the {num_experts} experts", 1)
        elif not 1 <= group_topk <= groups:
            yield BrokenRule("moe_router_group_topk", f"must be between 1 and the {groups} groups", groups)
        elif topk > group_topk * (num_experts // groups):
            rule = f"groups of {num_experts // groups} experts do not hold moe_router_topk {topk}"
            yield BrokenRule("moe_router_group_topk", rule, -(-topk // (num_experts // groups)))
        elif topk < group_topk:
            yield BrokenRule("moe_router_group_topk", f"must be at most moe_router_topk {topk}", topk)
    if sinkhorn and (groups is not None or score == "sqrtsoftplus"):
        yield BrokenRule("moe_router_load_balancing_type", "sinkhorn chooses by itself: neither groups nor sqrtsoftplus", "aux_loss")
    eps = settings.moe_input_jitter_eps
    if eps is not None and not 0 <= eps < 1:
        yield BrokenRule("moe_input_jitter_eps", "must be in [0, 1)", 0.01)


def _balance_problems(settings: Any) -> Iterator[BrokenRule]:
    types, coefficients = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
    names = [types] if isinstance(types, str) else list(types)
    numbers = list(coefficients) if isinstance(coefficients, list | tuple) else [coefficients]
    for name in names:
        if name not in BALANCING_TYPES:
            yield BrokenRule(
                "moe_router_load_balancing_type", f"{name} is not built yet; there are {', '.join(BALANCING_TYPES)}", "aux_loss"
            )
    if len(set(names)) != len(names):
        yield BrokenRule("moe_router_load_balancing_type", "names one type twice", names[0])
    if len(names) > 1 and not set(names) <= set(BALANCE_LOSSES):
        yield BrokenRule("moe_router_load_balancing_type", f"only the losses {', '.join(BALANCE_LOSSES)} combine", "aux_loss seq_aux_loss")
    if len(names) != len(numbers):
        rule = f"{len(numbers)} given for {len(names)} of moe_router_load_balancing_type: each type has its own"
        yield BrokenRule("moe_aux_loss_coeff", rule, " ".join(["0.01"] * len(names)))
    if names == ["sinkhorn"] and any(numbers):
        yield BrokenRule("moe_aux_loss_coeff", "sinkhorn has no balance loss", 0.0)


def _dispatch_problems(settings: Any) -> Iterator[BrokenRule]:
    dispatcher, factor = settings.moe_token_dispatcher_type, settings.moe_expert_capacity_factor
    if dispatcher not in DISPATCHER_TYPES:
        yield BrokenRule("moe_token_dispatcher_type", f"must be one of {', '.join(DISPATCHER_TYPES)}", "alltoall")
    if settings.moe_token_drop_policy not in DROP_POLICIES:
        yield BrokenRule("moe_token_drop_policy", f"must be {' or '.join(DROP_POLICIES)}", "probs")
    if factor is not None and factor <= 0:
        yield BrokenRule("moe_expert_capacity_factor", "must be more than 0", 1.25)
    if settings.moe_pad_expert_input_to_capacity and factor is None:
        yield BrokenRule("moe_pad_expert_input_to_capacity", "needs moe_expert_capacity_factor")
    elif settings.moe_pad_expert_input_to_capacity and dispatcher in ("allgather", "flex"):
        yield BrokenRule("moe_token_dispatcher_type", f"{dispatcher} does not pad experts' input to their capacity", "alltoall")
    shared = settings.moe_shared_expert_intermediate_size
    for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if getattr(settings, name) and not shared:
            yield BrokenRule(name, "needs moe_shared_expert_intermediate_size")
    if settings.moe_shared_expert_overlap and dispatcher != "alltoall":
        yield BrokenRule("moe_shared_expert_overlap", "needs moe_token_dispatcher_type alltoall: it computes beside the all-to-all")
    if settings.moe_enable_deepep and dispatcher != "flex":
        yield BrokenRule("moe_enable_deepep", "is for moe_token_dispatcher_type flex")
    if dispatcher == "flex" and settings.moe_flex_dispatcher_backend != "deepep":
        yield BrokenRule("moe_flex_dispatcher_backend", "is not built yet", "deepep")
    elif dispatcher == "flex" and not optional_imports.available("deep_ep"):
        how = optional_imports.INSTALL_COMMAND["deep_ep"]
        rule = f"needs the package deep_ep (DeepEP), which is not installed ({how}); alltoall computes the same without it"
        yield BrokenRule("moe_token_dispatcher_type", rule, "alltoall")


def _layout_problems(settings: Any) -> Iterator[BrokenRule]:
    tp, ep, cp = settings.tensor_model_parallel_size, settings.expert_model_parallel_size, settings.context_parallel_size
    etp = settings.expert_tensor_parallel_size or tp
    if tp > 1 and not settings.sequence_parallel:
        if ep > 1:
            yield BrokenRule(
                "expert_model_parallel_size", "with tensor parallelism it needs sequence_parallel: ranks must hold tokens of their own", 1
            )
        elif etp != tp:
            rule = f"must be tensor_model_parallel_size {tp} without sequence_parallel: its ranks hold the same tokens"
            yield BrokenRule("expert_tensor_parallel_size", rule, tp)
    ffn = settings.moe_ffn_hidden_size or settings.ffn_hidden_size
    if ffn and ffn % etp:
        yield BrokenRule("moe_ffn_hidden_size", f"must be a multiple of expert_tensor_parallel_size {etp}", -(-ffn // etp) * etp)
    shared = settings.moe_shared_expert_intermediate_size
    if shared and shared % tp:
        rule = f"must be a multiple of tensor_model_parallel_size {tp}"
        yield BrokenRule("moe_shared_expert_intermediate_size", rule, -(-shared // tp) * tp)
    if settings.moe_expert_capacity_factor is not None and settings.moe_token_drop_policy == "position" and cp > 1:
        rule = "position knows no order of tokens that lie on several context-parallel ranks"
        yield BrokenRule("moe_token_drop_policy", rule, "probs")
