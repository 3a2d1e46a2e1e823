"""What goes with which kind of exchange (`cp_comm_type`), in one place: the command line, the config and the layer all ask here. No torch.

The kinds:

    p2p         keys and values travel round a ring, while each rank computes with those that it holds
    all_gather  every rank collects all keys and values
    a2a         ranks exchange heads for tokens: each attends over the whole sequence with its share of the heads
    a2a+p2p     the first of the hierarchical sizes exchanges heads, the second is a ring
"""

from collections.abc import Iterator, Sequence
from math import prod

from megatron.core.broken_rule import BrokenRule

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")

# What a layer may ask for -> the kinds that give the result of one rank. A kind that is not in the row refuses it by name, so that a new
# kind can do nothing until it is written, and tested, in each row.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "a causal mask": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "no mask": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "a sliding window": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "packed sequences": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "an attention mask": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "attention dropout": (),  # the masks that one rank draws are no function of which rank holds the token
}


def unsupported(feature: str, *comm_types: str) -> str | None:
    """Why layers of these kinds cannot have the feature (a row of SUPPORTED); None where all can."""
    without = [kind for kind in dict.fromkeys(comm_types) if kind not in SUPPORTED[feature]]
    if not without:
        return None
    others = ", ".join(SUPPORTED[feature])
    verb = "does not go" if len(without) == 1 else "do not go"
    works = f"; {others} {'do' if len(SUPPORTED[feature]) > 1 else 'does'}" if others else ": context_parallel_size 1 does"
    return f"cp_comm_type {', '.join(without)} {verb} with {feature}{works}"


def comm_types_of(setting: str | Sequence[str] | None, num_layers: int) -> list[str]:
    """One kind a layer from the setting: None (p2p), one for all layers, or one for each."""
    kinds = ["p2p"] if setting is None else [setting] if isinstance(setting, str) else list(setting)
    return kinds * num_layers if len(kinds) == 1 else kinds


def comm_type_of_layer(setting: str | Sequence[str] | None, layer_number: int) -> str:
    """The kind of the layer, counted from 1 over the whole model."""
    kinds = comm_types_of(setting, 1)
    return kinds[0] if len(kinds) == 1 else kinds[layer_number - 1]


def context_parallel_problems(
    cp_size: int,
    setting: str | Sequence[str] | None,
    hierarchical_sizes: Sequence[int] | None,
    *,
    num_layers: int | None,
    groups: int | None,
    tp_size: int,
    attention_dropout: float,
    window: bool,
    attention_mask: bool = False,
    overlap: bool = False,
) -> Iterator[BrokenRule]:
    """What is wrong with these settings, `groups` being the whole model's key and value heads.

    window, attention_mask: whether the run has them. overlap: cp_comm_overlap. Packed sequences come with a batch; the layer judges them.
    """
    kinds = comm_types_of(setting, 1)
    unknown = [kind for kind in kinds if kind not in COMM_TYPES]
    if unknown:
        yield BrokenRule("cp_comm_type", f"knows no {unknown[0]!r}: the kinds are {', '.join(COMM_TYPES)}", "p2p")
        return
    if num_layers and len(kinds) not in (1, num_layers):
        yield BrokenRule("cp_comm_type", f"gives {len(kinds)} kinds: one for all layers, or one for each of the {num_layers}", "p2p")
    hierarchical = "a2a+p2p" in kinds
    if hierarchical_sizes is not None and not (hierarchical and cp_size > 1):
        yield BrokenRule("hierarchical_context_parallel_sizes", "is for cp_comm_type a2a+p2p with a context size above 1")
    if overlap and not (cp_size > 1 and any("p2p" in kind for kind in kinds)):
        yield BrokenRule("cp_comm_overlap", "is for cp_comm_type p2p or a2a+p2p with a context size above 1", False)
    if cp_size <= 1:
        return
    if attention_dropout and (reason := unsupported("attention dropout", *kinds)):
        yield BrokenRule("attention_dropout", reason, 0.0)
    if window and (reason := unsupported("a sliding window", *kinds)):
        yield BrokenRule("window_size", reason)
    if attention_mask and (reason := unsupported("an attention mask", *kinds)):
        able = SUPPORTED["an attention mask"]
        yield BrokenRule("cp_comm_type", reason, able[0]) if able else BrokenRule("context_parallel_size", reason, 1)
    exchanged = {}
    if "a2a" in kinds:
        exchanged["a2a"] = cp_size
    if hierarchical:
        sizes = list(hierarchical_sizes or ())
        if len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != cp_size:
            inner = next(n for n in range(2, cp_size + 1) if cp_size % n == 0)
            rule = f"cp_comm_type a2a+p2p needs two sizes (ranks that exchange heads, ranks of the ring) whose product is {cp_size}"
            yield BrokenRule("hierarchical_context_parallel_sizes", rule, [inner, cp_size // inner])
        else:
            exchanged["a2a+p2p"] = sizes[0]
    for kind, ranks in exchanged.items():
        if groups and tp_size > 0 and groups % tp_size == 0 and (groups // tp_size) % ranks:
            rule = f"{kind} exchanges heads between {ranks} ranks, which do not divide the {groups // tp_size} query groups of a rank"
            yield BrokenRule("cp_comm_type", rule, "p2p")
