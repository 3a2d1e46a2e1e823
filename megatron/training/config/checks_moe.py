"""What must hold between the flags of a mixture of experts: the rules of core/transformer/moe/settings.py in the words of the line."""

import re
from collections.abc import Iterator

from megatron.core.transformer.moe.settings import moe_problems
from megatron.training.argument_utils import Problem, all_fields
from megatron.training.config.checks import Args, name_of, problem

FLAG_OF = {"num_moe_experts": "num_experts"}  # config fields whose flag has another name


def check_experts(args: Args) -> Iterator[Problem]:
    unbuilt = set(all_fields()["moe_router_load_balancing_type"].metadata["choices"])
    unbuilt -= set(all_fields()["moe_router_load_balancing_type"].metadata["built"])
    for name, rule, works in moe_problems(args, args.num_experts):
        if any(rule.startswith(kind) for kind in unbuilt) or (name == "moe_flex_dispatcher_backend"):
            continue  # said by checks.check_built
        text = "leave it out" if works == "" else " ".join(map(str, works)) if isinstance(works, list) else str(works)
        yield problem(args, FLAG_OF.get(name, name), in_flags(rule), in_flags(text))


def in_flags(text: str) -> str:
    """`text` with the names of settings as flags."""
    return re.sub(r"[a-z]+(_[a-z]+)+", lambda word: _flag(word.group()), text)


def _flag(word: str) -> str:
    dest = FLAG_OF.get(word, word)
    return name_of(dest) if dest in all_fields() else word


RULES = (check_experts,)
