"""What Transformer Engine's layers cannot do: the rules of core/transformer/transformer_engine_rules.py in the words of the line."""

from collections.abc import Iterator

from megatron.core.transformer.transformer_engine_rules import transformer_engine_problems
from megatron.training.argument_utils import Problem
from megatron.training.config.checks import FLAG_OF, Args, broken_rule, unbuilt_values


def check_transformer_engine(args: Args) -> Iterator[Problem]:
    if args.transformer_impl != "transformer_engine":
        return
    for broken in transformer_engine_problems(args, args.num_experts):
        if not unbuilt_values(args, FLAG_OF.get(broken.setting, broken.setting)):  # those are said by checks.check_built
            yield broken_rule(args, broken)


RULES = (check_transformer_engine,)
