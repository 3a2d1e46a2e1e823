"""What goes with which kind of exchange (`cp_comm_type`), in one place: the command line, the config and the layer all ask here. No torch.

The kinds:

    p2p         keys and values travel round a ring, while each rank computes with those that it holds
    all_gather  every rank collects all keys and values
    a2a         ranks exchange heads for tokens: each attends over the whole sequence with its share of the heads
    a2a+p2p     the first of the hierarchical sizes exchanges heads, the second is a ring
"""

from collections.abc import Iterator, Sequence
from math import prod

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")

# What a layer may ask for -> the kinds that give the result of one rank. A kind that is not in the row refuses it by name.
SUPPORTED: dict[str, tuple[str, ...]] = {
    "a causal mask": COMM_TYPES,
    "no mask": COMM_TYPES,
    "a sliding window": COMM_TYPES,
    "packed sequences": COMM_TYPES,
    "an attention mask": COMM_TYPES,
    "attention dropout": (),  # the masks that one rank draws are no function of which rank holds the token
    "an attention bias": (),
}
# What no kernel of --attention-backend flash knows: masks that are tensors.
MASK_TENSORS = ("a sliding window", "an attention mask")

Problem = tuple[str, object, str, object]  # the field, its value, the rule it breaks, a value that works


def unsupported(comm_type: str, feature: str) -> str | None:
    """Why a layer of kind `comm_type` cannot have the feature (a row of SUPPORTED); None where it can."""
    if comm_type in SUPPORTED[feature]:
        return None
    others = ", ".join(SUPPORTED[feature])
    return f"cp_comm_type {comm_type} does not go with {feature}" + (f"; {others} does" if others else ": context_parallel_size 1 does")


def comm_types_of(setting: str | Sequence[str] | None, num_layers: int) -> list[str]:
    """One kind a layer from the setting: None (p2p), one for all layers, or one for each."""
    kinds = ["p2p"] if setting is None else [setting] if isinstance(setting, str) else list(setting)
    return kinds * num_layers if len(kinds) == 1 else kinds


def comm_type_of_layer(setting: str | Sequence[str] | None, layer_number: int) -> str:
    """The kind of the layer, counted from 1 over the whole model."""
    kinds = comm_types_of(setting, 1)
    return kinds[0] if len(kinds) == 1 else kinds[layer_number - 1]


def is_window_layer(window_size: Sequence[int] | None, skip_freq: int | Sequence[int] | None, layer_number: int) -> bool:
    """Whether the layer, counted from 1, looks through the window.

    skip_freq N: every Nth layer sees everything; a list: 1 for a layer with the window, 0 for one without.
    """
    if window_size is None:
        return False
    if skip_freq is None:
        return True
    return layer_number % skip_freq != 0 if isinstance(skip_freq, int) else bool(skip_freq[layer_number - 1])


def window_problems(window_size: Sequence[int] | None, skip_freq: int | Sequence[int] | None, num_layers: int | None) -> Iterator[Problem]:
    """What is wrong with a sliding window."""
    if window_size is None:
        if skip_freq is not None:
            yield "window_attn_skip_freq", skip_freq, "needs a window_size", None
        return
    if len(window_size) != 2 or any(side < -1 for side in window_size):
        yield "window_size", window_size, "is two numbers, keys before and keys after a query, each at least -1 (all)", (128, 0)
    if isinstance(skip_freq, int):
        if skip_freq < 1:
            yield "window_attn_skip_freq", skip_freq, "must be at least 1", 4
    elif skip_freq is not None and ((num_layers and len(skip_freq) != num_layers) or any(n not in (0, 1) for n in skip_freq)):
        yield "window_attn_skip_freq", skip_freq, f"as a list has one 0 or 1 for each of the {num_layers} layers", 4


def context_parallel_problems(
    cp_size: int,
    setting: str | Sequence[str] | None,
    hierarchical_sizes: Sequence[int] | None,
    *,
    num_layers: int | None,
    groups: int | None,
    tp_size: int,
    attention_dropout: float,
) -> Iterator[Problem]:
    """What is wrong with these settings, `groups` being the whole model's key and value heads."""
    kinds = comm_types_of(setting, 1)
    unknown = [kind for kind in kinds if kind not in COMM_TYPES]
    if unknown:
        yield "cp_comm_type", setting, f"knows no {unknown[0]!r}: the kinds are {', '.join(COMM_TYPES)}", "p2p"
        return
    if num_layers and len(kinds) not in (1, num_layers):
        yield "cp_comm_type", setting, f"gives {len(kinds)} kinds: one for all layers, or one for each of the {num_layers}", "p2p"
    hierarchical = "a2a+p2p" in kinds
    if hierarchical_sizes is not None and not (hierarchical and cp_size > 1):
        yield "hierarchical_context_parallel_sizes", hierarchical_sizes, "is for cp_comm_type a2a+p2p with a context size above 1", None
    if cp_size <= 1:
        return
    if attention_dropout and (reason := unsupported(kinds[0], "attention dropout")):
        yield "attention_dropout", attention_dropout, reason, 0.0
    exchanged = {}
    if "a2a" in kinds:
        exchanged["a2a"] = cp_size
    if hierarchical:
        sizes = list(hierarchical_sizes or ())
        if len(sizes) != 2 or min(sizes) < 1 or prod(sizes) != cp_size:
            inner = next(n for n in range(2, cp_size + 1) if cp_size % n == 0)
            rule = f"cp_comm_type a2a+p2p needs two sizes (ranks that exchange heads, ranks of the ring) whose product is {cp_size}"
            yield "hierarchical_context_parallel_sizes", hierarchical_sizes, rule, [inner, cp_size // inner]
        else:
            exchanged["a2a+p2p"] = sizes[0]
    for kind, ranks in exchanged.items():
        if groups and tp_size > 0 and groups % tp_size == 0 and (groups // tp_size) % ranks:
            rule = f"{kind} exchanges heads between {ranks} ranks, which do not divide the {groups // tp_size} query groups of a rank"
            yield "cp_comm_type", setting, rule, "p2p"


def backend_problem(backend: str, *, window: bool, attention_mask: bool) -> str | None:
    """Why an attention backend cannot do what is asked of it on a GPU; None when it can."""
    asked = [feature for feature, wanted in zip(MASK_TENSORS, (window, attention_mask)) if wanted]
    if backend == "flash" and asked:
        return f"flash's kernels cannot honour {asked[0]}, which is a tensor"
    return None
