"""What may be asked for of multi-latent attention, for the command line and for configs made in Python. No torch."""

from collections.abc import Iterator
from typing import Any

from megatron.core.broken_rule import BrokenRule

ROPE_TYPES = ("rope", "yarn")
_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def latent_attention_problems(settings: Any, groups: int | None) -> Iterator[BrokenRule]:
    """What is wrong with the settings of a model with latent attention (flags or a config, under MLATransformerConfig's names).

    groups: its key and value heads; None where they are not given.
    """
    for name in _SIZES:
        if getattr(settings, name) is not None and getattr(settings, name) < 1:
            yield BrokenRule(name, "must be at least 1", "" if name == "q_lora_rank" else 64)
    heads, turning = settings.num_attention_heads, settings.qk_pos_emb_head_dim
    if groups is not None and groups != heads:
        rule = f"multi_latent_attention gives each of the num_attention_heads {heads} a key and a value of its own"
        yield BrokenRule("num_query_groups", rule, heads)
    if settings.add_qkv_bias:
        yield BrokenRule("add_qkv_bias", "multi_latent_attention has no bias in its projections to queries, keys and values")
    if settings.rotary_interleaved:
        yield BrokenRule("rotary_interleaved", "multi_latent_attention always turns pairs of neighbouring channels")
    if settings.rope_type not in ROPE_TYPES:
        yield BrokenRule("rope_type", f"must be {' or '.join(ROPE_TYPES)}", "yarn")
    elif settings.rope_type == "yarn" and settings.rotary_percent != 1.0:
        yield BrokenRule("rotary_percent", "rope_type yarn turns all of qk_pos_emb_head_dim", 1.0)
    elif turning >= 1 and (int(turning * settings.rotary_percent) % 2 or int(turning * settings.rotary_percent) < 2):
        rule = f"of which rotary_percent {settings.rotary_percent} turn: their number must be even and at least 2"
        yield BrokenRule("qk_pos_emb_head_dim", rule, 64)
    if settings.rotary_scaling_factor < 1.0:
        yield BrokenRule("rotary_scaling_factor", "must be at least 1: it stretches", 1.0)
    elif settings.rope_type == "rope" and settings.mscale_all_dim and settings.rotary_scaling_factor > 1.0:
        yield BrokenRule("mscale_all_dim", "scales the softmax of rope_type yarn; rope stretches nothing", 0.0)
