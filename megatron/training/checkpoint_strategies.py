"""How the ranks divide the work of saving and loading, from the flags: what of torch_dist's options a run has."""

import argparse
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import StrictHandling
from megatron.core.dist_checkpointing.saving import SaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper
from megatron.core.utils import Group


def _replicas() -> Group:
    """The ranks that hold the same parameters, less experts, which a part of them holds."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def save_strategy(args: argparse.Namespace) -> SaveStrategy:
    """One for all saves of a run: it keeps what the ranks agreed on."""
    group = _replicas() if args.ckpt_fully_parallel_save else None
    return FullyParallelSaveStrategyWrapper(None, group, args.ckpt_assume_constant_structure)


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of dist_checkpointing.load."""
    strict = args.dist_ckpt_strictness.replace("log_", "return_")  # the run's own log has what is returned
    options: dict[str, Any] = {"strict": StrictHandling(strict)}
    if args.ckpt_fully_parallel_load:
        options["sharded_strategy"] = FullyParallelLoadStrategyWrapper(None, _replicas())
    return options
