"""Renaming keys of sharded state dicts."""

from typing import Any

from .mapping import ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, leaves


def _sharded(state_dict: ShardedStateDict) -> list[Any]:
    return [leaf for leaf in leaves(state_dict) if isinstance(leaf, ShardedTensor | ShardedObject | ShardedTensorFactory)]


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """In place: every sharded key that starts with `old_prefix` starts with `new_prefix`; one that does not is an error."""
    for leaf in _sharded(sharded_state_dict):
        if not leaf.key.startswith(old_prefix):
            raise ValueError(f"key {leaf.key} does not start with {old_prefix}")
        leaf.key = new_prefix + leaf.key[len(old_prefix) :]


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """In place: each sharded key's longest prefix that `prefix_map` has is replaced."""
    for leaf in _sharded(sharded_state_dict):
        for old in sorted(prefix_map, key=len, reverse=True):
            if leaf.key.startswith(old):
                leaf.key = prefix_map[old] + leaf.key[len(old) :]
                break


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    replace_prefix_for_sharding(sharded_state_dict, "", prefix)
