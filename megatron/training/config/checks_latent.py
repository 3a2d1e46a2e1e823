"""What must hold between flags of latent attention: the rules of core/transformer/latent_attention_settings.py in the words of the line."""

import dataclasses
from collections.abc import Iterator

from megatron.core.transformer.latent_attention_settings import latent_attention_problems
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import Args, broken_rule, name_of, problem, was_given
from megatron.training.config.model import LatentAttentionFlags


def check_latent_attention(args: Args) -> Iterator[Problem]:
    if not args.multi_latent_attention:
        if args.rope_type == "yarn":
            yield problem(args, "rope_type", "is for --multi-latent-attention alone", "rope")
        return
    groups = args.num_query_groups if args.group_query_attention else None
    for broken in latent_attention_problems(args, groups):
        yield broken_rule(args, broken)
    for dest in ("use_rope_scaling", "rotary_seq_len_interpolation_factor"):
        if getattr(args, dest):
            yield problem(args, dest, "does not stretch --multi-latent-attention: yarn does", "--rope-type yarn")


def idle_flags(args: Args) -> Iterator[str]:
    """A note on flags of latent attention in a model without."""
    if args.multi_latent_attention:
        return
    idle = [name_of(field.name) for field in dataclasses.fields(LatentAttentionFlags) if was_given(args, field.name)]
    idle += ["--recompute-modules mla_up_proj"] if "mla_up_proj" in (args.recompute_modules or ()) else []
    if idle:
        yield f"{', '.join(idle)}: no effect without --multi-latent-attention"


RULES = (check_latent_attention,)
