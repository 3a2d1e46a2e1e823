"""What must hold between the flags of a mixture of experts: the rules of core/transformer/moe/settings.py in the words of the line."""

from collections.abc import Iterator

from megatron.core.transformer.moe.settings import moe_problems
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import FLAG_OF, Args, broken_rule, unbuilt_values


def check_experts(args: Args) -> Iterator[Problem]:
    for broken in moe_problems(args, args.num_experts):
        if not unbuilt_values(args, FLAG_OF.get(broken.setting, broken.setting)):  # those are said by checks.check_built
            yield broken_rule(args, broken)


RULES = (check_experts,)
