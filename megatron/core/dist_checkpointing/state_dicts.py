"""Sharded state dicts taken apart, and put together again."""

from typing import Any

from .mapping import LocalNonpersistentObject, ShardedObject, ShardedStateDict, ShardedTensor, ShardedTensorFactory, leaves, map_leaves


def with_built_factories(state_dict: ShardedStateDict) -> ShardedStateDict:
    return map_leaves(lambda leaf: with_built_factories(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else leaf, state_dict)


def split(state_dict: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    found = leaves(state_dict)
    return [leaf for leaf in found if isinstance(leaf, ShardedTensor)], [leaf for leaf in found if isinstance(leaf, ShardedObject)]


_NOTHING = object()


def common_state(state_dict: ShardedStateDict) -> dict[str, Any]:
    """`state_dict` less its sharded leaves and the dicts that only held such."""
    kept = _without(state_dict, (ShardedTensor, ShardedObject, LocalNonpersistentObject))
    return {} if kept is _NOTHING else kept


def _without(value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, dict):
        kept = {key: _without(item, kinds) for key, item in value.items()}
        kept = {key: item for key, item in kept.items() if item is not _NOTHING}
        return kept if kept or not value else _NOTHING
    if isinstance(value, list):
        items = [item for item in (_without(item, kinds) for item in value) if item is not _NOTHING]
        return items if items or not value else _NOTHING
    return _NOTHING if isinstance(value, kinds) else value


def merged(original: Any, built: Any) -> Any:
    """The values loaded into `built`, in the structure of `original` (factories merged back)."""
    if isinstance(original, dict):
        return {key: merged(item, built[key]) for key, item in original.items()}
    if isinstance(original, list):
        return [merged(item, built[place]) for place, item in enumerate(original)]
    if isinstance(original, ShardedTensorFactory):
        return original.merge_fn(merged(original.build(), built))
    if isinstance(built, ShardedTensor | ShardedObject):
        return built.data
    return built.unwrap() if isinstance(built, LocalNonpersistentObject) else built
