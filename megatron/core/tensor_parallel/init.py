"""Initial values of weights. A value depends on the seed, the checkpoint key and the layer; never on how the weight is split."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

Initializer = Callable[[torch.Tensor], torch.Tensor]

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


def init_method_normal(std: float) -> Initializer:
    """Fills a tensor in place from normal(0, std)."""

    def init(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.init.normal_(tensor, mean=0.0, std=std)

    return init


def scaled_init_method_normal(std: float, num_layers: int) -> Initializer:
    """normal(0, std / sqrt(2 num_layers)), for the two layers a block adds to the residual stream (GPT-2)."""
    return init_method_normal(std / math.sqrt(2.0 * num_layers))


def value_seed(seed: int, key: str, layer: int | None) -> int:
    """A 63-bit seed for one stored tensor: the same on every rank, different for each key and layer."""
    digest = hashlib.blake2b(f"{seed}/{key}/{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def deferred_initialization() -> Iterator[None]:
    """Layers built inside leave their weights unset: the model draws all of them at its end, by name."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def is_deferred() -> bool:
    return _deferred.get()
