"""What must hold between the flags of a mixture of experts: the rules of core/transformer/moe/settings.py in the words of the line."""

from collections.abc import Iterator

from megatron.core import optional_imports
from megatron.core.transformer.moe.settings import moe_problems
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import FLAG_OF, Args, broken_rule, problem, unbuilt_values


def check_experts(args: Args) -> Iterator[Problem]:
    for broken in moe_problems(args, args.num_experts):
        if not unbuilt_values(args, FLAG_OF.get(broken.setting, broken.setting)):  # those are said by checks.check_built
            yield broken_rule(args, broken)


def check_what_deepep_sends(args: Args) -> Iterator[Problem]:
    flex = args.num_experts is not None and args.moe_token_dispatcher_type == "flex" and optional_imports.available("deep_ep")
    if flex and args.expert_model_parallel_size > 1 and not args.bf16:
        yield problem(args, "moe_token_dispatcher_type", "DeepEP sends tokens in bf16 alone; alltoall sends any", "--bf16")


RULES = (check_experts, check_what_deepep_sends)
