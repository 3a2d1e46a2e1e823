"""Ranks that hold the same shards share the work: `save(..., sharded_strategy=FullyParallelSaveStrategyWrapper(...))`."""

from typing import Any

from megatron.core.utils import Group

from ..saving import SaveStrategy


class FullyParallelSaveStrategyWrapper(SaveStrategy):
    """Each shard whose main replica is in the group is written by one of the ranks that hold it, so that all write as much.

    strategy: of another wrapper or None; nothing but this one's own way of writing is there to wrap.
    do_cache_distribution: who writes what is found out once, for states of one structure (SaveStrategy.assume_constant_structure).
    """

    def __init__(self, strategy: Any = None, parallelization_group: Group = None, do_cache_distribution: bool = False) -> None:
        super().__init__(parallelization_group, do_cache_distribution)


class FullyParallelLoadStrategyWrapper:
    """Each shard is read by one of the group's ranks that want it, and handed to the others."""

    def __init__(self, strategy: Any = None, parallelization_group: Group = None, do_cache_distribution: bool = False) -> None:
        self.group = parallelization_group
