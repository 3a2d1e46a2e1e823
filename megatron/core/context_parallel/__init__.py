"""Context parallelism: ranks that share each sequence. Names load when first used.

The modules:

    sequence_split      which tokens a rank holds (the one owner of that fact), batches and packed sequences cut accordingly
    combinations        which kind of exchange goes with what; no torch, so that the command line can ask it
    block_plan          which blocks of queries and keys have to be computed, and under which mask (pure)
    block_attention     attention over one block, (output, logsumexp) and gradients: kernels and their plain twin
    partial_attention   results over several blocks made one
    communication       what is sent: the ring, the gathering of tokens, the exchange of heads for tokens
    ring_exchange       the ring's sending by copy engines, in memory that GPUs share (core/symmetric_memory.py): cp_comm_overlap
    ring, gathered, all_to_all   the kinds: what is computed with what was sent
    attention           from a layer's setting to its kind
"""

import importlib
from typing import Any

_EXPORTS = {
    "positions_of_rank": "sequence_split",
    "split_for_context_parallel": "sequence_split",
    "join_from_context_parallel": "sequence_split",
    "split_batch": "sequence_split",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
